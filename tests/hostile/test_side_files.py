"""Links, pipes and names that lead out of a stranger's folder are not followed."""

from __future__ import annotations

import json
import os
import time
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from mindspeed_rlxf.cli.convert import main
from mindspeed_rlxf.config.errors import UserError
from mindspeed_rlxf.data.tokenizer import eos_token_ids, load_tokenizer
from mindspeed_rlxf.files.safe import new_file, open_file, open_inside, replace_file
from mindspeed_rlxf.weights.folders import SIDE_FILES
from mindspeed_rlxf.weights.formats import find_weights
from mindspeed_rlxf.weights.hf_folder import HfFolder
from tests.unit.data.byte_tokenizer import byte_tokenizer
from tests.unit.weights.folders_of import make_folder

CANARY = "canary-4711"
BOUND_S = 30.0


@pytest.fixture
def secret(tmp_path: Path) -> Path:
    """A file of the user that nothing may read, copy or write to."""
    file = tmp_path / "of the user"
    file.write_text(json.dumps({CANARY: CANARY}))
    return file


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A Hugging Face folder that converts."""
    make_folder(tmp_path / "model", "llama")
    byte_tokenizer().save_pretrained(tmp_path / "model")
    return tmp_path / "model"


def put(file: Path, kind: str, secret: Path) -> None:
    """Replace a file by what a stranger may have put there."""
    file.unlink(missing_ok=True)
    file.parent.mkdir(exist_ok=True)
    if kind == "pipe":
        os.mkfifo(file)
    elif kind == "relative link":
        file.symlink_to(os.path.relpath(secret, file.parent))
    elif kind == "two links":
        file.symlink_to("middle")
        (file.parent / "middle").symlink_to(secret)
    else:
        file.symlink_to(secret)


def leaked(folder: Path) -> list[str]:
    """Files below a folder that hold the canary."""
    files = [file for file in folder.rglob("*") if file.is_file() and not file.is_symlink()]
    return [file.name for file in files if CANARY.encode() in file.read_bytes()]


def assert_convert_refuses(model: Path, said: Any, *words: str) -> None:
    """One `error:` line, no traceback, soon, and nothing of the user's file anywhere."""
    target, began = model.with_name("target"), time.monotonic()
    assert main([str(model), str(target), "--to", "mg"]) == 2
    assert time.monotonic() - began < BOUND_S
    printed = said.readouterr()
    (line,) = printed.err.splitlines()
    assert line.startswith("error: ") and CANARY not in line
    assert all(word in line for word in words), line
    assert not leaked(model.parent / "target") and not leaked(model.parent / "target.partial")


KINDS = ("link", "relative link", "two links", "pipe")


READ = ("config.json", "tokenizer.json")
OTHERS = sorted(set(SIDE_FILES) - set(READ))


@pytest.mark.parametrize(
    ("name", "kind"), [*product(READ, KINDS), *((name, "link") for name in OTHERS)]
)
def test_convert_reads_and_copies_no_file_of_elsewhere(
    model: Path, secret: Path, capsys: Any, name: str, kind: str
) -> None:
    put(model / name, kind, secret)
    reason = "plain file" if kind == "pipe" else "must not lead out of its folder, it is a link"
    assert_convert_refuses(model, capsys, f"{model / name}", reason)


def test_an_index_is_not_read_from_elsewhere(model: Path, secret: Path) -> None:
    put(model / "model.safetensors.index.json", "link", secret)
    with pytest.raises(ValueError, match=r"index\.json must not lead out of its folder"):
        HfFolder(model)


@pytest.mark.parametrize("kind", KINDS)
def test_a_tracker_shows_nothing_of_a_file_elsewhere(
    tmp_path: Path, secret: Path, kind: str
) -> None:
    (tmp_path / "mg").mkdir()
    put(tmp_path / "mg" / "latest_checkpointed_iteration.txt", kind, secret)
    with pytest.raises(ValueError, match=r"must not lead out of its folder|plain file") as refused:
        find_weights(tmp_path / "mg")
    assert CANARY not in str(refused.value)


TOKENIZER_FILES = (
    "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json",
    "chat_template.jinja", "tokenizer.model", "vocab.json", "merges.txt", "config.json",
    "additional_chat_templates/x.jinja", "additional_chat_templates",
)  # fmt: skip


