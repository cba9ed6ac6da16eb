"""What is legal, and worth a line before the run starts."""

from __future__ import annotations

from mindspeed_rlxf.config.schema import RunConfig


def notices(config: RunConfig) -> list[str]:
    """A line for each."""
    training, found = config.training, []
    if training.save_interval > training.train_iters:
        found.append(
            f"training.save_interval={training.save_interval} is over training.train_iters="
            f"{training.train_iters}: it fires never; what is saved is what "
            "training.save_interval_s asks for, and the end"
        )
    if config.shared_save:
        found.append(
            f"actor_rollout.save and critic.save are one folder, {config.shared_save}: weights go "
            "to its subfolders actor and critic"
        )
    return found
