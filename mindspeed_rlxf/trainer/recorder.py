"""Record iterations: metric and sample files, timeline, console."""

import io
import os
import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from mindspeed_rlxf.checkpoint.directory import RunDirectory
from mindspeed_rlxf.cluster.group import take_spans
from mindspeed_rlxf.cluster.refs import RowsRef
from mindspeed_rlxf.config.keys import to_tree
from mindspeed_rlxf.config.schema import RunConfig
from mindspeed_rlxf.data.batch import TokenLog
from mindspeed_rlxf.data.decoding import decode
from mindspeed_rlxf.data.sampler import ConsumedPrompts
from mindspeed_rlxf.reporting.console import Console, current
from mindspeed_rlxf.reporting.health_rules import (
    Finding,
    Health,
    rules_without_meaning,
    runaway_limit,
)
from mindspeed_rlxf.reporting.jsonl import (
    JsonlWriter,
    Sample,
    metrics_record,
    read_metrics,
    shorten_columns,
)
from mindspeed_rlxf.reporting.timeline import Span, Timeline
from mindspeed_rlxf.reporting.trackers import JSONL, TrackedRun, Trackers
from mindspeed_rlxf.roles.actor import ActorGroup
from mindspeed_rlxf.roles.reports import ScoreReport
from mindspeed_rlxf.weights.state_files import write_text


