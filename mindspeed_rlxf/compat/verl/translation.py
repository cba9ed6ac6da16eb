"""verl's keys as written, beside our sections that they become."""

from collections.abc import Collection, Mapping
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
        self.written, self.spelled = dict[str, Any](), dict[str, str]()
        for name in sorted(tree.keys() - SECTIONS - TOP_LEVEL - {"defaults", "hydra"}):
            self._report_unknown(name, tree[name])
        training = self.raw.sections["training"]
        read_entries(self.raw.problems, "training.plugins", training, complete_plugin)
        plain = resolve_interpolations(
            {name: value for name, value in tree.items() if name in SECTIONS}
        )
        self._take_ours(plain)
        pairs = dict(flatten(plain))
        self.is_recent = any(key.startswith("reward.") for key in pairs)
        lays_out = any(name.startswith(f"{ACTOR}.megatron.") for name in pairs)
        engine = pairs.get("model_engine") or ("megatron" if lays_out else "fsdp")
        usual = "megatron" if engine == "megatron" else "fsdp"
        strategy = pairs.get(f"{ACTOR}.strategy") or usual
        for key in sorted(pairs, key=lambda key: _outranks(key, pairs[key], strategy)):
            name = current_name(key)
            if pairs[key] is not None or name not in self.written:
                self.written[name], self.spelled[name] = pairs[key], key
        self.values = {**DEFAULTS, **self.written, f"{ACTOR}.strategy": strategy}
        for key, default in DEFAULTS.items():
            if str(default).startswith("${"):  # another key's value
                default = self.get(default[2:-1])
            value = self.written.get(key, default)
            if value is False and type(default) is int:
                value = 0  # as verl compares it
            name, *kinds = KINDS.get(type(default), ("", type(value)))
            if type(value) not in kinds:
                self.refuse(key, f"must be {name}", "correct it")
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
        return all(
            bool(self.get(key)) if wanted is True else self.get(key) in wanted
            for key, wanted in conditions.items()
        )

    def _put_entry(self, key: str, entry: Tree, value: Any) -> None:
        words, copied = entry.get("words", {}), not {"words", "where"} & entry.keys()
        kept = {**words, **entry.get("replace", {}), **entry.get("where", {})}
        needed, barred = entry.get("if", {}), entry.get("unless")
        if not self._holds(needed) or (barred and self._holds(barred)):
            if value and value != DEFAULTS.get(key) and "where" not in entry:
                shown = [f"{k}={format_value(self.get(k))}" for k in (barred or needed)]
                self.note(f"no effect with {', '.join(shown)}", key)
        elif "equal" in entry:
            if value not in (None, wanted := self.get(entry["equal"])):
                rule = f"must be {ref(entry['equal'])}={format_value(wanted)}"
                self.refuse(key, rule, "remove it")
        elif entry.get("model") == "required" and not isinstance(value, str):
            self.raw.problems.append(Problem(key, "is required", remedy="name a folder"))
        elif value in [*kept]:
            self.put(entry["to"], kept[value], "" if "where" in entry else key)
        elif copied:
            if "any" in entry and isinstance(value, dict):
                value = {k: v for k, v in value.items() if v is not None} or None
            value = find_model(value) if "model" in entry else value
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
            shown = f"{self.spelled[key]}={format_value(self.written[key])}"
            self.raw.note(meaning, shown)

    def sort_others(self) -> None:
        """Note or refuse each written key that is not translated."""
        for key, value in self.written.items():
            if key.startswith("critic.") and "critic" not in self.roles:
                self.raw.note("this estimator has no critic", "critic")
            elif key not in RENAMED:
                self._sort(key, value)

    def _sort(self, key: str, value: Any) -> None:
        asks = value is not None and value is not False and value not in ("", [])
        effect = next((each for each in NO_EFFECT if fnmatchcase(key, each)), None)
        for entry in TABLE["refused"]:
            fits = [each for each in entry["keys"].split() if fnmatchcase(key, each)]
            if fits and not (effect and fits[0].endswith("*")):
                if asks and value not in entry.get("neutral", ()):
                    if "section" in entry:  # one problem for all keys
                        key = key.partition(".")[0]
                        rule = f"is not supported: {entry['why']}"
                        problem = Problem(key, rule, remedy=entry["remedy"])
                        if str(problem) not in map(str, self.raw.problems):
                            self.raw.problems.append(problem)
                        return
                    self.refuse(key, f"is not supported: {entry['why']}", entry["remedy"])
                return
        if effect is None and value is not None:
            self._report_unknown(self.spelled[key], value)
        elif effect is not None and asks:
            section = effect.removesuffix(".*").rpartition(".")[2]
            path, shown = self.spelled[key], f"={format_value(value)}"
            if effect.endswith(".*") and section:  # one item for a section
                path, shown = f"{path.partition(f'{section}.')[0]}{section}", ""
            self.raw.note(NO_EFFECT[effect], path + shown)

    def _report_unknown(self, key: str, value: Any) -> None:
        known = [*EXACT_KEYS, *SECTIONS]
        if any(name.startswith(f"{key}.") for name in known) and not isinstance(value, dict):
            self.raw.refuse(key, "must be a section of keys", value, "correct it")
            return
        guess = closest(key, known)
        remedy = f"did you mean {guess}?" if guess else "remove it"
        self.raw.problems.append(Problem(key, "unknown key of verl", remedy=remedy, colon=True))


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
