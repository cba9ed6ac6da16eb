"""From the loop to the loss and to a drawn token there are few calls of this package."""

import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.forks import Forks

MOST = 12  # frames of this package, that of `PpoTrainer.fit` and the last function included


def test_loss_and_token_are_near_the_loop(forks: Forks, tmp_path: Path) -> None:
    """In a process of its own: the local runtime joins a torch world."""
    said = forks.run("tests.unit.test_chain", tmp_path, megatron=True)
    frames = dict(line.split(": ") for line in said.splitlines() if ": fit " in line)
    assert frames.keys() == {"clipped_policy_loss", "draw_tokens"}
    assert {name: path for name, path in frames.items() if len(path.split()) > MOST} == {}


def record(function: Callable[..., Any]) -> Callable[..., Any]:
    """Print the frames from `fit` to the function before its first call."""
    seen: list[str] = []

    def called(*arguments: Any, **named: Any) -> Any:
        frames = traceback.extract_stack()
        names = [frame.name for frame in frames if "mindspeed_rlxf/" in frame.filename]
        if not seen and "fit" in names:
            seen.append(" ".join([*names[names.index("fit") :], function.__name__]))
            print(f"{function.__name__}: {seen[0]}", flush=True)
        return function(*arguments, **named)

    return called


def main(folder: Path) -> None:
    from mindspeed_rlxf.config.compose import compose
    from mindspeed_rlxf.config.load import resolve
    from mindspeed_rlxf.roles import objectives
    from mindspeed_rlxf.rollout import generation
    from mindspeed_rlxf.trainer.preflight import prepare
    from mindspeed_rlxf.trainer.run import run
    from tests.golden.runs import PPO, SMALL

    objectives.clipped_policy_loss = record(objectives.clipped_policy_loss)
    generation.draw_tokens = record(generation.draw_tokens)
    own = {"training.train_iters": 1, "training.output_dir": folder / "run"}
    keys = {**SMALL, **PPO, **own, "runtime.kind": "local"}
    config = resolve(compose("ppo_trainer_tiny", [f"{k}={v}" for k, v in keys.items()]), "chain")
    assert run(config, prepare(config)) == 0


if __name__ == "__main__":
    main(Path(sys.argv[1]))
