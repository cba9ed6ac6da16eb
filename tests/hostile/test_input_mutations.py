"""Valid files of data, models and tokenizers with bytes flipped, doubled, cut and swapped."""

import json
import random
import time
from pathlib import Path
from typing import Any

import pytest

from mindspeed_rlxf.config.hf_config import find_disagreements
from mindspeed_rlxf.config.schema import DataConfig
from mindspeed_rlxf.data.indexed_prompts import load_indexed_prompts
from mindspeed_rlxf.data.preprocessing.pipeline import PreprocessOptions, preprocess
from mindspeed_rlxf.data.prompts import load_prompts
from mindspeed_rlxf.data.tokenizer import eos_token_ids, load_tokenizer
from mindspeed_rlxf.weights.tensor_conversion import choose_head, read_architecture
from tests.unit.data.byte_tokenizer import byte_tokenizer, write_tokenizer

SECONDS = 10.0
MODEL = {
    "model_type": "llama", "num_hidden_layers": 2, "hidden_size": 32, "intermediate_size": 64,
    "num_attention_heads": 4, "vocab_size": 99, "max_position_embeddings": 64,
    "rms_norm_eps": 1e-6, "rope_scaling": {"rope_type": "linear", "factor": 2.0},
    "architectures": ["LlamaForCausalLM"], "eos_token_id": [1, 2],
}  # fmt: skip
VALUES = [
    None, True, -1, 0, 1e308, 10**400, "x", "", [], {}, [None], {"a": []}, "\x1b[2J", "{{ 9 }}",
]  # fmt: skip


def mutated_json(tree: Any, dice: random.Random) -> Any:
    """Replace one value of the tree."""
    node = tree = json.loads(json.dumps(tree))
    while keys := list(node) if isinstance(node, dict) else list(range(len(node))):
        key = dice.choice(keys)
        if not isinstance(node[key], (dict, list)) or dice.random() >= 0.7:
            node[key] = dice.choice(VALUES)
            break
        node = node[key]
    return tree


def mutated_bytes(content: bytes, dice: random.Random) -> bytes:
    made = bytearray(content)
    for _ in range(dice.choice([1, 1, 3, 20])):
        place = dice.randrange(len(made) + 1)
        kind = dice.randrange(4)
        if kind == 0 and made:
            made[place % len(made)] ^= 1 << dice.randrange(8)
        elif kind == 1:
            made[place:place] = dice.choice([b"\xff" * 8, b"\0" * 4, b"[" * 9, b'"', b"9" * 99])
        elif kind == 2:
            del made[place:]
        else:
            made[place:place] = made[dice.randrange(len(made) + 1) :][:64]
    return bytes(made)


def model(folder: Path) -> Any:
    architecture, config = read_architecture(folder)
    choose_head(config, False)
    find_disagreements(architecture, config, scored=False)
    return eos_token_ids(byte_tokenizer(), str(folder), [])


def tokenized(folder: Path) -> Any:
    tokenizer = load_tokenizer(str(folder))
    return load_prompts(str(folder / "rows.jsonl"), tokenizer, DataConfig(train_files=["x"]), 100)


def indexed(folder: Path) -> Any:
    return load_indexed_prompts(
        [str(folder / "set")], byte_tokenizer(), DataConfig(data_path=["x"]), 99
    )


KINDS = {"model": model, "tokenized": tokenized, "indexed": indexed}


@pytest.fixture(scope="module")
def valid(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, bytes]]:
    """Name -> bytes of the files of a valid folder of each kind."""
    folders = {kind: tmp_path_factory.mktemp(kind) for kind in KINDS}
    for name in ("config.json", "generation_config.json"):
        (folders["model"] / name).write_text(json.dumps(MODEL))
    row = {"prompt": [{"role": "user", "content": "hi"}], "data_source": "x", "ground_truth": "1"}
    rows = "".join(json.dumps(row) + "\n" for _ in range(3))
    place = folders["tokenized"]
    write_tokenizer(place)
    (place / "rows.jsonl").write_text(rows)
    (place / "chat_template.jinja").write_text("{% for m in messages %}{{ m.content }}{% endfor %}")
    place = folders["indexed"]
    (place / "in.jsonl").write_text('{"instruction": "a", "data_source": "x"}\n' * 3)
    tokenizer = write_tokenizer(place.parent / "its_tokenizer")
    preprocess(PreprocessOptions((str(place / "in.jsonl"),), str(place / "set"), tokenizer))
    for kind, read in KINDS.items():
        read(folders[kind])
    return {kind: {f.name: f.read_bytes() for f in folders[kind].iterdir()} for kind in KINDS}


def check(seed: int, kind: str, files: dict[str, bytes], folder: Path) -> None:
    dice = random.Random(f"{kind} {seed}")
    name = dice.choice(sorted(files))
    content = files[name]
    if name.endswith(".json") and dice.random() < 0.7:
        content = json.dumps(mutated_json(json.loads(content), dice)).encode()
    else:
        content = mutated_bytes(content, dice)
    folder.mkdir()
    for each, before in files.items():
        (folder / each).write_bytes(content if each == name else before)
    start = time.monotonic()
    try:
        KINDS[kind](folder)
    except ValueError as error:  # UserError is one
        assert not isinstance(error, UnicodeError), f"{kind} {seed}: {name}"
    except Exception as error:
        raise AssertionError(f"{kind} {seed}: {name}: {error!r}") from error
    assert time.monotonic() - start < SECONDS, f"{kind} {seed}: {name}"


@pytest.mark.parametrize("count", [12, pytest.param(700, marks=pytest.mark.long)])
@pytest.mark.parametrize("kind", KINDS)
def test_mutated_files_end_in_user_errors(count, kind, valid, tmp_path):
    for seed in range(count):
        check(seed, kind, valid[kind], tmp_path / str(seed))
