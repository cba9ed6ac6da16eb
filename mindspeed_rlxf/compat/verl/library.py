"""The classes of verl's tutorial over this package: roles, pools, rewards and the trainer.

A script that imports these names in place of verl's runs as it is; the loop is `PpoTrainer.fit`.
Classes of the user reach the workers by pickle. Files of reward functions are read again where they
score, so a script stands under `if __name__ == "__main__":`.
"""

import ast
import functools
import inspect
import json
import os
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from omegaconf import DictConfig, OmegaConf

from mindspeed_rlxf import device as device_facade
from mindspeed_rlxf.cluster.ray.cluster import connected_address, has_resource
from mindspeed_rlxf.compat.mindspeed_llm.translate import translate
from mindspeed_rlxf.compat.verl.files import is_verl
from mindspeed_rlxf.compat.verl.managers import SELECT, DataProto as DataProto, overrides_call
from mindspeed_rlxf.compat.verl.translate import translate_verl
from mindspeed_rlxf.compat.verl.workers import (
    WORKER_CLASSES,
    ResourcePoolManager as ResourcePoolManager,
    Role as Role,
    assign_workers,
)
from mindspeed_rlxf.config import enums
from mindspeed_rlxf.config.keys import to_tree
from mindspeed_rlxf.config.load import resolve_raw
from mindspeed_rlxf.config.problems import ConfigError, Problem
from mindspeed_rlxf.config.raw_config import RawConfig
from mindspeed_rlxf.config.schema import RunConfig
from mindspeed_rlxf.data.files import count_rows
from mindspeed_rlxf.data.tokenizer import save_changed_tokenizer
from mindspeed_rlxf.reporting.console import opened
from mindspeed_rlxf.reporting.jsonl import Sample
from mindspeed_rlxf.reporting.live import make_console
from mindspeed_rlxf.rewards.rules import RULES
from mindspeed_rlxf.roles.actor import ActorRole
from mindspeed_rlxf.roles.critic import CriticRole
from mindspeed_rlxf.roles.own_roles import OWN_ROLES
from mindspeed_rlxf.roles.reward import RewardRole
from mindspeed_rlxf.trainer.ppo import PpoTrainer

ActorRolloutRefWorker = ActorRole
"""verl's name; it stands for the rollout and the reference too."""
CriticWorker = CriticRole
RewardModelWorker = RewardRole


class RayWorkerGroup:
    """A name for `ray_worker_group_cls`; the configuration chooses engines and runtime."""


class NVMegatronRayWorkerGroup(RayWorkerGroup):
    """The same for Megatron, which the actor must then have as `backend`."""


class RewardManager:
    """A reward by functions or rules.

    A subclass may have `_select_rm_score_fn(self, data_source)`, or a `__call__` that scores a
    `DataProto`. Both run in the scoring processes, in an instance made there with the same
    arguments. The function `_select_rm_score_fn` of the script chooses too.
    """

    def __init__(
        self,
        tokenizer: Any,
        num_examine: int,
        compute_score: Callable[..., Any] | None = None,
        reward_fn_key: str = "data_source",
    ) -> None:
        """Score by functions or rules.

        Args:
            tokenizer: The policy's.
            num_examine: Samples of each data source that a call prints.
            compute_score: A function with verl's or our arguments, or a partial one; None = the
                function that the script selects, else the data source's rule.
            reward_fn_key: Column of the data source.
        """
        self.tokenizer = tokenizer
        self.num_examine = num_examine
        self.compute_score = compute_score
        self.reward_fn_key = reward_fn_key
        frame = inspect.currentframe()
        while frame is not None and frame.f_code.co_filename == __file__:
            frame = frame.f_back
        self.script = "" if frame is None else frame.f_code.co_filename

    def __call__(self, samples: Sequence[Sample]) -> list[float]:
        """Print the first samples of each data source, after scoring; return all scores."""
        num_of_source: Counter[str | None] = Counter()
        for sample in samples:
            num_of_source[sample.data_source] += 1
            if num_of_source[sample.data_source] > self.num_examine:
                continue
            for name in ("prompt", "response", "ground_truth", "score"):
                value = getattr(sample, name)
                if value is not None:
                    print(f"[{name}] {value}")
        return [sample.score for sample in samples]


