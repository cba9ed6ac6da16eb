"""From the composed YAML tree to the typed, checked configuration, or every problem at once."""

from __future__ import annotations

import copy
import re
from collections.abc import Iterable, Mapping
from typing import Any

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from mindspeed_rlxf.config.checks import check
from mindspeed_rlxf.config.draft import Draft
from mindspeed_rlxf.config.errors import ConfigError
from mindspeed_rlxf.config.host import check_host
from mindspeed_rlxf.config.idle_keys import idle_keys
from mindspeed_rlxf.config.layers import make_draft
from mindspeed_rlxf.config.messages import explain
from mindspeed_rlxf.config.notices import notices
from mindspeed_rlxf.config.schema import RunConfig

LAYOUT_KEYS = ("parallel_size", "resource_pool", "placement")
"""While one of these is wrong, sizes derived from it mean nothing."""

STAND_INS: Mapping[str, Any] = {
    "tokenizer_name_or_path": "-",
    "model": "-",
}
"""For required texts; a required number is stood in for by 2."""


def resolve(tree: Mapping[str, Any], name: str) -> RunConfig:
    """The configuration that `tree` (see `compose`) describes.

    name: config name, which the run is called by unless `training.run_name` is given.
    Raises ConfigError with every problem found: unknown keys, types, limits, rules across
    sections, and devices that this host does not have (of a dry run its command asks for these).
    """
    return resolve_with_notes(tree, name)[0]


def resolve_with_notes(tree: Mapping[str, Any], name: str) -> tuple[RunConfig, list[str]]:
    """As `resolve`, with a line for keys that mean little, nothing or something else here."""
    draft = make_draft(tree, name)
    config = _validate(draft)
    if config is not None and not any(k in path for path in draft.broken for k in LAYOUT_KEYS):
        # A dry run shows its plan before what this host lacks: see `cli.train`.
        found = [*check(config), *([] if config.dry_run else check_host(config))]
        good = [text for text in found if not _mentions(text, draft.broken)]
        draft.problems += map(draft.as_written, good)
    if draft.problems:
        raise ConfigError(list(dict.fromkeys(draft.problems)))
    assert config is not None, "no problems, hence a configuration"
    for meaning, key in idle_keys(config, draft.origins):
        draft.note(meaning, key)
    return config, [*draft.note_lines(), *notices(config)]


def _mentions(problem: str, paths: Iterable[str]) -> bool:
    return any(re.search(rf"\b{re.escape(path)}[.=:]", problem) for path in paths)


def _validate(draft: Draft) -> RunConfig | None:
    """The typed payload. Wrong values become problems and are stood in for by good ones, so that
    rules about the other values can still be checked; None where that is not possible."""
    payload = copy.deepcopy(draft.payload)
    for attempt in range(4):
        try:
            return RunConfig.model_validate(payload)
        except ValidationError as error:
            details = error.errors(include_url=False)
        if attempt == 0:
            _report(draft, details)
        for detail in details:
            _patch(payload, detail)
    return None


def _report(draft: Draft, details: list[ErrorDetails]) -> None:
    by_path: dict[str, list[ErrorDetails]] = {}
    reported = frozenset(draft.broken)
    for detail in details:
        loc = _place(draft.payload, detail["loc"])
        path = draft.path(loc)
        if path in reported or loc[-1] == "architecture":
            continue  # a model that is missing
        by_path.setdefault(path, []).append(detail)
        draft.broken |= {
            path,
            ".".join(str(p) for p in loc if p not in ("architecture", "optimizer")),
        }
    draft.problems += [explain(path, errors) for path, errors in by_path.items()]


def _place(payload: Any, loc: tuple[int | str, ...]) -> tuple[int | str, ...]:
    """`loc` without the tags that pydantic adds for members of a union."""
    node = payload
    place: list[int | str] = []
    for part in loc:
        if isinstance(node, dict):
            node = node.get(part)
        elif isinstance(node, list) and isinstance(part, int):
            node = node[part] if part < len(node) else None
        else:
            break
        place.append(part)
    return tuple(place)


def _patch(payload: dict[str, Any], detail: ErrorDetails) -> None:
    """Takes a wrong value away, or puts a stand-in where a required one is missing."""
    *parents, last = _place(payload, detail["loc"])
    holder: Any = payload
    for part in parents:
        if isinstance(holder[part], list):
            last = part  # one bad element takes its whole list away
            break
        holder = holder[part]
    if detail["type"] == "missing":
        holder[str(last)] = STAND_INS.get(str(last), 2)
    else:
        holder.pop(str(last), None)
