"""Check commands of the documents without running them.

`check` parses a command of this package by the parser of the program, with stand-ins for files, and
looks for the targets of `make` and the files of `python`. Other programs are not checked.
"""

import importlib
import json
import os
import re
from contextlib import chdir
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest

from mindspeed_rlxf.cli import COMMANDS, generate, preprocess
from mindspeed_rlxf.cli.command_line import Parser
from mindspeed_rlxf.config.compose import compose
from mindspeed_rlxf.config.load import resolve
from tests.registries import restored_registries
from tests.unit.documents.commands import ROOT

SCRIPTS = {"ray_gpt.py": "train", "preprocess_data.py": "preprocess", "convert_ckpt.py": "convert"}
MODEL = {
    "model_type": "qwen2", "hidden_size": 896, "intermediate_size": 4864, "num_hidden_layers": 24,
    "num_attention_heads": 14, "num_key_value_heads": 2, "vocab_size": 151936,
    "max_position_embeddings": 32768, "rms_norm_eps": 1e-6, "tie_word_embeddings": True,
}  # fmt: skip
"""The config.json of the stand-in for a model folder that a command loads."""


class Parsed(Exception):
    """Ends a command as soon as its arguments are parsed. args: the namespace"""


class ParserAlone(Parser):
    """Raises Parsed, UserError for a bad command line, and AssertionError for unknown options."""

    def parse_args(self, args: Any = None, namespace: Any = None) -> Any:
        raise Parsed(self._parse(args))

    parse_intermixed_args = parse_args

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        raise Parsed(self._parse(args))

    def _parse(self, args: Any) -> Any:
        parser = Parser(())
        parser.__dict__ = self.__dict__
        found, unknown = parser.parse_known_intermixed_args(args)
        assert not unknown, f"no such option: {unknown}"
        return found


def check(words: list[str], folder: Path) -> None:
    """Raise AssertionError, or the parser's error, where a command cannot work.

    folder: gets the stand-ins for the files of the command
    """
    while words and re.match(r"[A-Z]\w*=", words[0]):
        words = words[1:]
    match words:
        case ["make", *given]:
            _check_make(given)
        case ["python", script, *given] if script in SCRIPTS:
            _check_command(SCRIPTS[script], given, folder)
        case ["python", "-m", module, *_] if module.startswith(("mindspeed_rlxf", "tests")):
            place = ROOT / module.replace(".", "/")
            assert place.with_suffix(".py").is_file() or place.is_dir(), f"no module {module}"
        case ["python" | "bash", script, *_] if script.endswith((".py", ".sh")):
            assert any(ROOT.glob(f"**/{script.removeprefix('./')}")), f"{script} is not there"
        case ["mindspeed-rlxf", name, *given]:
            _check_command(name, given, folder)


def _check_make(arguments: list[str]) -> None:
    """Assert that the Makefile has these targets and variables."""
    text = (ROOT / "Makefile").read_text(encoding="utf-8")
    targets = set(re.findall(r"^([a-z][a-z-]*):", text, re.MULTILINE))
    variables = set(re.findall(r"^([A-Z_]+) \?=", text, re.MULTILINE))
    variables |= set(re.findall(r"\$\((?:or|if) \$\(([A-Z_]+)\)", text))
    for word in arguments:
        name, sign, _value = word.partition("=")
        assert name in (variables if sign else targets), f"the Makefile does not have {name}"


def _check_command(name: str, arguments: list[str], folder: Path) -> None:
    """Parse a command of mindspeed-rlxf; for `train` also resolve the configuration."""
    given = [word for word in arguments if not word.startswith("[")]
    assert name in COMMANDS, f"mindspeed-rlxf has no command {name}"
    given = ["ppo_trainer_tiny" if word == "NAME" else word for word in given]
    module = importlib.import_module(f"mindspeed_rlxf.cli.{name}")
    alone = patch.object(module, "Parser", ParserAlone)
    with alone, patch.dict(os.environ), pytest.raises(Parsed) as found:
        module.main(given)
    parsed: Any = found.value.args[0]
    if name == "train":
        resolve_configuration(parsed.config_name, parsed.overrides, parsed.config_dir, folder)
    if name == "preprocess":
        preprocess._check_options(parsed)
    if name == "generate":
        generate._check(parsed)


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
            (folder / value / "config.json").write_text(json.dumps(MODEL), encoding="utf-8")
    if config_dir is not None:
        (folder / config_dir).mkdir(exist_ok=True)
    with chdir(folder), restored_registries():
        resolve(compose(name, overrides, config_dir), name)
