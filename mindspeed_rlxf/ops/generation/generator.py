"""Generate responses in one process, with the engines of training."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

from mindspeed_rlxf import device
from mindspeed_rlxf.cluster.local import LocalRuntime
from mindspeed_rlxf.config.enums import DeviceKind
from mindspeed_rlxf.config.problems import Problem, UserError
from mindspeed_rlxf.data.decoding import RewardTexts
from mindspeed_rlxf.data.prompts import encode_prompts, load_prompts
from mindspeed_rlxf.data.tokenizer import check_vocabulary, eos_token_ids, load_tokenizer
from mindspeed_rlxf.models.parameters import Head, hf_shapes
from mindspeed_rlxf.ops.generation.source import ModelSource
from mindspeed_rlxf.roles.requests import sampling_settings
from mindspeed_rlxf.rollout.replica import build_native_alone, build_transformers_alone
from mindspeed_rlxf.rollout.rollout_engine import GenerationRequest, RolloutEngine
from mindspeed_rlxf.rollout.sampling import StopStrings
from mindspeed_rlxf.weights.chunks import StoredWeights, whole
from mindspeed_rlxf.weights.folders import open_weights
from mindspeed_rlxf.weights.role_state import WEIGHT, read_states
from mindspeed_rlxf.weights.tensor_conversion import open_source

TEXT_FILE = ".txt"
CHUNK = 256  # responses generated between two writes
Messages = list[dict[str, str]]


@dataclass(frozen=True)
class TokenizedPrompt:
    """A prompt to answer; `fields` are written beside its responses."""

    text: str
    token_ids: np.ndarray
    fields: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Response:
    """A response; `finish_reason` is stop (an EOS or a stop string) or length."""

    text: str
    num_tokens: int
    finish_reason: str


class Generator:
    """A model with its tokenizer, and how it samples."""

    def __init__(self, source: ModelSource, engine: RolloutEngine, tokenizer: Any) -> None:
        actor = source.actor
        assert actor.load is not None
        self.source = source
        self.tokenizer = tokenizer
        self._engine = engine
        eos_ids = eos_token_ids(tokenizer, actor.load, actor.stop_token_ids)
        stop_strings = StopStrings(actor.stop_strings, tokenizer) if actor.stop_strings else None
        self._settings = sampling_settings(actor, eos_ids, actor.do_sample, stop_strings)
        self._texts = RewardTexts(tokenizer, actor.stop_strings)
        self._max_positions = actor.architecture.max_position_embeddings

    @property
    def _max_prompt_length(self) -> int:
        """Tokens of a prompt beside which a response of `max_new_tokens` has room."""
        return self._max_positions - self._settings.max_new_tokens

    def read_texts(self, prompts: Sequence[str | Messages]) -> list[TokenizedPrompt]:
        """Tokenize strings and chats as training does. Raises UserError (`encode_prompts`)."""
        tokenized = []
        for text, ids in encode_prompts(prompts, self.tokenizer, self.source.data):
            if len(ids) > self._max_prompt_length:
                rule = (
                    f"with max_new_tokens={self._settings.max_new_tokens} must be at most the "
                    f"model's {self._max_positions} positions"
                )
                remedy = "shorten it (a chat: begin anew), or lower --max-new-tokens"
                raise UserError(Problem("length of the prompt", rule, len(ids), remedy))
            tokenized.append(TokenizedPrompt(text, np.array(ids, dtype=np.int64)))
        return tokenized

    def read_file(self, file: str, as_chat: bool) -> list[TokenizedPrompt]:
        """Tokenize the lines of a .txt file, or the rows of a data file as training reads them.

        Args:
            file: .txt, or what `data.train_files` may name.
            as_chat: Lines are messages of the user; rows say themselves what they are.

        Raises:
            UserError: The problems of the file.
        """
        if Path(file).suffix.lower() == TEXT_FILE:
            try:
                lines = Path(file).read_text(encoding="utf-8-sig").splitlines()
            except (OSError, ValueError) as error:
                remedy = "correct the path, or write it in UTF-8"
                raise UserError(
                    Problem("--file", f"cannot be read: {error}", file, remedy)
                ) from None
            return self.read_texts(
                [self.as_message(line, as_chat) for line in lines if line.strip()]
            )
        if as_chat:
            remedy = "leave --chat out: a row with messages gets the template by itself"
            raise UserError(Problem("--chat", "is for strings, not for rows", file, remedy))
        prompts = load_prompts(file, self.tokenizer, self.source.data, self._max_prompt_length)
        tokenized = []
        for prompt in prompts:
            fields = {
                "data_source": prompt.data_source,
                "ground_truth": prompt.ground_truth,
                "extra_info": prompt.extra_info,
            }
            tokenized.append(TokenizedPrompt(prompt.text, prompt.token_ids, fields))
        return tokenized

    def as_message(self, text: str, as_chat: bool) -> str | Messages:
        """Return the text, or with `as_chat` it as the user's message of a new chat."""
        return [*self.begin_chat(), {"role": "user", "content": text}] if as_chat else text

    def begin_chat(self) -> Messages:
        """Return the messages before the user's first one."""
        system = self.source.data.system_prompt
        return [] if system is None else [{"role": "system", "content": system}]

    def answer(
        self, prompts: Sequence[TokenizedPrompt], seed: int, count: int, first_id: int = 0
    ) -> Iterator[list[Response]]:
        """Yield each prompt's `count` responses, in order.

        Response i to prompt p is sample `first_id` + p * count + i, which with the seed determines
        its random numbers.
        """
        per_chunk = max(1, CHUNK // count)
        for start in range(0, len(prompts), per_chunk):
            chunk = prompts[start : start + per_chunk]
            requests: list[GenerationRequest] = []
            for prompt in chunk:
                for _ in range(count):
                    index = len(requests)
                    sample_id = first_id + start * count + index
                    requests.append(
                        GenerationRequest(index, sample_id, prompt.token_ids, self._settings, seed)
                    )
            responses: dict[int, Response] = {}
            for result in self._engine.generate(requests):
                reason = result.finish_reason.value
                text = self._texts.response(result.tokens, reason == "stop")
                responses[result.place] = Response(text, len(result.tokens), reason)
            for number in range(len(chunk)):
                yield [responses[number * count + i] for i in range(count)]


def record(prompt_id: int, prompt: TokenizedPrompt, response: Response) -> str:
    """Return the line of a response in a jsonl file."""
    about = {
        "prompt_id": prompt_id,
        "prompt": prompt.text,
        "response": response.text,
        "finish_reason": response.finish_reason,
        "num_tokens": response.num_tokens,
        **prompt.fields,
    }
    return json.dumps(about, ensure_ascii=False, default=str) + "\n"


@contextlib.contextmanager
def open_generator(source: ModelSource, kind: DeviceKind, engine: str) -> Iterator[Generator]:
    """Load the model, and yield its generator; a torch world of one process meanwhile.

    Args:
        source: The model.
        kind: Device to compute on.
        engine: native, transformers, or auto = native where it knows the model.

    Raises:
        UserError: Tokenizer or device cannot be used, or the engine does not know the model.
        ValueError: Weights are missing or damaged.
    """
    is_native = source.is_native if engine == "auto" else engine == "native"
    if is_native and not source.is_native:
        rule = "does not know this model"
        raise UserError(Problem("--engine", rule, engine, "use --engine transformers"))
    tokenizer = load_tokenizer(source.tokenizer, "SOURCE")
    vocab_size = source.actor.architecture.vocab_size
    problems = check_vocabulary(tokenizer, vocab_size)
    if problems:
        raise UserError([replace(problem, remedy="give its own tokenizer") for problem in problems])
    threads = len(os.sched_getaffinity(0))
    runtime = LocalRuntime(kind, threads, megatron=is_native)
    try:
        rollout_engine = _native_engine(source) if is_native else _transformers_engine(source)
        rollout_engine.wake()
        yield Generator(source, rollout_engine, tokenizer)
    finally:
        runtime.shutdown()


def _native_engine(source: ModelSource) -> RolloutEngine:
    actor = source.actor
    head = Head.LANGUAGE_MODEL
    assert actor.load is not None
    folder = open_source(Path(actor.load), actor.architecture, head, actor.trust_files)
    engine = build_native_alone(actor, source.seed)
    engine.update_weights(_stream(folder, hf_shapes(actor.architecture, head), source), 0)
    return engine


def _transformers_engine(source: ModelSource) -> RolloutEngine:
    from mindspeed_rlxf.engine.fsdp.weights import plain_names

    actor = source.actor
    assert actor.load is not None
    engine = build_transformers_alone(actor)
    folder = plain_names(open_weights(actor.load, actor.architecture, actor.trust_files))
    for name in engine.base_names:
        if name not in folder:
            raise ValueError(f"{actor.load} lacks {name}; give the folder of a whole model")
    engine.update_weights(_stream(folder, engine.base_names, source), 0)
    return engine


def _stream(
    folder: StoredWeights, names: Iterable[str], source: ModelSource
) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors of the model, then those of its adapters."""
    target = device.current_device()
    for name in names:
        yield name, folder[name].read(whole(folder[name].shape)).to(target)
    if source.adapters is not None:
        for name, stored in read_states(source.adapters)[WEIGHT].items():
            yield name, stored.read(whole(stored.shape)).to(target)
