"""Records 20 updates of TRL's PPO trainer on fixed responses: `python tests/trl/record.py`.

Needs the extra `trl` (TRL 1.12.0 is the last release with PPO). Nothing of TRL is changed but where
its numbers come from: generation is replaced by fixed responses with the scores of one forward
pass. What TRL computes on the way is written to `traces/`, which the parity test reads.

Settings: `minibatch` steps once per mini-batch; `epoch` is stock TRL, whose accumulation counter
makes one step per epoch of all mini-batches.
"""

from __future__ import annotations

import copy
import json
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from torch import Tensor
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    LlamaForSequenceClassification,
    PreTrainedTokenizerFast,
)

TRACES = Path(__file__).parent / "traces"
PAD, EOS, VOCAB = 0, 2, 32
UPDATES, BATCH, MINI_BATCHES, MICRO, EPOCHS = 20, 16, 4, 2, 2
LONGEST_PROMPT, LONGEST_RESPONSE = 8, 12

SETTINGS: dict[str, dict[str, Any]] = {
    "minibatch": {"kl_estimator": "k1", "gamma": 0.97, "lam": 0.93, "temperature": 0.8},
    "epoch": {"kl_estimator": "k3", "gamma": 0.99, "lam": 0.9, "temperature": 1.0},
}
SHARED = {
    "kl_coef": 0.05,
    "cliprange": 0.2,
    "cliprange_value": 0.2,
    "vf_coef": 0.1,
    "missing_eos_penalty": 1.0,
    "learning_rate": 2e-3,
}


def main() -> None:
    TRACES.mkdir(exist_ok=True)
    models = make_models()
    save_models(models)
    for name, settings in SETTINGS.items():
        record(name, settings, {k: copy.deepcopy(m) for k, m in models.items()})
        print(f"recorded {name}", file=sys.stderr)


def make_models() -> dict[str, Any]:
    """Policy, value and reward model: random fp32 Llamas whose layers matter."""
    config = LlamaConfig(
        num_hidden_layers=2,
        hidden_size=16,
        intermediate_size=24,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=VOCAB,
        max_position_embeddings=64,
        tie_word_embeddings=False,
        initializer_range=0.2,
        pad_token_id=PAD,
        bos_token_id=None,
        eos_token_id=EOS,
        num_labels=1,
        attn_implementation="eager",
    )
    kinds = {
        "policy": LlamaForCausalLM,
        "value": LlamaForSequenceClassification,
        "reward": LlamaForSequenceClassification,
    }
    models = {}
    for seed, (name, kind) in enumerate(kinds.items()):
        torch.manual_seed(seed)
        models[name] = kind(config)
        with torch.no_grad():
            for key, parameter in models[name].named_parameters():
                if "norm" in key:
                    parameter.uniform_(0.5, 1.5)
    return models


def make_tokenizer() -> PreTrainedTokenizerFast:
    """Every id is a word: `7` is token 7."""
    vocabulary = {str(i): i for i in range(VOCAB)}
    return PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(WordLevel(vocabulary, unk_token="1")),
        pad_token=str(PAD),
        eos_token=str(EOS),
        padding_side="left",
    )


def save_models(models: dict[str, Any]) -> None:
    for name, model in models.items():
        model.save_pretrained(TRACES / "start" / name)


class Recorder:
    """What TRL computes, in the order it does."""

    def __init__(self) -> None:
        self.queries: list[list[int]] = []
        self.responses: list[list[int]] = []
        self.orders: list[list[int]] = []  # of the samples, one for each epoch of each update
        self.losses: list[dict[str, float]] = []  # one for each micro-batch
        self.norms: list[dict[str, float]] = []  # one for each optimizer step, not clipped
        self.first: dict[str, Tensor] = {}  # tensors of the first update

    def keep_first(self, name: str, value: Tensor) -> None:
        self.first.setdefault(name, value.detach().clone().contiguous())


def fixed_response(rng: np.random.Generator, kind: int) -> list[int]:
    """Kinds: 0 = no EOS, 1 = EOS in the last slot, others = EOS earlier."""
    length = LONGEST_RESPONSE if kind < 2 else int(rng.integers(1, LONGEST_RESPONSE))
    tokens = rng.integers(3, VOCAB, size=length).tolist()
    return tokens if kind == 0 else [*tokens[:-1], EOS]


def record(name: str, settings: dict[str, Any], models: dict[str, Any]) -> None:
    from datasets import Dataset

    from trl.experimental.ppo import PPOConfig, PPOTrainer, ppo_trainer

    torch.manual_seed(7)
    np.random.seed(7)
    rng = np.random.default_rng(11)
    prompts = [
        rng.integers(3, VOCAB, size=rng.integers(2, LONGEST_PROMPT + 1)).tolist()
        for _ in range((UPDATES + 4) * BATCH)  # more than are used: TRL steps oddly on the last
    ]
    with tempfile.TemporaryDirectory() as output:
        config = PPOConfig(
            output_dir=output,
            per_device_train_batch_size=MICRO,
            gradient_accumulation_steps=BATCH // MICRO,
            num_mini_batches=MINI_BATCHES,
            num_ppo_epochs=EPOCHS,
            total_episodes=UPDATES * BATCH,
            response_length=LONGEST_RESPONSE,
            local_rollout_forward_batch_size=BATCH,
            stop_token_id=EOS,
            num_sample_generations=0,
            optim="adamw_torch",
            lr_scheduler_type="linear",
            bf16=False,
            use_cpu=True,
            report_to=[],
            save_strategy="no",
            seed=7,
            **{**SHARED, **settings},
        )
        trainer = PPOTrainer(
            args=config,
            processing_class=make_tokenizer(),
            model=models["policy"],
            ref_model=copy.deepcopy(models["policy"]),
            reward_model=models["reward"],
            value_model=models["value"],
            train_dataset=Dataset.from_dict({"input_ids": prompts}),
        )
        if name == "minibatch":
            trainer.accelerator.gradient_accumulation_steps = BATCH // MINI_BATCHES // MICRO
        recorder = Recorder()
        with recording(ppo_trainer, trainer, recorder, rng):
            trainer.train()
    write(name, settings, recorder, models)


