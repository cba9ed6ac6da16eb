"""A first configuration is complete, and defaults that are rarely wanted are warned of."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from mindspeed_rlxf.cli.new import main
from mindspeed_rlxf.config.load import resolve
from mindspeed_rlxf.config.starter import first_yaml, list_warnings
from mindspeed_rlxf.ops.planning.plan import plan
from tests.unit.config.test_auto import QWEN3


@pytest.fixture
def model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(QWEN3))
    return str(folder)


@pytest.mark.parametrize("stage", ["ppo", "grpo", "dpo"])
def test_a_first_configuration_resolves_has_a_plan_and_no_warnings(stage, model, capsys):
    arguments = ["mine", "--stage", stage, "--model", model, "--seq-length", "512"]
    assert main(arguments) == 0
    text = Path("mine.yaml").read_text()
    assert len(text.splitlines()) <= 18
    config = resolve({**yaml.safe_load(text), "dry_run": True, "device": {"kind": "cpu"}}, "mine")
    assert list_warnings(config) == []
    assert config.actor_rollout.ppo_mini_batch_size * 4 == config.samples_per_iteration
    assert "Optimizer" in plan(config).text
    assert main(arguments) == 2 and "must not exist" in capsys.readouterr().err


ROW = {"question": "1 + 1?", "answer": "2"}


@pytest.mark.parametrize(
    ("row", "keys", "rules"),
    [
        ({"prompt": "1", "ground_truth": "2", "data_source": "arithmetic"}, {}, {}),
        (
            {**ROW, "data_source": "trivia"},
            {"prompt_key": "question", "ground_truth_key": "answer"},
            {"trivia": "gsm8k"},
        ),
        (
            {"prompt": "Who?", "reward_model": {"ground_truth": "Ada"}},
            {"ground_truth_key": "reward_model.ground_truth", "default_data_source": "mine"},
            {"mine": "exact_match"},
        ),
    ],
)
def test_a_first_configuration_reads_the_columns_of_its_file(row, keys, rules, model):
    Path("rows.jsonl").write_text(f"{json.dumps(row)}\n")
    assert main(["mine", "--model", model, "--train-files", "rows.jsonl"]) == 0
    tree = yaml.safe_load(Path("mine.yaml").read_text())
    del tree["data"]["train_files"], tree["data"]["overlong_prompts"]
    assert tree["data"] == keys
    assert tree["reward"].get("rules", {}) == rules


@pytest.mark.parametrize(
    ("text", "rule"), [(None, "no such file"), ("", "at least one row"), ('{"a": 1}', "prompts")]
)
def test_a_first_configuration_of_a_file_that_cannot_train_is_refused(text, rule, model, capsys):
    if text is not None:
        Path("rows.jsonl").write_text(text)
    assert main(["mine", "--model", model, "--train-files", "rows.jsonl"]) == 2
    assert rule in capsys.readouterr().err and not Path("mine.yaml").exists()


@pytest.mark.parametrize(("positions", "expected"), [(64, 64), (40960, 1024)])
def test_a_first_configuration_fits_the_positions_of_the_model(positions, expected, model):
    small = {**QWEN3, "max_position_embeddings": positions}
    (Path(model) / "config.json").write_text(json.dumps(small))
    assert main(["mine", "--model", model]) == 0
    assert yaml.safe_load(Path("mine.yaml").read_text())["training"]["seq_length"] == expected


@pytest.mark.parametrize(("vocab_size", "recompute"), [(1000, None), (2000000, "full")])
def test_large_models_alone_recompute(vocab_size, recompute, model):
    sizes = {**QWEN3, "vocab_size": vocab_size, "hidden_size": 2048}
    (Path(model) / "config.json").write_text(json.dumps(sizes))
    assert main(["mine", "--model", model]) == 0
    assert yaml.safe_load(Path("mine.yaml").read_text())["training"].get("recompute") == recompute


@pytest.mark.parametrize("num_devices", [1, 3, 6, 64])
def test_batches_fit_any_number_of_devices(num_devices, model):
    for stage in ("ppo", "grpo", "dpo"):
        text = first_yaml(stage, model, "a.jsonl", num_devices, 512)
        resolve({**yaml.safe_load(text), "dry_run": True}, "mine")


def test_defaults_of_the_older_toolkit_are_warned_of(make_tree):
    def keys(changes: dict[str, Any], drop: tuple[str, ...]) -> list[str]:
        warnings = list_warnings(resolve(make_tree(changes, drop), "test"))
        return [re.findall(r"^[\w.]+", warning)[0] for warning in warnings]

    sizes = "actor_rollout.ppo_mini_batch_size", "critic.critic_mini_batch_size"
    one = {"resource_pool": {"main": 1}}
    assert keys(one, sizes) == ["actor_rollout.do_sample", *sizes]
    assert keys({**one, "actor_rollout.do_sample": False}, sizes[1:]) == [sizes[1]]
