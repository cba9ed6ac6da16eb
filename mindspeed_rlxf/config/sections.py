"""Sections without a role: training, data, validation, logging, devices, runtime, plan."""

import datetime
import re
from collections.abc import Iterator
from typing import Annotated, Any, Literal

from pydantic import Field, field_validator
from pydantic_core import PydanticCustomError

from mindspeed_rlxf.config.enums import DeviceKind, HealthRule, OverlongPrompts, RewardKind, Stage
from mindspeed_rlxf.config.fields import (
    FilePath,
    FilePaths,
    Section,
    Strings,
    Word,
    free,
    key,
    reshard,
)
from mindspeed_rlxf.config.problems import Problem, ref
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

CUT_SIDES = {
    "left": OverlongPrompts.KEEP_TAIL,
    "right": OverlongPrompts.KEEP_HEAD,
    "middle": OverlongPrompts.KEEP_ENDS,
}
"""Truncated side -> treatment keeping the rest."""
OWN_VARIABLES = (
    "add_generation_prompt", "chat_template", "continue_final_message", "conversation", "messages",
    "padding", "return_dict", "return_tensors", "tokenize", "truncation",
)  # fmt: skip
"""Chat template arguments set by this package, not by users."""
SCORES = "has_validation_prompts; happens"
"""Condition for keys read only in validation, see `unused`."""
CLOCK = re.compile(r"(?:(\d+)-)?(\d+):([0-5]?\d):([0-5]?\d)")


class PluginConfig(Section):
    """A user's Python file. In the YAML its path may replace the section."""

    file: str = key(..., "path, absolute")
    sha256: str = key("", "of its text; a run is not resumed with another")


class TrainingConfig(Section):
    """The run as a whole. In the YAML this section may also have role keys, as defaults."""

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
    stop_grace_s: float = free(
        60.0, "on SIGTERM, SIGINT or SIGHUP: time to finish the iteration and save, seconds", ge=0
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
        "bitwise equal results each time, at some cost in speed (vLLM draws each row by its own "
        "seed); null = only on CPU, where it costs nothing",
    )
    max_skipped: int = free(
        10, "most optimizer steps skipped in a row", ge=0, used_if="nan_policy=skip"
    )
    new_run: bool = free(False, "take the next free name when the run directory is used")
    resume_from: int | None = free(
        None,
        "go back to the checkpoint of this iteration, once; newer ones are set aside; null = the "
        "newest",
        ge=1,
        used_if="!new_run",
    )

    @property
    def saves_during_training(self) -> bool:
        """Whether a checkpoint is saved before the last iteration."""
        return 0 < self.save_interval < self.train_iters or self.seconds_between_saves > 0

    @property
    def seconds_between_saves(self) -> float:
        """Seconds between checkpoints by time; 0 = none by time.

        `save_interval_s` if set. Else 0 if `save_interval` saves during the run, from 1 to
        `train_iters`; else 1800.
        """
        if self.save_interval_s is not None:
            return self.save_interval_s
        return 0.0 if 0 < self.save_interval <= self.train_iters else 1800.0

    @field_validator("max_wall_time", mode="before")
    @classmethod
    def _parse_time_limit(cls, value: Any) -> Any:
        match = CLOCK.fullmatch(value.strip()) if isinstance(value, str) else None
        if match is None:
            return value
        days, hours, minutes, seconds = (int(digits or 0) for digits in match.groups())
        return float(((days * 24 + hours) * 60 + minutes) * 60 + seconds)


