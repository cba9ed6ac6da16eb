"""A run that meets a rule of `logging.stop_on` is saved and stopped, and can be resumed."""

import json

import pytest

from mindspeed_rlxf.checkpoint.directory import RunDirectory
from mindspeed_rlxf.trainer.stopping import StoppedByRule, StopRequest
from tests.golden.runs import golden_config
from tests.training import run

ILL = {
    "algorithm.kl_ctrl.kl_coef": 0, "logging.reference_kl": True,
    "logging.stop_on": "[kl_runaway]", "actor_rollout.lr": 1e-2,
}  # fmt: skip


@pytest.mark.long
def test_a_run_stopped_by_a_high_kl_can_be_resumed(warm_runtime, tmp_path, capsys):
    def start(train_iters: int) -> None:
        keys = {**ILL, "training.train_iters": train_iters}
        run(golden_config("gae", tmp_path / "run", keys), warm_runtime, stop=StopRequest(60.0))

    reason = r"logging.stop_on=kl_runaway: the KL .* nats per token"
    with pytest.raises(StoppedByRule, match=reason):
        start(20)
    directory = RunDirectory(tmp_path / "run")
    saved = (directory.checkpoints / "latest_checkpointed_iteration.txt").read_text().strip()
    lines = directory.metrics.read_text().splitlines()
    (found,) = map(json.loads, directory.health.read_text().splitlines())
    assert (found["rule"], found["stops"]) == ("kl_runaway", True)
    assert int(saved) == found["iteration"] == len(lines) < 12
    assert "warning: kl_runaway: the KL" in capsys.readouterr().out

    last = int(saved) + 2
    start(last)  # still ill: it would not get further if that ended it again
    assert f"was stopped after iteration {saved} by logging.stop_on" in capsys.readouterr().out
    assert len(directory.metrics.read_text().splitlines()) == last
    assert len(directory.health.read_text().splitlines()) == 1
