"""Keys, defaults, configurations and tests that the documents name exist."""

import re
from collections.abc import Callable
from pathlib import Path

import pytest

from docs import key_reference
from docs.key_reference import document, put_into
from mindspeed_rlxf.compat.verl.table import NO_EFFECT, RENAMED, TABLE
from mindspeed_rlxf.config.compose import builtin_config_dir, config_names
from mindspeed_rlxf.config.keys import known_keys

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
    refused = {pattern for entry in TABLE["refused"] for pattern in entry["keys"].split()}
    known |= RENAMED.keys() | NO_EFFECT.keys() | refused  # of verl
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
        ("migrating.md", put_into, "docs.key_reference docs/migrating.md"),
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
