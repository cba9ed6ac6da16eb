"""Check commands of the documents without running them.

`check` parses the commands of code blocks by the parser of the program, with stand-ins for files.
`check_exists` is for commands that a sentence mentions: it looks for their scripts and options.
"""

import argparse
import ast
import importlib
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from contextlib import chdir
from functools import cache
from pathlib import Path
from typing import Any, NoReturn
from unittest.mock import patch

import click
import pytest

from mindspeed_rlxf.cli import COMMANDS, preprocess, train
from mindspeed_rlxf.cli.command_line import Parser
from mindspeed_rlxf.config.compose import compose
from mindspeed_rlxf.config.load import resolve_with_notes
from tests.registries import restored_registries
from tests.unit.documents.commands import ROOT

SCRIPTS = {"ray_gpt.py": "train", "preprocess_data.py": "preprocess", "convert_ckpt.py": "convert"}
BUILTINS = {"export", "ulimit", "umask", "cd"}
FOLDER_OF_MODEL = {
    "model_type": "qwen2", "architectures": ["Qwen2ForCausalLM"], "hidden_size": 896,
    "intermediate_size": 4864, "num_hidden_layers": 24, "num_attention_heads": 14,
    "num_key_value_heads": 2, "vocab_size": 151936, "max_position_embeddings": 32768,
    "rms_norm_eps": 1e-6, "rope_theta": 1000000.0, "tie_word_embeddings": True,
    "hidden_act": "silu",
}  # fmt: skip
"""The config.json of the stand-in for a model folder that a command loads."""
RESPONSE = {"prompt_id": 3, "iteration": 1, "sample_id": 0, "score": 1.0, "response": "46"}
"""The line of the stand-in for a val_samples.jsonl that a command reads."""


class Parsed(Exception):
    """Ends a command as soon as its arguments are parsed. args: the namespace"""


class ParserAlone(Parser):
    """Raises Parsed, and AssertionError for a bad command line."""

    inner = False

    def parse_args(self, args: Any = None, namespace: Any = None) -> Any:
        self.inner = True
        raise Parsed(super().parse_args(args))

    def parse_intermixed_args(self, args: Any = None, namespace: Any = None) -> Any:
        self.inner = True
        raise Parsed(super().parse_intermixed_args(args))

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        found, unknown = super().parse_known_args(args, namespace)
        if self.inner:
            return found, unknown
        assert not unknown, f"no such option: {unknown}"
        raise Parsed(found)

    def error(self, message: str) -> NoReturn:
        raise AssertionError(message)


class Unchecked(AssertionError):
    """Raised for a program that has no entry in CHECKS."""


def check(words: list[str], folder: Path) -> None:
    """Raise AssertionError, or the parser's error, where a command cannot work.

    folder: gets the stand-ins for the files of the command. Raises Unchecked for a program that no
    check knows.
    """
    words = _without_variables(words)
    if not words or words[0] in BUILTINS:
        return
    program, arguments = words[0], words[1:]
    if program not in CHECKS:
        raise Unchecked(f"{program}: no check knows this program; add one to CHECKS")
    CHECKS[program](arguments, folder)


def check_exists(words: list[str]) -> None:
    """Raise AssertionError where a script, target, command or option of a command does not exist.

    Commands of other programs are not checked.
    """
    words = _without_variables(words)
    if words[0] == "make":
        _make(words[1:], ROOT)
    elif words[0] == "mindspeed-rlxf" and len(words) > 1:
        _options_exist(_cli_source(words[1]), words[2:])
    elif words[0] == "python" and len(words) > 1 and words[1] in SCRIPTS:
        _options_exist(_cli_source(SCRIPTS[words[1]]), words[2:])
    elif words[0] == "python" and len(words) > 1:
        _python_file(words[1:])
    elif words[0] == "ray":
        _ray(words[1:], ROOT)


