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
from mindspeed_rlxf.data.sampler import ConsumedPrompts
from mindspeed_rlxf.reporting.console import Console, current
from mindspeed_rlxf.reporting.health_rules import Finding, Health, runaway_limit
from mindspeed_rlxf.reporting.jsonl import JsonlWriter, Sample, metrics_record, read_metrics
from mindspeed_rlxf.reporting.timeline import Span, Timeline
from mindspeed_rlxf.reporting.trackers import JSONL, TrackedRun, Trackers
from mindspeed_rlxf.roles.actor import ActorGroup
from mindspeed_rlxf.roles.reports import ScoreReport
from mindspeed_rlxf.weights.atomic import replace_file


class Recorder:
    """Writes metric, sample and health files, the timeline, trackers and the console of a run."""

    def __init__(
        self, config: RunConfig, directory: RunDirectory, tokenizer: Any, writes: bool = True
    ) -> None:
        """Open the files, replay the metrics of a resumed run, start trackers and the console.

        Discards calls recorded by an earlier run of this process.
        writes: False on all but the first rank of torchrun, which then write nowhere
        """
        self.tokenizer = tokenizer

        def open_lines(file: Path) -> JsonlWriter:
            return JsonlWriter(file if writes else Path(os.devnull))

        self._metrics, self._ledger = open_lines(directory.metrics), open_lines(directory.consumed)
        self._samples = open_lines(directory.samples)
        self._val_samples = open_lines(directory.val_samples)
        self._health_file = open_lines(directory.health)
        self._timeline = Timeline(directory.timeline) if writes else None
        self._directory, self._logging = directory, config.logging
        take_spans()  # those of another run of this process
        self.console = current() if writes else Console(io.StringIO())
        self.note = self.console.note  # prints a line beside the progress
        self.health = Health(config.logging.stop_on, _kl_limit(config))
        done = self._replay_health(directory)
        self._trackers = _make_trackers(config, directory, done, self._warn_of_tracker, writes)
        names = config.logging.console_metrics
        path, here = directory.path, Path.cwd()
        title = str(path.relative_to(here) if path.is_relative_to(here) else path)
        self.console.begin(config.training.train_iters, names, done, title)

    def write_iteration(self, iteration: int, metrics: dict[str, float], seconds: float) -> None:
        """Write an iteration's metrics to file and trackers, and show them on the console.

        Warns, the first time, if all responses of a prompt group score the same. seconds: of the
        iteration
        """
        self._metrics.write(metrics_record(iteration, metrics, seconds))
        self._trackers.log(iteration, metrics)
        self.console.update(iteration, metrics)
        if alike := int(metrics.get("rollout/alike_groups", 0)):
            self.console.warn_once(
                "alike_groups",
                f"{alike} prompt groups of iteration {iteration} have zero advantages, because "
                "all their responses score the same; raise algorithm.max_num_gen_batches, or use "
                "easier or harder prompts",
            )

    def check_health(self, iteration: int, metrics: Mapping[str, float]) -> Finding | None:
        """Apply the health rules; write illnesses that begin or end with this iteration to a file.

        Prints those that begin, but each rule only once. Returns the first one that ends the run by
        `logging.stop_on`, None without one.
        """
        found = self.health.check(iteration, metrics)
        for finding in found:
            self._health_file.write(asdict(finding))
            if finding.event == "began":
                text = f"{finding.rule}: {finding.text}; {finding.remedy}"
                self.console.warn_once(finding.rule, text)
        return next((finding for finding in found if finding.stops), None)

    def _warn_of_tracker(self, text: str) -> None:
        self.console.warn_once(text, text)

    def _replay_health(self, directory: RunDirectory) -> int:
        """Apply the health rules to all iterations in metrics.jsonl, without writing findings.

        Prints a note for each rule of `stop_on` whose illness began in the last of them. Returns
        the last iteration, 0 for none.
        """
        last = 0
        for last, metrics in read_metrics(directory.metrics):
            self.health.check(last, metrics)
        for rule, finding in self.health.active.items():
            if finding.stops and finding.iteration == last:
                self.note(
                    f"the run was stopped after iteration {last} by logging.stop_on ({rule}: "
                    f"{finding.text}); it goes on from there, and is stopped by it again only "
                    "after it has ended"
                )
        return last

    def warn_of_non_finite(
        self, iteration: int, metrics: dict[str, float], scores: dict[int, float]
    ) -> None:
        """Print a warning per role with skipped optimizer steps, and one if scores were not finite.

        The latter names the first 8 samples with their scores.
        metrics: of the iteration; `actor/skipped_steps` and `critic/skipped_steps` are read
        scores:  sample id -> score that was not finite
        """
        for role in ("critic", "actor"):
            if count := int(metrics.get(f"{role}/skipped_steps", 0)):
                self.note(
                    f"warning: skipped {count} optimizer steps of the {role} in iteration "
                    f"{iteration}: loss or gradient norm was not finite"
                )
        if scores:
            named = ", ".join(f"{score} for sample {i}" for i, score in list(scores.items())[:8])
            self.note(f"warning: the reward returned {named} in iteration {iteration}")

    def write_validation(
        self, iteration: int, metrics: dict[str, float], own_line: bool = False
    ) -> None:
        """Print one line of the metrics `val/...`, as a note.

        own_line: for metrics that belong to no iteration of this run: also write all of them to
                  metrics.jsonl and the trackers, and pass them to the health rules as replayed ones
        """
        if own_line:
            self._metrics.write(metrics_record(iteration, metrics, metrics["timing/val"]))
            self._trackers.log(iteration, metrics)
            self.health.check(iteration, metrics)
        shown = " | ".join(f"{k} : {v:.4f}" for k, v in metrics.items() if k.startswith("val/"))
        self.note(f"validation after iteration {iteration} | {shown}")

    def write_consumed(self, iteration: int, taken: ConsumedPrompts) -> None:
        """Append the iteration's prompts to consumed.jsonl."""
        self._ledger.write(
            {
                "iteration": iteration,
                "first_sample_id": taken.first_sample_id,
                "samples_per_prompt": taken.samples_per_prompt,
                "prompts": list(taken.prompts),
            }
        )

    def write_timeline(self, iteration: int, driver: Mapping[str, tuple[float, float]]) -> None:
        """Write phases of the driver and recorded calls to ranks to the timeline.

        Takes the spans of `take_spans`, so the next call has only later ones. Does nothing with
        `writes` False.
        driver: phase -> (start in seconds of the epoch, seconds)
        """
        if self._timeline is None:
            return
        own = [Span(name, "driver", 0, *when) for name, when in driver.items()]
        self._timeline.write(iteration, own + take_spans())

    def token_log(self, iteration: int, sample_ids: Sequence[int]) -> TokenLog | None:
        """Return which samples of this iteration the ranks log token by token.

        None without `logging.sample_tokens`, or if no sample is logged.
        sample_ids: of all samples of the iteration, in order; the first `logging.samples` count
        """
        chosen = frozenset(sample_ids[: self._num_kept(len(sample_ids))])
        if not chosen or not self._logging.sample_tokens:
            return None
        folder = str(self._directory.samples_tokens)
        return TokenLog(folder, iteration, chosen)

    def _num_kept(self, num_samples: int) -> int:
        """Return how many of these samples are logged: the first ones."""
        limit = self._logging.samples
        return num_samples if limit == "all" else min(limit, num_samples)

    def close(self) -> None:
        for writer in (
            self._metrics,
            self._ledger,
            self._samples,
            self._val_samples,
            self._health_file,
        ):
            writer.close()
        self._trackers.close()
        self.console.close()

    def write_samples(
        self,
        iteration: int,
        actor: ActorGroup,
        rollouts: RowsRef,
        scores: Sequence[ScoreReport],
        sources: Sequence[str],
        about: Sequence[Mapping[str, Any]] | None = None,
    ) -> None:
        """Fetch the texts of the first `logging.samples` samples, and append them to a sample file.

        Does nothing if `logging.samples` is 0.
        sources: data source of each sample
        about:   more fields of each sample of a validation, written to val_samples.jsonl; None =
                 samples of training
        """
        writer = self._samples if about is None else self._val_samples
        count = self._num_kept(rollouts.num_rows if about is None else len(about))
        if not count:
            return
        texts = actor.sample_texts(rollouts, count)
        values = [score for report in scores for score in report.scores]
        parts = [part for report in scores for part in report.parts] or [{}] * len(values)
        more = [{}] * count if about is None else about
        columns = (values, parts, sources, more)
        rows = zip(texts, *(column[:count] for column in columns), strict=True)
        decode = self.tokenizer.decode
        for text, score, part, source, fields in rows:
            sample = Sample(
                sample_id=text.sample_id,
                prompt=decode(text.prompt_ids),
                response=decode(text.response_ids),
                prompt_ids=text.prompt_ids,
                response_ids=text.response_ids,
                score=score,
                reward_parts=part,
                weights_version=text.weights_version,
                data_source=source,
                **fields,
            )
            writer.write(sample.record(iteration))