@pytest.mark.parametrize("kind", ["link", "pipe"])
@pytest.mark.parametrize("name", TOKENIZER_FILES)
def test_a_tokenizer_is_not_read_from_elsewhere(
    model: Path, secret: Path, name: str, kind: str
) -> None:
    put(model / name, kind, secret)
    began = time.monotonic()
    with pytest.raises(UserError, match=r"must not lead out of its folder|a plain file") as refused:
        load_tokenizer(str(model))
    assert time.monotonic() - began < BOUND_S
    assert CANARY not in str(refused.value) and len(str(refused.value).splitlines()) == 1


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("vocab_file", "{secret}"), ("tokenizer_file", "../of the user"),
        ("merges_file", "x/../../of the user"), ("fast_tokenizer_files", ["../tokenizer.4.0.json"]),
    ],
)  # fmt: skip
def test_a_tokenizer_names_no_file_of_elsewhere(
    model: Path, secret: Path, key: str, value: Any
) -> None:
    config = json.loads((model / "tokenizer_config.json").read_text())
    config[key] = value.format(secret=secret) if isinstance(value, str) else value
    (model / "tokenizer_config.json").write_text(json.dumps(config))
    with pytest.raises(UserError, match=f"{key}=.* leads out of"):
        load_tokenizer(str(model))


def test_stop_tokens_are_not_read_from_elsewhere(model: Path, secret: Path) -> None:
    secret.write_text(json.dumps({"eos_token_id": 4711}))
    put(model / "generation_config.json", "link", secret)
    with pytest.raises(UserError, match="must not lead out of its folder"):
        eos_token_ids(byte_tokenizer(), str(model), [])


def test_a_snapshot_of_the_hub_is_read_whole(model: Path, tmp_path: Path, capsys: Any) -> None:
    """Its files are links to the blobs of the same model; blobs of another model are elsewhere."""
    hub = tmp_path / "models--org--name"
    snapshot = hub / "snapshots" / "abc"
    snapshot.mkdir(parents=True)
    (hub / "blobs").mkdir()
    for number, file in enumerate(sorted(model.iterdir())):
        file.rename(hub / "blobs" / str(number))
        (snapshot / file.name).symlink_to(f"../../blobs/{number}")
    assert main([str(snapshot), str(tmp_path / "target"), "--to", "mg"]) == 0, capsys.readouterr()
    assert load_tokenizer(str(snapshot)).get_vocab() == byte_tokenizer().get_vocab()
    assert not any(file.is_symlink() for file in (tmp_path / "target").rglob("*"))
    (snapshot / "config.json").unlink()
    (snapshot / "config.json").symlink_to("../../../of another/blobs/0")
    with pytest.raises(UserError, match="must not lead out of its folder"):
        load_tokenizer(str(snapshot))


def test_a_folder_that_is_itself_a_link_is_read(model: Path, tmp_path: Path) -> None:
    """The user named it; a link inside it that stays inside is as good as the file."""
    (model / "tokenizer.json").rename(model / "real.json")
    (model / "tokenizer.json").symlink_to("real.json")
    (tmp_path / "alias").symlink_to(model)
    assert load_tokenizer(str(tmp_path / "alias")).get_vocab() == byte_tokenizer().get_vocab()
    assert main([str(tmp_path / "alias"), str(tmp_path / "target"), "--to", "mg"]) == 0


@pytest.mark.parametrize("planted", ["the file", "its folder"])
def test_a_link_planted_between_check_and_opening_is_not_followed(
    tmp_path: Path, secret: Path, monkeypatch: pytest.MonkeyPatch, planted: str
) -> None:
    folder, (inner, name) = tmp_path / "of a stranger", ("inner", "of the user")
    (folder / inner).mkdir(parents=True)
    (folder / inner / name).write_text("good")
    real = os.open

    def plant(path: Any, *arguments: Any, **keywords: Any) -> int:
        monkeypatch.setattr(os, "open", real)  # once: after the look, before the first opening
        if planted == "the file":
            put(folder / inner / name, "link", secret)
        else:
            (folder / inner).rename(folder / "away")
            (folder / inner).symlink_to(secret.parent)
        return real(path, *arguments, **keywords)

    monkeypatch.setattr(os, "open", plant)
    with pytest.raises((ValueError, OSError), match=r"must not lead out|Not a directory"):
        open_inside(folder, f"{inner}/{name}")


def test_files_replace_links_and_do_not_write_through_them(secret: Path, tmp_path: Path) -> None:
    before = secret.read_bytes()
    file = tmp_path / "out" / "file"
    for write in (lambda: replace_file(file, "new"), lambda: new_file(file).close()):
        put(file, "link", secret)
        write()
        assert not file.is_symlink() and secret.read_bytes() == before
    for how, kind in product(("a", "a+", "w", "r+", "x", "r"), ("link", "pipe")):
        put(file, kind, secret)
        with pytest.raises(OSError, match=r"is a link or a pipe|a FIFO|File exists"):
            open_file(file, how)
    assert secret.read_bytes() == before