class DataConfig(Section):
    """Prompts: files or indexed data sets, and their column names (dots reach inside)."""

    train_files: FilePaths = key(
        (), "jsonl, json or parquet files of training prompts", only_if="!data_path"
    )
    val_files: FilePaths = free(
        (), "files of validation prompts", used_if="validation.happens", only_if="!val_data_path"
    )
    data_path: FilePaths = key((), "in place of train_files: prefixes of preprocess_data.py")
    val_data_path: FilePaths = free(
        (), "in place of val_files: such prefixes", used_if="validation.happens"
    )
    prompt_key: str = key("prompt", "column of the prompt: text or chat messages")
    ground_truth_key: str = key("ground_truth", "column of the expected answer")
    data_source_key: str = key("data_source", "column that chooses the reward rule")
    default_data_source: str | None = key(None, "data source of rows without one")
    extra_columns: Annotated[tuple[str, ...] | None, Word] = key(
        None, "other columns, for reward functions; null = all, [] = none"
    )
    system_prompt: str | None = key(
        None, "system message for chats without one", min_length=1, used_if="reads_rows"
    )
    chat_template_kwargs: dict[str, Any] = key(
        {}, "variables of the chat template, such as enable_thinking", used_if="reads_rows"
    )
    template_date: str = key(
        "2025-01-01",
        "day that chat templates print, YYYY-MM-DD, in place of the current one",
        used_if="reads_rows",
    )
    train_weights: Annotated[tuple[Annotated[float, Field(gt=0)], ...], Word] = key(
        (), "fraction of each file (or data set) in a batch of training prompts; absent = by size"
    )
    invalid_rows: Literal["error", "drop"] = key(
        "error", "unreadable rows: error, or drop and count them", used_if="reads_rows"
    )
    overlong_prompts: Annotated[OverlongPrompts, Word] = key(
        OverlongPrompts.ERROR,
        "treatment of prompts over max_prompt_length: error, drop, keep_head (or right, where "
        "it is truncated), keep_tail (left), keep_ends (middle)",
    )
    allow_special_tokens: bool = key(
        False, "the text of a special token in a prompt becomes that token; else it stays text"
    )
    shuffle: bool = key(True, "a new order of the prompts in each epoch")

    @field_validator("overlong_prompts", mode="before")
    @classmethod
    def _accept_cut_side(cls, value: Any) -> Any:
        return CUT_SIDES.get(value, value) if isinstance(value, str) else value

    @field_validator("chat_template_kwargs")
    @classmethod
    def _refuse_own_variables(cls, value: dict[str, Any]) -> dict[str, Any]:
        taken = sorted({*value} & {*OWN_VARIABLES})
        if taken:
            raise PydanticCustomError("chat_template_kwargs", "no " + ", ".join(taken))
        return value

    @field_validator("template_date")
    @classmethod
    def _check_date(cls, value: str) -> str:
        try:
            datetime.date.fromisoformat(value)
        except ValueError:
            raise PydanticCustomError("template_date", "must be a day, as 2025-01-31") from None
        return value

    @field_validator("train_files", "val_files", "data_path", "val_data_path", mode="before")
    @classmethod
    def _wrap_single_file(cls, value: Any) -> Any:
        return [value] if isinstance(value, str) else value or []

    @property
    def reads_rows(self) -> bool:
        """Whether some prompts are text; indexed data sets hold tokens."""
        return bool(self.train_files or self.val_files)

    def _broken_rules(self) -> Iterator[Problem]:
        if not self.train_files and not self.data_path:
            remedy = f"name files of prompts, or an indexed data set by {ref('data_path')}"
            yield Problem("train_files", "is required", remedy=remedy)
        sources = self.train_files or self.data_path
        if self.train_weights and len(self.train_weights) != len(sources):
            rule = f"must have one for each of the {len(sources)} files or data sets"
            yield Problem("train_weights", rule, list(self.train_weights), "add or remove weights")


class ValidationConfig(Section):
    """Validation: when prompts are answered and scored, and how."""

    interval: int = free(
        0,
        "iterations between validations; 0 = never during training",
        ge=0,
        used_if="!only",
        only_if="has_validation_prompts",
    )
    before: bool = free(True, "validate before the first iteration", used_if="!only")
    after: bool = free(True, "validate after the last iteration", used_if="!only")
    only: bool = free(
        False,
        "validate the run's newest checkpoint, or the weights of `load` if there is none, and end",
        only_if="has_validation_prompts",
    )
    checkpoint: int | None = free(
        None,
        "with only: the iteration of the checkpoint; null = the newest",
        ge=1,
        used_if="only; !training.new_run",
    )
    max_samples: int | None = free(None, "prompts used; null = all", ge=1, used_if=SCORES)
    n_samples: int = free(1, "responses per prompt", ge=1, used_if=SCORES, only_if="do_sample")
    do_sample: bool = free(False, "sample; false = greedy", used_if=SCORES)
    temperature: float = free(
        1.0, "divides the logits; used only when sampling", gt=0, used_if=f"{SCORES}; do_sample"
    )
    top_k: int = free(0, "sample among this many; 0 = all", ge=0, used_if=f"{SCORES}; do_sample")
    top_p: float = free(
        1.0, "sample among tokens of this probability", gt=0, le=1, used_if=f"{SCORES}; do_sample"
    )
    reward: Annotated[RewardKind, Word] = free(
        RewardKind.RULE, "what scores: rule, or model (that of reward.kind=model)", used_if=SCORES
    )
    pass_score: float | None = free(
        None,
        "lowest score of a right response; null = accuracy, else score, above 0",
        used_if=SCORES,
    )
    best_metric: str = free(
        "score",
        "the best checkpoint has the highest: score, mean@N, maj@N, best@K or pass@K, averaged "
        "over data sources, or one metric `val/SOURCE/...`",
        used_if=f"{SCORES}; !only",
    )

    @property
    def happens(self) -> bool:
        """Whether the run validates at all."""
        return bool(self.interval or self.before or self.after or self.only)

    @property
    def sizes(self) -> list[int]:
        """K for best@K and pass@K, ascending: powers of 2 below `n_samples`, then `n_samples`."""
        sizes = []
        power = 1
        while power < self.n_samples:
            sizes.append(power)
            power *= 2
        return [*sizes, self.n_samples]

    @property
    def metrics(self) -> list[str]:
        """Legal `best_metric` names: metrics for every data source, without prefix.

        Always score and mean@N, N = `n_samples`; best@K for each K > 1 in `sizes`; with kind rule
        and N > 1 maj@N; with kind rule or a `pass_score` pass@K for each K in `sizes`.
        """
        n = self.n_samples
        by_rule = self.reward is RewardKind.RULE
        names = ["score", f"mean@{n}"]
        if n > 1:
            names += [f"best@{k}" for k in self.sizes if k > 1]
        if n > 1 and by_rule:
            names.append(f"maj@{n}")
        if by_rule or self.pass_score is not None:
            names += [f"pass@{k}" for k in self.sizes]
        return names

    def _broken_rules(self) -> Iterator[Problem]:
        source, _, name = self.best_metric.rpartition("/")
        if name not in self.metrics or (source and not source.startswith("val/")):
            rule = f"must be one of {', '.join(self.metrics)}, or val/SOURCE/ and one of these"
            yield Problem("best_metric", rule, self.best_metric, "use score")