class RLHFDataset:
    """The rows of data files, which the run reads itself.

    The files take the place of `data.train_files` or `val_files`; other arguments are verl's, and
    the configuration has what they say.
    """

    def __init__(self, data_files: str | Sequence[str], *_: Any, **__: Any) -> None:
        self.data_files = [data_files] if isinstance(data_files, str) else list(data_files)

    def __len__(self) -> int:
        """Return the number of rows."""
        return sum(count_rows(os.path.expanduser(file)) for file in self.data_files)


def collate_fn(*_: Any) -> None:
    """Stand for verl's function of this name, which batches rows; the run does it itself."""


def _namespace(name: str) -> SimpleNamespace:
    def compute_score(solution_str: str, ground_truth: str, **_: Any) -> float:
        """Return the score of the rule with the module's name."""
        return RULES[name](solution_str, str(ground_truth)).score or 0.0

    return SimpleNamespace(compute_score=compute_score)


gsm8k = _namespace("gsm8k")
"""verl's module of this name in reward_score."""
math = _namespace("math")
"""verl's module of this name in reward_score."""


class RayPPOTrainer:
    """The run that a configuration describes, with roles, pools and rewards of a script."""

    def __init__(
        self,
        config: Any,
        tokenizer: Any,
        role_worker_mapping: Mapping[Role, type],
        resource_pool_manager: ResourcePoolManager,
        ray_worker_group_cls: type = RayWorkerGroup,
        reward_fn: Any = None,
        val_reward_fn: Any = None,
        **of_verl: Any,
    ) -> None:
        """Resolve the configuration; starts nothing. Raises ConfigError with the problems.

        A tokenizer that was changed since it was loaded is saved beside the run directory.

        Args:
            config: A RunConfig, or a mapping (OmegaConf's too) with keys of verl or ours.
            tokenizer: One of transformers, from a folder.
            role_worker_mapping: The class of each role's workers.
            resource_pool_manager: The pools.
            ray_worker_group_cls: `NVMegatronRayWorkerGroup` asks for Megatron.
            reward_fn: A RewardManager, or a class with verl's methods of it.
            val_reward_fn: Likewise, with the same functions.
            **of_verl: verl's `processor`, `train_dataset`, `val_dataset`, `collate_fn`,
                `train_sampler`, `device_name`: what they ask for must be possible here.
        """
        raw = _read(config)
        _read_arguments(raw, of_verl)
        training = raw.sections["training"]
        if getattr(tokenizer, "name_or_path", None):
            folder = training.get("output_dir") or f"outputs/{training.get('run_name', 'library')}"
            saved = Path(os.path.expanduser(f"{folder}.tokenizer")).absolute()
            training["tokenizer_name_or_path"] = save_changed_tokenizer(tokenizer, saved)
        function = _reward_key(reward_fn)
        val_function = _reward_key(val_reward_fn)
        if function:
            if "tokenizer" in function.get("arguments", {}):
                function["arguments"]["tokenizer"] = training["tokenizer_name_or_path"]
                if val_function and val_function["function"] == function["function"]:
                    val_function = function  # whose num_examine may differ
            raw.sections["reward"]["function"] = function
        self.reward_fns = (_printer(reward_fn), _printer(val_reward_fn))
        _join_connected(raw)
        self.classes = assign_workers(raw, role_worker_mapping, resource_pool_manager)
        self.config, notes = resolve_raw(raw, "library")
        problems = self._find_missing_workers()
        if val_function not in (None, function):
            rule = "val_reward_fn must have the compute_score of reward_fn, or none"
            problems.append(Problem("", rule))
        is_megatron = issubclass(ray_worker_group_cls, NVMegatronRayWorkerGroup)
        if is_megatron and self.config.actor_rollout.backend == "fsdp":
            problems.append(Problem("", "ray_worker_group_cls must be RayWorkerGroup with FSDP"))
        if problems:
            raise ConfigError(problems)
        for note in notes:
            print(f"note: {note}", flush=True)

    def _find_missing_workers(self) -> list[Problem]:
        """Return a problem for each role of the run without a worker; a rule needs none."""
        problems = []
        for role in self.config.roles:
            is_rule = role is enums.Role.REWARD and self.config.reward.kind is enums.RewardKind.RULE
            if role not in self.classes and not is_rule:
                rule = f"role_worker_mapping must have a worker for {role.value}"
                problems.append(Problem("", rule))
        return problems

    def init_workers(self) -> None:
        """Check files, make the run directory, start the workers; UserError for mistakes before.

        A run that is finished already, or only validates, ends here. Raises SystemExit as `fit`.
        """
        user_classes = {}
        for role, worker in self.classes.items():
            if worker is not WORKER_CLASSES[role]:
                user_classes[role] = worker
        OWN_ROLES.update(user_classes)
        self._steps = self._run()
        try:
            self.trainer = next(self._steps, None)
        finally:
            for role in user_classes:
                del OWN_ROLES[role]

    def fit(self) -> None:
        """Train, export the final weights and end the workers.

        Raises:
            SystemExit: The run failed or was stopped, with its exit code; stderr has the reason.
        """
        next(self._steps, None)

    def _run(self) -> Iterator[PpoTrainer]:
        warnings.filterwarnings("ignore", category=UserWarning, module="megatron")
        from mindspeed_rlxf.trainer.preflight import prepare
        from mindspeed_rlxf.trainer.run import Ending, run_in_steps

        with opened(make_console(self.config.logging.console)):
            prepared = prepare(self.config)
            ending = Ending(self.config, prepared)
            for trainer in run_in_steps(self.config, prepared, ending):
                trainer.recorder.show_samples = self.reward_fns
                yield trainer
        if ending.exit_code:
            raise SystemExit(ending.exit_code)


