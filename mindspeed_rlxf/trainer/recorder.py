"""Writes an iteration down: metrics, samples, console."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from mindspeed_rlxf.config.schema import RunConfig
from mindspeed_rlxf.reporting.console import Progress
from mindspeed_rlxf.reporting.metrics import MetricsWriter, SampleWriter
from mindspeed_rlxf.reporting.run_dir import RunDirectory
from mindspeed_rlxf.roles.reports import SampleText, ScoreReport
from mindspeed_rlxf.runtime.refs import RowsRef
from mindspeed_rlxf.runtime.role_groups import ActorGroup


class Recorder:
    def __init__(self, config: RunConfig, directory: RunDirectory, tokenizer: Any) -> None:
        self.tokenizer, self.limit = tokenizer, config.logging.samples
        self._metrics = MetricsWriter(directory.metrics)
        self._samples = SampleWriter(directory.samples)
        self._val_samples = SampleWriter(directory.val_samples)
        self._progress = Progress(config.training.train_iters, config.logging.console_metrics)

    def iteration(self, iteration: int, metrics: dict[str, float], seconds: float) -> None:
        self._metrics.write(iteration, metrics, seconds)
        self._progress.iteration(iteration, metrics, seconds)

    def validation(self, iteration: int, metrics: dict[str, float]) -> None:
        """The first validation has a metrics line of its own; later ones are in the iteration's."""
        if iteration == 0:
            self._metrics.write(iteration, metrics, metrics["timing/val"])
        self._progress.validation(iteration, metrics)

    def samples(
        self, iteration: int, actor: ActorGroup, rollouts: RowsRef, scores: Sequence[ScoreReport]
    ) -> None:
        for text, score, parts in self._described(actor, rollouts, scores):
            self._samples.write(iteration, **self._columns(text), score=score, parts=parts)

    def validation_samples(
        self,
        iteration: int,
        actor: ActorGroup,
        rollouts: RowsRef,
        scores: Sequence[ScoreReport],
        ground_truths: Sequence[str],
    ) -> None:
        described = self._described(actor, rollouts, scores)
        for (text, score, parts), truth in zip(described, ground_truths, strict=False):
            self._val_samples.write(
                iteration, **self._columns(text), score=score, parts=parts, ground_truth=truth
            )

    def close(self) -> None:
        self._progress.close()
        for writer in (self._metrics, self._samples, self._val_samples):
            writer.close()

    def _described(
        self, actor: ActorGroup, rollouts: RowsRef, scores: Sequence[ScoreReport]
    ) -> list[tuple[SampleText, float, dict[str, float]]]:
        """The first `logging.samples` samples with score and named parts."""
        count = rollouts.num_rows if self.limit == "all" else min(self.limit, rollouts.num_rows)
        if not count:
            return []
        texts = [t for part in actor.describe(rollouts.take(list(range(count)))).result() for t in part]
        values = [s for report in scores for s in report.scores][:count]
        parts = [p for report in scores for p in report.parts][:count] or [{}] * count
        return list(zip(texts, values, parts, strict=True))

    def _columns(self, text: SampleText) -> dict[str, Any]:
        return {
            "sample_id": text.sample_id,
            "prompt": self.tokenizer.decode(text.prompt_ids),
            "response": self.tokenizer.decode(text.response_ids),
            "prompt_ids": text.prompt_ids,
            "response_ids": text.response_ids,
        }
