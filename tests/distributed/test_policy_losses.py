"""Gradients of every policy loss through Megatron workers against loops over transformers."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from mindspeed_rlxf.config.enums import KlPenalty, LossNormalizer, RewardKind, Role, Stage
from mindspeed_rlxf.config.schema import OptimizerConfig
from mindspeed_rlxf.data.batch import Experience, Rollouts, fit_columns
from mindspeed_rlxf.engine.train_engine import TrainEngine
from mindspeed_rlxf.roles.actor import ActorRole
from tests.distributed.groups import build_group, update
from tests.distributed.llamas import MAX_NEW_TOKENS, TIED, make_llama, run_config
from tests.distributed.samples import make_experience, make_rollouts, sequences
from tests.distributed.test_layout_invariance import CP2, PP2, SP2, TP2
from tests.unit.weights.folders_of import read_folder

EPSILON = 1e8  # of Adam, and its rate: the first step is then the gradient itself
KL_COEF, CLIP = 0.7, 0.2
LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "one process": (1, {"micro_batch_size": 4}),
    "tp2 pp2": (4, {**SP2, **PP2, "micro_batch_size": 2}),
    "tp2 dp2": (4, {**TP2, "micro_batch_size": 2}),
    "cp2 tp2": (4, {**SP2, **CP2, "micro_batch_size": 2}),
    "cp4 row by row": (4, {"context_parallel_size": 4, "micro_batch_size": 1}),
}


@dataclass(frozen=True)
class Response:
    """One response under the model, token by token."""

    log_probs: Tensor
    entropy: Tensor
    old: Tensor
    ref: Tensor
    rollout: Tensor
    advantages: Tensor


Slow = Callable[[list[Response]], Tensor]


def token_losses(r: Response, low: float = CLIP, high: float = CLIP) -> Tensor:
    ratio = (r.log_probs - r.old).exp()
    return torch.maximum(-r.advantages * ratio, -r.advantages * ratio.clamp(1 - low, 1 + high))


def with_kl_and_entropy(responses: list[Response]) -> Tensor:
    losses = []
    for r in responses:
        d = r.log_probs - r.ref
        kl = ((-d).exp() - 1 + d).clamp(max=10)
        losses.append(token_losses(r) + KL_COEF * kl - 0.05 * r.entropy)
    return torch.cat(losses).mean()


def with_squared_kl(responses: list[Response]) -> Tensor:
    kl = [KL_COEF * (r.log_probs - r.ref) ** 2 / 2 for r in responses]
    return torch.cat([token_losses(r) + k for r, k in zip(responses, kl, strict=True)]).mean()


def with_sequence_ratios(responses: list[Response]) -> Tensor:
    means = []
    for r in responses:
        ratio = (r.log_probs - r.old).mean().exp()
        # One advantage for each response makes both forms of GSPO the same.
        a = r.advantages[0]
        means.append(max(-a * ratio, -a * ratio.clamp(1 - CLIP, 1 + CLIP)))
    return torch.stack(means).mean()


def dual_and_higher(responses: list[Response]) -> Tensor:
    sums = []
    for r in responses:
        plain = token_losses(r, 0.2, 0.4)
        bound = torch.where(r.advantages < 0, -r.advantages * 1.3, torch.inf)
        sums.append(torch.minimum(plain, bound).sum() / MAX_NEW_TOKENS)
    return torch.stack(sums).mean()


def weighed(responses: list[Response]) -> Tensor:
    losses = [token_losses(r) * (r.old - r.rollout).exp().clamp(max=1.1) for r in responses]
    return torch.cat(losses).mean()


def preferring(responses: list[Response], ipo: bool = False) -> Tensor:
    pairs = []
    for first, second in zip(responses[::2], responses[1::2], strict=True):
        margin = (first.log_probs - first.ref).sum() - (second.log_probs - second.ref).sum()
        sign = first.advantages[0]
        pair = -torch.log(torch.sigmoid(0.1 * sign * margin))
        pairs.append(((sign * margin - 1 / 0.2) ** 2 if ipo else pair) * sign.abs())
    return torch.stack(pairs).mean()


CASES: dict[str, tuple[Slow, dict[str, dict[str, Any]]]] = {
    "kl and entropy": (with_kl_and_entropy, {
        "algorithm": {"kl_in": "loss", "kl_penalty": KlPenalty.LOW_VAR_KL},
        "actor_rollout": {"entropy_coeff": 0.05},
    }),
    "squared kl": (with_squared_kl, {
        "algorithm": {"kl_in": "loss", "kl_penalty": KlPenalty.MSE},
    }),
    "gspo": (with_sequence_ratios, {
        "algorithm": {"loss_normalizer": LossNormalizer.SEQUENCE_MEANS},
        "actor_rollout": {"policy_loss": "gspo"},
    }),
    "dual clip": (dual_and_higher, {
        "algorithm": {"loss_normalizer": LossNormalizer.SEQUENCE_SUMS},
        "actor_rollout": {"clip_ratio_high": 0.4, "clip_ratio_c": 1.3},
    }),
    "importance weights": (weighed, {"algorithm": {"rollout_is_threshold": 1.1}}),
    "online dpo": (preferring, {"training": {"stage": Stage.RAY_ONLINE_DPO}}),
    "online ipo": (partial(preferring, ipo=True), {
        "training": {"stage": Stage.RAY_ONLINE_DPO}, "actor_rollout": {"dpo_loss_type": "ipo"},
    }),
}  # fmt: skip
SKIPPED = [2, 3, 4]  # responses of two replicas whose advantages are 0
LOST = [2, 3]  # a whole micro-batch of responses that could not be scored


@pytest.mark.parametrize(
    ("case", "layout_name", "lost"),
    [
        ("kl and entropy", "one process", []),
        ("kl and entropy", "tp2 pp2", []),
        ("squared kl", "tp2 dp2", []),
        ("gspo", "tp2 pp2", []),
        ("dual clip", "tp2 dp2", []),
        ("importance weights", "one process", []),
        ("online dpo", "tp2 pp2", []),
        ("online ipo", "tp2 pp2", []),
        ("kl and entropy", "tp2 pp2", LOST),
        ("gspo", "tp2 pp2", LOST),
        ("dual clip", "tp2 dp2", LOST),
        ("online dpo", "tp2 dp2", LOST),
        pytest.param("gspo", "cp2 tp2", [], marks=pytest.mark.long),
        pytest.param("online dpo", "cp2 tp2", [], marks=pytest.mark.long),
        # Ranks whose tokens are all of a prompt, and a micro-batch without trained tokens.
        pytest.param("kl and entropy", "cp4 row by row", LOST, marks=pytest.mark.long),
    ],
)
def test_gradient_equals_a_loop_over_transformers(warm_runtime, tmp_path, case, layout_name, lost):
    slow, sections = CASES[case]
    model = make_llama(tmp_path / "lm", TIED).double()
    model.model.embed_tokens.padding_idx = None  # transformers would drop the gradient of token 0
    rollouts, experience = samples(prefers="training" in sections)
    responses = responses_of(model, rollouts, experience)
    loss = slow([response for row, response in enumerate(responses) if row not in lost])
    loss.backward()
    experience.trained_mask[lost] = False
    experience.advantages[lost] = 0.0
    size, keys = LAYOUTS[layout_name]
    optimizer = OptimizerConfig(lr=EPSILON, adam_eps=EPSILON, clip_grad=0.0)
    config = run_config(
        tmp_path / "lm", tmp_path / "lm", TIED, keys, size, optimizer,
        **{"reward": {"kind": RewardKind.RULE}, **sections},
    )  # fmt: skip
    layout = config.layout(Role.ACTOR_ROLLOUT)
    group = build_group(warm_runtime, layout, ActorRole, config)
    report = update(group, ActorRole.update_policy, rollouts, experience, KL_COEF)
    group.call_engine(TrainEngine.export, tmp_path / "out", None).result()
    before, after = (read_folder(tmp_path / name) for name in ("lm", "out"))
    named = {name: p for name, p in model.named_parameters() if p.grad is not None}
    assert named.keys() == before.keys() == after.keys()
    moved = {name: before[name].double() - after[name].double() for name in sorted(named)}
    ours = torch.cat([difference.flatten() for difference in moved.values()])
    theirs = torch.cat([named[n].grad.flatten() for n in sorted(named)])
    assert theirs.norm() > 0.01
    assert (ours - theirs).norm() < 1e-4 * theirs.norm()
    metrics = report.steps[0]
    assert metrics["grad_norm"] == pytest.approx(float(theirs.norm()), rel=1e-4)
    if "dpo_loss" in metrics:
        decided = 2 / 3 if lost else 0.75
        assert metrics["dpo_decided"] == pytest.approx(decided)
        assert metrics["dpo_loss"] * decided == pytest.approx(loss.item(), rel=1e-5)


@pytest.mark.parametrize("layout_name", ["one process", "tp2 dp2"])
def test_responses_without_advantages_are_not_in_the_mean(warm_runtime, tmp_path, layout_name):
    model = make_llama(tmp_path / "lm", TIED).double()
    model.model.embed_tokens.padding_idx = None  # as above
    rollouts, experience = samples(prefers=False)
    responses = responses_of(model, rollouts, experience)
    kept = [r for row, r in enumerate(responses) if row not in SKIPPED]
    torch.cat([token_losses(response) for response in kept]).mean().backward()
    norm = torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None]).norm()
    experience.advantages[SKIPPED] = 0.0
    columns = {name: value for name, value in vars(experience).items() if isinstance(value, Tensor)}
    width = experience.advantages.size(1) + 1  # as of pieces with a longer response
    wider = {name: fit_columns(value, width) for name, value in columns.items()}
    experience = replace(experience, **wider)
    size, keys = LAYOUTS[layout_name]
    config = run_config(
        tmp_path / "lm", tmp_path / "lm", TIED, keys, size, OptimizerConfig(lr=EPSILON),
        reward={"kind": RewardKind.RULE}, algorithm={"skip_zero_advantages": True},
    )  # fmt: skip
    group = build_group(warm_runtime, config.layout(Role.ACTOR_ROLLOUT), ActorRole, config)
    report = update(group, ActorRole.update_policy, rollouts, experience, KL_COEF)
    assert report.steps[0]["grad_norm"] == pytest.approx(float(norm), rel=1e-4)


def samples(prefers: bool) -> tuple[Rollouts, Experience]:
    """Eight responses; of four pairs one has no preference. One advantage for a whole response."""
    rollouts = make_rollouts()
    made = make_experience(rollouts)
    made = replace(made, trained_mask=made.trained_mask.clone())
    mask = rollouts.trained_mask
    generator = torch.Generator().manual_seed(9)

    def noise() -> Tensor:
        return torch.randn(mask.shape, generator=generator) * mask

    signs = torch.tensor([1.0, -1, -1, 1, 0, 0, 1, -1]) if prefers else made.advantages[:, 0]
    rollouts = replace(rollouts, rollout_log_probs=made.old_log_probs + 0.2 * noise())
    return rollouts, replace(
        made, advantages=signs[:, None] * mask, ref_log_probs=made.old_log_probs + 0.3 * noise()
    )


def responses_of(model: Any, rollouts: Rollouts, experience: Experience) -> list[Response]:
    found = []
    for row, (prompt, tokens) in enumerate(sequences(rollouts)):
        logits = model(torch.cat((prompt, tokens))[None]).logits[0, len(prompt) - 1 : -1]
        logs = torch.log_softmax(logits, -1)
        columns = (
            experience.old_log_probs, experience.ref_log_probs,
            rollouts.rollout_log_probs, experience.advantages,
        )  # fmt: skip
        old, ref, rollout, advantages = (column[row, : len(tokens)].double() for column in columns)
        chosen = logs.gather(-1, tokens[:, None]).squeeze(-1)
        found.append(Response(chosen, -(logs.exp() * logs).sum(-1), old, ref, rollout, advantages))
    return found
