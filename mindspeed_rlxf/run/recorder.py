"""Record iterations: metric and sample files, timeline, console."""

from __future__ import annotations

import io
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from mindspeed_rlxf.cluster import spans
from mindspeed_rlxf.cluster.refs import RowsRef
from mindspeed_rlxf.cluster.role_groups import ActorGroup
from mindspeed_rlxf.config.schema import RunConfig
from mindspeed_rlxf.data.batch import TokenLog
from mindspeed_rlxf.data.sampler import ConsumedPrompts
from mindspeed_rlxf.reporting.console import Progress
from mindspeed_rlxf.reporting.metrics import LedgerWriter, MetricsWriter, Sample, SampleWriter
from mindspeed_rlxf.reporting.timeline import Span, Timeline
from mindspeed_rlxf.roles.reports import ScoreReport
from mindspeed_rlxf.run.directory import RunDirectory

GAP_WARNING = 0.05  # mean |log-prob of generation - of training|, nats; bf16 rounds to about 0.01


class Recorder:
    """Write the open files of the run directory and the progress on the console."""

    def __init__(
        self, config: RunConfig, directory: RunDirectory, tokenizer: Any, writes: bool = True
    ) -> None:
        """writes: False on all but the first rank of torchrun, which run the same driver code."""
        self.tokenizer = tokenizer
        mode, nowhere = directory.file_mode, Path(os.devnull)
        limit = config.logging.samples, config.logging.samples_file_mb * 10**6, mode
        self._metrics = MetricsWriter(directory.metrics if writes else nowhere, mode)
        self._ledger = LedgerWriter(directory.consumed if writes else nowhere, mode)
        self._samples = SampleWriter(directory.samples if writes else nowhere, *limit)
        self._val_samples = SampleWriter(directory.val_samples if writes else nowhere, *limit)
        self._timeline = Timeline(directory.timeline, mode) if writes else None
        self._directory, self._logging = directory, config.logging
        spans.take()  # those of another run of this process
        self._progress = Progress(
            config.training.train_iters,
            config.logging.console_metrics,
            sys.stdout if writes else io.StringIO(),
        )
        self.note = self._progress.note  # prints a line beside the progress

    def write_iteration(self, iteration: int, metrics: dict[str, float], seconds: float) -> None:
        """Write and print the metrics; warn of groups without signal and of log-probs that differ.

        seconds: of the whole iteration
        """
        self._metrics.write(iteration, metrics, seconds)
        self._progress.update(iteration, metrics)
        if alike := int(metrics.get("rollout/alike_groups", 0)):
            self.note(
                f"warning: {alike} prompt groups of this iteration have zero advantages, because "
                "all their responses score the same; raise algorithm.max_num_gen_batches, or use "
                "easier or harder prompts"
            )
        gap = metrics.get("rollout/log_prob_gap_mean", 0.0)
        if gap > GAP_WARNING:
            self.note(
                f"warning: log-probs of generation and training differ by {gap:.3g} on average; "
                "algorithm.max_log_prob_gap stops the run at the token with the largest gap"
            )

    def warn_of_non_finite(
        self, iteration: int, metrics: dict[str, float], scores: dict[int, float]
    ) -> None:
        """Warn of skipped optimizer steps, and of the samples whose scores were not finite."""
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
        """Print one line of validation metrics.

        own_line: also write them to metrics.jsonl, as they belong to no iteration
        """
        if own_line:
            self._metrics.write(iteration, metrics, metrics["timing/val"])
        shown = " | ".join(f"{k} : {v:.4f}" for k, v in metrics.items() if k.startswith("val/"))
        self.note(f"validation after iteration {iteration} | {shown}")

    def write_consumed(self, iteration: int, taken: ConsumedPrompts) -> None:
        """Add the iteration's prompts to the ledger."""
        self._ledger.write(
            iteration, taken.first_sample_id, taken.samples_per_prompt, taken.prompts
        )

    def write_timeline(self, iteration: int, driver: Mapping[str, tuple[float, float]]) -> None:
        """Write to the timeline which calls have ended since the last time.

        driver: phase of the driver -> start (seconds of the epoch), seconds
        """
        if self._timeline is None:
            return
        own = [Span(name, "driver", 0, *when) for name, when in driver.items()]
        self._timeline.write(iteration, own + spans.take())

    def token_log(self, iteration: int, sample_ids: Sequence[int]) -> TokenLog | None:
        """Return what the ranks log of each token of this iteration's samples; None = nothing.

        sample_ids: of all samples of the iteration, in order
        """
        chosen = frozenset(sample_ids[: self._samples.num_kept(len(sample_ids))])
        if not chosen or not self._logging.sample_tokens:
            return None
        folder = str(self._directory.samples_tokens)
        limit = self._logging.samples_file_mb * 10**6
        return TokenLog(folder, iteration, chosen, limit, self._directory.file_mode)

    def close(self) -> None:
        self._progress.close()
        for writer in (self._metrics, self._ledger, self._samples, self._val_samples):
            writer.close()

    def write_samples(
        self,
        iteration: int,
        actor: ActorGroup,
        rollouts: RowsRef,
        scores: Sequence[ScoreReport],
        sources: Sequence[str],
        about: Sequence[Mapping[str, Any]] | None = None,
    ) -> None:
        """Fetch and write the first samples; no others leave the workers.

        sources: data source of each
        about: further fields of the samples of a validation, which have a file of their own; None =
               samples of training
        """
        writer = self._samples if about is None else self._val_samples
        count = writer.num_kept(rollouts.num_rows if about is None else len(about))
        if not count:
            return
        texts = actor.sample_texts(rollouts, count)
        values = [score for report in scores for score in report.scores]
        parts = [part for report in scores for part in report.parts] or [{}] * len(values)
        more = [{}] * count if about is None else about
        columns = (values, parts, sources, more)
        rows = zip(texts, *(column[:count] for column in columns), strict=True)
        decode = self.tokenizer.decode
        writer.write(
            iteration,
            [
                Sample(
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
                for text, score, part, source, fields in rows
            ],
        )
