"""Translate verl's YAML (`ppo_trainer.yaml`, 0.5 to 0.9) to our keys, before anything is validated.

`verl_keys.yaml` lists verl's keys, and says what becomes of most; `convert` translates the rest.
What a key means in verl, and its default there, stays: where units differ, the value is converted.
"""

import contextlib
import math
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import yaml
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException
from omegaconf import OmegaConf
from omegaconf.errors import InterpolationKeyError, OmegaConfBaseException

from mindspeed_rlxf.config.compose import explain
from mindspeed_rlxf.config.estimator_traits import TRAITS
from mindspeed_rlxf.config.hf_config import read_hf_config
from mindspeed_rlxf.config.keys import TOP_LEVEL, Given, Tree, find_field, keys_of
from mindspeed_rlxf.config.plugins import complete_plugin, read_entries
from mindspeed_rlxf.config.problems import ConfigError, Problem, closest, format_value, ref
from mindspeed_rlxf.config.registry import CHOICES

TABLE: Tree = yaml.safe_load(Path(__file__).with_name("verl_keys.yaml").read_text("utf-8"))
ACTOR, ROLLOUT = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"
POOL, STEPS = "global_pool", "trainer.total_training_steps"
TRAINED: dict[str, str] = TABLE["groups"]["trained"]
"""verl's section of a trained role -> ours."""
LEGACY = ("auto", "enable")
"""Values of verl's key use_legacy_worker_impl, 0.6 and 0.7, with the FSDP workers of 0.5."""
MODELS = {ACTOR: "actor_rollout_ref.model", "critic": "critic.model"}
"""verl's section of a trained role -> that of its model."""


def _complete(entry: Tree | str, section: str, role: str) -> Tree:
    """Return an entry of the table with the full names of all keys."""
    found: Tree = {"to": entry} if isinstance(entry, str) else dict(entry)
    found["to"] = f"{role}.{found['to']}".lstrip(".")
    if "also" in found:
        found["also"] = _complete(found["also"], section, role)

    def name(key: str) -> str:
        return section + key if key.startswith(".") else key

    for part in {"if", "unless"} & found.keys():
        found[part] = {name(k): v for k, v in found[part].items()}
    if "times" in found:
        found["times"] = [name(key) for key in found["times"]]
    return found


RENAMED: dict[str, Tree] = {
    f"{section}.{key}".lstrip("."): _complete(entry, section, role)
    for group, sections in TABLE["groups"].items()
    for section, role in sections.items()
    for key, entry in TABLE[group].items()
}
NO_EFFECT = {pattern: text for text, keys in TABLE["no_effect"].items() for pattern in keys.split()}
EXACT_KEYS = [key for key in (*RENAMED, *TABLE["older"], *NO_EFFECT) if "*" not in key]
REFUSED = [key for entry in TABLE["refused"] for key in entry["keys"].split()]
SECTIONS = {key.partition(".")[0] for key in (*EXACT_KEYS, *NO_EFFECT, *REFUSED)} - {"*"}
"""verl's sections. A file may also have sections of ours with other names."""


def current_name(key: str) -> str:
    """Return the name in the table of a key, which may be an older one."""
    older = [name for name in TABLE["older"] if f"{key}.".startswith(f"{name}.")]
    name = max(older, key=len, default="")
    return TABLE["older"][name] + key.removeprefix(name) if name else key


def flatten(tree: Mapping[str, Any], path: str = "") -> Iterator[tuple[str, Any]]:
    """Yield dotted keys and values; a section with names of users' choice is one value."""
    for name, value in tree.items():
        key = f"{path}{name}"
        if isinstance(value, Mapping) and not RENAMED.get(current_name(key), {}).get("any"):
            yield from flatten(value, f"{key}.")
        elif value != "???" and name != "_target_":  # absent; a class
            yield key, value


DEFAULTS = dict(flatten(TABLE["defaults"]))
KINDS: dict[type, tuple[Any, ...]] = {
    bool: ("true or false", bool, type(None)), int: ("a number", int),
    float: ("a number", int, float, type(None)), list: ("a list", list),
}  # fmt: skip
"""Kind of a default -> its name, and the kinds that a value may have."""


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


def translate_verl(tree: Mapping[str, Any], count_rows: Callable[[str], int]) -> Given:
    """Return verl's tree in our keys, with the problems and notes found on the way.

    Args:
        tree: verl's keys, as read; interpolations are resolved here. Sections that only we have
            are kept, and beat the translation.
        count_rows: Returns the number of rows of a data file; may raise UserError.

    Raises:
        ConfigError: An interpolation cannot be resolved.
    """
    found = _Translation(tree)
    found.convert(count_rows)
    for key in RENAMED:
        found.move(key)
    found.sort_others()
    return found.given


