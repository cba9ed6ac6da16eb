"""Chunked, vocabulary-parallel log-probs against torch's log_softmax."""

import threading
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.testing import assert_close
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from mindspeed_rlxf.models import heads
from mindspeed_rlxf.models.heads import full_logits, token_log_probs

TOKENS, HIDDEN, VOCAB = 8, 6, 10
Problem = tuple[Tensor, Tensor, Tensor]
LogProbs = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]  # and entropies


@dataclass(frozen=True)
class Group:
    """The two questions that a head asks a process group."""

    index: int = 0
    count: int = 1

    def rank(self) -> int:
        return self.index

    def size(self) -> int:
        return self.count


def on_ranks(
    monkeypatch: pytest.MonkeyPatch, count: int, work: Callable[[Group], Any]
) -> list[Any]:
    """`work(group)` on threads, with collectives that really combine what the threads bring."""
    meeting = threading.Barrier(count, timeout=10)
    brought: list[Tensor] = [torch.empty(0)] * count

    def meet(tensor: Tensor, group: Group) -> list[Tensor]:
        brought[group.rank()] = tensor.clone()
        meeting.wait()
        everything = list(brought)
        meeting.wait()
        return everything

    def all_reduce(tensor: Tensor, op: Any, group: Group) -> None:
        stacked = torch.stack(meet(tensor, group))
        tensor.copy_(stacked.amax(0) if op is dist.ReduceOp.MAX else stacked.sum(0))

    def all_gather(parts: list[Tensor], tensor: Tensor, group: Group) -> None:
        for part, theirs in zip(parts, meet(tensor, group), strict=True):
            part.copy_(theirs)

    monkeypatch.setattr(heads.dist, "all_reduce", all_reduce)
    monkeypatch.setattr(heads.dist, "all_gather", all_gather)
    with ThreadPoolExecutor(count) as pool:
        return list(pool.map(work, [Group(i, count) for i in range(count)]))


@pytest.fixture
def problem() -> Problem:
    """hidden [tokens, hidden], weight [vocab, hidden], labels [tokens] with both end ids."""
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(TOKENS, HIDDEN, generator=generator)
    weight = torch.randn(VOCAB, HIDDEN, generator=generator)
    return hidden, weight, torch.tensor([0, 9, 3, 5, 5, 4, 9, 1])


def by_heads(labels: Tensor, group: Any, temperature: float = 1.0) -> LogProbs:
    return lambda hidden, weight: token_log_probs(hidden, weight, labels, VOCAB, group, temperature)


