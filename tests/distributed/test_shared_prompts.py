"""Computing a prompt once for its responses changes no result."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.testing import assert_close

from mindspeed_rlxf.algorithms.losses import LossOutput, normalised_loss
from mindspeed_rlxf.config.enums import LossNormalizer
from mindspeed_rlxf.config.schema import ArchitectureConfig, LearningConfig
from mindspeed_rlxf.data.batch import RoleOutput, Rollouts
from mindspeed_rlxf.engine.engine import MegatronEngine
from mindspeed_rlxf.engine.train_engine import ValueStep
from mindspeed_rlxf.models.parameters import Head
from tests.distributed.groups import build_group, layout_of
from tests.distributed.llamas import PLAIN, QWEN3_MOE, VOCAB, make_llama
from tests.distributed.probe import likelihood_step
from tests.distributed.test_layout_invariance import PP2, SP2
from tests.rows import length_mask, made_rollouts


def make_groups(sizes: tuple[int, ...], prompts: tuple[int, ...]) -> Rollouts:
    """Rows of prompts with so many responses; responses of 1 to 6 tokens."""
    generator = torch.Generator().manual_seed(0)
    count = sum(sizes)
    ids = [torch.randint(0, VOCAB, (max(prompts),), generator=generator) for _ in sizes]
    prompt_lengths = torch.tensor(prompts).repeat_interleave(torch.tensor(sizes))
    responses = torch.randint(1, 7, (count,), generator=generator)
    responses[0] = 1
    return made_rollouts(
        prompt_ids=torch.stack([x for x, n in zip(ids, sizes, strict=True) for _ in range(n)])
        * length_mask(prompt_lengths, max(prompts)),
        prompt_lengths=prompt_lengths,
        response_ids=torch.randint(0, VOCAB, (count, 6), generator=generator)
        * length_mask(responses, 6),
        response_mask=length_mask(responses, 6),
        has_eos=torch.zeros(count, dtype=torch.bool),
        data_sources=["test"] * count,
    )


class Probe:
    """A policy and a value model; computes passes and one step of each, with their gradients."""

    def __init__(self, role: LearningConfig) -> None:
        self.engines = {
            head: MegatronEngine(role, head, 1, role.optimizer)
            for head in (Head.LANGUAGE_MODEL, Head.SCORE)
        }

    def run(self, rollouts: Rollouts) -> RoleOutput:
        """Return passes, gradients by name, and computed tokens, all of this rank."""
        policy, critic = self.engines.values()
        slots = torch.nn.functional.pad(rollouts.trained_mask, (1, 0), value=True)
        found: dict[str, Any] = {}
        for name, result in (
            ("log_probs", policy.log_probs(rollouts, 1.0)),
            ("values", critic.values(rollouts)),
            ("scores", critic.scores(rollouts)),
        ):
            found[name] = None if result is None else getattr(result, name).tolist()

        def value_loss(rows: list[int], values: torch.Tensor) -> LossOutput:
            lengths, mean = slots[rows].sum(1), LossNormalizer.MINIBATCH_TOKENS
            return normalised_loss(values**2, lengths, mean, 1, {"loss": values}, {})

        rows = list(range(rollouts.num_rows))[::2] + list(range(rollouts.num_rows))[1::2]
        steps = (likelihood_step(rollouts), ValueStep(value_loss, slots))
        for engine, step in zip((policy, critic), steps, strict=True):
            batches = engine.micro_batches(rollouts, rows)
            engine.train_step(batches, step)
            found[f"{engine.head.value} tokens"] = sum(b.token_ids.numel() for b in batches)
            for name, tensor in engine.weights.tensors.items():
                gradient = tensor.main_grad  # type: ignore[attr-defined]
                found[f"{engine.head.value} {name}"] = gradient.tolist()
        return RoleOutput(report=found)


def results(
    runtime: Any, folder: Path, architecture: ArchitectureConfig, rollouts: Rollouts, **keys: Any
) -> dict[str, Any]:
    base = {"model": "t", "architecture": architecture, "load": str(folder), "micro_batch_size": 4}
    role = LearningConfig(**{**base, "lr": 0.0, **keys})
    group = build_group(runtime, layout_of(role), Probe, role)
    found: dict[str, Any] = group.call(Probe.run, rollouts).result()[0]
    return found


def close(found: dict[str, Any], expected: dict[str, Any], tolerance: float = 1e-5) -> None:
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        if value is not None and not name.endswith("tokens"):
            one, other = torch.tensor(found[name]), torch.tensor(value)
            scale = float(other.abs().max()) if other.numel() else 0.0
            assert_close(one, other, rtol=0.0, atol=tolerance * max(scale, 1e-3))


@pytest.mark.parametrize(
    ("architecture", "keys"),
    [
        (PLAIN, {}),
        (PLAIN, {"max_tokens_per_micro_batch": 40}),
        (QWEN3_MOE, {}),
        pytest.param(PLAIN, SP2, id="sp2"),
        pytest.param(PLAIN, {**SP2, **PP2}, id="sp2-pp2", marks=pytest.mark.long),
    ],
)
def test_results_are_those_of_whole_rows(warm_runtime, tmp_path, architecture, keys):
    make_llama(tmp_path, architecture)
    rollouts = make_groups((4, 1, 9, 2), (12, 5, 7, 1))
    apart = results(warm_runtime, tmp_path, architecture, rollouts, share_prompts=False, **keys)
    shared = results(warm_runtime, tmp_path, architecture, rollouts, **keys)
    close(shared, apart)
    for name in shared:
        if name.endswith("tokens"):
            assert shared[name] < 0.8 * apart[name]


def test_in_bf16_results_are_as_near_as_its_rounding(warm_runtime, tmp_path):
    """Both round each of some ten operations of two layers to 8 bits, 0.4%, in another order.

    Eight models, with AVX-512 and AMX or with AVX2 alone, differ by at most 2.5%.
    """
    make_llama(tmp_path, PLAIN)
    rollouts = make_groups((4, 2), (12, 5))
    apart, shared = (
        results(warm_runtime, tmp_path, PLAIN, rollouts, bf16=True, share_prompts=share)
        for share in (False, True)
    )
    for name, value in apart.items():
        if not name.endswith("tokens"):
            one, other = torch.tensor(shared[name]), torch.tensor(value)
            assert (one - other).norm() <= 0.06 * other.norm() + 1e-6, name
