"""Sections of the configuration that belong to no role: training, rollout, logging, runtime."""

import re
from collections.abc import Iterator
from typing import Annotated, Any, Literal

from pydantic import Field, field_validator

from mindspeed_rlxf.config.enums import DeviceKind, HealthRule, Stage
from mindspeed_rlxf.config.fields import FilePath, Section, Strings, Word, free, key, reshard
from mindspeed_rlxf.config.problems import Problem
from mindspeed_rlxf.config.secrets import Secret, find_masks, variable_secret

CONSOLE_METRICS = (
    "actor/pg_loss_abs",
    "actor/dpo_loss",
    "actor/dpo_accuracy",
    "actor/dpo_decided",
    "critic/vf_loss",
    "critic/kl",
    "critic/score/mean",
    "response_length/mean",
    "timing/all",
)

CLOCK = re.compile(r"(?:(\d+)-)?(\d+):([0-5]?\d):([0-5]?\d)")


class PluginConfig(Section):
    """A Python file of the user. In the YAML its path may stand for the section."""

    file: str = key(..., "path, absolute")
    sha256: str = key("", "of its text; a run is not resumed with another")


class TrainingConfig(Section):
    """The run as a whole. In the YAML this section may also have keys of roles, as defaults."""

    stage: Annotated[Stage, Word] = key(Stage.RAY_PPO, "training algorithm")
    train_iters: int = free(..., "iterations", ge=1)
    global_batch_size: int = key(..., "prompts per iteration", ge=1)
    seq_length: int = key(..., "longest prompt and response together, tokens", ge=2)
    tokenizer_type: Literal["PretrainedFromHF"] = key("PretrainedFromHF", "kind of tokenizer")
    tokenizer_name_or_path: FilePath = key(..., "Hugging Face folder of the tokenizer")
    plugins: Annotated[tuple[PluginConfig, ...], Word] = key(
        (), "Python files that add estimators, reward rules, rollout engines, trackers"
    )
    seed: int = key(1234, "every random stream derives from it", ge=0)
    max_restarts: int = free(
        3,
        "restarts after failures, renewed by a checkpoint; 0 = none",
        ge=0,
        used_if="runtime.kind=ray",
    )
    node_wait_s: float = free(
        600.0,
        "a restart's longest wait for devices in place of lost ones, seconds",
        gt=0,
        used_if="max_restarts; joins_cluster",
    )
    allow_shrink: bool = free(
        False,
        "after a restart with too few devices continue with fewer data-parallel ranks",
        used_if="max_restarts; joins_cluster",
    )
    stop_grace_s: float = free(
        60.0, "on SIGTERM or SIGINT: time to finish the iteration and save, seconds", ge=0
    )
    max_wall_time: float | None = free(
        None, "save and stop before this time, seconds or [D-]HH:MM:SS; null = no limit", gt=0
    )
    output_dir: FilePath = free(..., "run directory; absent = outputs/<run_name>")
    run_name: str = free(..., "name of the run; absent = config name", min_length=1)
    save_interval: int = free(
        0, "iterations between checkpoints of the run; 0 = by time alone", ge=0
    )
    save_interval_s: float | None = free(
        None, "seconds between checkpoints; null = 1800 without save_interval, 0 = none", ge=0
    )
    async_save: bool = free(
        False, "write checkpoints while the next iteration runs", used_if="saves_during_training"
    )
    keep_last: int = free(2, "newest checkpoints that are kept", ge=1)
    keep_every: int = free(
        0, "also keep checkpoints whose iteration is a multiple of it; 0 = none", ge=0
    )
    resume: Literal["auto", "never"] = free(
        "auto", "auto: resume in a used run directory; never: refuse a used one", used_if="!new_run"
    )
    nan_policy: Literal["raise", "skip"] = free(
        "raise",
        "on NaN or inf in loss, gradient norm or reward: raise before weights change, or skip "
        "the step",
    )
    deterministic: bool | None = free(
        None,
        "bitwise equal results each time, at some cost in speed; null = only on CPU, where it "
        "costs nothing",
    )
    max_skipped: int = free(
        10, "most optimizer steps skipped in a row", ge=0, used_if="nan_policy=skip"
    )
    new_run: bool = free(False, "take the next free name when the run directory is used")

    @property
    def saves_during_training(self) -> bool:
        """Whether a checkpoint is saved before the last iteration."""
        return 0 < self.save_interval < self.train_iters or self.seconds_between_saves > 0

    @property
    def seconds_between_saves(self) -> float:
        """Seconds between checkpoints by time; 0 = none by time.

        `save_interval_s` if set. Else 0 if `save_interval` is from 1 to `train_iters`, so that it
        saves during the run; else 1800.
        """
        if self.save_interval_s is not None:
            return self.save_interval_s
        return 0.0 if 0 < self.save_interval <= self.train_iters else 1800.0

    @field_validator("max_wall_time", mode="before")
    @classmethod
    def _parse_time_limit(cls, value: Any) -> Any:
        found = CLOCK.fullmatch(value.strip()) if isinstance(value, str) else None
        if found is None:
            return value
        days, hours, minutes, seconds = (int(part or 0) for part in found.groups())
        return float(((days * 24 + hours) * 60 + minutes) * 60 + seconds)


