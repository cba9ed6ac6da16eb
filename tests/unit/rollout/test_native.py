"""The generation loop with a tiny model whose next token depends on the whole sequence."""

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from tokenizers import Tokenizer, decoders, models
from torch import Tensor, nn
from transformers import PreTrainedTokenizerFast

from mindspeed_rlxf.config.generation_memory import CACHE_SHARE
from mindspeed_rlxf.models.attention import Attend, PackedSequences
from mindspeed_rlxf.rollout import generation, native, rows
from mindspeed_rlxf.rollout.expert_sync import ExpertSync
from mindspeed_rlxf.rollout.kv_cache import DecodeStep, KvCache
from mindspeed_rlxf.rollout.native import NativeRollout
from mindspeed_rlxf.rollout.rollout_engine import FinishReason, GenerationRequest, answer_from_table
from mindspeed_rlxf.rollout.sampling import SamplingSettings, StopStrings

VOCAB, HEADS, GROUPS, DIM, EOS = 11, 4, 2, 4, 0
SEED = 5


class TinyModel(nn.Module):
    """Embedding, positions, one attention layer: what NativeRollout asks of a TransformerModel."""

    linear = staticmethod(F.linear)

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(3)

        def weight(*shape: int) -> nn.Parameter:
            values = torch.randn(shape, generator=generator, dtype=torch.float64)
            return nn.Parameter(values * 0.5)

        self.embedding, self.places = weight(VOCAB, 16), weight(64, 16)
        self.qkv = weight((HEADS + 2 * GROUPS) * DIM, 16)
        self.output_weight = weight(VOCAB, HEADS * DIM)
        self.config = SimpleNamespace(
            num_layers=1,
            num_query_groups=GROUPS,
            tensor_model_parallel_size=1,
            kv_channels=DIM,
            num_moe_experts=None,
            params_dtype=torch.float64,
        )
        self.architecture = SimpleNamespace(vocab_size=VOCAB)
        self.linear = nn.functional.linear  # the head's product
        self.tp_group = SimpleNamespace(rank=lambda: 0, size=lambda: 1)
        self.calls: list[int] = []  # tokens of each forward

    def forward(self, token_ids: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        self.calls.append(token_ids.numel())
        hidden = self.embedding[token_ids[0]] + self.places[positions]
        heads = (hidden @ self.qkv.T).view(len(hidden), -1, DIM)
        query, key, value = heads.split((HEADS, GROUPS, GROUPS), dim=1)
        return attend.attend(1, query, key, value).flatten(1)[:, None]


def settings(**keys: Any) -> SamplingSettings:
    base: dict[str, Any] = {"do_sample": False, "temperature": 1.0, "top_k": 0, "top_p": 1.0}
    base |= {"min_new_tokens": 0, "max_new_tokens": 9, "eos_token_ids": (EOS,)}
    return SamplingSettings(**(base | keys))


class Source:
    """Weights that are there."""

    def __init__(self, model: nn.Module) -> None:
        self.module: Any = model
        nobody: Any = None
        self.expert_sync = ExpertSync((), nobody, nobody)
        self.groups, self.is_active = self, False

    @contextlib.contextmanager
    def active(self) -> Any:
        self.is_active = True
        yield
        self.is_active = False

    def wake(self) -> None: ...

    def sleep(self) -> None: ...

    def load(self, tensors: Any) -> None:
        self.module.load_state_dict(dict(tensors))


def engine(model: nn.Module, max_rows: int | None = None, **keys: Any) -> NativeRollout:
    """Awake, with weights."""
    made = NativeRollout(Source(model), max_rows, **keys)
    made.update_weights(model.state_dict().items(), 0)
    made.wake()
    return made


def requests(
    prompts: Sequence[np.ndarray], ids: Sequence[int], wanted: SamplingSettings
) -> list[GenerationRequest]:
    found = zip(ids, prompts, strict=True)
    return [GenerationRequest(n, i, p, wanted, SEED) for n, (i, p) in enumerate(found)]


def answers(
    rollout: NativeRollout, prompts: Sequence[np.ndarray], ids: Any = None, **keys: Any
) -> tuple[list[list[int]], list[list[float]]]:
    """Tokens and log-probs in the order of the prompts."""
    asked = requests(prompts, ids or range(len(prompts)), settings(**keys))
    found = sorted(rollout.generate(asked), key=lambda result: result.place)
    assert [result.place for result in found] == list(range(len(prompts)))
    return [result.tokens for result in found], [result.log_probs for result in found]


@pytest.fixture
def prompts() -> list[np.ndarray]:
    random = np.random.default_rng(0)
    return [random.integers(1, VOCAB, size=n) for n in (3, 8, 1, 5, 2, 7, 4, 4)]


def generate(
    prompts: list[np.ndarray], max_rows: int | None = 3, ids: Any = None, **keys: Any
) -> tuple[list[list[int]], list[list[float]], NativeRollout, TinyModel]:
    model = TinyModel()
    rollout = engine(model, max_rows)
    return *answers(rollout, prompts, ids, **keys), rollout, model


@torch.no_grad()
def without_cache(prompt: np.ndarray, limit: int) -> tuple[list[int], list[float]]:
    """Greedy, the whole sequence anew for every token."""
    model, tokens, log_probs = TinyModel(), list(prompt), []
    while len(log_probs) < limit and (not log_probs or tokens[-1] != EOS):
        attend = PackedSequences(lengths=(len(tokens),))
        hidden = model(torch.tensor([tokens]), torch.arange(len(tokens)), attend)
        logs = torch.log_softmax(hidden[-1, 0] @ model.output_weight.T, -1)
        tokens.append(int(logs.argmax()))
        log_probs.append(float(logs.max()))
    return tokens[len(prompt) :], log_probs


@pytest.mark.parametrize("max_rows", [1, 3, 100])
def test_greedy_responses_are_those_of_the_model_without_cache(prompts, max_rows):
    tokens, log_probs, _, _ = generate(prompts, max_rows)
    for prompt, row, logs in zip(prompts, tokens, log_probs, strict=True):
        expected_tokens, expected_logs = without_cache(prompt, 9)
        assert row == expected_tokens
        assert logs == pytest.approx(expected_logs, abs=1e-6)


@dataclass
class Sizes:
    """The most rows and tokens that the caches had, and the rows of each decode step."""

    num_rows: int = 0
    tokens: int = 0
    decoded: list[int] = field(default_factory=list)


@pytest.fixture
def sizes(monkeypatch: pytest.MonkeyPatch) -> Sizes:
    seen = Sizes()

    class Cache(KvCache):
        def fit(self, num_rows: int, length: int) -> None:
            super().fit(num_rows, length)
            seen.num_rows = max(seen.num_rows, self.num_rows)
            seen.tokens = max(seen.tokens, self.num_rows * self.capacity)

    class Step(DecodeStep):
        def __post_init__(self) -> None:
            super().__post_init__()
            seen.decoded.append(len(self.position))

    monkeypatch.setattr(generation, "KvCache", Cache)
    monkeypatch.setattr(generation, "DecodeStep", Step)
    return seen


def test_without_a_number_as_many_rows_grow_as_the_cache_holds(prompts, sizes):
    expected = answers(engine(TinyModel(), memory=2**40), prompts)[0]
    assert sizes.num_rows == len(prompts)
    token = 2 * GROUPS * DIM * 8  # keys and values of one layer, fp64
    # A row counts with its prompt of up to 8 and half a response of 9: 12 tokens.
    three_rows = int(3 * 12 * token / CACHE_SHARE) + 10
    sizes.num_rows = sizes.tokens = 0
    assert answers(engine(TinyModel(), memory=three_rows), prompts)[0] == expected
    assert sizes.num_rows == 2 and sizes.tokens == 2 * 17  # whole, 3 rows are 51 tokens of 36


@pytest.mark.parametrize("keys", [{}, {"do_sample": True, "temperature": 2.0}])
def test_a_given_response_scores_what_generating_it_reported(prompts, monkeypatch, keys):
    tokens, log_probs, rollout, _ = generate(prompts, **keys)
    for limit in (1, 20, 10000):  # every sequence alone, a few, all in one pack
        monkeypatch.setattr(native, "PREFILL_TOKENS", limit)
        scored = rollout.score(prompts, tokens, keys.get("temperature", 1.0))
        for ours, theirs in zip(scored, log_probs, strict=True):
            assert ours == pytest.approx(theirs, abs=1e-5)
    assert rollout.stats().prompt_tokens == sum(map(len, prompts)) + sum(len(t) - 1 for t in tokens)


def test_prefill_passes_are_limited_by_tokens(prompts, monkeypatch):
    expected, _, _, _ = generate(prompts, 100)
    monkeypatch.setattr(generation, "PREFILL_TOKENS", 6)
    tokens, _, _, model = generate(prompts, 100)
    assert tokens == expected
    # 3 | 8 alone, though above the limit | 1 + 5 | 2 | 7 | 4 | 4
    assert model.calls[:7] == [3, 8, 6, 2, 7, 4, 4]


def test_every_eos_token_ends_a_response_and_min_new_tokens_holds_it_back(prompts):
    ends = (EOS, 1, 2, 3)
    keys = {"do_sample": True, "temperature": 3.0, "eos_token_ids": ends, "max_new_tokens": 20}
    for minimum in (0, 4):
        tokens, _, _, _ = generate(prompts, min_new_tokens=minimum, **keys)
        assert all(len(row) > minimum for row in tokens)
        assert not any(token in ends for row in tokens for token in row[:-1])
        assert len({row[-1] for row in tokens} & set(ends)) > 1


def test_tensor_parallel_ranks_take_rows_and_tokens_of_the_first(prompts, monkeypatch, sizes):
    """A rank that rounds differently would stop at another step and wait for ever."""

    def broadcast(tokens: Tensor, source: int, group: object) -> None:
        assert source == 40
        if limits:
            tokens.copy_(limits.pop())
        else:
            tokens.fill_(7)

    # The second of two ranks, whose first is rank 40 of the world.
    monkeypatch.setattr(generation, "full_logits", lambda h, w, *_: (h @ w.T).float())
    monkeypatch.setattr(generation.dist, "get_global_rank", lambda group, rank: 40 + rank)
    monkeypatch.setattr(generation.dist, "broadcast", broadcast)
    model = TinyModel()
    model.tp_group = SimpleNamespace(rank=lambda: 1, size=lambda: 2)
    limits = [torch.tensor([3, 0])]  # rows, tokens of the cache
    tokens, _ = answers(engine(model, 5), prompts, max_new_tokens=3)
    assert tokens == [[7, 7, 7]] * len(prompts) and sizes.num_rows == 3


def test_a_short_response_is_handed_out_before_a_long_one_has_ended(prompts):
    model = TinyModel()
    rollout = engine(model, 100)
    asked = requests(prompts, range(len(prompts)), settings(do_sample=True, temperature=2.0))
    steps, lengths, sources = [], [], []
    for result in rollout.generate(asked):
        steps.append(len(model.calls))
        lengths.append(len(result.tokens))
        sources.append(rollout.source.is_active)  # type: ignore[attr-defined]
    # all begin together, so that a response of n tokens has ended after n passes
    assert steps == lengths == sorted(lengths) and len(set(lengths)) > 2
    assert not any(sources), "the receiver of a result may run other roles"


def test_an_engine_without_weights_or_asleep_does_not_generate(prompts):
    rollout = NativeRollout(Source(TinyModel()), 3)
    asked = requests(prompts, range(len(prompts)), settings())
    rollout.wake()
    with pytest.raises(AssertionError, match="has not received its weights"):
        next(rollout.generate(asked))
    state = TinyModel().state_dict()
    rollout.update_weights(state.items(), 5)
    results = rollout.generate(asked)
    assert next(results).weights_version == 5
    rollout.update_weights(state.items(), 6)
    with pytest.raises(AssertionError, match="weights changed during a generation"):
        list(results)
    rollout.sleep()
    with pytest.raises(AssertionError, match="the rollout sleeps"):
        next(rollout.generate(asked))


def letter_stops(*strings: str) -> StopStrings:
    """Tokens are letters, so that a string of two is cut by them."""
    core = Tokenizer(models.WordLevel({letter: i for i, letter in enumerate("abcdefghijk")}, "a"))
    core.decoder = decoders.Fuse()
    return StopStrings(strings, PreTrainedTokenizerFast(tokenizer_object=core))


@pytest.mark.parametrize("steps", [1, 5])
def test_stop_strings_end_a_response_where_their_last_token_is(prompts, steps):
    """The rest of the batch goes on."""
    stop = letter_stops("cd", "gg", "ib", "e")
    sampled: dict[str, Any] = {"do_sample": True, "eos_token_ids": (), "max_new_tokens": 12}
    free, _, *_ = generate(prompts, **sampled)
    rollout = engine(TinyModel(), 3, steps=steps)
    ended, log_probs = answers(rollout, prompts, **sampled, stop=stop)
    expected = []
    for tokens in free:
        text = "".join("abcdefghijk"[i] for i in tokens)
        ends = [text.find(string) + len(string) for string in stop.strings if string in text]
        expected.append(tokens[: min(ends, default=12)])
    assert ended == expected and len({len(tokens) for tokens in ended}) > 3
    assert [len(row) for row in log_probs] == [len(row) for row in ended]
    assert rollout.stats().sampled_tokens == sum(map(len, ended))


def test_stop_strings_read_each_token_once(prompts, monkeypatch):
    """Beside the copies of whole rows as they leave."""
    copied: list[int] = []
    read, read_new = rows.RowStates.read, rows.RowStates.read_new

    def noted(self: Any, *arguments: Any) -> Any:
        parts = read_new(self, *arguments)
        copied.extend(map(len, parts))
        return parts

    leaving = MagicMock(side_effect=read, autospec=True)
    monkeypatch.setattr(rows.RowStates, "read_new", noted)
    monkeypatch.setattr(rows.RowStates, "read", lambda *arguments: leaving(*arguments))
    sampled: dict[str, Any] = {"do_sample": True, "eos_token_ids": (), "max_new_tokens": 12}
    rollout = engine(TinyModel(), 3)
    ended, _ = answers(rollout, prompts, **sampled, stop=letter_stops("cd", "gg", "ib", "e"))
    assert sum(copied) == sum(map(len, ended))
    assert sum(len(call.args[1]) for call in leaving.call_args_list) == len(prompts)


def test_given_responses_come_back_with_the_versions_and_reasons_of_generated_ones(prompts):
    rollout, ids = engine(TinyModel(), 2), [70, 50, 60]
    asked = requests(prompts[:3], ids, settings(do_sample=True, temperature=2.0))
    responses = {70: [5, EOS], 50: [5, 6], 60: [EOS]}
    rollout.update_weights(TinyModel().state_dict().items(), 7)
    found = {result.place: result for result in answer_from_table(rollout, responses, asked)}
    stop, length = FinishReason.STOP, FinishReason.LENGTH
    assert [found[place].finish_reason for place in range(3)] == [stop, length, stop]
    scored = rollout.score(prompts[:3], [responses[i] for i in ids], 2.0)
    assert [found[place].log_probs for place in range(3)] == scored
    assert found[1].tokens == [5, 6] and found[1].weights_version == 7
    with pytest.raises(KeyError):
        next(answer_from_table(rollout, {70: [5]}, asked))
