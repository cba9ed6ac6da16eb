"""The sections `data`, files of prompts, and `validation`, when and how to validate."""

from collections.abc import Iterator
from typing import Annotated, Any, Literal

from pydantic import Field, field_validator
from pydantic_core import PydanticCustomError

from mindspeed_rlxf.config.enums import OverlongPrompts, RewardKind
from mindspeed_rlxf.config.fields import FilePaths, Section, Word, free, key
from mindspeed_rlxf.config.problems import Problem, ref

CUT_SIDES = {
    "left": OverlongPrompts.KEEP_TAIL,
    "right": OverlongPrompts.KEEP_HEAD,
    "middle": OverlongPrompts.KEEP_ENDS,
}
"""Word for the side on which a prompt is cut -> treatment that keeps the rest."""
OWN_VARIABLES = (
    "add_generation_prompt", "chat_template", "continue_final_message", "conversation", "messages",
    "padding", "return_dict", "return_tensors", "tokenize", "truncation",
)  # fmt: skip
"""Arguments of a chat template that this package sets, and a user must not."""


SCORES = "has_validation_prompts; happens"
"""Condition of keys that only validation reads, see `unused`."""


class DataConfig(Section):
    """Prompts: files or indexed data sets, and the names of their columns (dots reach inside)."""

    train_files: FilePaths = key(
        (), "jsonl, json or parquet files of training prompts", only_if="!data_path"
    )
    val_files: FilePaths = free(
        (), "files of validation prompts", used_if="validation.happens", only_if="!val_data_path"
    )
    data_path: FilePaths = key((), "in place of train_files: prefixes of preprocess_data.py")
    val_data_path: FilePaths = free(
        (), "in place of val_files: such prefixes", used_if="validation.happens"
    )
    prompt_key: str = key("prompt", "column of the prompt: text or chat messages")
    ground_truth_key: str = key("ground_truth", "column of the expected answer")
    data_source_key: str = key("data_source", "column that chooses the reward rule")
    default_data_source: str | None = key(None, "data source of rows without one")
    extra_columns: Annotated[tuple[str, ...] | None, Word] = key(
        None, "other columns, for reward functions; null = all, [] = none"
    )
    system_prompt: str | None = key(
        None, "system message for chats without one", min_length=1, used_if="reads_rows"
    )
    chat_template_kwargs: dict[str, Any] = key(
        {}, "variables of the chat template, such as enable_thinking", used_if="reads_rows"
    )
    train_weights: Annotated[tuple[Annotated[float, Field(gt=0)], ...], Word] = key(
        (), "share of each file (or data set) of the training prompts in a batch; absent = by size"
    )
    invalid_rows: Literal["error", "drop"] = key(
        "error", "unreadable rows: error, or drop and count them", used_if="reads_rows"
    )
    overlong_prompts: Annotated[OverlongPrompts, Word] = key(
        OverlongPrompts.ERROR,
        "treatment of prompts over max_prompt_length: error, drop, keep_head (or right, where "
        "it is cut), keep_tail (left), keep_ends (middle)",
    )
    allow_special_tokens: bool = key(
        False, "the text of a special token in a prompt becomes that token; else it stays text"
    )
    shuffle: bool = key(True, "a new order of the prompts in each epoch")

    @field_validator("overlong_prompts", mode="before")
    @classmethod
    def _accept_cut_side(cls, value: Any) -> Any:
        return CUT_SIDES.get(value, value) if isinstance(value, str) else value

    @field_validator("chat_template_kwargs")
    @classmethod
    def _refuse_own_variables(cls, value: dict[str, Any]) -> dict[str, Any]:
        if taken := sorted({*value} & {*OWN_VARIABLES}):
            raise PydanticCustomError("chat_template_kwargs", "no " + ", ".join(taken))
        return value

    @field_validator("train_files", "val_files", "data_path", "val_data_path", mode="before")
    @classmethod
    def _wrap_single_file(cls, value: Any) -> Any:
        value = [] if value is None else value
        return [value] if isinstance(value, str) else value

    @property
    def reads_rows(self) -> bool:
        """Whether some prompts are text; those of indexed data sets are tokenized already."""
        return bool(self.train_files or self.val_files)

    def broken_rules(self) -> Iterator[Problem]:
        if not self.train_files and not self.data_path:
            remedy = f"name files of prompts, or an indexed data set by {ref('data_path')}"
            yield Problem("train_files", "is required", remedy=remedy)
        sources = self.train_files or self.data_path
        if self.train_weights and len(self.train_weights) != len(sources):
            rule = f"must have one for each of the {len(sources)} files or data sets"
            yield Problem("train_weights", rule, list(self.train_weights), "add or remove weights")