class RolloutConfig(Section):
    """The rollout engine, and its layout on `actor_rollout.num_gpus_for_infer` devices."""

    engine: str = key("native", "rollout engine: native, or the name of a plugin's engine")
    tensor_model_parallel_size: int | None = reshard(
        None, "ranks that share a layer in generation; null = as in training", ge=1
    )
    expert_model_parallel_size: int | None = reshard(
        None,
        "replicas that share the experts of a layer in generation, which then make each step "
        "together; null = as in training on the actor's devices, 1 on devices of its own",
        ge=1,
    )


class LoggingConfig(Section):
    """Contents of log files and of the console."""

    samples: Annotated[int, Field(ge=0)] | Literal["all"] = free(
        32, "responses per iteration in samples.jsonl, or `all`"
    )
    sample_tokens: bool = free(
        True, "also log advantage, KL and value of their tokens, in samples_tokens/"
    )
    console: Literal["auto", "line"] = free(
        "auto", "auto = a live view on a terminal, else a line per iteration; line"
    )
    console_metrics: Strings = free(CONSOLE_METRICS, "metrics on the console")
    stop_on: Annotated[tuple[Annotated[HealthRule, Word], ...], Word] = free(
        (), "training problems that save and end the run, by their names in docs/running.md"
    )
    trackers: Strings = free(
        ("jsonl",), "jsonl (always), tensorboard, wandb, swanlab, or trackers of plugins"
    )
    tracker_project: str = free("mindspeed-rlxf", "project of the run at trackers")
    tracker_mode: Literal["auto", "online", "offline"] = free(
        "auto", "auto: trackers that need an account are offline where there is no key"
    )
    reference_kl: bool = free(
        False, "compute critic/kl though nothing else needs a reference", used_if="!reads_reference"
    )


class DeviceConfig(Section):
    """Devices of the workers."""

    kind: Annotated[DeviceKind, Word] = reshard(DeviceKind.AUTO, "npu, cuda, cpu, or auto")
    resource_name: str | None = free(
        None, "Ray resource of one device; null = the kind's", used_if="runtime.kind=ray"
    )
    devices_per_node: int = reshard(
        8,
        "devices of each host of a joined cluster; a larger resource_pool fills whole hosts",
        ge=1,
        used_if="joins_cluster",
    )
    memory_gib: float | None = free(
        None, "memory of one device for the plan, GiB; null = ask the device", gt=0
    )
    cpu_threads: int = free(1, "threads of one worker process", ge=1)


class PoolSettings(Section):
    """Keys of `resource_pool` that name no pool."""

    wait_s: float = free(
        600.0, "longest wait for a joined cluster's devices, seconds", gt=0, used_if="joins_cluster"
    )
    env: dict[str, Secret] = free(
        {}, "environment variables of every worker", used_if="runtime.kind=ray"
    )
    bad_nodes: Literal["refuse", "exclude"] = free(
        "refuse", "nodes that do not answer, or differ from the driver's", used_if="joins_cluster"
    )
    tensor_parallel_spans_nodes: bool = reshard(
        False, "allow tensor parallel over nodes (slow)", used_if="has_pools_of_several_nodes"
    )

    @field_validator("env", mode="before")
    @classmethod
    def _hide_secrets(cls, value: Any) -> Any:
        if not isinstance(value, dict):
            return value
        return {str(name): variable_secret(str(name), item) for name, item in value.items()}

    def broken_rules(self) -> Iterator[Problem]:
        yield from find_masks("env", self.env)
        for name in (name for name in self.env if "VISIBLE_DEVICES" in name):
            yield Problem(
                f"env.{name}", "must not be set: Ray hands out devices", remedy="remove it"
            )

    @field_validator("bad_nodes", mode="before")
    @classmethod
    def _read_older_word(cls, value: object) -> object:
        return "exclude" if value == "leave_out" else value


class RuntimeConfig(Section):
    """Launcher of the workers; `runtime: local` is short for `runtime: {kind: local}`."""

    kind: Literal["ray", "local"] = free("ray", "ray or local")
    address: str | None = free(
        None,
        "Ray cluster to join, local = start one; null = RAY_ADDRESS, else this user's, else "
        "start one",
        used_if="kind=ray",
    )
    timeout_s: float = free(
        1800.0, "longest wait for one call, seconds; the shortest deadline is a tenth", gt=0
    )
    start_timeout_s: float = free(
        600.0, "longest wait for the workers, seconds", gt=0, used_if="kind=ray"
    )


class PlanConfig(Section):
    """The plan of a dry run."""

    section_used_if = "dry_run"

    suggest: bool = free(False, "dry_run: also print three layouts that fit")
