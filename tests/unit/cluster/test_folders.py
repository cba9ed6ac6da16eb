"""Which folders every node must have."""

from pathlib import Path

from mindspeed_rlxf.cluster.ray.runtime import folders_of_workers
from mindspeed_rlxf.config.load import resolve
from tests.unit.config.conftest import make_tree, no_cluster

__all__ = ["make_tree", "no_cluster"]


def test_folders_of_models_and_tokenizer_are_read_on_every_node(make_tree):
    tree = make_tree({"critic.load": "weights/critic", "training.tokenizer_name_or_path": "tok"})
    here = Path.cwd()
    assert folders_of_workers(resolve(tree, "t")) == {
        f"{here}/weights/sft": "actor_rollout.load, ref.load",  # the reward is a rule
        f"{here}/weights/critic": "critic.load",
        f"{here}/tok": "training.tokenizer_name_or_path",
    }
