"""What the demo makes, and what it makes only on request."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import make
import pytest
from train_models import new_policy
from transformers import LlamaConfig, LlamaForSequenceClassification


@pytest.fixture
def taught(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Which models were taught; teaching takes no time."""
    models: list[str] = []

    def policy(*args: Any) -> SimpleNamespace:
        models.append("policy")
        return SimpleNamespace(model=new_policy(), accuracy=0.5)

    def reward(start: Any, *args: Any) -> tuple[Any, float]:
        models.append("reward")
        config = LlamaConfig(**{**start.config.to_dict(), "num_labels": 1})
        return LlamaForSequenceClassification(config), 0.9

    monkeypatch.setattr(make, "pretrain_policy", policy)
    monkeypatch.setattr(make, "train_reward_model", reward)
    return models


def test_the_reward_model_is_made_on_request_beside_the_other_models(
    taught: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["--output", str(tmp_path / "tiny")]
    models = tmp_path / "tiny" / "models"
    make.main(words)
    assert taught == ["policy"] and [f.name for f in models.iterdir()] == ["sft"]
    before = (models / "sft" / "model.safetensors").read_bytes()
    make.main([*words, "--reward-model"])
    assert taught == ["policy", "reward"]
    assert sorted(f.name for f in models.iterdir()) == ["rm", "sft"]
    assert (models / "sft" / "model.safetensors").read_bytes() == before
    make.main([*words, "--reward-model"])
    assert taught == ["policy", "reward"]
    make.main([*words, "--seed", "2"])  # another seed is another policy: all of it is made anew
    assert taught == ["policy", "reward", "policy"] and not (models / "rm").exists()
    assert "Writing model shards" not in capsys.readouterr().err