class LoggingConfig(Section):
    """Contents of log files and the console."""

    samples: int | Literal["all"] = free(32, "responses per iteration in samples.jsonl, or `all`")
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

    @field_validator("samples", mode="plain")
    @classmethod
    def _count_or_all(cls, value: Any) -> Any:
        if value == "all" or (type(value) is int and value >= 0):
            return value
        raise PydanticCustomError("samples", "must be 0 or more, or all")


class DeviceConfig(Section):
    """The workers' devices."""

    kind: Annotated[DeviceKind, Word] = reshard(DeviceKind.AUTO, "npu, cuda, cpu, or auto")
    resource_name: str | None = free(
        None, "Ray resource of one device; null = the kind's", used_if="runtime.kind=ray"
    )
    devices_per_node: int = reshard(
        8,
        "devices of each host of a joined cluster, or of the machine that a plan is for; a larger "
        "resource_pool fills whole hosts",
        ge=1,
        used_if="counts_hosts",
    )
    memory_gib: float | None = free(
        None, "memory of one device for the plan, GiB; null = ask the device", gt=0
    )
    cpu_threads: int = free(1, "threads of one worker process", ge=1)


class PoolSettings(Section):
    """Keys in `resource_pool` besides pool names."""

    wait_s: float = free(
        600.0, "longest wait for a joined cluster's devices, seconds", gt=0, used_if="joins_cluster"
    )
    env: dict[str, Secret] = free(
        {}, "environment variables of every worker", used_if="runtime.kind=ray"
    )
    bad_nodes: Literal["refuse", "exclude"] = free(
        "refuse", "nodes that do not answer, or differ from the driver's", used_if="joins_cluster"
    )
    tensor_parallel_spans_nodes: bool = reshard(False, "allow tensor parallel over nodes (slow)")

    @field_validator("env", mode="before")
    @classmethod
    def _hide_secrets(cls, value: Any) -> Any:
        if not isinstance(value, dict):
            return value
        return {str(name): variable_secret(str(name), item) for name, item in value.items()}

    def _broken_rules(self) -> Iterator[Problem]:
        yield from find_masks("env", self.env)
        for name in self.env:
            if "VISIBLE_DEVICES" in name:
                rule = "must not be set: Ray hands out devices"
                yield Problem(f"env.{name}", rule, remedy="remove it")

    @field_validator("bad_nodes", mode="before")
    @classmethod
    def _read_older_word(cls, value: object) -> object:
        return "exclude" if value == "leave_out" else value


class RuntimeConfig(Section):
    """The workers' launcher; `runtime: local` is short for `runtime: {kind: local}`."""

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
    """A dry run's plan."""

    section_used_if = "dry_run"

    suggest: bool = free(False, "dry_run: also print three layouts that fit")
    host_memory_gib: float | None = free(
        None,
        "memory of a host; null = this host's, or unknown where the plan is for another machine",
        gt=0,
    )
    mfu: float = free(
        0.3,
        "fraction of the peak that devices reach, for minutes without those of generation",
        gt=0,
        le=1,
    )
    peak_tflops: float | None = free(
        None, "dense bf16 peak of a device, such as 313 or 989; null = no minutes", gt=0
    )
    disk_gib: float | None = free(
        None,
        "free disk space; null = this host's, or unknown where the plan is for another machine",
        gt=0,
    )