def _kl_limit(config: RunConfig) -> float:
    """Return the KL, in nats per token, above which the health rules report a runaway.

    KL_LIMIT, or with an adaptive `kl_ctrl` twice its `target_kl` if that is larger.
    """
    control = config.algorithm.kl_ctrl
    return runaway_limit(control.type == "adaptive", control.target_kl)


def _make_trackers(
    config: RunConfig,
    directory: RunDirectory,
    resumed: int,
    warn: Callable[[str], None],
    writes: bool,
) -> Trackers:
    """Start the trackers of `logging.trackers`, except for JSONL; none with `writes` False.

    resumed: last iteration before a resume, 0 = new run; warn: called with a tracker's problems
    """
    logging = config.logging
    names = [name for name in logging.trackers if name != JSONL] if writes else []
    run = TrackedRun(
        name=config.training.run_name if names else "",
        project=logging.tracker_project,
        run_id=_find_run_id(directory) if names else "",
        folder=directory.trackers,
        config=to_tree(config) if names else {},
        resumed=resumed,
        offline={"auto": None, "online": False, "offline": True}[logging.tracker_mode],
    )
    return Trackers(names, run, warn)


def _find_run_id(directory: RunDirectory) -> str:
    """Return the run's id for trackers; the first call writes a random one to trackers/run_id."""
    file = directory.trackers / "run_id"
    if not file.exists():
        directory.trackers.mkdir(parents=True, exist_ok=True)
        replace_file(file, secrets.token_hex(8))
    return file.read_text(encoding="ascii").strip()
