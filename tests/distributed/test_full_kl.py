"""The KL over the whole vocabulary, through the workers, against transformers."""

from pathlib import Path
from typing import Any

import pytest
import torch

from mindspeed_rlxf.cluster.group import Sharded
from mindspeed_rlxf.cluster.interface import ColocatedRole
from mindspeed_rlxf.config.enums import KlPenalty, RewardKind, Role
from mindspeed_rlxf.data.batch import RoleOutput, Rollouts
from mindspeed_rlxf.roles.actor import ActorRole
from mindspeed_rlxf.roles.reference import ReferenceRole
from tests.distributed.groups import build_group
from tests.distributed.llamas import PLAIN, make_llama, run_config
from tests.distributed.samples import make_rollouts, sequences
from tests.distributed.test_layout_invariance import CP2, PP2, TP2

TEMPERATURE = 0.8
LAYOUTS: dict[str, tuple[int, Any]] = {
    "one process": (1, {}),
    "tp2 pp2": (4, {**TP2, **PP2}),
    "cp2 tp2": (4, {**CP2, **TP2}),
}


class ReportingReference(ReferenceRole):
    def report_kl(self, rollouts: Rollouts, actor: ActorRole) -> RoleOutput:
        rows = self.log_probs_with_kl(rollouts, actor).rows
        return RoleOutput(report=rows and (rows.kl.tolist(), rows.log_probs.tolist()))


@pytest.mark.parametrize(
    "layout",
    ["one process", "tp2 pp2", pytest.param("cp2 tp2", marks=pytest.mark.long)],
)
def test_kl_is_the_sum_over_the_vocabulary(warm_runtime: Any, tmp_path: Path, layout: str) -> None:
    policy = make_llama(tmp_path / "policy", PLAIN, seed=1)
    reference = make_llama(tmp_path / "reference", PLAIN, seed=2)
    size, keys = LAYOUTS[layout]
    config = run_config(
        tmp_path / "policy", tmp_path / "policy", PLAIN, keys, size,
        ref={"load": str(tmp_path / "reference"), "micro_batch_size": 3},
        actor_rollout={"do_sample": True, "temperature": TEMPERATURE, "micro_batch_size": 2},
        algorithm={"kl_penalty": KlPenalty.FULL},
        reward={"kind": RewardKind.RULE},
    )  # fmt: skip
    layout = config.layout(Role.REF)
    build_group(warm_runtime, layout, ActorRole, config)
    ref = build_group(warm_runtime, layout, ReportingReference, config, role=Role.REF)
    rollouts = make_rollouts()
    call = ref.call(
        ReportingReference.report_kl, Sharded([rollouts]), ColocatedRole(Role.ACTOR_ROLLOUT)
    )
    kl, log_probs = call.result()[0]
    for row, (prompt, tokens) in enumerate(sequences(rollouts)):
        count = len(tokens)
        logs = []
        for model in (policy, reference):
            with torch.no_grad():
                logits = model(torch.cat((prompt, tokens))[None]).logits[0, len(prompt) - 1 : -1]
            logs.append(torch.log_softmax(logits / TEMPERATURE, -1))
        expected = (logs[0].exp() * (logs[0] - logs[1])).sum(-1)
        assert expected.min() > 0.01
        torch.testing.assert_close(torch.tensor(kl[row][:count]), expected, rtol=1e-4, atol=1e-5)
        chosen = logs[1].gather(-1, tokens[:, None]).squeeze(-1)
        torch.testing.assert_close(torch.tensor(log_probs[row][:count]), chosen)
        assert not any(kl[row][count:])
