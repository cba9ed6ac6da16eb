"""Twenty updates through `PpoTrainer.fit` equal those that TRL's trainer made, on fixed responses
and on greedy ones that each side generates.

TRL's numbers are in tests/trl/traces, written by tests/trl/record.py.
"""

from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from mindspeed_rlxf.algorithms.losses import LossOutput, TokenLoss, clipped_policy_loss
from mindspeed_rlxf.algorithms.masked import masked_whiten
from mindspeed_rlxf.checkpoint.directory import RunDirectory
from mindspeed_rlxf.config.enums import AdvantageWhiten, LossNormalizer
from mindspeed_rlxf.config.schema import KlControlConfig, RunConfig
from mindspeed_rlxf.data.batch import (
    Experience,
    ExperienceInputs,
    LogProbs,
    RoleOutput,
    Rollouts,
    Scores,
    fit_columns,
)
from mindspeed_rlxf.roles import (
    actor as actor_module,
    critic as critic_module,
    objectives as objectives_module,
)
from mindspeed_rlxf.roles.actor import ActorRole
from mindspeed_rlxf.roles.critic import CriticGroup, CriticRole
from mindspeed_rlxf.roles.objectives import ClippedObjective
from tests.distributed.llamas import with_fsdp
from tests.processes import read_lines, read_metrics
from tests.rows import length_mask
from tests.training import run, train
from tests.trl.record import BATCH, EOS, START, TRACES, UPDATES, make_tokenizer
from tests.trl.runs import SeenEnough, Trace, prepared, recorded_order, trl_config

LAYOUTS = {
    "one process": (1, {}),
    "tp2 pp2": (4, {"tensor_model_parallel_size": 2, "pipeline_model_parallel_size": 2}),
    "fsdp": (1, {"backend": "fsdp"}),
}


class ReportingCritic(CriticRole):
    def report_tensors(
        self, rollouts: Rollouts, experience: Experience, ref: LogProbs, scores: Scores
    ) -> RoleOutput:
        names = "old_log_probs", "values", "advantages", "returns"
        found = {name: getattr(experience, name).tolist() for name in names}
        others = {"ref_log_probs": ref.log_probs.tolist(), "scores": scores.scores.tolist()}
        return RoleOutput(report=found | others)


def differences(trace: Trace, metrics: list[dict[str, float]]) -> list[str]:
    """Curves of the updates in `metrics` that are not TRL's, with their relative error."""
    curves = {
        "actor/pg_loss_abs": (trace.curve("pg_loss"), 1e-5, 1e-4),
        "critic/vf_loss": (trace.curve("vf_loss"), 1e-5, 1e-4),
        "actor/grad_norm": (trace.norm_curve("policy"), 1e-4, 1e-4),
        "critic/grad_norm": (trace.norm_curve("value"), 1e-4, 1e-4),
    }
    found = []
    for key, (theirs, mean, most) in curves.items():
        ours = np.array([line[key] for line in metrics])
        error = np.abs(ours - theirs[: len(ours)]) / theirs[: len(ours)]
        if error.mean() > mean or error.max() > most:
            found.append(f"{key}: mean {error.mean():.1e}, largest {error.max():.1e}")
    return found


def run_like_trl(
    trace: Trace, config: RunConfig, runtime: Any, monkeypatch: pytest.MonkeyPatch
) -> tuple[list[dict[str, float]], dict[str, Any]]:
    """Metrics of every iteration and the tensors of the first one; weights are in final/."""
    first: dict[str, Any] = {}
    original = CriticGroup.make_experience

    def listening(self: CriticGroup, inputs: ExperienceInputs) -> Any:
        pending = original(self, inputs)
        if not first:
            given = inputs.rollouts, pending.rows(), inputs.ref, inputs.scores
            (tensors,) = self.group.call(ReportingCritic.report_tensors, *given).result()
            first.update(tensors)
        return pending

    for module in (actor_module, critic_module):
        monkeypatch.setattr(module, "mini_batch_order", recorded_order(trace, UPDATES))
    monkeypatch.setattr(critic_module, "CriticRole", ReportingCritic)
    monkeypatch.setattr(CriticGroup, "make_experience", listening)
    return read_metrics(run(config, runtime, prepared(trace)).path), first