class ValidationConfig(Section):
    """Times at which the validation prompts are answered and scored, and how."""

    interval: int = free(
        0,
        "iterations between validations; 0 = never during training",
        ge=0,
        used_if="!only",
        only_if="has_validation_prompts",
    )
    before: bool = free(True, "validate before the first iteration", used_if="!only")
    after: bool = free(True, "validate after the last iteration", used_if="!only")
    only: bool = free(
        False,
        "validate the run's newest checkpoint, or the weights of `load` if there is none, and end",
        only_if="has_validation_prompts",
    )
    max_samples: int | None = free(None, "prompts used; null = all", ge=1, used_if=SCORES)
    n_samples: int = free(1, "responses per prompt", ge=1, used_if=SCORES, only_if="do_sample")
    do_sample: bool = free(False, "sample; false = greedy", used_if=SCORES)
    temperature: float = free(
        1.0, "divides the logits; used only when sampling", gt=0, used_if=f"{SCORES}; do_sample"
    )
    top_k: int = free(0, "sample among this many; 0 = all", ge=0, used_if=f"{SCORES}; do_sample")
    top_p: float = free(
        1.0, "sample among tokens of this probability", gt=0, le=1, used_if=f"{SCORES}; do_sample"
    )
    reward: Annotated[RewardKind, Word] = free(
        RewardKind.RULE, "what scores: rule, or model (that of reward.kind=model)", used_if=SCORES
    )
    pass_score: float | None = free(
        None,
        "lowest score of a right response; null = accuracy, else score, above 0",
        used_if=SCORES,
    )
    best_metric: str = free(
        "score",
        "the best checkpoint has the highest: score, mean@N, maj@N, best@K or pass@K, averaged "
        "over data sources, or one metric `val/SOURCE/...`",
        used_if=f"{SCORES}; !only",
    )

    @property
    def happens(self) -> bool:
        return bool(self.interval or self.before or self.after or self.only)

    @property
    def sizes(self) -> list[int]:
        """K of best@K and pass@K, ascending: 1, 2, 4 ... below `n_samples`, then `n_samples`."""
        powers = [2**i for i in range(self.n_samples.bit_length()) if 2**i < self.n_samples]
        return [*powers, self.n_samples]

    @property
    def metrics(self) -> list[str]:
        """Names that `best_metric` may have: metrics that every data source gets, without prefix.

        Always score and mean@N, N = `n_samples`; best@K for each K > 1 of `sizes`; with kind rule
        and N > 1 maj@N; with kind rule or a `pass_score` pass@K for each K of `sizes`.
        """
        n = self.n_samples
        by_rule = self.reward is RewardKind.RULE
        found = ["score", f"mean@{n}"]
        if n > 1:
            found += [f"best@{k}" for k in self.sizes if k > 1]
            found += [f"maj@{n}"] if by_rule else []
        if by_rule or self.pass_score is not None:
            found += [f"pass@{k}" for k in self.sizes]
        return found

    def broken_rules(self) -> Iterator[Problem]:
        source, _, name = self.best_metric.rpartition("/")
        if name not in self.metrics or (source and not source.startswith("val/")):
            rule = f"must be one of {', '.join(self.metrics)}, or val/SOURCE/ and one of these"
            yield Problem("best_metric", rule, self.best_metric, "use score")
