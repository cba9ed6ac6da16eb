"""The Hugging Face tokenizer of a run: loading without network, EOS set, fit to the model."""

from __future__ import annotations

import hashlib
import json
import logging
import stat
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING

from mindspeed_rlxf.config.errors import Problem, UserError
from mindspeed_rlxf.config.hf_config import find_bad_fields
from mindspeed_rlxf.files.plain import folder_problem, parse_json, read_json
from mindspeed_rlxf.files.safe import is_plain_path, leading_out, leaves, read_inside

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

logger = logging.getLogger(__name__)

LIMITS = {
    **dict.fromkeys(("tokenizer.json", "tokenizer.model", "vocab.json"), 512 * 2**20),
    **dict.fromkeys(("merges.txt", "vocab.txt", "added_tokens.json"), 128 * 2**20),
    **dict.fromkeys(("tokenizer_config.json", "special_tokens_map.json"), 64 * 2**20),
    **dict.fromkeys(("config.json", "chat_template.jinja", "chat_template.json"), 16 * 2**20),
}
"""Bytes of the files that transformers reads whole; the largest published ones have 35 MB."""

KEY = "training.tokenizer_name_or_path"
CONFIG, TEMPLATES = "tokenizer_config.json", "additional_chat_templates"
NOT_READ = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".onnx", ".msgpack", ".h5", ".py")
STALE = ("special_tokens_map_file", "added_tokens_file")
"""Keys of its configuration that older transformers wrote and no version reads."""


def load_tokenizer(path: str, key: str = KEY) -> PreTrainedTokenizerBase:
    """The tokenizer of a local folder (or of a name in the local Hugging Face cache).

    key: what errors call the path.
    No network and no code of the folder's is used. Raises UserError when there is no tokenizer, or
    when what loads knows no ordinary token (transformers builds such an empty one, without a word,
    for a model folder whose tokenizer files are missing).
    """
    if Path(path).is_dir() and (broken := _folder_problem(Path(path))):
        raise UserError(_missing(key, path, broken))
    try:
        tokenizer = _load(path)
    except BaseException as error:  # transformers and tokenizers raise many kinds, bare ones too
        if isinstance(error, (KeyboardInterrupt, SystemExit)):
            raise  # what is left is, beside errors, a panic of Rust
        found = _first_line(error) if Path(path).is_dir() else "there is no such folder"
        raise UserError(_missing(key, path, found)) from error
    if _is_empty(tokenizer):
        raise UserError(_missing(key, path, "its tokenizer files are missing"))
    return tokenizer


def load_slow_tokenizer(path: str, key: str = KEY) -> tuple[PreTrainedTokenizerBase, str]:
    """The tokenizer in Python; where there is none, the fast one and the reason, else "".

    transformers has both kinds up to version 4; from 5 on one of a kind, which is fast for most.
    Raises UserError as load_tokenizer does.
    """
    fast = load_tokenizer(path, key)
    try:
        slow = _load(path, use_fast=False)
    except Exception as error:  # a file that the fast one does without, a library: many kinds
        return fast, _first_line(error)
    if slow.is_fast or _is_empty(slow):
        return fast, f"transformers {metadata.version('transformers')} has no other for it"
    return slow, ""


def _load(path: str, use_fast: bool = True) -> PreTrainedTokenizerBase:
    from transformers import AutoTokenizer, PreTrainedTokenizerBase

    if (folder := _folder_of(path)) is not None:
        _check_files(folder)
    tokenizer = AutoTokenizer.from_pretrained(
        path, local_files_only=True, trust_remote_code=False, use_fast=use_fast
    )
    if not isinstance(tokenizer, PreTrainedTokenizerBase):  # False: version 4, of a missing file
        raise ValueError("transformers cannot make one of its files")
    tokenizer.decode(tokenizer("a")["input_ids"])  # settings of a wrong type show only in use
    return tokenizer


def _folder_of(path: str) -> Path | None:
    """The folder that transformers will read: this one, or that of a name in the local cache."""
    if Path(path).is_dir():
        return Path(path)
    from huggingface_hub import try_to_load_from_cache

    try:
        found = try_to_load_from_cache(path, CONFIG)
    except ValueError:  # no name of the hub's
        return None
    return Path(found).parent if isinstance(found, str) else None


def _check_files(folder: Path) -> None:
    """What is beside a tokenizer is plain files of its folder; its configuration names no others.

    transformers opens by name: what changes between this look and that is not seen.
    Errors: ValueError.
    """
    places = [folder, *([folder / TEMPLATES] if (folder / TEMPLATES).is_dir() else [])]
    for file in sorted(file for place in places for file in place.iterdir()):
        if file.name.endswith(NOT_READ) or (file.is_dir() and file.name != TEMPLATES):
            continue
        if file.is_symlink() and leaves(folder, file):
            raise ValueError(leading_out(file))
        if file.exists() and not file.is_dir() and not stat.S_ISREG(file.stat().st_mode):
            raise ValueError(f"{file} must be a plain file; remove it")
    config = json.loads(read_inside(folder, CONFIG)) if (folder / CONFIG).exists() else {}
    for key, value in config.items() if isinstance(config, dict) else ():
        names = value if key == "fast_tokenizer_files" and isinstance(value, list) else [value]
        if not key.endswith(("_file", "_files")) or key in STALE:
            continue
        for name in names:
            if isinstance(name, str) and not is_plain_path(name):
                raise ValueError(f"{key}={name[:200]!r} in {CONFIG} leads out of {folder}")