def _reward_key(manager: Any) -> dict[str, Any] | None:
    """Return what a manager scores by as `reward.function`, None for the rules of data sources.

    Raises:
        ConfigError: It cannot be made again where it scores.
    """
    if manager is None:
        return None
    manager_class = type(manager)
    select: Any = getattr(manager_class, SELECT, None)
    has_own_call = overrides_call(manager_class)
    if manager_class is not RewardManager and (has_own_call or select is not None):
        method = manager_class.__call__ if has_own_call else inspect.unwrap(select)
        file = method.__code__.co_filename
        return {
            "function": f"{file}:{manager_class.__qualname__}",
            "arguments": _constructor_arguments(manager, file),
        }
    if not isinstance(manager, RewardManager):
        rule = f"must be a RewardManager, or a class with its methods __call__ or {SELECT}"
        raise ConfigError(Problem("reward_fn", rule, manager_class.__name__, "use one"))
    function = manager.compute_score
    if function is not None:
        keywords = {}
        if isinstance(function, functools.partial):
            if function.args:
                rule = "must have its arguments by name"
                remedy = "use partial(function, name=value)"
                raise ConfigError(Problem("compute_score", rule, remedy=remedy))
            keywords = dict(function.keywords)
            function = function.func
        return {"function": _file_of(function), "arguments": keywords}
    if _defines(manager.script, SELECT):
        return {"function": f"{manager.script}:{SELECT}"}
    return None


def _file_of(function: Callable[..., Any]) -> str:
    """Return a function as `file.py:name`; ConfigError if it is in no file."""
    unwrapped = inspect.unwrap(function)
    name = getattr(unwrapped, "__qualname__", "<")  # of a lambda "<lambda>"
    code = getattr(unwrapped, "__code__", None)
    if "<" in name or code is None or not code.co_filename.endswith(".py"):
        rule = "must be a function of a Python file, at its top level"
        raise ConfigError(Problem("compute_score", rule, name, "write it there"))
    return f"{code.co_filename}:{name}"


