"""Load a run's Hugging Face tokenizer from local files, and check it against the model."""

from __future__ import annotations

import hashlib
import json
import re
import secrets
from collections.abc import Sequence
from functools import cached_property
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mindspeed_rlxf.config.problems import MissingFile, Problem, UserError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

KEY = "training.tokenizer_name_or_path"
ROLE_MARK = re.compile("<\uff5c.*\uff5c>")  # DeepSeek's, which its tokenizers do not call special
MAX_TOKENS = 4  # per character; UTF-8 has at most four bytes


def load_tokenizer(path: str, key: str = KEY) -> PreTrainedTokenizerBase:
    """Load a tokenizer from a local folder (or a name in the local Hugging Face cache).

    Uses no network and executes no code from the folder. Raises UserError, naming `key` (config key
    or flag), if loading fails or there are special tokens only: transformers silently makes such a
    tokenizer if the files are missing.
    """
    from transformers import AutoTokenizer, PreTrainedTokenizerBase

    try:
        tokenizer = AutoTokenizer.from_pretrained(
            path, local_files_only=True, trust_remote_code=False
        )
        if not isinstance(tokenizer, PreTrainedTokenizerBase):  # version 4 may return False
            raise ValueError("transformers cannot make one of its files")
        tokenizer.decode(tokenizer("a")["input_ids"])  # settings of a wrong type fail only in use
        if set(tokenizer.get_vocab()) <= set(tokenizer.all_special_tokens):
            raise ValueError("its tokenizer files are missing")
    except BaseException as error:  # transformers raises many types, tokenizers bare ones
        if isinstance(error, (KeyboardInterrupt, SystemExit)):
            raise
        is_there = Path(path).is_dir()
        reason = _first_line(error) if is_there else "there is no such folder"
        rule = "must be a folder with a Hugging Face tokenizer (tokenizer.json or tokenizer.model)"
        remedy = "give the folder of the model's tokenizer"
        kind = Problem if is_there else MissingFile
        raise UserError(kind(key, f"{rule}: {reason}", repr(path), remedy)) from error
    return tokenizer


def eos_token_ids(
    tokenizer: PreTrainedTokenizerBase, model_folder: str | None, stop_token_ids: Sequence[int]
) -> tuple[int, ...]:
    """Return the token ids ending a response, ascending.

    They are the tokenizer's EOS, generation_config.json's in `model_folder` (the actor's, None for
    random weights) or without this file config.json's, and `stop_token_ids`. Raises UserError if
    the file is invalid.
    """
    ids = set(stop_token_ids)
    for ids_of_source in _model_stop_ids(tokenizer, model_folder).values():
        ids.update(ids_of_source)
    return tuple(sorted(ids))


def describe_stop_tokens(
    tokenizer: PreTrainedTokenizerBase,
    model_folder: str | None,
    data_set_ids: Sequence[int],
    configured_ids: Sequence[int],
) -> str:
    """Return a log line with every id ending a response, its token and sources.

    Raises UserError if generation_config.json, or without it config.json, is invalid.
    """
    sources: dict[str, Sequence[int]] = {
        **_model_stop_ids(tokenizer, model_folder),
        "template of the data set": data_set_ids,
        "stop_token_ids": configured_ids,
    }
    tokens = {token_id: repr(token) for token, token_id in tokenizer.get_vocab().items()}
    descriptions = []
    for token_id in sorted(set(chain(*sources.values()))):
        token = tokens.get(token_id, "not in the vocabulary")
        named_by = ", ".join(source for source, ids in sources.items() if token_id in ids)
        descriptions.append(f"{token_id} {token} ({named_by})")
    return f"responses end with: {'; '.join(descriptions) or 'nothing but max_new_tokens'}"


def _model_stop_ids(
    tokenizer: PreTrainedTokenizerBase, model_folder: str | None
) -> dict[str, list[int]]:
    """Return the EOS ids of the tokenizer, and of the model's file by its name."""
    eos = tokenizer.eos_token_id
    ids = {"tokenizer": [] if eos is None else [int(eos)]}
    if model_folder is not None:
        file = Path(model_folder) / "generation_config.json"
        if not file.exists():  # as transformers does
            file = file.with_name("config.json")
        ids[file.name] = []
        if file.exists():
            try:
                config = json.loads(file.read_bytes())
                eos_ids = config.get("eos_token_id")
                if eos_ids is None:  # a model that also sees images
                    eos_ids = (config.get("text_config") or {}).get("eos_token_id")
                if not isinstance(eos_ids, list):
                    eos_ids = [eos_ids]
                ids[file.name] = [int(eos_id) for eos_id in eos_ids if eos_id is not None]
            except (OSError, ValueError, OverflowError, TypeError, AttributeError) as error:
                rule = "must be a JSON object whose eos_token_id is an id or a list of ids"
                rule = f"{rule}; {_first_line(error)}"
                remedy = "repair the file or remove it"
                raise UserError(Problem(f"{file}", rule, remedy=remedy, colon=True)) from error
    return ids