def _folder_problem(folder: Path) -> str | None:
    """What transformers would wait for or drown in."""
    templates = folder / "additional_chat_templates"
    found = folder_problem(folder) or (folder_problem(templates) if templates.is_dir() else None)
    if found:
        return found
    for name, limit in LIMITS.items():
        file = folder / name
        if file.is_file() and file.stat().st_size > limit:
            return f"{name} has {file.stat().st_size} bytes, more than {limit}"
    return _size_problem(folder / "config.json")


def _size_problem(config: Path) -> str | None:
    """What transformers would make lists of: it reads this file to find the tokenizer's class."""
    if not config.exists():
        return None
    try:
        found = read_json(config)
    except (OSError, ValueError) as error:
        return f"config.json is not valid JSON ({_first_line(error)})"
    return next(find_bad_fields(found), None) if isinstance(found, dict) else None


def _is_empty(tokenizer: PreTrainedTokenizerBase) -> bool:
    return set(tokenizer.get_vocab()) <= set(tokenizer.all_special_tokens)


def eos_token_ids(
    tokenizer: PreTrainedTokenizerBase, model_folder: str | None, stop_token_ids: Sequence[int]
) -> tuple[int, ...]:
    """Ids that end a response: EOS of the tokenizer and the generation config, `stop_token_ids`.

    model_folder: Hugging Face folder of the actor, None when it starts from random weights.
    Returns them ascending, each once; may be empty (logged: responses then never end early).
    Raises UserError when generation_config.json is broken.
    """
    ids = set(stop_token_ids)
    if tokenizer.eos_token_id is not None:
        ids.add(int(tokenizer.eos_token_id))
    if model_folder is not None:
        ids.update(_generation_config_eos(Path(model_folder) / "generation_config.json"))
    if not ids:
        logger.warning(
            "no EOS token: neither the tokenizer, nor generation_config.json, nor "
            "actor_rollout.stop_token_ids names one; every response runs to max_new_tokens"
        )
    return tuple(sorted(ids))


def describe_stop_tokens(
    tokenizer: PreTrainedTokenizerBase,
    model_folder: str | None,
    data_set_ids: Sequence[int],
    configured_ids: Sequence[int],
) -> str:
    """One line: every id that ends a response, its token, and who named it."""
    eos = tokenizer.eos_token_id
    folder = Path(model_folder) if model_folder is not None else None
    sources = {
        "tokenizer": () if eos is None else (int(eos),),
        "generation_config.json": _generation_config_eos(folder / "generation_config.json")
        if folder
        else (),
        "template of the data set": data_set_ids,
        "stop_token_ids": configured_ids,
    }
    named: dict[int, list[str]] = {}
    for source, ids in sources.items():
        for token_id in ids:
            named.setdefault(token_id, []).append(source)
    shown = [
        f"{token_id} {tokenizer.convert_ids_to_tokens(token_id)!r} ({', '.join(who)})"
        for token_id, who in sorted(named.items())
    ]
    return f"responses end with: {'; '.join(shown) or 'nothing but max_new_tokens'}"


def check_vocabulary(tokenizer: PreTrainedTokenizerBase, vocab_size: int) -> list[Problem]:
    """Problems of using the tokenizer with a model of `vocab_size` embeddings: none, or one."""
    largest = max(tokenizer.get_vocab().values(), default=-1)
    if largest < vocab_size:
        return []
    named = f"{largest} ({KEY}={tokenizer.name_or_path!r})"
    return [
        Problem(
            "vocab_size",
            f"must be larger than the tokenizer's largest token id {named}",
            vocab_size,
            f"use the tokenizer of this model, or a model with vocab_size >= {largest + 1}",
        )
    ]


def vocabulary_hash(tokenizer: PreTrainedTokenizerBase) -> str:
    """SHA-256 of all (id, token) pairs: tokenizers with the same one mean the same by an id.

    Files are not hashed: saving a tokenizer again, or a new chat template, leaves the ids alone.
    """
    pairs = sorted((i, token) for token, i in tokenizer.get_vocab().items())
    return hashlib.sha256(json.dumps(pairs).encode("ascii")).hexdigest()


def _generation_config_eos(file: Path) -> list[int]:
    """`eos_token_id` of a generation_config.json: absent, null, an id or a list of ids."""
    if not file.exists():
        return []
    try:
        eos = parse_json(read_inside(file.parent, file.name)).get("eos_token_id")
        return [] if eos is None else [int(i) for i in (eos if isinstance(eos, list) else [eos])]
    except (OSError, ValueError, TypeError, AttributeError) as error:
        wanted = "must be a JSON object whose eos_token_id is an id or a list of ids"
        raise UserError(
            Problem(
                f"{file}",
                f"{wanted}; {_first_line(error)}",
                remedy="repair the file or remove it",
                colon=True,
            )
        ) from error


def _missing(key: str, path: str, found: str) -> Problem:
    files = "(tokenizer.json or tokenizer.model)"
    return Problem(
        key,
        f"must be a folder with a Hugging Face tokenizer {files}: {found}",
        repr(path),
        "give the folder of the model's tokenizer",
    )


def _first_line(error: BaseException) -> str:
    text = str(error).strip() or type(error).__name__
    return text.splitlines()[0].rstrip(" .:")
