"""The native rollout engine generates with a real model behind the engine protocol."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

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

    def __init__(self, config: RunConfig) -> None:
        actor, self.tp = config.actor_rollout, config.rollout_layout.tp
        source = OwnWeights(actor.architecture, self.tp, torch.float32, seed=1)
        self.settings = sampling_settings(actor, [EOS], True)
        self.engine, self.folder = NativeRollout(source), Path(actor.load or "")

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