def _without_variables(words: list[str]) -> list[str]:
    """Return the words without assignments before the command.

    Raises AssertionError for a variable RLXF_... that no source file mentions.
    """
    while words and (match := re.match(r"([A-Z]\w*)=", words[0])):
        name, words = match[1], words[1:]
        assert not name.startswith("RLXF_") or name in _read_variables(), f"nothing reads {name}"
    return words


@cache
def _read_variables() -> set[str]:
    """Return all names RLXF_... in the sources of the package and the tests."""
    files = [*(ROOT / "tests").rglob("*.py"), *(ROOT / "mindspeed_rlxf").rglob("*.py")]
    text = "".join(file.read_text(encoding="utf-8") for file in files)
    return set(re.findall(r"\bRLXF_\w+", text))


def _make(arguments: list[str], _: Path) -> None:
    """Assert that the Makefile has these targets and variables."""
    text = (ROOT / "Makefile").read_text(encoding="utf-8")
    targets = set(re.findall(r"^([a-z][a-z-]*):", text, re.MULTILINE))
    variables = set(re.findall(r"^([A-Z_]+) \?=", text, re.MULTILINE))
    for word in arguments:
        name, sign, _value = word.partition("=")
        assert name in (variables if sign else targets), f"the Makefile does not have {name}"


def _python(arguments: list[str], folder: Path) -> None:
    """Check `python -c CODE`, a script of this repository, or `python -m MODULE`."""
    first = arguments[0]
    if first == "-c":
        _python_code(arguments[1], arguments[2:], folder)
    elif first in SCRIPTS:
        _command([SCRIPTS[first], *arguments[1:]], folder)
    else:
        _python_file(arguments)


def _python_code(code: str, files: list[str], folder: Path) -> None:
    """Run the code on stand-ins for the files that it reads; its output must have the response."""
    names = []
    for file in files:
        stand_in = folder / Path(file).name
        stand_in.write_text(f"{json.dumps(RESPONSE)}\n", encoding="utf-8")
        names.append(str(stand_in))
    command = [sys.executable, "-c", code, *names]
    text = subprocess.check_output(command, text=True, timeout=60)
    assert RESPONSE["response"] in text


def _python_file(arguments: list[str]) -> None:
    """Assert that a script or module exists, and that its source contains each option.

    The source includes modules of the same folder that it imports.
    """
    if arguments[0] == "-m":
        if arguments[1] in ("pytest", "pip"):
            return
        place, given = arguments[1].replace(".", "/"), arguments[2:]
        files = [ROOT / f"{place}.py", ROOT / place / "__main__.py"]
    else:
        files, given = [ROOT / arguments[0]], arguments[1:]
    existing = [file for file in files if file.is_file()]
    assert existing, f"{files[0].relative_to(ROOT)} is not there"
    beside = {file.stem: file for file in existing[0].parent.glob("*.py")}
    source = existing[0].read_text(encoding="utf-8")
    imported = re.findall(r"^(?:from|import) (\w+)", source, re.MULTILINE)
    sources = [source, *(beside[name].read_text("utf-8") for name in imported if name in beside)]
    _options_exist("\n".join(_without_future(text) for text in sources), given)


def _options_exist(source: str, arguments: list[str]) -> None:
    """Assert that each option, a word that begins with `--`, is a string of the source."""
    texts = {
        node.value
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
    }
    for word in arguments:
        option = word.partition("=")[0]
        assert not option.startswith("--") or option in texts, f"no option {option}"


def _cli_source(name: str) -> str:
    """Return the source of a command of mindspeed-rlxf and of the older toolkit's options."""
    assert name in COMMANDS, f"mindspeed-rlxf has no command {name}"
    files = [ROOT / "mindspeed_rlxf" / "cli" / f"{file}.py" for file in (name, "command_line")]
    return "\n".join(_without_future(file.read_text("utf-8")) for file in files)