def _defines(file: str, name: str) -> bool:
    if not file.endswith(".py"):
        return False
    body = ast.parse(Path(file).read_text("utf-8")).body
    return any(isinstance(node, ast.FunctionDef) and node.name == name for node in body)


def _constructor_arguments(manager: Any, file: str) -> dict[str, Any]:
    """Return the arguments that make a manager again: its attributes of these names."""
    arguments: dict[str, Any] = {}
    for name, parameter in inspect.signature(type(manager)).parameters.items():
        if name == "tokenizer" or parameter.kind is parameter.VAR_KEYWORD:
            arguments["tokenizer"] = None  # the run's, set later
            continue
        value = getattr(manager, name, parameter.default)
        if name == "compute_score" and value is not None:
            function_file, _, value = _file_of(value).rpartition(":")
            if function_file != file:
                value = inspect.Parameter.empty  # which the check below refuses
        try:
            json.dumps(value)
        except TypeError:
            rule = f"must be a number, text or list in the attribute {name}, to be made again"
            remedy = "keep it there, or write the score as a function"
            raise ConfigError(Problem("reward_fn", rule, remedy=remedy)) from None
        arguments[name] = value
    return arguments


def _printer(manager: Any) -> Callable[[Sequence[Sample]], Any] | None:
    """Return what prints samples for a manager, whose own call scores."""
    if manager is None:
        return None
    if isinstance(manager, RewardManager) and not overrides_call(type(manager)):
        return manager
    return RewardManager(None, getattr(manager, "num_examine", 0))


def _read_arguments(raw: RawConfig, of_verl: Mapping[str, Any]) -> None:
    """Set our keys for verl's further arguments of the trainer; ConfigError for what is missing."""
    for name, value in of_verl.items():
        if value is None or value is collate_fn:
            continue
        kind = type(value).__name__
        data = raw.sections["data"]
        if name in ("train_dataset", "val_dataset") and type(value) is RLHFDataset:
            data[name.replace("dataset", "files")] = value.data_files
        elif name == "train_sampler" and kind in ("RandomSampler", "SequentialSampler"):
            data["shuffle"] = kind == "RandomSampler"
        elif name == "device_name":
            raw.sections["device"].setdefault("kind", value)
        else:
            remedy = REMEDIES.get(name, "remove it")
            raise ConfigError(Problem(name, "is not supported", kind, remedy))


REMEDIES = {
    "processor": "remove it: there are no images",
    "train_dataset": "use RLHFDataset, or data.train_files: rows are read from files",
    "val_dataset": "use RLHFDataset, or data.val_files: rows are read from files",
    "train_sampler": "use data.shuffle, and data.train_weights",
}
"""verl's argument of the trainer -> what to do where it asks for something else."""


def _join_connected(raw: RawConfig) -> None:
    """Join the cluster that the script has connected to; without our resource its CPUs count."""
    address = connected_address()
    if address is None or raw.sections["runtime"].get("kind") == "local":
        return
    raw.sections["runtime"]["address"] = address
    device = raw.sections["device"]
    kind = device_facade.resolve_kind(enums.DeviceKind(device.get("kind", "auto")))
    if kind is enums.DeviceKind.CPU and device.get("resource_name") is None:
        our_resource = device_facade.facts(kind).ray_resource
        device["resource_name"] = our_resource if has_resource(our_resource) else "CPU"


def _read(config: Any) -> RawConfig:
    """Return a configuration with keys of verl, MindSpeed-LLM or ours."""
    if isinstance(config, RunConfig):
        return RawConfig(to_tree(config))
    tree: Any = OmegaConf.to_container(config) if isinstance(config, DictConfig) else dict(config)
    if is_verl(tree):
        return translate_verl(tree, count_rows)
    return translate(tree)
