"""`tests.chaos.moments.Watch` reads lost iterations, recovery and phase from a run's folder."""

from pathlib import Path

from mindspeed_rlxf.checkpoint.directory import RunDirectory
from tests.chaos.moments import Phase, Watch


def test_lost_iterations_and_recovery_are_counted_from_the_last_attempt(tmp_path: Path) -> None:
    directory = RunDirectory(tmp_path)
    directory.logs.mkdir()

    def iterations(count: int) -> None:
        directory.metrics.write_text("{}\n" * count)
        watch.iterations()

    directory.metrics.write_text("{}\n" * 5)
    watch = Watch(directory)
    assert watch.phase() is Phase.START
    iterations(6)  # written before the supervisor noticed the kill
    (directory.logs / "failures.jsonl").write_text("{}\n")
    watch.iterations()
    assert watch.recovery_s() is None and watch.lost_iterations() == 0
    iterations(4)
    assert (
        watch.recovery_s() is None and watch.lost_iterations() == 2 and watch.phase() is Phase.START
    )
    iterations(5)
    assert watch.recovery_s() is not None and watch.phase() is Phase.ITERATION
    (directory.checkpoints / ".iter_0000006").mkdir(parents=True)
    assert watch.phase() is Phase.SAVE
