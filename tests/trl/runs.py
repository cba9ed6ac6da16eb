"""Read TRL's recorded traces, and configure runs of ours that compute the same."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.torch import load_file

from mindspeed_rlxf.config.enums import (
    AdvantageWhiten,
    KlPenalty,
    LossNormalizer,
    OldLogProbs,
    RewardKind,
)
from mindspeed_rlxf.config.schema import ArchitectureConfig, OptimizerConfig, RunConfig
from mindspeed_rlxf.data.fixed_responses import FixedResponses
from mindspeed_rlxf.data.prompts import Prompt
from mindspeed_rlxf.trainer.preflight import Prepared
from tests.distributed.llamas import run_config
from tests.trl.record import (
    BATCH,
    EOS,
    EPOCHS,
    MICRO,
    MINI_BATCHES,
    START,
    TRACES,
    UPDATES,
    VOCAB,
    make_tokenizer,
)

ARCHITECTURE = ArchitectureConfig(
    num_layers=2, hidden_size=16, ffn_hidden_size=24, num_attention_heads=4, num_query_groups=2,
    vocab_size=VOCAB, max_position_embeddings=64, norm_epsilon=1e-6,
    untie_embeddings_and_output_weights=True,
)  # fmt: skip
# number of samples in an optimizer step
MINI_BATCH = {name: BATCH if name == "epoch" else BATCH // n for name, n in MINI_BATCHES.items()}
WHITEN = {"whiten": AdvantageWhiten.MINIBATCH}
KL = {"k1": KlPenalty.KL, "k3": KlPenalty.LOW_VAR_KL}


class Trace:
    """The recorded trace of one setting; the fields are those of `record.Recorder`."""

    def __init__(self, name: str) -> None:
        self.name, self.folder = name, TRACES / name
        text = (self.folder / "trace.json").read_text(encoding="utf-8")
        self.__dict__.update(json.loads(text))
        self.first = load_file(self.folder / "first_update.safetensors")

    settings: dict[str, Any]
    queries: list[list[int]]
    responses: list[list[int]]
    orders: list[list[int]]
    losses: list[dict[str, float]]
    norms: list[dict[str, float]]

    def curve(self, key: str) -> np.ndarray:
        """Return [UPDATES] means over the optimizer steps of an update of |loss of the step|."""
        values = np.array([loss[key] for loss in self.losses])
        return np.abs(values.reshape(UPDATES, -1, MINI_BATCH[self.name] // MICRO).mean(2)).mean(1)

    def norm_curve(self, model: str) -> np.ndarray:
        """Return [UPDATES] mean gradient norms of a model, `policy` or `value`."""
        return np.array([norm[model] for norm in self.norms]).reshape(UPDATES, -1).mean(1)


def trl_config(trace: Trace, folder: Path, size: int, layout: dict[str, Any]) -> RunConfig:
    """Return a configuration that computes what TRL computes.

    A comment gives TRL's name where it differs, and our default with its reason where that differs.

    folder: for the run directory, and with the tokenizer; size: number of devices; layout: keys of
    every role
    """
    settings, start = trace.settings, TRACES / "start"
    optimizer = OptimizerConfig(
        lr=settings["learning_rate"],  # 1e-6 by default
        lr_decay_style="linear",  # lr_scheduler_type; constant by default
        clip_grad=0.0,  # TRL never reads its max_grad_norm; 1.0 by default
    )
    longest = max(map(len, trace.responses))
    return run_config(
        start / START[trace.name],
        start / "value",
        ARCHITECTURE,
        {**layout, "micro_batch_size": MICRO},
        size,
        optimizer,
        training={
            "train_iters": UPDATES,
            "global_batch_size": BATCH,
            "output_dir": str(folder / "run"),
            "tokenizer_name_or_path": str(folder / "tokenizer"),
        },
        actor_rollout={
            # TRL always samples. False by default, as in MindSpeed-LLM.
            "do_sample": trace.name != "greedy",
            "temperature": settings["temperature"],
            "max_new_tokens": longest,
            # The batch divided by num_mini_batches; 1 by default, as in MindSpeed-LLM. Stock TRL
            # makes one optimizer step per epoch whatever num_mini_batches is (`epoch`).
            "ppo_mini_batch_size": MINI_BATCH[trace.name],
            "ppo_epochs": EPOCHS,  # num_ppo_epochs; 1 by default
            "clip_ratio": settings["cliprange"],
        },
        critic={
            "critic_mini_batch_size": MINI_BATCH[trace.name],  # as the actor's
            "critic_update_epochs": EPOCHS,  # num_ppo_epochs
            "cliprange_value": settings["cliprange_value"],  # 3.0 by default, as in MindSpeed-LLM
            "vf_coef": settings["vf_coef"],  # 1 by default: the critic has its own optimizer
        },
        reward={"kind": RewardKind.MODEL, "load": str(start / "reward")},
        algorithm={
            "gamma": settings["gamma"],  # 1 by default
            "lam": settings["lam"],
            "kl_penalty": KL[settings["kl_estimator"]],
            "kl_ctrl": {"kl_coef": settings["kl_coef"]},
            "missing_eos_penalty": settings["missing_eos_penalty"],
            "whiten_rewards": settings.get("whiten_rewards", False),
            # minibatch_tokens by default: a mean of means weighs tokens of short micro-batches
            # more, so the loss depends on micro_batch_size.
            "loss_normalizer": LossNormalizer.MICRO_BATCH_MEAN,
            # max_new_tokens by default: with the padded width a reward depends on the longest
            # response of the batch, so on batch size and layout.
            "score_slot_limit": "batch_width",
            # TRL takes the scores of generation. auto by default: generation and training round
            # differently, and the first ratio should be 1.
            "old_log_probs": OldLogProbs.ROLLOUT,
            "advantage_whiten": WHITEN.get(trace.name, AdvantageWhiten.BATCH),
        },
        data={"shuffle": False},  # the recorded prompts are in TRL's order
        logging={"samples": "all"},
    )


def prepared(trace: Trace) -> Prepared:
    """Return the recorded prompts, and responses unless `greedy`, as `prepare` would."""
    prompts = [
        Prompt(i, "", np.array(ids, dtype=np.int64), "", "test")
        for i, ids in enumerate(trace.queries)
    ]
    fixed = FixedResponses(dict(enumerate(trace.responses)))
    if trace.name == "greedy":
        fixed = None
    return Prepared(
        tokenizer=make_tokenizer(),
        eos_token_ids=(EOS,),
        train_prompts=prompts,
        fixed_responses=fixed,
    )


def recorded_order(trace: Trace, updates: int) -> Callable[..., list[list[int]]]:
    """Return a function with TRL's permutations, to replace `mini_batch_order`.

    The function raises SeenEnough after `updates` updates.
    """

    def order(
        samples: int, epochs: int, _shuffle: bool, _seed: int, k: int, _together: int = 1
    ) -> list[list[int]]:
        assert (samples, epochs) == (BATCH, EPOCHS)
        if k > updates:
            raise SeenEnough
        return trace.orders[(k - 1) * EPOCHS : k * EPOCHS]

    return order


class SeenEnough(Exception):
    """Ends a run after the updates that a test needs."""
