"""verl's keys as written, beside our sections that they become."""

from collections.abc import Collection, Iterable, Mapping
from fnmatch import fnmatchcase
from typing import Any

from mindspeed_rlxf.compat.verl.files import find_model, resolve_interpolations
from mindspeed_rlxf.compat.verl.table import (
    ACTOR,
    DEFAULTS,
    EXACT_KEYS,
    KINDS,
    MODELS,
    NO_EFFECT,
    RENAMED,
    SECTIONS,
    TABLE,
    TRAINED,
    current_name,
    flatten,
)
from mindspeed_rlxf.config.estimator_traits import TRAITS
from mindspeed_rlxf.config.keys import TOP_LEVEL, Tree, find_field, keys_of
from mindspeed_rlxf.config.plugins import complete_plugin, read_entries
from mindspeed_rlxf.config.problems import Problem, closest, format_value, ref
from mindspeed_rlxf.config.raw_config import RawConfig
from mindspeed_rlxf.config.registry import CHOICES


class Translation:
    """verl's keys, as written and with verl's defaults, and our sections that they become.

    Of several values for one of our keys, the first counts.

    Attributes:
        raw: Our sections, with problems and notes.
        written: Keys in the tree, by their names in the table.
        spelled: Name in the table -> key in the tree.
        values: `written`, and verl's values of absent keys.
        is_recent: Whether the tree has the section `reward` of verl 0.8 and later.
        roles: Trained roles: verl's section -> ours.
        idle: Parts of keys of the engine that does not train.
    """

    def __init__(self, tree: Mapping[str, Any]) -> None:
        self.raw = RawConfig({k: v for k, v in tree.items() if k in TOP_LEVEL - SECTIONS})
        self.written: dict[str, Any] = {}
        self.spelled: dict[str, str] = {}
        for name in sorted(tree.keys() - SECTIONS - TOP_LEVEL - {"defaults", "hydra"}):
            self._report_unknown(name, tree[name])
        training = self.raw.sections["training"]
        read_entries(self.raw.problems, "training.plugins", training, complete_plugin)
        plain = resolve_interpolations(
            {name: value for name, value in tree.items() if name in SECTIONS}
        )
        self._take_ours(plain)
        values = dict(flatten(plain))
        self.is_recent = any(key.startswith("reward.") for key in values)
        strategy = _strategy_of(values)
        # The spelling that counts comes last, and so replaces the others.
        for key in sorted(values, key=lambda key: _outranks(key, values[key], strategy)):
            name = current_name(key)
            if values[key] is not None or name not in self.written:
                self.written[name] = values[key]
                self.spelled[name] = key
        self.values = {**DEFAULTS, **self.written, f"{ACTOR}.strategy": strategy}
        for key, default in DEFAULTS.items():
            if str(default).startswith("${"):  # another key's value
                default = self.get(default[2:-1])
            value = self.written.get(key, default)
            if value is False and type(default) is int:
                value = 0  # as verl compares it
            kind_name, *types = KINDS.get(type(default), ("", type(value)))
            if type(value) not in types:
                self.refuse(key, f"must be {kind_name}", "correct it")
                value = default
            self.values[key] = value
        traits = TRAITS.get(str(self.get("algorithm.adv_estimator")))
        is_ppo = traits is not None and traits.needs_critic
        self.roles = TRAINED if is_ppo else {ACTOR: TRAINED[ACTOR]}
        self.idle = "fsdp_config" if strategy == "megatron" else "megatron"
        if strategy == "megatron":  # which ignores Ulysses, and has another default
            for section in (ACTOR, "critic", "actor_rollout_ref.ref"):
                self.values[f"{section}.ulysses_sequence_parallel_size"] = 1
            for model in MODELS.values():
                self.values[f"{model}.lora_alpha"] = self.written.get(f"{model}.lora_alpha", 32)

    def _take_ours(self, tree: Tree) -> None:
        """Move keys that only we have out of the sections that verl has too."""
        for section in SECTIONS & TOP_LEVEL & tree.keys():
            values = tree[section]
            for name in keys_of(section) if isinstance(values, dict) else ():
                key = f"{section}.{name}"
                if name in values and not any(f"{k}.".startswith(f"{key}.") for k in EXACT_KEYS):
                    self.raw.sections[section][name] = values.pop(name)

    def get(self, key: str) -> Any:
        """Return the YAML's value of a key of verl, else its default, else None."""
        return self.values.get(key)

    def refuse(self, key: str, rule: str, remedy: str) -> None:
        """Report a value of verl."""
        self.raw.refuse(self.spelled.get(key, key), rule, self.get(key), remedy)

    def put(self, target: str, value: Any, source: str = "") -> None:
        """Set our key, unless it is set, or is our default and no source is written."""
        *parents, name = target.split(".")
        field = find_field([*parents, name])
        is_default = field is not None and field.default == value and name not in TABLE["always"]
        if value is None or (is_default and source not in self.written):
            return
        node = self.raw.sections
        for parent in parents:
            node = node.setdefault(parent, {})
        if isinstance(node, dict) and name not in node:
            node[name] = value
            if source:
                self.raw.renamed[target] = self.spelled.get(source, source)

    def move(self, key: str) -> None:
        """Set our keys for a key of the table, unless `convert` does or its engine is not used."""
        entry: Tree | None = None if self.idle in key.split(".") else RENAMED[key]
        while entry and "converted" not in entry:
            ours = key if key.startswith("critic.") else entry["to"]
            if "critic" in self.roles or not ours.startswith("critic."):
                self._put_entry(key, entry, self.get(key))
            entry = entry.get("also")

    def _holds(self, conditions: Tree) -> bool:
        """Whether keys have one of the values; true stands for any that is on."""
        for key, allowed in conditions.items():
            value = self.get(key)
            holds = bool(value) if allowed is True else value in allowed
            if not holds:
                return False
        return True

    def _put_entry(self, key: str, entry: Tree, value: Any) -> None:
        """Set our key for an entry of the table, or report why the value does not become one."""
        words = entry.get("words", {})
        our_values = {**words, **entry.get("replace", {}), **entry.get("where", {})}
        condition = entry.get("if", {})
        exception = entry.get("unless")
        has_effect = self._holds(condition) and not (exception and self._holds(exception))
        if not has_effect:
            if value and value != DEFAULTS.get(key) and "where" not in entry:
                causes = [f"{k}={format_value(self.get(k))}" for k in (exception or condition)]
                self.note(f"no effect with {', '.join(causes)}", key)
        elif "equal" in entry:
            required = self.get(entry["equal"])
            if value not in (None, required):
                rule = f"must be {ref(entry['equal'])}={format_value(required)}"
                self.refuse(key, rule, "remove it")
        elif entry.get("model") == "required" and not isinstance(value, str):
            self.raw.problems.append(Problem(key, "is required", remedy="name a folder"))
        elif value in [*our_values]:  # a list, as the value may not be hashable
            self.put(entry["to"], our_values[value], "" if "where" in entry else key)
        elif "words" not in entry and "where" not in entry:
            if "any" in entry and isinstance(value, dict):
                value = {k: v for k, v in value.items() if v is not None} or None
            if "model" in entry:
                value = find_model(value)
            for factor in entry.get("times", ()):
                value = value * (self.get(factor) or 0)
            self.put(entry["to"], value, key)
        elif isinstance(value, str) and value in _choices(entry["to"]):
            self.put(entry["to"], value, key)
        elif words and value is not None and key in self.written:
            names = ", ".join(format_value(word).strip("'") for word in words)
            self.refuse(key, f"must be one of {names}", "use one of them")

    def note(self, meaning: str, key: str) -> None:
        """Note a key if it is written."""
        if key in self.written:
            self.raw.note(meaning, f"{self.spelled[key]}={format_value(self.written[key])}")

    def sort_others(self) -> None:
        """Note or refuse each written key that is not translated."""
        for key, value in self.written.items():
            if key.startswith("critic.") and "critic" not in self.roles:
                self.raw.note("this estimator has no critic", "critic")
            elif key not in RENAMED:
                self._sort(key, value)

    def _sort(self, key: str, value: Any) -> None:
        """Refuse a key that asks for something that is not here, else note that it has no effect.

        A pattern of TABLE["refused"] that ends with * gives way to one of NO_EFFECT.
        """
        asks = value is not None and value is not False and value not in ("", [])
        no_effect = _first_match(key, NO_EFFECT)
        for entry in TABLE["refused"]:
            refused = _first_match(key, entry["keys"].split())
            if refused is None or (no_effect is not None and refused.endswith("*")):
                continue
            if asks and value not in entry.get("neutral", ()):
                self._report_unsupported(key, entry)
            return
        if no_effect is None:
            if value is not None:
                self._report_unknown(self.spelled[key], value)
        elif asks:
            item = f"{self.spelled[key]}={format_value(value)}"
            section = no_effect.removesuffix(".*").rpartition(".")[2]
            if no_effect.endswith(".*") and section:  # one item for a section
                item = self.spelled[key].partition(f"{section}.")[0] + section
            self.raw.note(NO_EFFECT[no_effect], item)

    def _report_unsupported(self, key: str, entry: Tree) -> None:
        rule = f"is not supported: {entry['why']}"
        if "section" not in entry:
            self.refuse(key, rule, entry["remedy"])
            return
        # One problem for all keys of the section.
        problem = Problem(key.partition(".")[0], rule, remedy=entry["remedy"])
        if str(problem) not in map(str, self.raw.problems):
            self.raw.problems.append(problem)

    def _report_unknown(self, key: str, value: Any) -> None:
        verl_keys = [*EXACT_KEYS, *SECTIONS]
        is_section = any(name.startswith(f"{key}.") for name in verl_keys)
        if is_section and not isinstance(value, dict):
            self.raw.refuse(key, "must be a section of keys", value, "correct it")
            return
        guess = closest(key, verl_keys)
        remedy = f"did you mean {guess}?" if guess else "remove it"
        self.raw.problems.append(Problem(key, "unknown key of verl", remedy=remedy, colon=True))