class Recorder:
    """Writes a run's metric, sample and health files, timeline, trackers and console."""

    def __init__(
        self, config: RunConfig, directory: RunDirectory, tokenizer: Any, writes: bool = True
    ) -> None:
        """Open the files, replay the health rules on resume, start trackers and console.

        `writes` is False on all torchrun ranks but the first, which write nothing.
        """
        self.tokenizer = tokenizer
        self._writes = writes
        self._directory = directory
        self._logging = config.logging
        self._writers: list[JsonlWriter] = []
        self._metrics = self._open(directory.metrics)
        self._consumed = self._open(directory.consumed)
        self._findings = self._open(directory.health)
        self._samples = self._open(directory.samples)
        self._val_samples = self._open(directory.val_samples)
        self._syncs: JsonlWriter | None = None  # opened for the first receipt
        # Called with the samples written, of training and of validation.
        self.show_samples: Sequence[Callable[[Sequence[Sample]], Any] | None] = (None, None)
        self._timeline = Timeline(directory.timeline) if writes else None
        take_spans()  # drops those of an earlier run of this process
        self.console = current() if writes else Console(io.StringIO())
        self.note = self.console.note  # prints a line beside the progress
        control = config.algorithm.kl_ctrl
        limit = runaway_limit(control.type == "adaptive", control.target_kl)
        excluded = rules_without_meaning(config.rollout.max_staleness)
        self.health = Health(config.logging.stop_on, limit, excluded)
        last_iteration = self._replay_health()
        self._trackers = self._start_trackers(config)
        path = directory.path
        if path.is_relative_to(Path.cwd()):
            path = path.relative_to(Path.cwd())
        metric_names = config.logging.console_metrics
        self.console.begin(config.training.train_iters, metric_names, last_iteration, str(path))

    def _open(self, file: Path) -> JsonlWriter:
        writer = JsonlWriter(file if self._writes else Path(os.devnull))
        self._writers.append(writer)
        return writer

    def _replay_health(self) -> int:
        """Apply the health rules to the metrics of a resumed run; return its last iteration, or 0.

        Notes the rule that stopped the run there.
        """
        last_iteration = 0
        for iteration, metrics in read_metrics(self._directory.metrics):
            self.health.check(iteration, metrics)
            last_iteration = iteration
        for rule, finding in self.health.active.items():
            if finding.stops and finding.iteration == last_iteration:
                self.note(
                    f"the run was stopped after iteration {last_iteration} by logging.stop_on "
                    f"({rule}: {finding.text}); it goes on from there, and is stopped by it again "
                    "only after it has ended"
                )
        return last_iteration

    def _start_trackers(self, config: RunConfig) -> Trackers:
        """Start the trackers besides metrics.jsonl; they keep the id of a resumed run."""
        names = [name for name in config.logging.trackers if name != JSONL]
        if not self._writes:
            names = []
        run_id = self._directory.trackers / "run_id"
        if names and not run_id.exists():
            write_text(run_id, secrets.token_hex(8))
        run = TrackedRun(
            name=config.training.run_name if names else "",
            project=config.logging.tracker_project,
            run_id=run_id.read_text(encoding="ascii").strip() if names else "",
            folder=self._directory.trackers,
            config=to_tree(config) if names else {},
            offline={"auto": None, "online": False, "offline": True}[config.logging.tracker_mode],
        )
        return Trackers(names, run, self.console.warn_once)

    def write_iteration(self, iteration: int, metrics: dict[str, float], seconds: float) -> None:
        """Write an iteration's metrics to file and trackers, and show them on the console."""
        self._metrics.write(metrics_record(iteration, metrics, seconds))
        self._trackers.log(iteration, metrics)
        self.console.update(iteration, metrics)
        num_equal_groups = int(metrics.get("rollout/alike_groups", 0))
        if num_equal_groups > 0:
            self.console.warn_once(
                "alike_groups",
                f"{num_equal_groups} prompt groups of iteration {iteration} have zero advantages, "
                "because all their responses score the same; raise algorithm.max_num_gen_batches, "
                "or use easier or harder prompts",
            )

    def write_receipt(self, record: dict[str, Any]) -> None:
        """Append a replica's receipt for new weights (`rollout.receipts`) to sync.jsonl.

        The file exists once there is one.
        """
        if self._syncs is None:
            self._syncs = self._open(self._directory.syncs)
        self._syncs.write(record)

    def check_health(self, iteration: int, metrics: Mapping[str, float]) -> Finding | None:
        """Apply the health rules; append findings starting or ending with this iteration to a file.

        Prints each starting rule once. Returns the first finding stopping the run
        (`logging.stop_on`).
        """
        findings = self.health.check(iteration, metrics)
        for finding in findings:
            self._findings.write(asdict(finding))
            if finding.event == "began":
                text = f"{finding.rule}: {finding.text}; {finding.remedy}"
                self.console.warn_once(finding.rule, text)
        return next((finding for finding in findings if finding.stops), None)

    def warn_of_non_finite(
        self, iteration: int, metrics: dict[str, float], scores: dict[int, float]
    ) -> None:
        """Warn about skipped optimizer steps and non-finite `scores` (by sample id)."""
        for role in ("critic", "actor"):
            num_skipped = int(metrics.get(f"{role}/skipped_steps", 0))
            if num_skipped > 0:
                self.note(
                    f"warning: skipped {num_skipped} optimizer steps of the {role} in iteration "
                    f"{iteration}: loss or gradient norm was not finite"
                )
        if scores:
            examples = list(scores.items())[:8]
            listed = ", ".join(f"{score} for sample {sample_id}" for sample_id, score in examples)
            self.note(f"warning: the reward returned {listed} in iteration {iteration}")

    def write_validation(
        self, iteration: int, metrics: dict[str, float], own_line: bool = False
    ) -> None:
        """Print the `val/...` metrics on one line.

        With `own_line` no iteration records them: also write them to metrics.jsonl and trackers,
        and apply the health rules.
        """
        if own_line:
            self._metrics.write(metrics_record(iteration, metrics, metrics["timing/val"]))
            self._trackers.log(iteration, metrics)
            self.health.check(iteration, metrics)
        columns = [f"validation after iteration {iteration}"]
        for name, value in metrics.items():
            if name.startswith("val/"):
                columns.append(f"{name} : {value:.4f}")
        self.note(" | ".join(columns))

    def write_consumed(self, iteration: int, taken: ConsumedPrompts) -> None:
        """Append the iteration's prompts to consumed.jsonl."""
        self._consumed.write(
            {
                "iteration": iteration,
                "first_sample_id": taken.first_sample_id,
                "samples_per_prompt": taken.samples_per_prompt,
                "prompts": list(taken.prompts),
            }
        )

    def write_timeline(self, iteration: int, driver: Mapping[str, tuple[float, float]]) -> None:
        """Add the driver's phases and the recorded rank calls to the timeline.

        `driver` has (start in epoch seconds, duration in seconds) by phase.
        """
        if self._timeline is None:
            return
        spans = []
        for name, (start_s, duration_s) in driver.items():
            spans.append(Span(name, "driver", 0, start_s, duration_s))
        self._timeline.write(iteration, spans + take_spans())

    def token_log(self, iteration: int, sample_ids: Sequence[int]) -> TokenLog | None:
        """Return the samples to log token by token (the first `logging.samples`), or None."""
        chosen = frozenset(sample_ids[: self._num_logged(len(sample_ids))])
        if not chosen or not self._logging.sample_tokens:
            return None
        folder = str(self._directory.samples_tokens)
        return TokenLog(folder, iteration, chosen)

    def _num_logged(self, num_samples: int) -> int:
        limit = self._logging.samples
        return num_samples if limit == "all" else min(limit, num_samples)

    def close(self) -> None:
        """Close the files, trackers and console."""
        for writer in self._writers:
            writer.close()
        self._trackers.close()
        self.console.close()

    def write_samples(
        self,
        iteration: int,
        actor: ActorGroup,
        rollouts: RowsRef,
        scores: Sequence[ScoreReport],
        about: Sequence[Mapping[str, Any]],
        validates: bool = False,
    ) -> None:
        """Fetch the strings of the first `logging.samples` samples, and append them to a file.

        `scores` cover all rows, in order. `about` has further fields of `Sample`, for as many rows
        as there are samples. With `validates` the file is val_samples.jsonl.
        """
        writer = self._val_samples if validates else self._samples
        count = self._num_logged(len(about))
        if not count:
            return
        texts = actor.sample_texts(rollouts, count)
        values: list[float] = []
        reward_parts: list[dict[str, float | str]] = []  # empty if the reward has a single function
        for report in scores:
            values += report.scores
            reward_parts += report.parts
        if not reward_parts:
            reward_parts = [{}] * len(values)
        samples = []
        # The shortest is `texts`: samples are logged for the first `count` rows only.
        for text, score, parts_of_score, fields in zip(
            texts, values, reward_parts, about, strict=False
        ):
            columns = shorten_columns(fields["extra_info"])
            record = text.record
            failure = record.failure if record is not None else None
            sample = Sample(
                sample_id=text.sample_id,
                prompt=decode(self.tokenizer, text.prompt_ids),
                response=decode(self.tokenizer, text.response_ids),
                prompt_ids=text.prompt_ids,
                response_ids=text.response_ids,
                score=score,
                reward_parts=parts_of_score,
                weights_version=text.weights_version,
                turns=record.turns if record is not None else None,
                agent_failure=f"{failure.cause}: {failure.message}" if failure else None,
                **{**fields, "extra_info": columns},
            )
            writer.write(sample.record(iteration))
            samples.append(sample)
        show = self.show_samples[validates]
        if show is not None:
            show(samples)
