"""Keys, defaults, configurations and tests that the documents name exist."""

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import get_args

import pytest
from pydantic import BaseModel

from mindspeed_rlxf.config import key_reference
from mindspeed_rlxf.config.compose import builtin_config_dir, config_names
from mindspeed_rlxf.config.key_reference import document, put_into
from mindspeed_rlxf.config.keys import known_keys
from mindspeed_rlxf.config.roles import OptimizerConfig
from mindspeed_rlxf.config.schema import RunConfig

ROOT = Path(__file__).parents[2]
DOCUMENTS = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
KNOWN = known_keys()
FUNCTIONS = {
    "device.setup", "actor_rollout.generate", "actor_rollout.send_weights",
    "rollout.generate", "rollout.update_weights",
}  # fmt: skip


def code_words(document: Path) -> set[str]:
    """What stands between backticks, and the words of code blocks."""
    text = document.read_text(encoding="utf-8")
    blocks = re.findall(r"```.*?```", text, re.DOTALL)
    spans = re.findall(r"`([^`\n]+)`", re.sub(r"```.*?```", "", text, flags=re.DOTALL))
    return {word for part in (*blocks, *spans) for word in part.split()}


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda document: document.name)
def test_keys_that_a_document_names_are_known(document: Path) -> None:
    words = {word.partition("=")[0].rstrip(",;:.)") for word in code_words(document)}
    named = {word for word in words if word.rpartition(".")[0] in KNOWN} - FUNCTIONS
    known = KNOWN.keys() | {f"{section}.{key}" for section, keys in KNOWN.items() for key in keys}
    assert named - known == set()


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda document: document.name)
def test_configs_and_tests_that_a_document_names_exist(document: Path) -> None:
    text = document.read_text(encoding="utf-8")
    configs = set(re.findall(r"\b\w+_trainer_\w+\b", text))
    assert configs <= set(config_names([builtin_config_dir()]))
    names = (
        r"`(?:tests/)?((?:unit|distributed|hostile|long)/[\w/]+\.py)(?:::(\w+))?((?:`, `::\w+)*)"
    )
    for name, test, others in re.findall(names, text):
        source = (ROOT / "tests" / name).read_text(encoding="utf-8")
        for claim in filter(None, [test, *re.findall(r"::(\w+)", others)]):
            assert f"def {claim}(" in source, f"{name}::{claim}"


@pytest.mark.parametrize(
    ("name", "made", "command"),
    [
        ("migrating.md", put_into, "mindspeed_rlxf.config.key_reference docs/migrating.md"),
        (
            "configuration.md",
            lambda _: document(),
            f"{key_reference.__name__} docs/configuration.md",
        ),
    ],
)
def test_tables_of_keys_are_made_from_the_code(
    name: str, made: Callable[[str], str], command: str
) -> None:
    text = (ROOT / "docs" / name).read_text(encoding="utf-8")
    assert made(text) == text, f"run python -m {command}"


def test_every_key_has_a_row_in_the_reference() -> None:
    text = (ROOT / "docs" / "configuration.md").read_text(encoding="utf-8")
    rows = set(re.findall(r"^\| `([^`]+)`", text, re.MULTILINE))
    assert set().union(*KNOWN.values()) - rows == {"kl_ctrl", "sandbox", "offload"}  # sections


def default_of(name: str) -> object:
    """The default of a key; keys without a section are the optimizer's."""
    section: type[BaseModel] = RunConfig
    *sections, key = name.split(".")
    for part in sections:
        kinds = get_args(annotation := section.model_fields[part].annotation) or (annotation,)
        section = next(kind for kind in kinds if issubclass(kind, BaseModel))
    found = (section if sections else OptimizerConfig).model_fields[key].default
    return getattr(found, "value", found)


def value_of(cell: str) -> object:
    """A number, true, false or null, else a word."""
    try:
        return json.loads(cell)
    except ValueError:
        return cell


def test_the_comparison_with_trl_names_every_key_that_it_sets_with_its_default() -> None:
    text = (ROOT / "docs" / "results.md").read_text(encoding="utf-8")
    table = text.partition("| key | in the comparison |")[2].partition("\n\n")[0]
    lines = [line.replace("`", "").split("|")[1:-1] for line in table.splitlines()[2:]]
    stated = {cells[0].strip(): value_of(cells[3].strip()) for cells in lines}
    assert stated == {name: default_of(name) for name in stated}
    source = (ROOT / "tests" / "trl" / "runs.py").read_text(encoding="utf-8")
    for name in ("do_sample", "cliprange_value", "lr_decay_style", "ppo_epochs", "shuffle"):
        assert name in source and any(key.split(".")[-1] == name for key in stated), name
