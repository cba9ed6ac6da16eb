"""The commands of the documents that need no download run on the tiny models."""

from pathlib import Path

import pytest

from tests.processes import run_python
from tests.unit.documents.commands import ROOT, SHELL, blocks, commands, documents

pytestmark = pytest.mark.long
TINY = ("ppo_trainer_tiny", "grpo_trainer_tiny", "online_dpo_trainer_tiny")
ELSEWHERE = ("data/hh", "FOLDER")  # what nothing here makes


def runs() -> list[list[str]]:
    """Return the training commands of the documents that the tiny task is enough for."""
    found: dict[str, list[str]] = {}
    for file in documents():
        for block in blocks(file):
            if block.language not in SHELL or block.mark is not None:
                continue
            for words in commands(block.text):
                text = " ".join(words)
                tiny = words[:2] == ["python", "ray_gpt.py"] and any(n in words for n in TINY)
                if tiny and not any(place in text for place in ELSEWHERE):
                    found.setdefault(text, words)
    return list(found.values())


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a working directory with the tiny models and data, and links to what users call."""
    place = tmp_path_factory.mktemp("documents")
    for name in ("ray_gpt.py", "examples", "configs"):
        (place / name).symlink_to(ROOT / name)
    run_python("examples/tiny/make.py", "--output", "outputs/tiny", folder=place)
    return place


@pytest.mark.parametrize("words", runs(), ids=lambda words: " ".join(words[3:])[:60])
def test_a_command_of_the_documents_trains(words: list[str], folder: Path) -> None:
    short = ["runtime.address=local", "training.new_run=true"]
    if "dry_run=true" not in words:
        short += ["training.train_iters=1", "validation.max_samples=8"]
    run_python(*words[1:], *short, folder=folder)
