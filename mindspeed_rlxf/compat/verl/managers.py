"""Call verl's reward managers, and its `_select_rm_score_fn`, for one sample at a time."""

import inspect
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from mindspeed_rlxf.config.reward_section import ADAPTERS, DATA_SOURCE, Adapter, find_function

Score = Callable[..., Any]

SELECT = "_select_rm_score_fn"
"""verl's function, or a manager's method, from a data source to the function that scores it."""


@dataclass
class DataProto:
    """The part of verl's batch that reward managers read.

    Attributes:
        batch: `prompts` [rows, prompt], `responses` [rows, response], `attention_mask`
            [rows, prompt + response]; nothing is padded. A row taken by an index has no rows.
        non_tensor_batch: Column -> array of objects [rows]; of a row taken by an index its value.
        meta_info: Empty.
    """

    batch: dict[str, Any]
    non_tensor_batch: dict[str, Any]
    meta_info: dict[str, Any] = field(default_factory=dict)

    def __len__(self) -> int:
        """Return the number of rows."""
        return len(self.batch["responses"])

    def __getitem__(self, row: int) -> "DataProto":
        """Return one row."""
        if not -len(self) <= row < len(self):
            raise IndexError(row)  # ends a loop over rows
        tensors = {name: tensor[row] for name, tensor in self.batch.items()}
        values = {name: column[row] for name, column in self.non_tensor_batch.items()}
        return DataProto(tensors, values, self.meta_info)

    def __iter__(self) -> Iterator["DataProto"]:
        return (self[row] for row in range(len(self)))


def keywords_of(scorer: Any) -> tuple[str, ...] | None:
    """Return the keywords of a manager's class or of `_select_rm_score_fn`, None for others.

    A manager is made with a tokenizer, which the run gives.
    """
    if inspect.isclass(scorer):
        return () if "tokenizer" in inspect.signature(scorer).parameters else None
    return (DATA_SOURCE,) if getattr(scorer, "__name__", "") == SELECT else None


def as_function(scorer: Any, arguments: Mapping[str, Any]) -> Score:
    """Return a reward function for a manager's class or `_select_rm_score_fn`.

    A manager's class is made once, with `arguments`: `tokenizer` is the folder of one, and
    `compute_score` the name of a function in the manager's file.
    """
    if inspect.isclass(scorer):
        return _ManagerScore(scorer, arguments)
    return _SelectedScore(scorer)


ADAPTERS.append(Adapter(keywords_of, as_function))


class _SelectedScore:
    """Scores by the function that `select` returns for the data source."""

    def __init__(self, select: Score) -> None:
        self.select = select

    def __call__(
        self, prompt: str, response: str, ground_truth: Any, extra_info: Any, data_source: str,
        **_: Any,
    ) -> Any:  # fmt: skip
        function = self.select(data_source)
        parameters = inspect.signature(function).parameters
        if "solution_str" not in parameters:
            return function(response, ground_truth)
        keywords = {
            "solution_str": response,
            "ground_truth": ground_truth,
            "data_source": data_source,
            "extra_info": extra_info,
        }
        return function(**{name: value for name, value in keywords.items() if name in parameters})


class _ManagerScore:
    """Scores by a manager's `__call__`, or by the function that its method selects."""

    def __init__(self, manager_class: type, arguments: Mapping[str, Any]) -> None:
        from transformers import AutoTokenizer

        keywords = dict(arguments)
        folder = keywords.pop("tokenizer")
        self.tokenizer = folder and AutoTokenizer.from_pretrained(folder, local_files_only=True)
        function_name = keywords.get("compute_score")
        if function_name:
            module = sys.modules[manager_class.__module__]
            keywords["compute_score"] = find_function(module, function_name)
        self.manager = manager_class(tokenizer=self.tokenizer, **keywords)
        select = getattr(self.manager, SELECT, None)
        self.selected = None if select is None else _SelectedScore(select)
        self.is_called = not select or overrides_call(manager_class)

    def __call__(
        self, prompt: str, response: str, ground_truth: Any, extra_info: Any, data_source: str,
        **_: Any,
    ) -> Any:  # fmt: skip
        if self.selected is not None and not self.is_called:
            return self.selected(prompt, response, ground_truth, extra_info, data_source)
        label = {**(extra_info.get("reward_model") or {}), "ground_truth": ground_truth}
        row = {
            **extra_info,
            "extra_info": extra_info,
            "reward_model": label,
            "data_source": data_source,
            "ground_truth": ground_truth,
        }
        data = self._as_batch(prompt, response, row)
        if "return_dict" in inspect.signature(self.manager.__call__).parameters:
            result = self.manager(data, return_dict=True)
        else:
            result = self.manager(data)
        if not isinstance(result, dict):
            return float(result.sum())
        named_parts = {}
        for name, values in result.get("reward_extra_info", {}).items():
            if len(values):
                named_parts[name] = values[0]
        return {**named_parts, "score": float(result["reward_tensor"].sum())}

    def _as_batch(self, prompt: str, response: str, row: Mapping[str, Any]) -> DataProto:
        import numpy as np
        import torch

        texts = {"prompts": prompt, "responses": response or " "}
        ids = {
            name: torch.tensor([self.tokenizer(text, add_special_tokens=False)["input_ids"]])
            for name, text in texts.items()
        }
        mask = torch.ones_like(torch.cat([*ids.values()], dim=1))
        columns = {}
        for name, value in row.items():
            columns[name] = np.empty(1, dtype=object)
            columns[name][0] = value
        return DataProto({**ids, "attention_mask": mask}, columns)


def overrides_call(manager_class: type) -> bool:
    """Return whether a manager's class has a `__call__` that is the user's."""
    homes = (home for home in manager_class.__mro__ if "__call__" in vars(home))
    home = next(homes, None)
    return home is not None and not home.__module__.startswith("mindspeed_rlxf.")