def _strategy_of(values: Mapping[str, Any]) -> Any:
    """Return the training engine: the actor's `strategy`, else by `model_engine` or its layout."""
    engine = values.get("model_engine")
    if not engine:
        has_layout = any(name.startswith(f"{ACTOR}.megatron.") for name in values)
        engine = "megatron" if has_layout else "fsdp"
    default = "megatron" if engine == "megatron" else "fsdp"
    return values.get(f"{ACTOR}.strategy") or default


def _first_match(key: str, patterns: Iterable[str]) -> str | None:
    for pattern in patterns:
        if fnmatchcase(key, pattern):
            return pattern
    return None


def _choices(target: str) -> Collection[str]:
    """Return the values of our key, plugins' included, which verl's key may have too."""
    name = target.rpartition(".")[2]
    return TRAITS if name == "adv_estimator" else CHOICES.get(name, ())


def _outranks(key: str, value: Any, strategy: Any) -> bool:
    """Return whether a key beats its other name in verl: mostly the name of the table does.

    Megatron reads `lora`, FSDP the keys beside it. Of Ulysses' two names one is 1.
    """
    if key.endswith(".ulysses_sequence_parallel_size"):
        return bool(value not in (None, 1))
    if ".model.lora" in key:
        return bool((".model.lora." in key) == (strategy == "megatron"))
    return key == current_name(key)
