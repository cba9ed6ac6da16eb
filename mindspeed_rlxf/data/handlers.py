"""Handlers of the preprocessing: each sets how rows are read and which columns are written."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum

from mindspeed_rlxf.data.sidecar import TOKEN_IDS

LABELS = "labels"


class RowStyle(Enum):
    """alpaca: a column for each part; sharegpt: one column with the list of messages."""

    ALPACA = "alpaca"
    SHAREGPT = "sharegpt"


class Output(Enum):
    """Content of the data set.

    PROMPT:      the prompt
    ANSWERED:    the prompt, and the answer as text in a column `labels`
    INSTRUCTION: prompt and responses in one sequence, with labels
    PAIR:        prompt and response twice, the better and the worse, each with labels
    """

    PROMPT = "prompt"
    ANSWERED = "answered"
    INSTRUCTION = "instruction"
    PAIR = "pair"


SEQUENCES: Mapping[Output, tuple[str, ...]] = {
    Output.PROMPT: (TOKEN_IDS,),
    Output.ANSWERED: (TOKEN_IDS,),
    Output.INSTRUCTION: (TOKEN_IDS, LABELS),
    Output.PAIR: ("chosen_input_ids", "chosen_labels", "rejected_input_ids", "rejected_labels"),
}
"""Columns of token ids, first that of the prompts (PAIR: of the better response)."""


@dataclass(frozen=True)
class Handler:
    """A choice of `--handler-name`."""

    name: str
    style: RowStyle
    output: Output

    @property
    def sequences(self) -> tuple[str, ...]:
        return SEQUENCES[self.output]

    @property
    def has_mask(self) -> bool:
        """Whether to write a column of ones beside the ids, as the older toolkit did."""
        return self.output is not Output.PAIR

    @property
    def is_conversation(self) -> bool:
        return self.output is Output.INSTRUCTION

    @property
    def has_responses(self) -> bool:
        return self.output in (Output.INSTRUCTION, Output.PAIR)


_ALPACA, _SHAREGPT = RowStyle.ALPACA, RowStyle.SHAREGPT
HANDLERS: Mapping[str, Handler] = {
    handler.name: handler
    for handler in (
        Handler("PPOAlpacaStyleInstructionHandler", _ALPACA, Output.PROMPT),
        Handler("R1AlpacaStyleInstructionHandler", _ALPACA, Output.ANSWERED),
        Handler("R1SharegptStyleInstructionHandler", _SHAREGPT, Output.ANSWERED),
        Handler("AlpacaStyleInstructionHandler", _ALPACA, Output.INSTRUCTION),
        Handler("LlamaFactoryInstructionHandler", _ALPACA, Output.INSTRUCTION),
        Handler("SharegptStyleInstructionHandler", _SHAREGPT, Output.INSTRUCTION),
        Handler("AlpacaStylePairwiseHandler", _ALPACA, Output.PAIR),
        Handler("SharegptStylePairwiseHandler", _SHAREGPT, Output.PAIR),
    )
}
DEFAULT_HANDLER = "PPOAlpacaStyleInstructionHandler"

_PRETRAIN = "texts for pre-training are not preprocessed here; use the tools of Megatron-LM"
_OWN_FORMAT = (
    "rewrite the rows as alpaca or sharegpt rows and use AlpacaStyleInstructionHandler or "
    "SharegptStyleInstructionHandler"
)
REFUSED_HANDLERS: Mapping[str, str] = {
    "GeneralPretrainHandler": _PRETRAIN,
    "AlpacaPretrainHandler": _PRETRAIN,
    "AlpacaStyleProcessRewardHandler": "rewards of single steps are not trained here; score whole "
    "responses and use AlpacaStylePairwiseHandler",
    "HunyuanInstructionHandler": "models of this family cannot be loaded; use "
    "SharegptStyleInstructionHandler with the template of a family that can",
    **dict.fromkeys(
        (
            "GeneralInstructionHandler",
            "BelleMultiTurnInstructionHandler",
            "MOSSInstructionHandler",
            "MOSSMultiTurnHandler",
            "LeetcodePythonInstructionHandler",
            "StackOverflowPythonPretrainHandler",
        ),
        _OWN_FORMAT,
    ),
}
"""Handlers of the older toolkit that are not supported -> remedy."""