def check_vocabulary(tokenizer: PreTrainedTokenizerBase, vocab_size: int) -> list[Problem]:
    """Return a problem if the tokenizer has an id >= vocab_size, which the model cannot embed."""
    largest = max(tokenizer.get_vocab().values(), default=-1)
    if largest < vocab_size:
        return []
    rule = "must be larger than the tokenizer's largest token id "
    rule += f"{largest} ({KEY}={tokenizer.name_or_path!r})"
    remedy = f"use the tokenizer of this model, or a model with vocab_size >= {largest + 1}"
    return [Problem("vocab_size", rule, vocab_size, remedy)]


def vocabulary_hash(tokenizer: PreTrainedTokenizerBase) -> str:
    """Return the SHA-256, in hex, over all (id, token) pairs in the vocabulary.

    Saving the tokenizer again, or changing its chat template, keeps the hash.
    """
    pairs = sorted((i, token) for token, i in tokenizer.get_vocab().items())
    return hashlib.sha256(json.dumps(pairs).encode("ascii")).hexdigest()


def save_changed_tokenizer(tokenizer: PreTrainedTokenizerBase, parent: Path) -> str:
    """Return a tokenizer's folder: `name_or_path`, or a new one if the tokenizer was changed since.

    Vocabulary, special tokens and chat template are compared. The new folder, below `parent`, has
    their hash as its name.
    """
    from transformers import AutoTokenizer

    path = str(tokenizer.name_or_path)
    stored = AutoTokenizer.from_pretrained(path, local_files_only=True)
    description = _describe_tokenizer(tokenizer)
    if _describe_tokenizer(stored) == description:
        return path
    folder = parent / hashlib.sha256(description.encode()).hexdigest()[:12]
    if not folder.exists():
        tokenizer.save_pretrained(str(folder))
    return str(folder)


def _describe_tokenizer(tokenizer: PreTrainedTokenizerBase) -> str:
    facts = [vocabulary_hash(tokenizer), tokenizer.special_tokens_map, tokenizer.chat_template]
    return json.dumps(facts, default=str, sort_keys=True)


def _first_line(error: BaseException) -> str:
    text = str(error).strip() or type(error).__name__
    return text.splitlines()[0].rstrip(" .:")