@pytest.mark.parametrize(
    ("name", "layout"),
    [
        ("minibatch", "one process"),
        pytest.param("minibatch", "fsdp", marks=pytest.mark.long),
        pytest.param("greedy", "fsdp", marks=pytest.mark.long),
        pytest.param("minibatch", "tp2 pp2", marks=pytest.mark.long),
        pytest.param("epoch", "one process", marks=pytest.mark.long),
        pytest.param("epoch", "tp2 pp2", marks=pytest.mark.long),
        pytest.param("whiten", "one process", marks=pytest.mark.long),
        pytest.param("greedy", "one process", marks=pytest.mark.long),
    ],
)
def test_twenty_updates_equal_trl(warm_runtime, tmp_path, monkeypatch, name, layout):
    trace = Trace(name)
    size, keys = LAYOUTS[layout]
    make_tokenizer().save_pretrained(tmp_path / "tokenizer")
    config = trl_config(trace, tmp_path, size, keys)
    if "backend" in keys:
        config = with_fsdp(config, size=size)
    metrics, first = run_like_trl(trace, config, warm_runtime, monkeypatch)
    samples = read_lines(Path(config.training.output_dir) / "samples.jsonl")
    assert [sample["response_ids"] for sample in samples] == trace.responses
    check_first_update(trace, first)
    assert len(metrics) == UPDATES
    assert differences(trace, metrics) == []
    for part, role in (("policy", "actor"), ("value", "critic")):
        assert moved_apart(config, trace, part, role) < 1e-4


def check_first_update(trace: Trace, ours: dict[str, Any]) -> None:
    """Where TRL masks, its log-probs are 1 and its values 0; only what counts is compared."""
    lengths = [len(response) for response in trace.responses[:BATCH]]
    for name in ("old_log_probs", "ref_log_probs", "advantages"):
        theirs = trace.first[name]
        for row, length in enumerate(lengths):
            mine = torch.tensor(ours[name][row][:length])
            assert (mine - theirs[row, :length]).abs().max() < 1e-5, name
    width = trace.first["values"].size(1)
    for row, length in enumerate(lengths):
        slots = min(length + 1, width) if trace.responses[row][-1] == EOS else length
        values = trace.first["values"][row, :slots]
        returns = values + trace.first["raw_advantages"][row, :slots]
        assert (torch.tensor(ours["values"][row][:slots]) - values).abs().max() < 1e-5
        assert (torch.tensor(ours["returns"][row][:slots]) - returns).abs().max() < 1e-5
    assert (torch.tensor(ours["scores"]) - trace.first["scores"]).abs().max() < 1e-5


def moved_apart(config: RunConfig, trace: Trace, part: str, role: str) -> float:
    """Distance between our final weights and TRL's, as a share of the distance TRL's moved."""
    folder = Path(config.training.output_dir) / "final" / f"{role}_hf"
    ours = {k: v for file in folder.glob("*.safetensors") for k, v in load_file(file).items()}
    begin = START[trace.name] if part == "policy" else part
    start = load_file(TRACES / "start" / begin / "model.safetensors")
    end = load_file(trace.folder / part / "model.safetensors")
    assert ours.keys() == end.keys() == start.keys()

    def distance(a: dict[str, Any], b: dict[str, Any]) -> float:
        return float(sum((a[k].double() - b[k].double()).square().sum() for k in a) ** 0.5)

    assert distance(end, start) > 1e-3 * distance(start, {k: v * 0 for k, v in start.items()})
    return distance(ours, end) / distance(end, start)


class BiasedVariance(CriticRole):
    """Whitens with divisor n in place of n - 1."""

    def make_experience(self, *arguments: Any) -> RoleOutput:
        def whiten(values: Tensor, mask: Tensor, *rest: Any) -> Tensor:
            count = mask.sum()
            return masked_whiten(values, mask, *rest) * (count / (count - 1)).sqrt()

        with patch.object(objectives_module, "masked_whiten", whiten):
            return super().make_experience(*arguments)


class WhitensOverValueSlots(CriticRole):
    """Whitens over the slot after EOS too."""

    def make_experience(self, inputs: ExperienceInputs) -> RoleOutput:
        rollouts, width = inputs.rollouts, inputs.rollouts.response_ids.size(1)
        slots = torch.minimum(rollouts.response_lengths + rollouts.has_eos, torch.tensor(width))

        def whiten(values: Tensor, _mask: Tensor, *arguments: Any) -> Tensor:
            return masked_whiten(values, length_mask(slots, width), *arguments)

        with patch.object(objectives_module, "masked_whiten", whiten):
            return super().make_experience(inputs)


