"""The word sums that SmolLM2 is trained on, their score, and the configurations."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import word_sums

from mindspeed_rlxf.config.compose import compose
from mindspeed_rlxf.config.load import resolve
from tests.processes import ROOT
from tests.registries import restored_registries


def question(row: dict[str, Any]) -> str:
    return str(row["prompt"][0]["content"])


def numbers(row: dict[str, Any]) -> tuple[int, ...]:
    return tuple(sorted(int(digits) for digits in re.findall(r"\d+", question(row))))


@pytest.mark.parametrize("seed", [1, 2])
def test_no_pair_of_numbers_is_in_training_and_test(seed: int) -> None:
    train, test = word_sums.make_split(seed)
    assert (len(train), len(test)) == (2048, 256)
    pairs = [{numbers(row) for row in rows} for rows in (train, test)]
    assert all(len(pair) == 2 for part in pairs for pair in part)
    assert [len(part) for part in pairs] == [210 - 21, 21]
    assert not pairs[0] & pairs[1]
    assert len({question(row) for row in (*train, *test)}) == 2048 + 256
    assert word_sums.make_split(seed) == (train, test) != word_sums.make_split(seed + 1)


def test_the_ground_truth_is_what_a_question_asks_for() -> None:
    train, test = word_sums.make_split(1)
    for row in (*train, *test):
        low, high = numbers(row)
        expected = high - low if "gives away" in question(row) else high + low
        assert row["ground_truth"] == str(expected)


@pytest.mark.parametrize(
    ("response", "expected"),
    [
        ("Tom has 15 + 6 = 21 now.", 1.0),
        ("21", 1.0),
        ("15+6=21.0 apples, and\nno more", 1.0),
        ("Tom has 15 + 6 = 22 now.", 0.0),
        ("15 - 36 = -21", 0.0),
        ("21 apples, of which 6 are new", 0.0),  # the last number counts
        ("0.21", 0.0),
        ("121", 0.0),
        ("", 0.0),
        ("= = twenty-one <|im_end|>", 0.0),
    ],
)
def test_the_last_number_of_a_response_is_scored(response: str, expected: float) -> None:
    assert word_sums.score("", response, ground_truth="21", extra_info={}) == expected


def large() -> list[str]:
    """Return the changes that the documents call LARGE."""
    text = (ROOT / "docs" / "models_and_weights.md").read_text(encoding="utf-8")
    (changes,) = re.findall(r"- `LARGE` stands for [^:]*:\s*`(.*)`", text)
    return changes.split()


@pytest.mark.parametrize(
    ("name", "roles", "heads", "changes"),
    [
        ("grpo", 2, 9, []),
        ("ppo", 3, 9, []),
        ("agent", 2, 9, []),
        ("agent_ppo", 3, 9, []),
        ("grpo", 2, 12, large()),
    ],
)
def test_a_configuration_needs_only_the_folder_of_the_model(
    name: str,
    roles: int,
    heads: int,
    changes: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = tmp_path / "outputs" / "smollm2" / "model"
    model.mkdir(parents=True)
    sizes = {"num_hidden_layers": 30, "hidden_size": 576, "intermediate_size": 1536}
    sizes |= {"num_attention_heads": heads, "num_key_value_heads": heads // 3, "vocab_size": 49152}
    told = {"model_type": "llama", "max_position_embeddings": 8192, "rms_norm_eps": 1e-5, **sizes}
    (model / "config.json").write_text(json.dumps(told), encoding="utf-8")
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    monkeypatch.chdir(tmp_path)
    with restored_registries():
        config = resolve(compose(name, ["device.kind=cpu", *changes], "examples/smollm2"), name)
    assert len(config.roles) == roles
    assert config.actor_rollout.architecture.num_layers == 30
    assert config.actor_rollout.do_sample