def prepended_ids(tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """Return the ids that the tokenizer puts before a text, as a BOS; [] if none."""
    plain = list(tokenizer("a", add_special_tokens=False)["input_ids"])
    framed = list(tokenizer("a")["input_ids"])
    for start in range(len(framed) - len(plain) + 1):
        if framed[start : start + len(plain)] == plain:
            return framed[:start]
    return []


def begin_once(ids: list[int], start: Sequence[int]) -> list[int]:
    """Return a text's ids without the first `start` if it begins with two: its own is one."""
    size = len(start)
    is_twice = size > 0 and ids[:size] == ids[size : 2 * size] == list(start)
    return ids[size:] if is_twice else ids


class SpecialTokens:
    """One tokenizer's special tokens.

    While a chat template is rendered, a random word, which no text can contain, replaces each
    special token spelled in a user's text, and each ROLE_MARK of the tokenizer.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        special = {*tokenizer.all_special_tokens}
        role_marks = set[str]()
        for token in getattr(tokenizer, "added_tokens_decoder", {}).values():
            if token.special:
                special.add(str(token))
            elif ROLE_MARK.fullmatch(str(token)):
                role_marks.add(str(token))
        special.discard("")
        # Longest first: a name may begin with another one.
        self._names = sorted(special | role_marks, key=lambda name: (-len(name), name))
        self._pattern = _any_of(self._names)
        self._special_pattern = _any_of([name for name in self._names if name in special])
        self._tokenizer = tokenizer
        self._nonce = secrets.token_hex(12)
        self._words = re.compile(rf"zq{self._nonce}n(\d+)z")

    def hide(self, value: Any) -> Any:
        """Replace special tokens in strings, also inside lists and dicts, by random words.

        A string alone is a text without roles, whose marks stay.
        """
        if isinstance(value, str):
            return self._special_pattern.sub(self._random_word, value)
        return self._hide_in_chat(value)

    def _hide_in_chat(self, value: Any) -> Any:
        if isinstance(value, str):
            return self._pattern.sub(self._random_word, value)
        if isinstance(value, dict):
            hide = self._hide_in_chat
            return {hide(key): hide(entry) for key, entry in value.items()}
        if isinstance(value, list):
            return [self._hide_in_chat(entry) for entry in value]
        return value

    def _random_word(self, name: re.Match[str]) -> str:
        return f"zq{self._nonce}n{self._names.index(name[0])}z"

    def restore(self, text: str) -> str:
        """Replace every random word by its special token."""
        return self._words.sub(lambda word: self._names[int(word[1])], text)

    def token_ids(self, text: str) -> list[int]:
        """Tokenize a rendered chat template, with special tokens as the tokenizer reads them.

        Words inserted by `hide` become their special token's spelling, tokenized as text.
        """
        if not self._tokenizer.is_fast:
            return self._ids_around_special_tokens(text)
        core, original_ids = self._renamed
        marked = self._pattern.sub(lambda name: self._mark(name[0]), text)
        ids = core.encode(self.restore(marked), add_special_tokens=False).ids
        return [original_ids.get(i, i) for i in ids]

    def _mark(self, name: str) -> str:
        return f"zw{self._nonce}n{self._names.index(name)}z"

    @cached_property
    def _renamed(self) -> tuple[Any, dict[int, int]]:
        """A copy of the tokenizer whose special tokens have other names, and its ids -> ids.

        It reads the old names as text, and what stands beside a special token as the tokenizer
        does, which may strip it or begin it with a blank.
        """
        from tokenizers import AddedToken, Tokenizer

        settings = json.loads(self._tokenizer.backend_tokenizer.to_str())
        for token in settings["added_tokens"]:
            if token["content"] in self._names:
                token["content"] = self._mark(token["content"])
        core = Tokenizer.from_str(json.dumps(settings))
        core.no_truncation()
        core.no_padding()
        for name in self._names:
            if core.token_to_id(self._mark(name)) is None:  # in the vocabulary alone
                core.add_special_tokens([AddedToken(self._mark(name), normalized=False)])
        original_ids: dict[Any, int] = {}
        # A renamed token of the vocabulary gets an id behind it, and those added there move.
        for token in settings["added_tokens"]:
            original_ids[core.token_to_id(token["content"])] = token["id"]
        for name in self._names:
            token_id = int(self._tokenizer.convert_tokens_to_ids(name))
            original_ids[core.token_to_id(self._mark(name))] = token_id
        return core, original_ids

    def _ids_around_special_tokens(self, text: str) -> list[int]:
        """Tokenize special tokens by id, and the text between on its own."""
        ids = []
        start = 0
        for token in self._pattern.finditer(text):
            ids += self._text_ids(text[start : token.start()])
            ids.append(int(self._tokenizer.convert_tokens_to_ids(token[0])))
            start = token.end()
        return ids + self._text_ids(text[start:])

    def _text_ids(self, text: str) -> list[int]:
        if not text:
            return []
        ids: list[int] = self._tokenizer(
            self.restore(text), add_special_tokens=False, split_special_tokens=True
        )["input_ids"]
        return ids


def _any_of(names: Sequence[str]) -> re.Pattern[str]:
    return re.compile("|".join(map(re.escape, names)) or r"(?!)")


def token_pieces(tokenizer: PreTrainedTokenizerBase, ids: Sequence[int]) -> list[str]:
    """Return the text for each response token.

    A character spanning several tokens belongs to the last one; the others get "". Bytes outside
    UTF-8 become U+FFFD after MAX_TOKENS tokens, or at the end of `ids`.
    """
    pieces: list[str] = []
    before: list[int] = []  # the tokens of the last piece
    waiting: list[int] = []  # tokens of a character that is not complete
    for count, token_id in enumerate(ids, 1):
        waiting.append(token_id)
        # With the tokens before, as some decoders drop the blank at the start of a text.
        start = str(tokenizer.decode(before, clean_up_tokenization_spaces=False))
        text = str(tokenizer.decode([*before, *waiting], clean_up_tokenization_spaces=False))
        is_incomplete = text.endswith("\ufffd") and len(waiting) < MAX_TOKENS
        if is_incomplete and count < len(ids):
            pieces.append("")
            continue
        pieces.append(text[len(start) :])
        before = waiting
        waiting = []
    return pieces
