"""Turn the composed YAML tree into the typed, checked configuration, or report all problems."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from itertools import takewhile
from typing import Any

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from mindspeed_rlxf.config.draft import Dialect, Draft, yaml_parts
from mindspeed_rlxf.config.errors import ConfigError, Problem
from mindspeed_rlxf.config.fields import RULES_LATER, Section
from mindspeed_rlxf.config.layers import make_draft
from mindspeed_rlxf.config.messages import explain
from mindspeed_rlxf.config.rules.host import check_host
from mindspeed_rlxf.config.rules.idle_keys import find_idle_keys
from mindspeed_rlxf.config.rules.sections import check_sections
from mindspeed_rlxf.config.schema import (
    ActorConfig,
    ArchitectureConfig,
    FunctionConfig,
    RunConfig,
    TrainingConfig,
)

LAYOUT_KEYS = ("parallel_size", "resource_pool", "placement")
"""Rules across sections are not checked while a key that contains one of these words is wrong."""

STAND_INS: Mapping[str, Any] = {
    name: "-" if field.annotation is str else 2
    for section in (TrainingConfig, ActorConfig, ArchitectureConfig, FunctionConfig)
    for name, field in section.model_fields.items()
    if field.is_required() and name not in ("architecture", "optimizer")  # these are sections
}
"""Legal values that replace wrong ones of required keys, so that other rules can be checked."""


def resolve(tree: Mapping[str, Any], name: str, dialect: Dialect | None = None) -> RunConfig:
    """Return the typed, checked configuration of a composed tree (see `compose`).

    name:    config name, the default of `training.run_name`
    dialect: translator of another toolkit's keys
    Runs plugins and files of reward functions.
    Errors: ConfigError with all problems that were found: unknown keys, types, limits, rules across
    sections, and devices or memory that this host lacks (not checked here for a dry run).
    """
    return resolve_with_notes(tree, name, dialect)[0]


def resolve_with_notes(
    tree: Mapping[str, Any], name: str, dialect: Dialect | None = None
) -> tuple[RunConfig, list[str]]:
    """Return what `resolve` returns, and lines about legal keys that may surprise.

    Such keys have no effect in this run, or an effect that the user may not expect.
    Errors: ConfigError with all problems that were found. A rule is not checked while a key that it
    depends on is wrong, no rule while actor, reference or critic lacks its architecture, rules
    between sections and the host not while a key of LAYOUT_KEYS is wrong. In a dry run the host is
    never checked.
    """
    draft = make_draft(tree, name, dialect)
    if (config := _validate(draft)) is not None:
        draft.add_problems(_section_rules(draft, config))
        if not any(key in path for path in draft.broken for key in LAYOUT_KEYS):
            # A dry run checks the host after it has printed its plan: see `cli.train`.
            between = check_sections(config)
            draft.add_problems(between if config.dry_run else [*between, *check_host(config)])
    if draft.problems:
        raise ConfigError(list({str(problem): problem for problem in draft.problems}.values()))
    assert config is not None, "no problems, hence a configuration"
    for meaning, key in find_idle_keys(config, draft.origins):
        draft.note(meaning, key)
    lines = [f"{', '.join(keys)}: {meaning}" for meaning, keys in draft.notes.items()]
    return config, [*lines, *_remarks(config)]


def _remarks(config: RunConfig) -> Iterator[str]:
    """Yield a text if `save_interval` is over `train_iters`, one if actor and critic share `save`.

    The texts are for the user; neither case is an error.
    """
    training = config.training
    if training.save_interval > training.train_iters:
        yield (
            f"training.save_interval={training.save_interval} is over training.train_iters="
            f"{training.train_iters}: checkpoints are saved by training.save_interval_s only, and "
            "at the end"
        )
    if config.shared_save:
        yield (
            f"actor_rollout.save and critic.save are one folder, {config.shared_save}: weights go "
            "to its subfolders actor and critic"
        )


def _validate(draft: Draft) -> RunConfig | None:
    """Return the payload as RunConfig, with types and limits checked.

    None if actor, reference or critic has no architecture. Wrong values are added to the draft's
    problems, and the result lacks them or has stand-ins, so that the caller can check rules between
    the other keys. The payload is not changed.
    """
    try:
        return RunConfig.model_validate(draft.payload, context=RULES_LATER)
    except ValidationError as error:
        details = error.errors(include_url=False)
    places = [_location(draft.payload, detail) for detail in details]
    _report_errors(draft, details, places)
    if any(place[-1] == "architecture" for place in places):
        return None
    payload = copy.deepcopy(draft.payload)
    for place in places:
        _replace_wrong_value(payload, place)
    return RunConfig.model_validate(payload, context=RULES_LATER)


def _section_rules(draft: Draft, section: Section, loc: tuple[str, ...] = ()) -> Iterator[Problem]:
    """Yield the `broken_rules` of a section, then those of the sections inside it, also in tuples.

    The problems' keys become full keys as the user wrote them.
    loc: location of the section in the payload
    """
    for problem in section.broken_rules():
        yield problem.rename_keys(lambda key: draft.path((*loc, *key.split("."))))
    for name, value in section:
        for item in value if isinstance(value, tuple) else (value,):
            if isinstance(item, Section):
                yield from _section_rules(draft, item, (*loc, name))


def _report_errors(
    draft: Draft, details: list[ErrorDetails], places: list[tuple[int | str, ...]]
) -> None:
    """Add one problem to the draft for each wrong key that is not in `draft.broken` yet.

    All errors of a key make one problem, and the key is added to `draft.broken`. A missing
    architecture is passed over, as the missing model is reported already.
    details, places: pydantic's errors and the location of each in the payload
    """
    by_path: dict[str, list[ErrorDetails]] = {}
    reported = frozenset(draft.broken)
    for detail, place in zip(details, places, strict=True):
        path = draft.path(place)
        if path in reported or place[-1] == "architecture":  # a missing model is reported already
            continue
        by_path.setdefault(path, []).append(detail)
        draft.broken |= {path, ".".join(yaml_parts(place))}
    draft.problems += [explain(path, errors) for path, errors in by_path.items()]


def _location(payload: Any, detail: ErrorDetails) -> tuple[int | str, ...]:
    """Return the path of keys and indices in the payload at which a pydantic error lies.

    It ends before the first item of the error's `loc` that the payload lacks, such as pydantic's
    tag of a member of a union. For a missing key it is the whole `loc`: no union of the schema has
    a section as a member, so that `loc` has no tags.
    """
    node = payload
    place: list[int | str] = []
    for part in detail["loc"]:
        if isinstance(node, dict) and (part in node or detail["type"] == "missing"):
            node = node.get(part)
        elif isinstance(node, list) and isinstance(part, int):
            node = node[part] if part < len(node) else None
        else:
            break
        place.append(part)
    return tuple(place)


def _replace_wrong_value(payload: dict[str, Any], place: tuple[int | str, ...]) -> None:
    """Remove the wrong value at `place` from `payload` in place.

    A key whose name is in STAND_INS gets that value instead, also a missing one. For a wrong item
    of a list, or a key that is no text, the whole list or dict is removed or replaced. Does nothing
    if the value went with another wrong value of its dict.
    """
    *parents, last = takewhile(lambda part: isinstance(part, str), place)
    holder: Any = payload
    for part in parents:
        if part not in holder:  # removed because of another of its values
            return
        holder = holder[part]
    holder[last] = STAND_INS.get(str(last))
    if holder[last] is None:
        del holder[last]
