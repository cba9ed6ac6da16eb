"""Draw our loss curves over those of TRL, and their difference below.

    python tests/trl/draw.py docs/trl_parity.png minibatch epoch
    python tests/trl/draw.py outputs/trl_greedy.png greedy

Our curves come from the twenty updates of each setting, run here in one process; TRL's from the
recorded run of its trainer. `greedy` also has the length of the responses. Prints one line of JSON
with the relative differences. Needs the extra `docs`.
"""

import argparse
import json
import sys
import tempfile
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from mindspeed_rlxf.checkpoint.directory import RunDirectory
from mindspeed_rlxf.cluster.local import LocalRuntime
from mindspeed_rlxf.config.enums import DeviceKind
from mindspeed_rlxf.roles import actor, critic
from tests.processes import read_metrics
from tests.training import train
from tests.trl.record import BATCH, SETTINGS, UPDATES, make_tokenizer
from tests.trl.runs import Trace, prepared, recorded_order, trl_config

CURVES = {
    "|policy loss|": ("actor/pg_loss_abs", "pg_loss"),
    "value loss": ("critic/vf_loss", "vf_loss"),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("output", type=Path, help="picture to write")
    parser.add_argument("settings", nargs="+", choices=SETTINGS, help="a column for each")
    arguments = parser.parse_args()
    curves = {name: both_curves(name) for name in arguments.settings}
    draw(arguments.output, curves)
    errors = {
        f"{name} {title}": [float(e) for e in (error.mean(), error.max())]
        for name, titled in curves.items()
        for title, (ours, theirs) in titled.items()
        for error in [np.abs(ours - theirs) / theirs]
    }
    print(json.dumps({"benchmark": "trl_parity", "relative_difference_mean_and_max": errors}))


def both_curves(name: str) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """Run a setting; return title -> (our curve, TRL's curve), each [UPDATES].

    Replaces `mini_batch_order` of actor and critic by the recorded order during the run.
    """
    trace, original = Trace(name), actor.mini_batch_order
    actor.mini_batch_order = critic.mini_batch_order = recorded_order(trace, UPDATES)
    with tempfile.TemporaryDirectory() as folder:
        make_tokenizer().save_pretrained(Path(folder) / "tokenizer")
        config = trl_config(trace, Path(folder), 1, {})
        directory = RunDirectory.create(config)
        runtime = LocalRuntime(DeviceKind.CPU)
        try:
            train(config, prepared(trace), directory, runtime)
        finally:
            runtime.shutdown()
            actor.mini_batch_order = critic.mini_batch_order = original
        metrics = read_metrics(directory.path)
    curves = {
        title: (np.array([line[ours] for line in metrics]), trace.curve(theirs))
        for title, (ours, theirs) in CURVES.items()
    }
    if name == "greedy":
        lengths = np.array([line["response_length/mean"] for line in metrics])
        theirs = np.array([len(ids) for ids in trace.responses]).reshape(UPDATES, BATCH).mean(1)
        curves["mean response length"] = lengths, theirs
    return curves


def draw(output: Path, curves: dict[str, dict[str, tuple[np.ndarray, np.ndarray]]]) -> None:
    """Write the picture: a column for each setting, a row of curves and of differences per loss."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot

    rows = 2 * max(map(len, curves.values()))
    figure, axes = pyplot.subplots(
        rows, len(curves), figsize=(11, 2.25 * rows), sharex=True, squeeze=False
    )
    updates = np.arange(1, UPDATES + 1)
    for column, (name, titled) in enumerate(curves.items()):
        for place, (title, (ours, theirs)) in enumerate(titled.items()):
            above, below = axes[2 * place][column], axes[2 * place + 1][column]
            above.plot(updates, theirs, color="tab:orange", linewidth=4, label="TRL")
            above.plot(updates, ours, color="tab:blue", linewidth=1.2, label="mindspeed_rlxf")
            above.set_title(f"{title}, {name}")
            above.legend()
            below.plot(updates, ours - theirs, color="tab:red", linewidth=1)
            below.axhline(0.0, color="grey", linewidth=0.5)
            below.set_ylabel("difference")
        axes[-1][column].set_xlabel("update")
        axes[-1][column].xaxis.get_major_locator().set_params(integer=True)
    figure.tight_layout()
    figure.savefig(output, dpi=90)  # keeps the file below 200 kB


if __name__ == "__main__":
    main()