def by_torch(labels: Tensor, temperature: float = 1.0) -> LogProbs:
    def log_probs(hidden: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        logs = torch.log_softmax(hidden @ weight.T / temperature, dim=-1)
        chosen = logs.gather(-1, labels[:, None]).squeeze(-1)
        return chosen, -(logs.exp() * logs).sum(-1)

    return log_probs


def gradients(log_probs: LogProbs, hidden: Tensor, weight: Tensor) -> tuple[Tensor, ...]:
    """Of sums in which every token has its own weight: log-probs alone, entropies alone, both."""
    inputs = (hidden.clone().requires_grad_(), weight.clone().requires_grad_())
    weights = torch.arange(1.0, len(hidden) + 1)
    found: tuple[Tensor, ...] = ()
    for of_values, of_entropy in ((1.0, 0.0), (0.0, 1.0), (0.5, 2.0)):
        values, entropy = log_probs(*inputs)
        parts = (values * weights * of_values, entropy * weights.flip(0) * of_entropy)
        total = sum(
            p.sum() for p, wanted in zip(parts, (of_values, of_entropy), strict=True) if wanted
        )
        found += torch.autograd.grad(total, inputs)
    return found


@pytest.mark.parametrize("chunk", [3, 4, 1024])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_log_probs_entropy_and_gradients_are_those_of_log_softmax(
    problem: Problem, monkeypatch: pytest.MonkeyPatch, chunk: int, temperature: float
) -> None:
    monkeypatch.setattr(heads, "CHUNK_TOKENS", chunk)
    hidden, weight, labels = problem
    ours, theirs = by_heads(labels, Group(), temperature), by_torch(labels, temperature)
    assert_close(ours(hidden, weight), theirs(hidden, weight))
    assert_close(gradients(ours, hidden, weight), gradients(theirs, hidden, weight))


def test_padding_ids_have_probability_zero_and_no_gradient(problem: Problem) -> None:
    hidden, weight, labels = problem
    padded = torch.cat((weight, torch.full((2, HIDDEN), 50.0)))
    ours = by_heads(labels, Group())
    assert_close(ours(hidden, padded), by_torch(labels)(hidden, weight))
    for slope in gradients(ours, hidden, padded)[1::2]:
        assert not slope[VOCAB:].any() and slope[:VOCAB].any(dim=1).all()


@pytest.mark.parametrize(("ranks", "rows"), [(2, 5), (3, 4), (4, 3), (2, 10)])
def test_vocabulary_split_over_ranks_changes_nothing(
    problem: Problem, monkeypatch: pytest.MonkeyPatch, ranks: int, rows: int
) -> None:
    # 10 ids over 3 ranks of 4 rows, or 4 of 3: the last rank holds padding; of 2 of 10 nothing else
    hidden, weight, labels = problem
    padded = torch.cat((weight, torch.ones(ranks * rows - VOCAB, HIDDEN)))

    def work(group: Group) -> tuple[Any, ...]:
        shard, ours = padded.split(rows)[group.rank()], by_heads(labels, group, 0.7)
        return ours(hidden, shard), gradients(ours, hidden, shard)

    results, theirs = on_ranks(monkeypatch, ranks, work), by_torch(labels, 0.7)
    expected = gradients(theirs, hidden, weight)
    for values, _ in results:
        assert_close(values, theirs(hidden, weight))
    # each rank has its share of the hidden gradient (Megatron sums them) and its rows of the weight
    for hidden_place in range(0, len(expected), 2):
        shares = torch.stack([slopes[hidden_place] for _, slopes in results])
        rows_of = torch.cat([slopes[hidden_place + 1] for _, slopes in results])
        assert_close(shares.sum(0), expected[hidden_place])
        assert_close(rows_of[:VOCAB], expected[hidden_place + 1])


def test_full_logits_of_split_vocabulary_have_no_padding(
    problem: Problem, monkeypatch: pytest.MonkeyPatch
) -> None:
    hidden, weight, _ = problem
    padded = torch.cat((weight, torch.ones(2, HIDDEN)))

    def work(group: Group) -> Tensor:
        return full_logits(hidden, padded.split(4)[group.rank()], VOCAB, group)  # type: ignore[arg-type]

    for logits in on_ranks(monkeypatch, 3, work):
        assert_close(logits, hidden @ weight.T)


@pytest.mark.parametrize("ranks", [1, 3])
def test_kl_over_the_vocabulary_is_torchs(
    problem: Problem, monkeypatch: pytest.MonkeyPatch, ranks: int
) -> None:
    monkeypatch.setattr(heads, "CHUNK_TOKENS", 3)
    hidden, weight, _ = problem
    generator = torch.Generator().manual_seed(5)
    other_hidden, other = (x + torch.randn(x.shape, generator=generator) for x in (hidden, weight))
    padding = torch.ones(2, HIDDEN)

    def work(group: Group) -> Tensor:
        mine, theirs = (
            torch.cat((w, padding)).split(12 // ranks)[group.rank()] for w in (weight, other)
        )
        return heads.full_kl(hidden, mine, other_hidden, theirs, VOCAB, group, 0.7)  # type: ignore[arg-type]

    logs = torch.log_softmax(hidden @ weight.T / 0.7, -1)
    others = torch.log_softmax(other_hidden @ other.T / 0.7, -1)
    expected = torch.nn.functional.kl_div(others, logs, log_target=True, reduction="none").sum(-1)
    for found in on_ranks(monkeypatch, ranks, work):
        assert_close(found, expected)


def test_softmax_sums_are_fp32_and_shifted() -> None:
    # 512 equal logits: a bf16 sum of exponentials stops growing at 256
    hidden, weight = torch.ones(1, 4, dtype=torch.bfloat16), torch.zeros(512, 4).bfloat16()
    values, entropy = token_log_probs(hidden, weight, torch.tensor([3]), 512, Group())
    assert values.dtype == entropy.dtype == torch.float32
    assert_close(values, -torch.tensor([512.0]).log())
    hidden, weight = torch.tensor([[1000.0]]), torch.tensor([[1.0], [-1.0], [1.0]])
    values, entropy = token_log_probs(hidden, weight, torch.tensor([0]), 3, Group())
    assert_close(values, torch.tensor([0.5]).log())
    assert_close(entropy, torch.tensor([2.0]).log())


def weight_gradient(
    hidden: Tensor, weight: Tensor, labels: Tensor, main_grad: Tensor | None = None
) -> Tensor:
    """Of the mean negative log-likelihood, in fp64.

    main_grad: the buffer of Megatron's data parallelism, to which its hook adds what autograd has
    """
    leaf = torch.nn.Parameter(weight.clone())
    if main_grad is not None:
        leaf.main_grad = main_grad  # type: ignore[attr-defined]
    vocab = len(weight)
    values, _ = token_log_probs(hidden.clone().requires_grad_(), leaf, labels, vocab, Group())
    (-values.mean()).backward()
    if main_grad is None:
        assert leaf.grad is not None and leaf.grad.dtype is weight.dtype
        return leaf.grad.double()
    assert (leaf.grad is None) == (len(hidden) > heads.CHUNK_TOKENS)
    if leaf.grad is not None:
        main_grad.add_(leaf.grad)
    return main_grad.double()


@pytest.mark.parametrize("buffered", [True, False], ids=["main_grad", "plain torch"])
def test_weight_gradient_of_many_chunks_is_as_exact_as_of_one_product(
    monkeypatch: pytest.MonkeyPatch, buffered: bool
) -> None:
    # 128 chunks: summed up in bf16 the error is seven times that of one product
    tokens, hidden_size, vocab = 4096, 32, 48
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(tokens, hidden_size, generator=generator).bfloat16()
    weight = (torch.randn(vocab, hidden_size, generator=generator) * 0.2).bfloat16()
    labels = torch.randint(vocab, (tokens,), generator=generator)
    exact = torch.autograd.functional.vjp(
        lambda w: by_torch(labels)(hidden.double(), w)[0].mean(),
        weight.double(),
        torch.tensor(-1.0).double(),
    )[1]

    def error(chunk: int) -> float:
        monkeypatch.setattr(heads, "CHUNK_TOKENS", chunk)
        main_grad = torch.zeros(weight.shape) if buffered else None
        found = weight_gradient(hidden, weight, labels, main_grad)
        return float((found - exact).norm() / exact.norm())

    assert error(32) < 1.2 * error(tokens)


def test_no_logits_of_a_whole_micro_batch_are_kept_for_backward(
    problem: Problem, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(heads, "CHUNK_TOKENS", 2)
    hidden, weight, labels = problem
    given = {hidden.data_ptr(), weight.data_ptr()}
    kept: list[int] = []

    def keep(tensor: Tensor) -> Tensor:
        kept.append(tensor.numel() if tensor.data_ptr() not in given else 0)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        token_log_probs(hidden.requires_grad_(), weight, labels, VOCAB, Group())
    assert max(kept, default=0) < 2 * VOCAB


def test_an_fp32_head_rounds_no_logits_of_a_bf16_model() -> None:
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(TOKENS, 64, generator=generator).bfloat16()
    weight = torch.randn(VOCAB, 64, generator=generator).bfloat16()
    labels = torch.arange(TOKENS)
    exact, _ = by_torch(labels)(hidden.double(), weight.double())

    def error_of(linear: heads.Linear) -> float:
        values, _ = token_log_probs(hidden, weight, labels, VOCAB, Group(), linear=linear)
        return float((values - exact).abs().max())

    assert error_of(heads.fp32_linear) < 1e-5 < 1e-2 < error_of(F.linear)

    def log_probs(hidden: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        return token_log_probs(hidden, weight, labels, VOCAB, Group(), linear=heads.fp32_linear)

    ours = gradients(log_probs, hidden, weight)
    theirs = gradients(by_torch(labels), hidden.double(), weight.double())
    for slope, exact_slope in zip(ours, theirs, strict=True):
        assert (slope - exact_slope).norm() < 0.01 * exact_slope.norm()


class Passes(TorchDispatchMode):
    """Count operators on fp32 arrays [tokens, vocab], but products, views and single columns."""

    def __init__(self, numel: int) -> None:
        super().__init__()
        self.numel = numel
        self.count = 0

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        result = function(*args, **(kwargs or {}))
        free = ("mm", "view", "slice", "detach", "t", "gather", "scatter_add_", "empty_like")
        if function.__name__.split(".")[0] not in free:
            tensors = [x for x in tree_leaves((args, kwargs, result)) if isinstance(x, Tensor)]
            self.count += any(x.numel() == self.numel and x.dtype is torch.float32 for x in tensors)
        return result


def test_a_forward_pass_reads_a_chunk_of_logits_five_times(problem: Problem) -> None:
    """Conversion with temperature, maximum, difference, exponentials and their sum."""
    hidden, weight, labels = problem
    arguments = hidden.bfloat16(), weight.bfloat16(), labels, VOCAB, Group(), 0.7
    with Passes(TOKENS * VOCAB) as passes:
        token_log_probs(*arguments, with_entropy=False)
    assert passes.count <= 5


def test_without_the_gradient_of_the_entropy_an_update_reads_a_chunk_fourteen_times(
    problem: Problem, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Seven times forward, with three for the entropy, and seven backward, with those again."""
    monkeypatch.setattr(heads, "CHUNK_TOKENS", TOKENS // 2)
    hidden, weight, labels = problem
    leaf = hidden.bfloat16().requires_grad_()
    with Passes(TOKENS // 2 * VOCAB) as passes:
        values, _ = token_log_probs(leaf, weight.bfloat16(), labels, VOCAB, Group(), 0.7)
        values.sum().backward()
    assert passes.count <= 2 * 14


def test_log_probs_do_not_depend_on_whether_the_entropy_is_computed(problem: Problem) -> None:
    hidden, weight, labels = problem
    leaf = hidden.clone().requires_grad_()
    values, _ = token_log_probs(leaf, weight, labels, VOCAB, Group())
    alone, nothing = token_log_probs(leaf, weight, labels, VOCAB, Group(), with_entropy=False)
    assert torch.equal(alone, values) and nothing.numel() == 0
    slopes = [torch.autograd.grad(of.sum(), leaf)[0] for of in (values, alone)]
    assert torch.equal(*slopes)


class Arrays(TorchDispatchMode):
    """Keep the largest number of arrays [tokens, vocab] that are alive at once."""

    def __init__(self, num_bytes: int) -> None:
        super().__init__()
        self.num_bytes = num_bytes
        self.alive: set[int] = set()
        self.most = 0

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        result = function(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            storage = tensor.untyped_storage()
            if storage.nbytes() == self.num_bytes and storage._cdata not in self.alive:
                self.alive.add(storage._cdata)
                weakref.finalize(storage, self.alive.discard, storage._cdata)
        self.most = max(self.most, len(self.alive))
        return result


@pytest.mark.parametrize(("trains_entropy", "most"), [(False, 2), (True, 4)])
def test_an_update_has_as_many_arrays_of_logits_as_the_plan_counts(
    problem: Problem, monkeypatch: pytest.MonkeyPatch, trains_entropy: bool, most: int
) -> None:
    """At any time, over all chunks."""
    monkeypatch.setattr(heads, "CHUNK_TOKENS", TOKENS // 4)
    hidden, weight, labels = problem
    leaf = hidden.clone().requires_grad_()
    with Arrays(TOKENS // 4 * VOCAB * 4) as arrays:
        values, entropy = token_log_probs(leaf, weight, labels, VOCAB, Group(), 0.7)
        total = values + entropy if trains_entropy else values
        total.sum().backward()
    assert arrays.most == most


def test_a_forward_pass_has_one_array_of_logits(
    problem: Problem, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(heads, "CHUNK_TOKENS", TOKENS // 4)
    with torch.no_grad(), Arrays(TOKENS // 4 * VOCAB * 4) as arrays:
        token_log_probs(*problem, VOCAB, Group(), 0.7, with_entropy=False)
    assert arrays.most == 1
