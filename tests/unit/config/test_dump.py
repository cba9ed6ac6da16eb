"""The printed YAML is complete and gives the same configuration again."""

from mindspeed_rlxf.config.compose import compose
from mindspeed_rlxf.config.keys import to_yaml
from mindspeed_rlxf.config.load import resolve

MODEL_REWARD = {
    "critic.num_layers": 2,  # an architecture of its own
    "reward": {"kind": "model"},
    "placement.reward": "main",
    "algorithm.missing_eos_penalty": 1,
    "training.run_name": "\u8fd0\u884c",
}


def test_dump_loads_to_the_same_configuration(make_tree, tmp_path):
    for changes in ({}, MODEL_REWARD, {"algorithm.kl_ctrl.kl_coef": 0.0}):  # without a reference
        config = resolve(make_tree(changes), "again")
        (tmp_path / "again.yaml").write_text(to_yaml(config), encoding="utf-8")
        assert resolve(compose("again", [], tmp_path), "again") == config