class _Translation:
    """verl's keys, as written and with verl's defaults, and our sections that they become.

    Of several values for one of our keys, the first counts.

    Attributes:
        given: Our sections, with problems and notes.
        written: Keys in the tree, by their names in the table.
        spelled: Name in the table -> key in the tree.
        values: `written`, and verl's values of absent keys.
        is_recent: Whether the tree has the section `reward` of verl 0.8 and later.
        roles: Trained roles: verl's section -> ours.
        idle: Parts of keys of the engine that does not train.
    """

    def __init__(self, tree: Mapping[str, Any]) -> None:
        self.given = Given({k: v for k, v in tree.items() if k in TOP_LEVEL - SECTIONS})
        self.written, self.spelled = dict[str, Any](), dict[str, str]()
        for name in sorted(tree.keys() - SECTIONS - TOP_LEVEL - {"defaults", "hydra"}):
            self._report_unknown(name, tree[name])
        training = self.given.sections["training"]
        read_entries(self.given.problems, "training.plugins", training, complete_plugin)
        plain = _resolve({name: value for name, value in tree.items() if name in SECTIONS})
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
                    self.given.sections[section][name] = values.pop(name)

    def get(self, key: str) -> Any:
        """Return the given value of a key of verl, else its default, else None."""
        return self.values.get(key)

    def refuse(self, key: str, rule: str, remedy: str) -> None:
        """Report a value of verl."""
        self.given.refuse(self.spelled.get(key, key), rule, self.get(key), remedy)

    def put(self, target: str, value: Any, source: str = "") -> None:
        """Set our key, unless it is set, or is our default and no source is written."""
        *parents, name = target.split(".")
        field = find_field([*parents, name])
        is_default = field is not None and field.default == value and name not in TABLE["always"]
        if value is None or (is_default and source not in self.written):
            return
        node = self.given.sections
        for parent in parents:
            node = node.setdefault(parent, {})
        if isinstance(node, dict) and name not in node:
            node[name] = value
            if source:
                self.given.renamed[target] = self.spelled.get(source, source)

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
            self.given.problems.append(Problem(key, "is required", remedy="name a folder"))
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
            self.given.note(meaning, shown)

    def convert(self, count_rows: Callable[[str], int]) -> None:
        """Set our keys that depend on several of verl's, or on the data."""
        get, put, longest = self.get, self.put, "data.max_response_length"
        put("training.stage", "ray_ppo" if "critic" in self.roles else "ray_grpo")
        put("training.model", "auto")
        put("training.seq_length", get("data.max_prompt_length") + get(longest))
        self.given.renamed["training.seq_length"] = f"data.max_prompt_length + {longest}"
        put("training.train_iters", self._count_iterations(count_rows), STEPS)
        names = [name for name in _as_list(get("trainer.logger")) if name != "console"]
        put("logging.trackers", ["jsonl", *names], "trainer.logger")
        self._convert_batches()
        if not self.given.sections["resource_pool"]:
            self._make_pool(POOL, "trainer")
            self._split_pool()
        model, own = "reward_model", "custom_reward_function"
        if get(f"{model}.enable") and get(f"{model}.enable_resource_pool"):
            self._make_pool("reward_pool", model)
            pools = dict.fromkeys(("actor_rollout", "ref", *self.roles.values()), POOL)
            for role, pool in {**pools, "reward": "reward_pool"}.items():
                put(f"placement.{role}", pool, f"{model}.enable_resource_pool")
        if get(f"{own}.path"):
            function = f"{get(f'{own}.path')}:{get(f'{own}.name')}"
            put("reward.function.function", function, f"{own}.path")
            if get(f"{model}.enable"):
                self._choose_scorer(f"{model}.enable", f"{own}.path")
        elif not get(f"{model}.enable"):
            reward = self.given.sections["reward"]
            reward["rules"] = {**TABLE["rules"], **(reward.get("rules") or {})}
        both = "algorithm.use_kl_in_reward", f"{ACTOR}.use_kl_loss"
        if all(map(get, both)):
            rule = "must not stand together: one KL term is in the reward or in the loss"
            self.refuse(both[0], f"and {ref(both[1])}=true {rule}", "keep one")
        if get(f"{ROLLOUT}.name") in ("sglang", "trtllm"):
            self.note("vllm generates in its place", f"{ROLLOUT}.name")
        for section, role in self.roles.items():
            self._convert_optimizer(section, role)
            self._convert_chunks(section, role)

    def _convert_batches(self) -> None:
        """Set the number of prompts of an iteration, and the limit of dynamic sampling."""
        get, generated = self.get, "data.gen_batch_size"
        if get("algorithm.filter_groups.enable"):
            if not (get("algorithm.filter_groups.max_num_gen_batches") or 0) > 0:
                self.given.sections["algorithm"].setdefault("max_num_gen_batches", None)
            if get(generated) != get("data.train_batch_size"):
                self.note(
                    "the filter draws the prompts that are missing, batch by batch", generated
                )
        elif get(generated) is not None:
            self.put("training.global_batch_size", get(generated), generated)

    def _choose_scorer(self, model: str, function: str) -> None:
        """Let the function score beside a reward model, as in verl 0.7 and later."""
        reward = self.given.sections["reward"]
        if self.is_recent or self.get("reward_model.use_reward_loop"):
            reward.setdefault("model_weight", 0.0)
            self.note("the function alone scores; reward.model_weight=1 adds the model's", model)
        elif "model_weight" not in reward:
            rule = f"and {ref(function)} leave open which scores: up to verl 0.6 the model does, "
            remedy = f"remove {function}, or add reward.model_weight=0"
            self.refuse(model, f"{rule}from 0.7 the function", remedy)

    def _convert_chunks(self, section: str, role: str) -> None:
        """Convert the number of chunks of a pipeline stage to their layers."""
        chunks = f"{section}.megatron.virtual_pipeline_model_parallel_size"
        stages = self.get(f"{section}.megatron.pipeline_model_parallel_size") or 1
        number, path = self.get(chunks), self.get(f"{MODELS[section]}.path")
        if self.idle == "megatron" or type(number) is not int or number < 2:
            return
        try:
            layers = read_hf_config(Path(str(find_model(path))).expanduser())["num_hidden_layers"]
        except (ValueError, KeyError) as error:
            self.refuse(chunks, f"needs the number of layers of {path}: {error}", "correct it")
            return
        self.put(
            f"{role}.num_layers_per_virtual_pipeline_stage", layers // (stages * number), chunks
        )

    def _make_pool(self, name: str, section: str) -> None:
        sizes = [self.get(f"{section}.n_gpus_per_node")] * self.get(f"{section}.nnodes")
        self.put(f"resource_pool.{name}", sizes, f"{section}.n_gpus_per_node")

    def _split_pool(self) -> None:
        """Add the devices that only generate, as in verl's one-step-off trainer."""
        pool = self.given.sections["resource_pool"]
        for section in ("rollout", ROLLOUT):
            nodes, per_node = self.get(f"{section}.nnodes"), self.get(f"{section}.n_gpus_per_node")
            if not nodes or POOL not in pool:
                continue
            trains, generates = sum(pool[POOL]), nodes * (per_node or 8)
            pool[POOL] = [*pool[POOL], *[generates // nodes] * nodes]
            if self.idle == "megatron":
                self.note("with FSDP all devices train and generate", f"{section}.nnodes")
                continue
            self.put("actor_rollout.num_gpus_for_train", trains, "trainer.n_gpus_per_node")
            self.put("actor_rollout.num_gpus_for_infer", generates, f"{section}.nnodes")

    def _count_iterations(self, count_rows: Callable[[str], int]) -> Any:
        if self.get(STEPS) is not None or "train_iters" in self.given.sections["training"]:
            return self.get(STEPS)
        batch, epochs = self.get("data.train_batch_size"), self.get("trainer.total_epochs")
        if not self.get("algorithm.filter_groups.enable"):
            batch = self.get("data.gen_batch_size") or batch
        try:
            files = [Path(name).expanduser() for name in _as_list(self.get("data.train_files"))]
            rows = sum(count_rows(str(file)) for file in files)
        except (ValueError, TypeError) as error:
            rule = f"is required, as rows cannot be counted: {error}"
            self.given.problems.append(Problem(STEPS, rule, remedy=f"use {STEPS}=NUMBER"))
            return 1  # a legal value, as the problem is reported
        if batch > rows:
            rule = f"must be at most the {rows} rows of the files"
            self.refuse("data.train_batch_size", rule, "lower it")
        steps = rows // max(1, batch) * epochs
        counted = f"{epochs} epochs of {rows} rows, long prompts too, in whole batches of {batch}"
        self.given.note(counted, f"training.train_iters={steps}")
        return steps

    def _convert_optimizer(self, section: str, role: str) -> None:
        betas, warmup = f"{section}.optim.betas", f"{section}.optim.lr_warmup_steps"
        ratio, waits = f"{section}.optim.lr_warmup_steps_ratio", "trainer.critic_warmup"
        for number, beta in enumerate(self.get(betas), 1):
            self.put(f"{role}.adam_beta{number}", beta, betas)
        micro, by_device = (
            f"{section}.ppo_micro_batch_size",
            f"{section}.ppo_micro_batch_size_per_gpu",
        )
        if (
            self.get(micro)
            and not self.get(by_device)
            and not self.get(f"{section}.use_dynamic_bsz")
        ):
            devices = sum(self.given.sections["resource_pool"].get(POOL, [1]))
            self.put(f"{role}.micro_batch_size", max(1, self.get(micro) // devices), micro)
        clips = [f"{section}.optim.clip_grad", f"{section}.grad_clip"]
        if self.idle == "megatron" and self.get("trainer.use_legacy_worker_impl") in LEGACY:
            clips.reverse()
        for clip in clips:
            self.put(f"{role}.clip_grad", self.get(clip), clip)
        iterations = self.given.sections["training"].get("train_iters")
        steps = -1 if self.get(warmup) is None else self.get(warmup)
        least = 1 if self.idle == "fsdp_config" else 0  # with FSDP 0 beats the ratio too
        if section == ACTOR and "critic" in self.roles and type(iterations) is int:
            if steps < least and self.get(waits) > 0 and self.get(ratio):
                steps, warmup = int(self.get(ratio) * iterations), ratio  # of all iterations
            iterations -= self.get(waits)
        if steps >= least and type(iterations) is int:
            share = steps / max(1, iterations)
            if int(share * iterations) < steps:  # which a schedule would round down
                share = math.nextafter(share, 1.0)
            self.put(f"{role}.lr_warmup_fraction", min(share, 0.999), warmup)

    def sort_others(self) -> None:
        """Note or refuse each written key that is not translated."""
        for key, value in self.written.items():
            if key.startswith("critic.") and "critic" not in self.roles:
                self.given.note("this estimator has no critic", "critic")
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
                        if str(problem) not in map(str, self.given.problems):
                            self.given.problems.append(problem)
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
            self.given.note(NO_EFFECT[effect], path + shown)

    def _report_unknown(self, key: str, value: Any) -> None:
        known = [*EXACT_KEYS, *SECTIONS]
        if any(name.startswith(f"{key}.") for name in known) and not isinstance(value, dict):
            self.given.refuse(key, "must be a section of keys", value, "correct it")
            return
        guess = closest(key, known)
        remedy = f"did you mean {guess}?" if guess else "remove it"
        self.given.problems.append(Problem(key, "unknown key of verl", remedy=remedy, colon=True))


def _resolve(theirs: Tree) -> Tree:
    """Return verl's tree with its interpolations resolved, also to keys that only verl's file has.

    Raises:
        ConfigError: An interpolation cannot be resolved.
    """
    config, absent = OmegaConf.create(theirs), list[str]()
    while True:
        try:
            plain: Any = OmegaConf.to_container(config, resolve=True)
            break
        except (OmegaConfBaseException, ValueError) as error:
            named = re.search(r"'([\w.]+)'", str(error))
            key = named[1] if named and isinstance(error, InterpolationKeyError) else ""
            if key in absent or not is_known(key):
                raise ConfigError(explain(error, "of verl", ())) from error
            OmegaConf.update(config, key, DEFAULTS.get(key), force_add=True)
            absent.append(key)
    for key in absent:
        *sections, name = key.split(".")
        section = plain
        for parent in sections:
            section = section[parent]
        del section[name]
    return dict(plain)


def is_known(key: str) -> bool:
    """Return whether verl has a key, also one without effect or one that is refused."""
    patterns = [*RENAMED, *DEFAULTS, *TABLE["older"], *NO_EFFECT, *REFUSED]
    return any(fnmatchcase(key, pattern) for pattern in patterns)


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


def _as_list(value: Any) -> list[Any]:
    if isinstance(value, str) and value.startswith("["):  # a list in quotes
        value = yaml.safe_load(value)
    return value if isinstance(value, list) else [] if value is None else [value]


def find_model(path: Any) -> Any:
    """Return a model's folder: the path, or the folder of a name in this host's Hugging Face cache.

    A name that is not there is returned as it is.
    """
    if not isinstance(path, str) or Path(path).expanduser().exists():
        return path
    from huggingface_hub import try_to_load_from_cache

    with contextlib.suppress(ValueError):  # no name of a model
        if isinstance(found := try_to_load_from_cache(path, "config.json"), str):
            return str(Path(found).parent)
    return path
