"""Score a sample by the functions of the configuration, or by the rule of its data source."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeAlias

from mindspeed_rlxf.config import plugins
from mindspeed_rlxf.config.reward_calls import BY_SOURCE, DATA_SOURCE, find_function, keywords_of
from mindspeed_rlxf.config.sources import Source, run_as_module
from mindspeed_rlxf.rewards.outcome import Cause, Sample, ScoreFailure, ScoringBroken, to_result
from mindspeed_rlxf.rewards.rules import RULES, RewardResult

Score: TypeAlias = Callable[[Sample], RewardResult]


@dataclass(frozen=True)
class Part:
    """One function. source: its file; None = `function` is the name of a rule"""

    name: str
    function: str
    source: Source | None = None
    weight: float = 1.0
    arguments: dict[str, Any] = field(default_factory=dict)
    data_sources: tuple[str, ...] = ()

    def applies_to(self, data_source: str) -> bool:
        return not self.data_sources or data_source in self.data_sources


@dataclass(frozen=True)
class Plan:
    """All that a process needs to score, in plain values.

    rules:    data source -> name of its rule
    plugins:  files that register rules of `rules`, or of parts
    defaults: a sample that no part applies to is scored by the rule of its data source
    sandbox:  keys of reward.sandbox; None where no rule runs programs
    """

    parts: tuple[Part, ...]
    rules: dict[str, str]
    plugins: tuple[Source, ...] = ()
    defaults: bool = True
    sandbox: dict[str, Any] | None = None

    @classmethod
    def from_plain(cls, plain: dict[str, Any]) -> Plan:
        """Read what `dataclasses.asdict` made, after JSON."""
        parts = [
            Part(**{**part, "source": part["source"] and Source(**part["source"])})
            for part in plain["parts"]
        ]
        plugins = tuple(Source(**source) for source in plain["plugins"])
        return cls(tuple(parts), plain["rules"], plugins, plain["defaults"], plain["sandbox"])


class SampleScorer:
    """Runs the files of a plan. Exceptions of these files are not caught."""

    def __init__(self, plan: Plan) -> None:
        for source in plan.plugins:
            plugins.load(source)
        self._plan = plan
        self._parts = [(part, self._make(part)) for part in plan.parts]

    def _make(self, part: Part) -> Score:
        if part.source is not None:
            function = find_function(run_as_module(part.source), part.function)
            return partial(_call, function, keywords_of(function), part.arguments)
        if part.function == BY_SOURCE:
            return self._by_source
        return partial(_apply, part.function, part.arguments)

    def _by_source(self, sample: Sample) -> RewardResult:
        return _apply(self._plan.rules[sample.data_source], {}, sample)

    def score(self, sample: Sample) -> RewardResult:
        """Add up the weighted scores of the parts that apply.

        The parts of the result are each function's score by its name, and the other numbers that it
        returned by `name/key`. Raises ScoreFailure; a failure of one part is one of the sample.
        """
        wanted = [(p, score) for p, score in self._parts if p.applies_to(sample.data_source)]
        if not wanted and self._plan.defaults:
            return self._by_source(sample)
        return weighted_sum([(part.name, part.weight, score(sample)) for part, score in wanted])


def weighted_sum(results: Sequence[tuple[str, float, RewardResult]]) -> RewardResult:
    """Add up results. results: name, weight and result of each"""
    parts: dict[str, float] = {}
    for name, _, result in results:
        parts[name] = result.score
        parts.update({f"{name}/{key}": value for key, value in result.parts.items()})
    return RewardResult(sum(weight * result.score for _, weight, result in results), parts)


def _apply(rule: str, arguments: dict[str, Any], sample: Sample) -> RewardResult:
    result = RULES[rule](sample.response, sample.ground_truth, **arguments)
    return to_result({**result.parts, "score": result.score})


def _call(
    function: Callable[..., Any],
    keywords: Sequence[str],
    arguments: dict[str, Any],
    sample: Sample,
) -> RewardResult:
    """Call a function of the user; a coroutine is run to its end."""
    given = {
        "prompt": sample.prompt,
        "response": sample.response,
        "ground_truth": sample.ground_truth,
        "extra_info": sample.extra_info,
        DATA_SOURCE: sample.data_source,
    }
    value = function(**{name: given[name] for name in keywords}, **arguments)
    if inspect.iscoroutine(value):
        value = asyncio.run(value)
    return to_result(value)


def score_safely(scorer: SampleScorer, sample: Sample) -> dict[str, Any]:
    """Score a sample; return {score, parts}, or {cause, message} of a failure; never raise.

    It returns {error} when no sample can be scored any more.
    """
    try:
        result = scorer.score(sample)
        return {"score": result.score, "parts": result.parts}
    except ScoreFailure as failure:
        return {"cause": failure.cause.value, "message": failure.message}
    except ScoringBroken as error:
        return {"error": str(error)[:1000]}
    except MemoryError:
        return {"cause": Cause.MEMORY.value, "message": "MemoryError"}
    except SystemExit as error:
        return {"cause": Cause.EXIT.value, "message": f"sys.exit({error.code!r:.60})"}
    except BaseException as error:
        return {"cause": Cause.EXCEPTION.value, "message": f"{type(error).__name__}: {error}"[:300]}