class LearnsNoSlotAfterEos(CriticRole):
    """Masks the value loss as the policy loss."""

    def update_critic(self, rollouts: Rollouts, experience: Experience, *rest: Any) -> RoleOutput:
        mask = fit_columns(experience.trained_mask, experience.value_mask.size(1))
        return super().update_critic(rollouts, replace(experience, value_mask=mask), *rest)


class MeanOfSequenceMeans(ActorRole):
    """Weighs every response of a micro-batch the same, whatever its length."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.objective = WeighsResponsesAlike(arguments[0], self.engine.sum_over_replicas)


class WeighsResponsesAlike(ClippedObjective):
    def loss(self, experience: Experience, *rest: Any) -> LossOutput:
        lengths = experience.trained_mask[rest[2]].sum(1)
        weights = torch.repeat_interleave(lengths.sum() / lengths / len(lengths), lengths)

        def weighed(*arguments: Any) -> TokenLoss:
            token = clipped_policy_loss(*arguments)
            return TokenLoss(token.loss * weights, token.clipped)

        with patch.object(objectives_module, "clipped_policy_loss", weighed):
            return super().loss(experience, *rest)


WRONG_KEYS: dict[str, dict[str, Any]] = {
    "score at EOS": {"algorithm": {"score_position": "eos"}},
    "whitened per mini-batch": {"algorithm": {"advantage_whiten": AdvantageWhiten.MINIBATCH}},
    "not whitened": {"algorithm": {"advantage_whiten": AdvantageWhiten.NONE}},
    "gradient clip 1.0": {"optimizer": {"clip_grad": 1.0}},
    "Adam eps 1e-5": {"optimizer": {"adam_eps": 1e-5}},
    "no value clip": {"critic": {"cliprange_value": 1e9}},
    "lam .931": {"algorithm": {"lam": 0.931}},
    "kl_coef .051": {"algorithm": {"kl_ctrl": KlControlConfig(kl_coef=0.051)}},
    "EOS penalty 1.01": {"algorithm": {"missing_eos_penalty": 1.01}},
    "temperature .801": {"actor_rollout": {"temperature": 0.801}},
    "clip ratio .2001": {"actor_rollout": {"clip_ratio": 0.2001}},
    "vf_coef .11": {"critic": {"vf_coef": 0.11}},
    "token mean": {"algorithm": {"loss_normalizer": LossNormalizer.MINIBATCH_TOKENS}},
    "slot after EOS in every response": {
        "algorithm": {"score_slot_limit": "max_new_tokens"},
        "actor_rollout": {"max_new_tokens": 13},
    },
}
WRONG_ROLES: dict[str, tuple[Any, str, type]] = {
    "biased variance": (critic_module, "CriticRole", BiasedVariance),
    "whitened over value slots": (critic_module, "CriticRole", WhitensOverValueSlots),
    "value loss without the slot after EOS": (critic_module, "CriticRole", LearnsNoSlotAfterEos),
    "mean of sequence means": (actor_module, "ActorRole", MeanOfSequenceMeans),
}
SHORT = ("score at EOS", "lam .931")


@pytest.mark.parametrize(
    "error",
    [
        pytest.param(error, marks=() if error in SHORT else pytest.mark.long)
        for error in ("none", *WRONG_KEYS, *WRONG_ROLES)
    ],
)
def test_a_deliberate_error_is_seen_within_six_updates(warm_runtime, tmp_path, monkeypatch, error):
    trace = Trace("minibatch")
    make_tokenizer().save_pretrained(tmp_path / "tokenizer")
    config = with_keys(trl_config(trace, tmp_path, 1, {}), WRONG_KEYS.get(error, {}))
    for module in (actor_module, critic_module):
        monkeypatch.setattr(module, "mini_batch_order", recorded_order(trace, 6))
    if error in WRONG_ROLES:
        monkeypatch.setattr(*WRONG_ROLES[error])
    directory = RunDirectory.create(config)
    with pytest.raises(SeenEnough):
        train(config, prepared(trace), directory, warm_runtime)
    metrics = read_metrics(directory.path)
    assert len(metrics) == 6
    assert bool(differences(trace, metrics)) == (error != "none")


def with_keys(config: RunConfig, changes: dict[str, dict[str, Any]]) -> RunConfig:
    """Sections with keys changed; `optimizer` is the actor's and the critic's."""
    sections = {}
    for name in ("algorithm", "actor_rollout", "critic"):
        section, keys = getattr(config, name), changes.get(name, {})
        if hasattr(section, "optimizer"):
            keys = {**keys, **changes.get("optimizer", {})}
        sections[name] = section.model_copy(update=keys)
    return config.model_copy(update=sections)
