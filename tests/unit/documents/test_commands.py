"""Every command of the documents works, or carries a mark that says why it is not tried."""

import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from mindspeed_rlxf.config.problems import UserError
from tests.bubblewrap import has_bubblewrap
from tests.processes import with_sources
from tests.unit.documents.checks import check, resolve_configuration
from tests.unit.documents.commands import SHELL, Block, blocks, commands, documents

BLOCKS = [block for file in documents() for block in blocks(file)]
SHELL_BLOCKS = [b for b in BLOCKS if b.language in SHELL and b.mark is None]
SCRIPTS = list({str(commands(b.text)): b for b in SHELL_BLOCKS[::-1]}.values())  # translations once
PROGRAMS = ("make", "python", "mindspeed-rlxf", "ray")
OTHERS = {"", "text", "math", "json", "yaml", "python", "{toctree}", *SHELL}


@pytest.mark.parametrize("block", SCRIPTS, ids=str)
def test_a_command_works_or_is_marked(block: Block, tmp_path: Path) -> None:
    for words in commands(block.text):
        try:
            check(words, tmp_path)
        except (AssertionError, UserError) as problem:
            pytest.fail(f"{block}: {' '.join(words)}\n{problem}")


def test_every_block_says_what_it_is() -> None:
    for block in BLOCKS:
        assert block.language in OTHERS, f"{block}: unknown language {block.language}"
        if block.language in ("", "text"):
            starts = tuple(f"{program} " for program in (*PROGRAMS, "pip", "git", "bash"))
            hidden = [line for line in block.text.splitlines() if line.startswith(starts)]
            assert not hidden, f"{block}: mark commands as bash: {hidden[0]}"


@pytest.mark.parametrize(
    "block", [b for b in BLOCKS if b.language == "yaml" and b.mark is None], ids=str
)
def test_a_piece_of_yaml_is_a_good_configuration(block: Block, tmp_path: Path) -> None:
    """Laid over one of the tiny configurations."""
    problems = []
    for base in ("ppo_trainer_tiny", "grpo_trainer_tiny"):
        tree = {"defaults": [base, "_self_"], **yaml.safe_load(block.text)}
        (tmp_path / base).mkdir()
        (tmp_path / base / "piece.yaml").write_text(yaml.safe_dump(tree), encoding="utf-8")
        try:
            resolve_configuration("piece", [], str(tmp_path / base), tmp_path)
            return
        except UserError as problem:
            problems.append(f"{base}: {problem}")
    pytest.fail(f"{block}: {problems}")


@pytest.mark.parametrize("block", [b for b in BLOCKS if b.language == "python"], ids=str)
def test_python_runs_and_prints_what_is_shown(block: Block, tmp_path: Path) -> None:
    """Without bubblewrap, a script with a sandbox ends with the error that the page promises."""
    script = tmp_path / "script.py"
    script.write_text(block.text, encoding="utf-8")
    command = [sys.executable, str(script)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, env=with_sources())
    if "SandboxConfig" in block.text and not has_bubblewrap():
        assert done.returncode == 1
        assert "reward.sandbox: programs of responses must run in bubblewrap" in done.stderr
        return
    assert done.returncode == 0, done.stderr
    after = next((b for b in BLOCKS if b.file == block.file and b.line > block.line), None)
    if after is not None and after.language == "text":
        assert after.text.strip() in done.stdout
