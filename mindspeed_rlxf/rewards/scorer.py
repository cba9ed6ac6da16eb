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
    """One reward function.

    source:       file of the function; None = `function` is the name of a rule
    data_sources: those that it scores, empty = all
    """

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
    """All that a scoring process needs, in plain values.

    parts:    reward functions, whose weighted scores are added
    rules:    data source -> name of its rule
    plugins:  files that register rules of plugins
    defaults: whether the rule of its data source scores a sample that no part applies to
    sandbox:  keys of reward.sandbox; None where no rule runs programs
    """

    parts: tuple[Part, ...]
    rules: dict[str, str]
    plugins: tuple[Source, ...] = ()
    defaults: bool = True
    sandbox: dict[str, Any] | None = None

    @classmethod
    def from_plain(cls, plain: dict[str, Any]) -> Plan:
        """Make a plan from what `dataclasses.asdict` gave and JSON has written and read back."""
        parts = [
            Part(**{**part, "source": part["source"] and Source(**part["source"])})
            for part in plain["parts"]
        ]
        plugins = tuple(Source(**source) for source in plain["plugins"])
        return cls(tuple(parts), plain["rules"], plugins, plain["defaults"], plain["sandbox"])


class SampleScorer:
    """Scores samples by a plan; runs the plan's files, whose exceptions are not caught."""

    def __init__(self, plan: Plan) -> None:
        for source in plan.plugins:
            plugins.load(source)
        self._plan = plan
        self._parts = [(part, self._make_score_function(part)) for part in plan.parts]

    def _make_score_function(self, part: Part) -> Score:
        if part.source is not None:
            function = find_function(run_as_module(part.source), part.function)
            return partial(_call_function, function, keywords_of(function), part.arguments)
        if part.function == BY_SOURCE:
            return self._by_source
        return partial(_apply_rule, part.function, part.arguments)

    def _by_source(self, sample: Sample) -> RewardResult:
        return _apply_rule(self._plan.rules[sample.data_source], {}, sample)

    def score(self, sample: Sample) -> RewardResult:
        """Add up the weighted scores of the functions that apply to the sample's data source.

        The parts of the result are each function's score under its name, and the other numbers that
        it returned under `name/key`. If no function applies, the rule of the data source scores the
        sample. Raises what a function raises, and ScoreFailure for a return value that is no score.
        """
        wanted = [(p, score) for p, score in self._parts if p.applies_to(sample.data_source)]
        if not wanted:
            return self._by_source(sample)
        return weighted_sum([(part.name, part.weight, score(sample)) for part, score in wanted])


def weighted_sum(results: Sequence[tuple[str, float, RewardResult]]) -> RewardResult:
    """Add up weighted scores. results: (name, weight, result) of each function

    The parts are each score, unweighted, under its name, and its own parts under `name/key`. No
    results give 0.
    """
    parts: dict[str, float] = {}
    for name, _, result in results:
        parts[name] = result.score
        parts.update({f"{name}/{key}": value for key, value in result.parts.items()})
    return RewardResult(sum(weight * result.score for _, weight, result in results), parts)


def _apply_rule(rule: str, arguments: dict[str, Any], sample: Sample) -> RewardResult:
    result = RULES[rule](sample.response, sample.ground_truth, **arguments)
    return to_result({**result.parts, "score": result.score})


def _call_function(
    function: Callable[..., Any],
    keywords: Sequence[str],
    arguments: dict[str, Any],
    sample: Sample,
) -> RewardResult:
    """Call a function of the user and convert its return value; a coroutine is run to its end.

    keywords: fields of the sample that the function takes. Raises what the function raises, and
    ScoreFailure for a value that is no score.
    """
    fields = {
        "prompt": sample.prompt,
        "response": sample.response,
        "ground_truth": sample.ground_truth,
        "extra_info": sample.extra_info,
        DATA_SOURCE: sample.data_source,
    }
    value = function(**{name: fields[name] for name in keywords}, **arguments)
    if inspect.iscoroutine(value):
        value = asyncio.run(value)
    return to_result(value)


def score_safely(scorer: SampleScorer, sample: Sample) -> dict[str, Any]:
    """Score a sample; return {score, parts}, or {cause, message} if it failed.

    Returns {error} when scoring is broken for all samples. Catches every exception, SystemExit and
    KeyboardInterrupt included.
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
