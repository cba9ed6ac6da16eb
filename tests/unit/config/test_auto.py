"""`model: auto`: the architecture comes from the folder that the role loads."""

import json
from pathlib import Path
from typing import Any

import pytest

from mindspeed_rlxf.config.compose import compose
from mindspeed_rlxf.config.load import resolve

QWEN3 = {
    "model_type": "qwen3", "num_hidden_layers": 2, "hidden_size": 32, "intermediate_size": 48,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 12, "vocab_size": 99,
    "max_position_embeddings": 512, "rope_theta": 1000000.0, "rms_norm_eps": 1e-6,
    "tie_word_embeddings": True,
}  # fmt: skip


def write_config(folder: Path, **keys: Any) -> str:
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(QWEN3 | keys), encoding="utf-8")
    return str(folder)


def test_each_role_has_the_architecture_of_its_folder(make_tree, tmp_path):
    small, large = write_config(tmp_path / "a"), write_config(tmp_path / "b", num_hidden_layers=6)
    changes = {"training.model": "auto", "training.load": small, "critic.load": large}
    config = resolve(make_tree(changes, drop=("model",)), "test")
    actor, critic = config.actor_rollout.architecture, config.critic.architecture
    assert (actor.num_layers, critic.num_layers) == (2, 6)
    assert (actor.head_dim, actor.kv_heads, actor.vocab_size) == (12, 2, 99)
    assert actor.qk_layernorm and not actor.add_qkv_bias
    assert (actor.rotary_base, actor.norm_epsilon) == (1e6, 1e-6)
    assert not actor.untie_embeddings_and_output_weights


def test_the_twelve_lines_of_the_quick_start_are_a_configuration(tmp_path, monkeypatch):
    """Nothing is laid under them; the folder has a model of another family than the examples'."""
    monkeypatch.chdir(tmp_path)
    page = (Path(__file__).parents[3] / "docs" / "quick_start.md").read_text(encoding="utf-8")
    text = page.split("```yaml\n")[1].split("```")[0]
    assert len(text.splitlines()) == 12
    (tmp_path / "model_from_hf").mkdir()
    write_config(tmp_path / "model_from_hf" / "my_model", max_position_embeddings=2048)
    (tmp_path / "mine.yaml").write_text(text, encoding="utf-8")
    overrides = ["device.kind=cpu"]
    config = resolve(compose("mine", overrides, str(tmp_path)), "mine")
    assert config.actor_rollout.do_sample and config.actor_rollout.architecture.num_layers == 2
    assert config.ref.load == config.actor_rollout.load
    assert {config.placement[role] for role in config.roles} == {"main"}


@pytest.mark.parametrize(
    ("keys", "text"),
    [
        ({"model_type": "gemma"}, "model_type: one of llama, "),
        ({"hidden_act": "gelu"}, "hidden_act: silu, gelu; use another model"),
        ({"rope_theta": None}, "config.json: a field has a wrong type"),
        ({"rope_scaling": "x"}, "config.json: a field has a wrong type"),
        ({"hidden_size": "32", "head_dim": None}, "config.json: a field has a wrong type"),
    ],
)
def test_a_config_that_cannot_be_a_model_is_the_users_mistake(problems, tmp_path, keys, text):
    folder = write_config(tmp_path / "a", **{"model_type": "llama", **keys})
    (problem,) = problems({"critic.model": "auto", "critic.load": folder})
    assert problem.startswith(f"critic.load={folder}: ") and text in problem
