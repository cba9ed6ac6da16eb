"""The schema of a checkpoint's `trainer/state.json`, checked before a run resumes from it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

from pydantic import Discriminator, Field, Tag, ValidationError

from mindspeed_rlxf.config.errors import Problem
from mindspeed_rlxf.config.fields import Section
from mindspeed_rlxf.config.suggest import shorten_value

MAX_NUMBER = 1 << 53  # exact as a float
Count = Annotated[int, Field(ge=0, le=MAX_NUMBER)]
AtLeastOne = Annotated[int, Field(ge=1, le=MAX_NUMBER)]


class KlState(Section):
    """Result of `KlController.state_dict`."""

    value: float


class SamplerState(Section):
    """Result of `PromptSampler.state_dict`."""

    epoch: Count
    offset: Count
    num_prompts: AtLeastOne
    seed: Count
    shuffle: Annotated[int, Field(ge=0, le=1)]

    def broken_rules(self) -> Iterator[Problem]:
        if self.offset >= self.num_prompts:
            yield Problem("offset", f"must be below num_prompts={self.num_prompts}", self.offset)


class MixtureState(Section):
    """Result of `MixtureSampler.state_dict`."""

    weights: list[Annotated[float, Field(gt=0)]]
    sources: Annotated[list[SamplerState], Field(min_length=1)]

    def broken_rules(self) -> Iterator[Problem]:
        if len(self.weights) != len(self.sources):
            rule = f"must have one for each of the {len(self.sources)} sources"
            yield Problem("weights", rule, self.weights)


def _kind_of_sampler(state: Any) -> str:
    return "mixture" if isinstance(state, dict) and "sources" in state else "single"


class PromptsState(Section):
    """Result of `PromptSource.state_dict`."""

    sampler: Annotated[
        Annotated[SamplerState, Tag("single")] | Annotated[MixtureState, Tag("mixture")],
        Discriminator(_kind_of_sampler),
    ]
    next_sample_id: Count


class TrainerState(Section):
    """Result of `PpoTrainer.state_dict`."""

    iteration: AtLeastOne
    kl: KlState
    prompts: PromptsState


class DriverState(Section):
    """The driver's state in a checkpoint.

    positions: file name -> bytes of each line file (`driver_state.line_positions`)
    prompts_digest: result of `driver_state.hash_prompts`
    score: validation score of this iteration, None = not validated; may be NaN
    score_metric: metric that the score is of
    """

    iteration: AtLeastOne
    trainer: TrainerState
    positions: dict[str, Count]
    prompts_digest: Annotated[str, Field(max_length=200)]
    score: Annotated[float | None, Field(allow_inf_nan=True)] = None
    score_metric: Annotated[str, Field(max_length=1000)] = "score"


def read_driver_state(file: Path, iteration: int) -> dict[str, Any]:
    """Read and check the driver's state; return it as plain JSON values.

    iteration: iteration in the name of the checkpoint's folder, which the state must have
    Raises OSError, and ValueError where the file is not what the driver wrote.
    """
    try:
        tree = json.loads(file.read_bytes())
    except ValueError as error:
        raise ValueError(f"{file} must be JSON, it is not ({error})") from None
    try:
        state = DriverState.model_validate(tree)
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False)[0]
        place = ".".join(map(str, first["loc"])) or "the whole"
        rule = first["msg"].partition(" or instance of ")[0]
        raise ValueError(
            f"{file}: {place[:200]} is not valid ({rule}), it is {shorten_value(first['input'])}"
        ) from None
    for found in (state.iteration, state.trainer.iteration):
        if found != iteration:
            raise ValueError(f"{file} is of iteration {found}, its folder of {iteration}")
    return dict(tree)
