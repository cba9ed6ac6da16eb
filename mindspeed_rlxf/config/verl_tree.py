"""verl's keys: the table, a file with overrides, and a tree on its way into our keys."""

from collections.abc import Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import yaml
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from mindspeed_rlxf.config.compose import explain
from mindspeed_rlxf.config.keys import TOP_LEVEL, Given, Tree, find_field
from mindspeed_rlxf.config.problems import ConfigError, Problem, closest, format_value

TABLE: Tree = yaml.safe_load(Path(__file__).with_name("verl_keys.yaml").read_text("utf-8"))
ACTOR, ROLLOUT = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"
REF, MODEL = "actor_rollout_ref.ref", "actor_rollout_ref.model"


def _flatten(tree: Mapping[str, Any], path: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in tree.items():
        if isinstance(value, Mapping):
            yield from _flatten(value, f"{path}{name}.")
        elif value != "???" and name != "_target_":  # absent; a class
            yield f"{path}{name}", value


TRAINED = {ACTOR: "actor_rollout", "critic": "critic"}
"""verl's section of a trained role -> ours."""
GROUPS = {
    "renamed": {"": ""}, "model": {MODEL: "actor_rollout", "critic.model": "critic"},
    "trained": TRAINED, "every_role": {**TRAINED, REF: "ref"},
}  # fmt: skip
"""Part of the table -> verl's sections with these keys, and ours."""


class Renamed(NamedTuple):
    """What becomes of one of verl's keys.

    Attributes:
        target: Our key.
        change: What differs, where `verl.py` converts the value.
        words: verl's values -> ours.
        only: Whether other values than `words` are refused.
        condition: verl's key that must be on, then the values that it must have, if any.
    """

    target: str
    change: str = ""
    words: Mapping[Any, Any] = MappingProxyType({})
    only: bool = False
    condition: Sequence[Any] = ()


def _expand(group: str) -> Iterator[tuple[str, Renamed]]:
    for section, role in GROUPS[group].items():
        at, to = f"{section}.".lstrip("."), f"{role}.".lstrip(".")
        for key, entry in TABLE[group].items():
            if not isinstance(entry, dict):
                target, *change = [entry] if isinstance(entry, str) else entry
                yield f"{at}{key}", Renamed(f"{to}{target}", *change)
                continue
            words = entry.get("words") or entry.get("replace", {})
            needs = [f"{at}{name}" for name in entry.get("if", ())[:1]] + entry.get("if", [])[1:]
            yield f"{at}{key}", Renamed(f"{to}{entry['to']}", "", words, "words" in entry, needs)


RENAMED = {key: found for group in GROUPS for key, found in _expand(group)}
NO_EFFECT = {pattern: text for text, keys in TABLE["no_effect"].items() for pattern in keys.split()}
DEFAULTS = dict(_flatten(TABLE["defaults"]))
KINDS: dict[type, tuple[Any, ...]] = {
    bool: ("true or false", bool, type(None)), int: ("a number", int),
    float: ("a number", int, float, type(None)), list: ("a list", list),
}  # fmt: skip
"""Kind of a default -> its name, and the kinds that a value may have."""
SECTIONS = {
    key.partition(".")[0]
    for key in (*RENAMED, *TABLE["older"], *NO_EFFECT)
    if key.partition(".")[0].isidentifier()
}
"""verl's top level. Other sections of ours may stand beside them."""
ALWAYS = {"adv_estimator", "kl_in", "kl_penalty", "loss_normalizer", "lam", "clip_ratio_c"}
"""Our keys that are always written, as their defaults depend on others or are not verl's."""


def is_verl(tree: Mapping[str, Any]) -> bool:
    """Return whether a tree has verl's sections, not ours or MindSpeed-LLM's."""
    nested = tree.get("actor_rollout_ref")
    known = {"actor", "rollout", "model"}
    return "trainer" in tree or (isinstance(nested, Mapping) and not known.isdisjoint(nested))


def read_verl(file: str | Path, overrides: Sequence[str] = ()) -> Tree:
    """Return the YAML file with overrides in Hydra's grammar; interpolations stay as they are.

    Raises:
        ConfigError: The file or an override cannot be read, or the file is no mapping.
    """
    try:
        tree: Any = OmegaConf.load(file)
        for each in OverridesParser.create().parse_overrides(list(overrides)):
            value = "???" if each.is_delete() else each.value()
            OmegaConf.update(tree, each.key_or_group, value, force_add=True)
    except (HydraException, OmegaConfBaseException, yaml.YAMLError, OSError) as error:
        raise ConfigError(explain(error, str(file), ())) from error
    plain: Any = OmegaConf.to_container(tree)
    if not isinstance(plain, dict) or not is_verl(plain):
        rule = "must hold verl's sections, as trainer and actor_rollout_ref"
        raise ConfigError(Problem(str(file), rule, remedy="use --config-name for other files"))
    return {str(name): value for name, value in plain.items()}


def _current_name(key: str) -> str:
    older = [name for name in TABLE["older"] if f"{key}.".startswith(f"{name}.")]
    name = max(older, key=len, default="")
    return TABLE["older"][name] + key.removeprefix(name) if name else key


def asks(value: Any) -> bool:
    """Whether a value asks for something: not null, false, "" or []."""
    return value is not None and value is not False and value not in ("", [])


class VerlTree:
    """verl's keys, as written and with verl's defaults, and our sections that they become.

    Attributes:
        given: Our sections, with problems and notes.
        written: Keys in the tree, by their names in the table.
        spelled: Name in the table -> key in the tree.
        values: `written`, and verl's values of absent keys.
        roles: Trained roles: verl's section -> ours.
        megatron: Whether Megatron trains; else FSDP does.
    """

    def __init__(self, tree: Mapping[str, Any]) -> None:
        self.given = Given({k: v for k, v in tree.items() if k in TOP_LEVEL - SECTIONS})
        self.written, self.spelled = dict[str, Any](), dict[str, str]()
        for name in sorted(tree.keys() - SECTIONS - TOP_LEVEL - {"defaults", "hydra"}):
            self._report_unknown(name)
        theirs = {name: value for name, value in tree.items() if name in SECTIONS}
        try:
            plain: Any = OmegaConf.to_container(OmegaConf.create(theirs), resolve=True)
        except (OmegaConfBaseException, ValueError) as error:
            raise ConfigError(explain(error, "of verl", ())) from error
        for key, value in _flatten(plain):
            name = _current_name(key)
            if value is not None or name not in self.written:  # files of 0.8 have both names
                self.written[name], self.spelled[name] = value, key
        self.values: Tree = {**DEFAULTS, **self.written}
        self._check_kinds()
        for key, default in DEFAULTS.items():
            if key not in self.written and str(default).startswith("${"):  # another key's value
                self.values[key] = self.values.get(default[2:-1])
        is_ppo = self.values["algorithm.adv_estimator"] == "gae"
        self.roles = TRAINED if is_ppo else {ACTOR: TRAINED[ACTOR]}
        lays_out = any(name.startswith(f"{ACTOR}.megatron.") for name in self.written)
        guess = self.get("model_engine") or ("megatron" if lays_out else "fsdp")
        self.megatron = (self.get(f"{ACTOR}.strategy") or guess) == "megatron"

    def _check_kinds(self) -> None:
        """Replace values of another kind than verl's default by it; report them."""
        for key in DEFAULTS.keys() & self.written:
            default = DEFAULTS[key]
            default = DEFAULTS.get(default[2:-1]) if str(default).startswith("${") else default
            name, *kinds = KINDS.get(type(default), ("", type(self.written[key])))
            if type(self.written[key]) not in kinds:
                self.refuse(key, f"must be {name}", "correct it")
                self.values[key] = default

    def get(self, key: str) -> Any:
        """Return verl's value, its default if absent, else None."""
        return self.values.get(key)

    def refuse(self, key: str, rule: str, remedy: str) -> None:
        """Report a value of verl."""
        self.given.refuse(self.spelled.get(key, key), rule, self.get(key), remedy)

    def note(self, meaning: str, *keys: str) -> None:
        """Note those of the keys that are written and ask for something."""
        for key in keys:
            if asks(value := self.written.get(key)):
                self.given.note(meaning, f"{self.spelled[key]}={format_value(value)}")

    def put(self, target: str, value: Any, *sources: str) -> None:
        """Set our key, unless it is set, or is our default and no source is written."""
        *parents, name = target.split(".")
        field = find_field([*parents, name])
        is_default = field is not None and field.default == value and name not in ALWAYS
        if value is None or (is_default and not any(key in self.written for key in sources)):
            return
        node = self.given.sections
        for parent in parents:
            node = node.setdefault(parent, {})
        if name not in node:
            node[name] = value
            if sources:
                self.given.renamed[target] = self.spelled.get(sources[0], sources[0])

    def move(self, key: str) -> None:
        """Set our key for a key of the table, if its condition holds."""
        found, value = RENAMED[key], self.get(key)
        if found.condition:
            asked, *needed = self.get(found.condition[0]), *found.condition[1:]
            if asked not in needed if needed else not asked:
                return
        if value in [*found.words]:
            value = found.words[value]
        elif found.only and value is not None:
            if key in self.written:
                names = ", ".join(format_value(word).strip("'") for word in found.words)
                self.refuse(key, f"must be one of {names}", "use one of them")
            return
        self.put(found.target, value, key)

    def collect(self, section: str) -> Tree:
        """Return the keys below a section whose names users choose."""
        prefix = f"{section}."
        found = {k: v for k, v in self.written.items() if k.startswith(prefix)}
        for key in found:
            del self.written[key]
        return {key.removeprefix(prefix): value for key, value in found.items()}

    def copy_equal(self) -> None:
        """Set our keys for all keys that the table alone translates."""
        other = "fsdp_config" if self.megatron else "megatron"
        for key, found in RENAMED.items():
            idle = other in key.split(".") or (
                "critic" not in self.roles and found.target.startswith("critic.")
            )
            if not found.change and not idle:
                self.move(key)

    def sort_others(self) -> None:
        """Note or refuse each written key that is not translated."""
        for key, value in self.written.items():
            if key.startswith("critic.") and "critic" not in self.roles:
                self.given.note("this estimator has no critic", "critic")
            elif key not in RENAMED:
                self._sort(key, value)

    def _sort(self, key: str, value: Any) -> None:
        effect = next((each for each in NO_EFFECT if fnmatchcase(key, each)), None)
        for entry in TABLE["refused"]:
            fits = [each for each in entry["keys"].split() if fnmatchcase(key, each)]
            if fits and not (effect and fits[0].endswith("*")):
                if asks(value) and value not in entry.get("neutral", ()):
                    self.refuse(key, f"is not supported: {entry['why']}", entry["remedy"])
                return
        if effect is None and value is not None:
            self._report_unknown(self.spelled[key])
        elif effect is not None and asks(value):
            section = effect.removesuffix(".*").rpartition(".")[2]
            path, shown = self.spelled[key], f"={format_value(value)}"
            if effect.endswith(".*") and section:  # one item for a section
                path, shown = f"{path.partition(f'{section}.')[0]}{section}", ""
            self.given.note(NO_EFFECT[effect], path + shown)

    def _report_unknown(self, key: str) -> None:
        known = [
            name for name in (*RENAMED, *TABLE["older"], *NO_EFFECT, *SECTIONS) if "*" not in name
        ]
        if any(name.startswith(f"{key}.") for name in known):
            self.given.refuse(key, "must be a section of keys", self.written[key], "correct it")
            return
        guess = closest(key, known)
        remedy = f"did you mean {guess}?" if guess else "remove it"
        self.given.problems.append(Problem(key, "unknown key of verl", remedy=remedy, colon=True))
