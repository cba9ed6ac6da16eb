"""A run directory belongs to one run. Creating it writes config.yaml, checking writes nothing."""

import os
from pathlib import Path

import pytest

from mindspeed_rlxf.checkpoint.directory import RunDirectory
from mindspeed_rlxf.config.keys import to_yaml
from mindspeed_rlxf.config.problems import UserError
from mindspeed_rlxf.config.schema import ValidationConfig


def test_create_makes_the_folder_and_its_config(make_config):
    config = make_config()
    directory = RunDirectory.create(config)
    assert directory.path == Path(config.training.output_dir) and directory.logs.is_dir()
    assert sorted(os.listdir(directory.path)) == ["config.yaml", "logs", "run.lock"]
    directory.unlock()
    assert sorted(os.listdir(directory.path)) == ["config.yaml", "logs"]
    text = directory.config.read_text(encoding="utf-8")
    assert "größe" in text and text == to_yaml(config)  # which loads to the same configuration


def test_validation_alone_writes_to_a_folder_of_its_own_in_that_of_the_run(make_config):
    run = RunDirectory.create(make_config())  # alive, and locked
    config = make_config().model_copy(update={"validation": ValidationConfig(only=True)})
    first, second = RunDirectory.create(config), RunDirectory.create(config)
    assert [first.path, second.path] == [run.path / "validation", run.path / "validation-2"]
    assert RunDirectory.of_run(config).path == run.path
    assert first.config.exists() and not first.changes
    for directory in (run, first, second):
        directory.unlock()


def test_release_frees_the_folder_of_a_run_that_has_not_trained(make_config):
    config = make_config()
    directory = RunDirectory.create(config)
    (directory.logs / "driver.log").write_text("waited for devices")
    directory.release()
    assert RunDirectory.check(config) == [] and (directory.logs / "driver.log").exists()
    RunDirectory.create(config).metrics.write_text("{}\n")
    directory.release()
    assert directory.is_used and directory.metrics.read_text() == "{}\n"


def test_free_keys_that_changed_are_kept_beside_the_first_configuration(make_config):
    first = RunDirectory.create(make_config())
    before = first.config.read_text()
    for n, iters in ((1, 20), (2, 30)):
        again = RunDirectory.create(make_config(train_iters=iters))
        assert [str(change) for change in again.changes] == [
            f"training.train_iters: {iters - 10 if n > 1 else 2} -> {iters}"
        ]
        kept = again.path / f"config.{n}.yaml"
        assert kept.read_text() == to_yaml(make_config(train_iters=iters))
    assert first.config.read_text() == before
    RunDirectory.create(make_config(train_iters=30))  # as the last time
    assert not (first.path / "config.3.yaml").exists()


def test_fixed_keys_that_changed_are_refused_by_name(make_config):
    folder = RunDirectory.create(make_config()).path
    other = make_config(seed=7, global_batch_size=8, train_iters=50)
    problem = str(*RunDirectory.check(other))
    assert (
        "(there -> here): training.global_batch_size: 4 -> 8; training.seed: 1234 -> 7;" in problem
    )
    assert f"training.new_run=true to take {folder}-2" in problem
    assert "train_iters" not in problem
    with pytest.raises(UserError, match="must hold the same run"):
        RunDirectory.create(other)
    assert not (folder / "config.1.yaml").exists()


@pytest.mark.parametrize(
    ("name", "keys"), [("config.yaml", {"resume": "never"}), ("metrics.jsonl", {})]
)
def test_a_folder_of_another_run_is_refused(make_config, name, keys):
    folder = Path(make_config().training.output_dir)
    folder.mkdir(parents=True)
    (folder / name).write_text("")
    problem = str(*RunDirectory.check(make_config(**keys)))
    assert problem.startswith(f"training.output_dir='{folder}' must not hold another run, it has")
    assert f"it has {name}; " in problem


def test_a_configuration_that_cannot_be_read_is_reported(make_config):
    directory = RunDirectory.create(make_config())
    directory.config.write_text("a: [")
    with pytest.raises(UserError, match="must be what the run wrote"):
        RunDirectory.create(make_config())


def test_new_run_takes_the_next_free_name(make_config):
    config = make_config(new_run=True)
    first = Path(config.training.output_dir)
    paths = [RunDirectory.create(config).path for _ in range(3)]
    assert paths == [first, first.with_name("run-2"), first.with_name("run-3")]


def test_a_file_in_place_of_a_parent_folder_is_a_user_error(make_config, tmp_path):
    (tmp_path / "outputs").write_text("")
    problem = str(*RunDirectory.check(make_config()))
    assert problem.endswith(
        f"must be a folder that can be written: {tmp_path / 'outputs'} is a file; "
        "set training.output_dir to another one"
    )


def test_a_failing_write_is_a_user_error_and_leaves_no_config(make_config, monkeypatch):
    def full(_descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    config = make_config()
    with pytest.raises(UserError, match="can be written: No space left on device; set"):
        RunDirectory.create(config)
    assert os.listdir(config.training.output_dir) == ["logs"]