def _without_future(source: str) -> str:
    """Remove the `from __future__` line, which may not follow other code, so that files can be
    joined."""
    return source.replace("from __future__ import annotations", "")


def _command(arguments: list[str], folder: Path) -> None:
    """Parse a command of mindspeed-rlxf; for `train` also resolve the configuration."""
    name, given = arguments[0], [word for word in arguments[1:] if not word.startswith("[")]
    assert name in COMMANDS, f"mindspeed-rlxf has no command {name}"
    given = ["ppo_trainer_tiny" if word == "NAME" else word for word in given]
    module = importlib.import_module(f"mindspeed_rlxf.cli.{name}")
    alone = patch.object(module, "Parser", ParserAlone)
    with alone, patch.dict(os.environ), pytest.raises(Parsed) as found:
        module.main(given)
    parsed: argparse.Namespace = found.value.args[0]
    if name == train.__name__.rpartition(".")[2]:
        resolve_configuration(parsed.config_name, parsed.overrides, parsed.config_dir, folder)
    if name == "preprocess":
        preprocess._check_options(parsed)


def resolve_configuration(
    name: str, overrides: list[str], config_dir: str | None, folder: Path
) -> None:
    """Compose and resolve a configuration in `folder`. Raises its problems.

    Model folders that it loads are replaced by stand-ins, device.kind=npu by cpu.
    """
    for part in ("examples", "configs"):
        if not (folder / part).exists():
            (folder / part).symlink_to(ROOT / part)
    overrides = [re.sub("^device.kind=npu$", "device.kind=cpu", word) for word in overrides]
    for override in overrides:
        key, _, value = override.partition("=")
        if key.endswith(".load") and not Path(value).is_absolute():
            (folder / value).mkdir(parents=True, exist_ok=True)
            text = json.dumps(FOLDER_OF_MODEL)
            (folder / value / "config.json").write_text(text, encoding="utf-8")
    if config_dir is not None:
        (folder / config_dir).mkdir(exist_ok=True)
    with chdir(folder), restored_registries():
        tree = compose(name, overrides, config_dir)
        resolve_with_notes(tree, name)


def _ray(arguments: list[str], _: Path) -> None:
    """Assert that Ray's command line has the command and its options."""
    from ray.scripts.scripts import cli

    name, given = arguments[0], [word for word in arguments[1:] if word != "..."]
    assert name in cli.commands, f"ray has no command {name}"
    options = {o for p in cli.commands[name].params for o in getattr(p, "opts", [])}
    assert isinstance(cli.commands[name], click.Command)
    for word in given:
        option = word.partition("=")[0]
        assert not option.startswith("--") or option in options, f"ray {name} has no {option}"


def _bash(arguments: list[str], _: Path) -> None:
    script = arguments[0]
    assert list(ROOT.glob(script)) or list((ROOT / "examples").rglob(script)), f"no {script}"


def _source(arguments: list[str], _: Path) -> None:
    assert arguments == [".venv/bin/activate"], "only the environment of make can be sourced"


def _pip(arguments: list[str], _: Path) -> None:
    if arguments != ["install", "-e", "."]:
        raise Unchecked("pip: only the installation of this package is known to work")


def _tail(arguments: list[str], _: Path) -> None:
    kept = (ROOT / "docs" / "running.md").read_text(encoding="utf-8")
    assert f"`{Path(arguments[-1]).name}`" in kept, f"a run leaves no {arguments[-1]}"


def _pytest(arguments: list[str], _: Path) -> None:
    for word in arguments:
        assert word.startswith("-") or (ROOT / word).exists(), f"{word} is not there"


CHECKS: dict[str, Callable[[list[str], Path], None]] = {
    "make": _make, "python": _python, "mindspeed-rlxf": _command, "ray": _ray, "bash": _bash,
    "source": _source, "pip": _pip, "tail": _tail, "pytest": _pytest,
}  # fmt: skip