@contextmanager
def recording(
    module: Any, trainer: Any, recorder: Recorder, rng: np.random.Generator
) -> Iterator[None]:
    """TRL with our ears at its functions and fixed responses for its generation."""
    names = "batch_generation selective_log_softmax get_reward masked_whiten masked_mean"
    originals = {name: getattr(module, name) for name in names.split()}
    permutation, means = np.random.permutation, []

    def batch_generation(policy: Any, queries: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
        rows = [fixed_response(rng, kind % 5) for kind in range(len(queries))]
        recorder.queries += [[int(t) for t in row if t != PAD] for row in queries]
        recorder.responses += rows
        width = max(map(len, rows))
        padded = torch.tensor([row + [PAD] * (width - len(row)) for row in rows])
        both = torch.cat((queries, padded), dim=1)
        policy.eval()
        logits = module.forward(policy, both, PAD).logits[:, queries.shape[1] - 1 : -1]
        policy.train()
        return both, logits / (trainer.args.temperature + 1e-7)

    def selective_log_softmax(*arguments: Any) -> Tensor:
        result = originals["selective_log_softmax"](*arguments)
        name = "ref_log_probs" if "old_log_probs" in recorder.first else "old_log_probs"
        recorder.keep_first(name, result)
        return result

    def get_reward(*arguments: Any) -> Any:
        result = originals["get_reward"](*arguments)
        if "values" in recorder.first:
            recorder.keep_first("scores", result[1])
        else:
            recorder.keep_first("values", result[0][:, arguments[3] - 1 : -1].squeeze(-1))
        return result

    def masked_whiten(values: Tensor, mask: Tensor, **keys: Any) -> Tensor:
        result = originals["masked_whiten"](values, mask, **keys)
        recorder.keep_first("mask", mask)
        recorder.keep_first("raw_advantages", values)
        recorder.keep_first("advantages", result)
        return result

    def masked_mean(*arguments: Any) -> Tensor:
        """For each micro-batch: value loss, its clip fraction, policy loss, its clip fraction."""
        result = originals["masked_mean"](*arguments)
        if len(arguments) == 2 and torch.is_tensor(result) and in_update[0]:
            means.append(float(result))
            if len(means) == 4:
                means[0] *= 0.5  # TRL halves the value loss after its mean
                keys = ("vf_loss", "vf_clipfrac", "pg_loss", "pg_clipfrac")
                recorder.losses.append(dict(zip(keys, means, strict=True)))
                means.clear()
        return result

    in_update = [False]

    def seen_permutation(count: int) -> Any:
        order = permutation(count)
        recorder.orders.append(order.tolist())
        in_update[0] = True
        return order

    inner = trainer.optimizer.optimizer
    step = inner.step

    def seen_step(*arguments: Any, **keys: Any) -> Any:
        recorder.norms.append(
            {
                "policy": gradient_norm(trainer.model.policy),
                "value": gradient_norm(trainer.model.value_model),
            }
        )
        return step(*arguments, **keys)

    def generation_starts(*arguments: Any) -> tuple[Tensor, Tensor]:
        in_update[0] = False
        return batch_generation(*arguments)

    replaced: dict[str, Callable[..., Any]] = {
        "batch_generation": generation_starts,
        "selective_log_softmax": selective_log_softmax,
        "get_reward": get_reward,
        "masked_whiten": masked_whiten,
        "masked_mean": masked_mean,
    }
    for name, function in replaced.items():
        setattr(module, name, function)
    np.random.permutation, inner.step = seen_permutation, seen_step
    try:
        yield
    finally:
        np.random.permutation = permutation
        for name, function in originals.items():
            setattr(module, name, function)


def gradient_norm(model: torch.nn.Module) -> float:
    squares = [p.grad.double().square().sum() for p in model.parameters() if p.grad is not None]
    return float(torch.stack(squares).sum().sqrt())


def write(name: str, settings: dict[str, Any], recorder: Recorder, models: dict[str, Any]) -> None:
    folder = TRACES / name
    for part in ("policy", "value"):
        models[part].save_pretrained(folder / part)
    save_file(recorder.first, folder / "first_update.safetensors")
    trace = {
        "settings": {**SHARED, **settings},
        "queries": recorder.queries,
        "responses": recorder.responses,
        "orders": recorder.orders,
        "losses": recorder.losses,
        "norms": recorder.norms,
    }
    (folder / "trace.json").write_text(json.dumps(trace) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
