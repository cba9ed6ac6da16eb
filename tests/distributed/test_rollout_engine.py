"""The native rollout engine generates with a real model behind the engine protocol."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist

from mindspeed_rlxf.cluster.group import Sharded
from mindspeed_rlxf.config.enums import Role
from mindspeed_rlxf.config.schema import RunConfig
from mindspeed_rlxf.data.batch import Prompts, RoleOutput
from mindspeed_rlxf.roles.reports import ResponseLengths
from mindspeed_rlxf.roles.requests import make_requests, sampling_settings
from mindspeed_rlxf.rollout.native import NativeRollout
from mindspeed_rlxf.rollout.weights import OwnWeights
from tests.distributed.groups import build_group, build_policy
from tests.distributed.llamas import QWEN2, QWEN3_MOE, TIED, make_llama, run_config
from tests.distributed.test_parity_with_transformers import LAYOUTS, make_prompts
from tests.unit.weights.folders_of import read_folder

EOS, SEED, VERSION = 3, 11, 6


class Streamed:
    """A rank whose engine gets its weights as a stream of Hugging Face tensors."""

    def __init__(self, config: RunConfig, first_rank_draws: bool = False) -> None:
        actor, self.tp = config.actor_rollout, config.rollout_layout.tp
        source = OwnWeights(actor.architecture, self.tp, torch.float32, seed=1)
        self.settings = sampling_settings(actor, [EOS], True)
        self.engine = NativeRollout(source, first_rank_draws=first_rank_draws)
        self.folder = Path(actor.load or "")

    def responses(self, prompts: Prompts) -> RoleOutput:
        """Tokens, log-probs and version of each, in the order of the prompts."""

        def stream() -> Iterator[tuple[str, torch.Tensor]]:
            yield from sorted(read_folder(self.folder).items(), reverse=True)

        self.engine.update_weights(stream(), VERSION)
        self.engine.wake()
        results = list(self.engine.generate(make_requests(prompts, self.settings, SEED)))
        results.sort(key=lambda result: result.place)
        return RoleOutput(report=[(r.tokens, r.log_probs, r.weights_version) for r in results])


@pytest.mark.parametrize(
    ("architecture", "layout"),
    [
        pytest.param(TIED, "tp2", id="tied-tp2"),
        pytest.param(QWEN2, "tp2", id="biases-tp2", marks=pytest.mark.long),
        pytest.param(QWEN3_MOE, "tp1", id="experts-tp1"),
    ],
)
def test_streamed_weights_generate_what_a_loaded_folder_does(
    warm_runtime: Any, tmp_path: Path, architecture: Any, layout: str
) -> None:
    make_llama(tmp_path, architecture)
    keys = LAYOUTS[layout]
    size = keys.get("tensor_model_parallel_size", 1)
    sampling = {"do_sample": True, "temperature": 0.9}
    config = run_config(tmp_path, tmp_path, architecture, keys, pool=size, actor_rollout=sampling)
    pool, prompts = warm_runtime.create_pools({"main": [size]})["main"], make_prompts(8)
    actor, rollout = build_policy(config, pool, [EOS])
    rows = rollout.generate(prompts, SEED).rows()
    expected = actor.sample_texts(rows, 8)
    layout = config.rollout_layout
    streamed = build_group(warm_runtime, layout, Streamed, config, role=Role.ROLLOUT)
    (found,) = streamed.call(Streamed.responses, Sharded([prompts])).result()
    assert [tokens for tokens, _, _ in found] == [text.response_ids for text in expected]
    assert len({tuple(tokens) for tokens, _, _ in found}) == 8
    assert {version for _, _, version in found} == {VERSION}
    recomputed = actor.log_probs(rows, lambda: ResponseLengths([], [], [])).result()
    assert recomputed[0].gap.largest < 1e-4


class Counted(Streamed):
    """Counts the elements of gathered logits that a rank receives."""

    def responses(self, prompts: Prompts) -> RoleOutput:
        received: list[int] = []
        gather, all_gather = dist.gather, dist.all_gather

        def counted_gather(sent: Any, parts: Any, *rest: Any, **keys: Any) -> Any:
            received.append(sum(part.numel() for part in parts or ()))
            return gather(sent, parts, *rest, **keys)

        def counted_all_gather(parts: Any, sent: Any, **keys: Any) -> Any:
            received.append(sum(part.numel() for part in parts))
            return all_gather(parts, sent, **keys)

        with patch.multiple(dist, gather=counted_gather, all_gather=counted_all_gather):
            results = super().responses(prompts).report
        ranks: list[Any] = [None] * self.tp
        dist.all_gather_object(ranks, sum(received))
        return RoleOutput(report=(results, ranks))


def test_the_first_rank_alone_gets_logits_and_draws_the_same(
    warm_runtime: Any, tmp_path: Path
) -> None:
    make_llama(tmp_path, TIED)
    sampling = {"do_sample": True, "temperature": 0.9}
    config = run_config(tmp_path, tmp_path, TIED, LAYOUTS["tp2"], pool=2, actor_rollout=sampling)
    found = {}
    for first_rank_draws in (False, True):
        arguments = config.rollout_layout, Counted, config, first_rank_draws
        group = build_group(warm_runtime, *arguments, role=Role.ROLLOUT)
        (found[first_rank_draws],) = group.call(
            Counted.responses, Sharded([make_prompts(8)])
        ).result()
    assert found[True][0] == found[False][0]
    everything, _ = found[False][1]
    assert found[False][1] == [everything, everything] and found[True][1] == [everything, 0]
