"""Composition: model files, overrides of new keys, search order, and mistakes in files."""

from pathlib import Path

import pytest

from mindspeed_rlxf.config.compose import compose
from mindspeed_rlxf.config.problems import ConfigError


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "mine-1b.yaml").write_text("mine-1b:\n  num_layers: 3\n")
    (tmp_path / "run.yaml").write_text(
        "defaults:\n  - model: [mine-1b, tiny]\ntraining:\n  lr: 1e-6\n  name: ${training.lr}\n"
    )
    return tmp_path


def error(folder: Path, name: str, *overrides: str) -> str:
    with pytest.raises(ConfigError) as caught:
        compose(name, overrides, folder)
    (problem,) = map(str, caught.value.problems)
    return problem


def test_model_files_land_under_model_and_their_name(folder: Path) -> None:
    tree = compose("run", [], folder)
    assert tree["model"]["mine-1b"] == {"num_layers": 3}
    assert tree["model"]["tiny"]["hidden_size"] == 128  # from the built-in folder
    assert tree["training"] == {"lr": 1e-6, "name": 1e-6}


def test_plain_overrides_reach_keys_that_the_file_does_not_mention(folder: Path) -> None:
    overrides = ["training.lr=2e-5", "critic.lr=1", "resource_pool.main=[4,4]", "~training.name"]
    tree = compose("run", overrides, folder)
    assert tree["training"] == {"lr": 2e-5}
    assert tree["critic"] == {"lr": 1}
    assert tree["resource_pool"] == {"main": [4, 4]}


def test_a_mapping_replaces_that_of_the_file_and_may_be_changed_afterwards(folder: Path) -> None:
    pools = folder / "pools.yaml"
    pools.write_text("resource_pool:\n  actor: 4\n  critic: 4\n", encoding="utf-8")
    overrides = ["resource_pool={main: 8}", "resource_pool.reward=1", "placement={ref: main}"]
    tree = compose("pools", overrides, folder)
    assert tree == {"resource_pool": {"main": 8, "reward": 1}, "placement": {"ref": "main"}}


def test_a_built_in_config_is_found_beside_a_folder(folder: Path) -> None:
    tree = compose("ppo_trainer_tiny", ["model=[tiny,mine-1b]"], folder)
    assert tree["training"] == compose("ppo_trainer_tiny")["training"]
    assert tree["model"]["mine-1b"] == {"num_layers": 3}
    (folder / "model" / "tiny.yaml").write_text("tiny:\n  num_layers: 1\n")
    assert "model/tiny.yaml would be ignored" in error(folder, "ppo_trainer_tiny")


def test_missing_name_lists_what_there_is(folder: Path) -> None:
    problem = error(folder, "runn")
    assert "--config-name runn: no such config" in problem
    assert "did you mean run?" in problem
    assert "ppo_trainer_tiny" in problem


def test_missing_model_file_lists_what_there_is(folder: Path) -> None:
    problem = error(folder, "run", "model=[mine-7b]")
    assert "defaults name model/mine-7b, which does not exist; there are: " in problem
    assert " mine-1b, " in problem


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("training: [1\n", "bad.yaml:2:1: not valid YAML: expected ',' or ']'"),
        ("a: 1\na: 2\n", "bad.yaml:2:1: not valid YAML: found duplicate key a"),
        ("a:\n\tb: 1\n", "bad.yaml:2:1: not valid YAML: found character '\\t'"),
        ("- 1\n", "cannot be composed: primary config 'bad' must be a DictConfig"),
        ("a: ${b}\n", "cannot be composed: Interpolation key 'b' not found"),
        ("a: ???\n", "cannot be composed: Missing mandatory value: a"),
        ("defaults: 3\n", "cannot be composed: Invalid defaults list in 'bad'"),
    ],
)
def test_bad_file_is_one_line_with_its_place(folder: Path, text: str, message: str) -> None:
    (folder / "bad.yaml").write_text(text)
    problem = error(folder, "bad")
    assert message in problem and "\n" not in problem


@pytest.mark.parametrize("override", ["training.lr", "a=[1,", "a=(1)", "\u540d=1"])
def test_override_that_cannot_be_read_is_shown_as_written(folder: Path, override: str) -> None:
    problem = error(folder, "run", override)
    assert problem.startswith(f"{override}: cannot be read; write key=value")


def test_text_in_any_script_needs_no_quotes(folder: Path) -> None:
    tree = compose("run", ["training.name=\u8fd0\u884c/it's", "data.x='\u00e9'"], folder)
    assert tree["training"]["name"] == "\u8fd0\u884c/it's"
    assert tree["data"] == {"x": "\u00e9"}
