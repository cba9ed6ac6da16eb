"""Record 20 updates of TRL's PPO trainer on fixed responses, and on greedy ones of its own.

    python tests/trl/record.py [NAME ...]

NAME is a key of SETTINGS, default all. Needs the extra `trl` (TRL 1.12.0 is the last release with
PPO). TRL is unchanged but for generation, which is replaced by fixed responses and the logits of
one forward pass. Writes what TRL computes on the way to `traces/`, which the parity test reads.

Setting `minibatch`: one optimizer step per mini-batch. Setting `epoch`: TRL as it is, whose
accumulation counter makes one step per epoch of all mini-batches, with whitened token rewards.
Setting `whiten`: as `minibatch`, but each mini-batch whitens its own advantages, by TRL's function.
Setting `greedy`: as `minibatch`, but TRL generates, with `do_sample=False` in place of True.
Its policy starts with an output row of zeros for PAD: TRL takes a generated PAD for the end.
"""

import copy
import json
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from torch import Tensor

TRACES = Path(__file__).parent / "traces"
PAD, EOS, VOCAB = 0, 2, 32
UPDATES, BATCH, MICRO, EPOCHS = 20, 16, 2, 2
# To whiten rewards, TRL needs 8 samples in each.
MINI_BATCHES = {"minibatch": 4, "epoch": 2, "whiten": 4, "greedy": 4}
LONGEST_PROMPT, LONGEST_RESPONSE = 8, 12

SETTINGS: dict[str, dict[str, Any]] = {
    "minibatch": {"kl_estimator": "k1", "gamma": 0.97, "lam": 0.93, "temperature": 0.8},
    "epoch": {
        "kl_estimator": "k3", "gamma": 0.99, "lam": 0.9, "temperature": 1.0, "whiten_rewards": True,
    },
    "whiten": {"kl_estimator": "k1", "gamma": 0.97, "lam": 0.93, "temperature": 0.8},
    "greedy": {"kl_estimator": "k1", "gamma": 0.97, "lam": 0.93, "temperature": 1.0},
}  # fmt: skip
START = {name: "greedy" if name == "greedy" else "policy" for name in SETTINGS}  # policy's folder
SHARED = {
    "kl_coef": 0.05, "cliprange": 0.2, "cliprange_value": 0.2, "vf_coef": 0.1,
    "missing_eos_penalty": 1.0, "learning_rate": 2e-3,
}  # fmt: skip
# TRL's functions that methods of Recorder replace
REPLACED = (
    "batch_generation", "selective_log_softmax", "get_reward", "masked_whiten", "masked_mean",
)  # fmt: skip


def main() -> None:
    TRACES.mkdir(exist_ok=True)
    models = make_models()
    save_models(models)
    for name in sys.argv[1:] or SETTINGS:
        record(name, SETTINGS[name], {k: copy.deepcopy(m) for k, m in models.items()})
        print(f"recorded {name}", file=sys.stderr)


def make_models() -> dict[str, Any]:
    """Return policies, value and reward model: random fp32 Llamas, each layer has an effect."""
    from transformers import LlamaConfig, LlamaForCausalLM, LlamaForSequenceClassification

    config = LlamaConfig(
        num_hidden_layers=2, hidden_size=16, intermediate_size=24, num_attention_heads=4,
        num_key_value_heads=2, vocab_size=VOCAB, max_position_embeddings=64,
        tie_word_embeddings=False, initializer_range=0.2, pad_token_id=PAD, bos_token_id=None,
        eos_token_id=EOS, num_labels=1, attn_implementation="eager",
    )  # fmt: skip
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
    models["greedy"] = copy.deepcopy(models["policy"])
    models["greedy"].lm_head.weight.data[PAD] = 0.0
    return models


def make_tokenizer() -> Any:
    """Return a tokenizer whose words are the ids themselves: `7` is token 7."""
    from transformers import PreTrainedTokenizerFast

    vocabulary = {str(i): i for i in range(VOCAB)}
    return PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(WordLevel(vocabulary, unk_token="1")),
        pad_token=str(PAD),
        eos_token=str(EOS),
        padding_side="left",
    )


def save_models(models: dict[str, Any]) -> None:
    """Write the models to `traces/start`."""
    for name, model in models.items():
        model.save_pretrained(TRACES / "start" / name)


class Recorder:
    """Records what TRL computes. Methods named like functions of TRL replace these functions."""

    def __init__(self, name: str, module: Any, trainer: Any, rng: np.random.Generator) -> None:
        """module: module of TRL whose functions `trainer` calls; rng: draws the fixed responses"""
        self.name, self.module, self.trainer, self.rng = name, module, trainer, rng
        self.queries: list[list[int]] = []
        self.responses: list[list[int]] = []
        self.orders: list[list[int]] = []  # order of the samples in each epoch of each update
        self.losses: list[dict[str, float]] = []  # one entry for each micro-batch
        self.norms: list[dict[str, float]] = []  # gradient norms of each step, before clipping
        self.first: dict[str, Tensor] = {}  # tensors of the first update
        self.originals = {name: getattr(module, name) for name in REPLACED}
        self._in_update, self._means = False, []

    @contextmanager
    def listening(self) -> Iterator[None]:
        """Replace TRL's functions by the methods of the recorder inside the block."""
        optimizer = self.trainer.optimizer.optimizer
        permutation, step = np.random.permutation, optimizer.step

        def seen_permutation(count: int) -> Any:
            order = permutation(count)
            self.orders.append(order.tolist())
            self._in_update = False
            if self.name == "whiten":
                self._whiten_mini_batches(sys._getframe(1).f_locals["advantages"], order)
            self._in_update = True
            return order

        def seen_step(*arguments: Any, **keys: Any) -> Any:
            models = {"policy": self.trainer.model.policy, "value": self.trainer.model.value_model}
            self.norms.append({name: gradient_norm(model) for name, model in models.items()})
            return step(*arguments, **keys)

        for name in REPLACED:
            setattr(self.module, name, getattr(self, name))
        np.random.permutation, optimizer.step = seen_permutation, seen_step
        try:
            yield
        finally:
            np.random.permutation = permutation
            for name, function in self.originals.items():
                setattr(self.module, name, function)

    def batch_generation(self, policy: Any, queries: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
        """Return queries with fixed responses, and the logits of one forward pass; record both.

        Setting `greedy`: what TRL's function returns for greedy generation.
        """
        self._in_update = False
        self.queries += [[int(t) for t in row if t != PAD] for row in queries]
        if self.name == "greedy":
            return self._generate(policy, queries, *rest)
        rows = [fixed_response(self.rng, kind % 5) for kind in range(len(queries))]
        self.responses += rows
        width = max(map(len, rows))
        padded = torch.tensor([row + [PAD] * (width - len(row)) for row in rows])
        both = torch.cat((queries, padded), dim=1)
        policy.eval()
        logits = self.module.forward(policy, both, PAD).logits[:, queries.shape[1] - 1 : -1]
        policy.train()
        return both, logits / (self.trainer.args.temperature + 1e-7)

    def _generate(self, policy: Any, queries: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
        rest[-1].do_sample = False  # of the GenerationConfig
        both, logits = self.originals["batch_generation"](policy, queries, *rest)
        for row in both[:, queries.shape[1] :].tolist():
            row = row[: row.index(EOS) + 1] if EOS in row else row
            assert PAD not in row
            self.responses.append(row)
        return both, logits

    def selective_log_softmax(self, *arguments: Any) -> Tensor:
        """Record the log-probs of the policy, then those of the reference."""
        result = self.originals["selective_log_softmax"](*arguments)
        self._keep("ref_log_probs" if "old_log_probs" in self.first else "old_log_probs", result)
        return result

    def get_reward(self, *arguments: Any) -> Any:
        """Record the values of the first call, by the value model, and the scores of the second."""
        result = self.originals["get_reward"](*arguments)
        if "values" in self.first:
            self._keep("scores", result[1])
        else:
            self._keep("values", result[0][:, arguments[3] - 1 : -1].squeeze(-1))
        return result

    def masked_whiten(self, values: Tensor, mask: Tensor, **keys: Any) -> Tensor:
        """Record mask, raw and whitened advantages. A call for rewards, which keeps the mean, comes
        first where rewards are whitened, and is not recorded."""
        result = self.originals["masked_whiten"](values, mask, **keys)
        if not keys.get("shift_mean", True):
            return result
        if self.name == "whiten":
            self._raw, result = (values, mask), values
        for name, tensor in (("mask", mask), ("raw_advantages", values), ("advantages", result)):
            self._keep(name, tensor)
        return result

    def _whiten_mini_batches(self, advantages: Tensor, order: Any) -> None:
        """Change the advantages of TRL's loop in place, for the mini-batches of one epoch."""
        values, mask = self._raw
        for rows in np.split(order, MINI_BATCHES[self.name]):
            white = self.originals["masked_whiten"](values[rows], mask[rows])
            advantages[rows] = white * mask[rows]

    def masked_mean(self, *arguments: Any) -> Tensor:
        """Record the four means of each micro-batch of an update: value loss, its clip fraction,
        policy loss, its clip fraction."""
        result = self.originals["masked_mean"](*arguments)
        if self._in_update:
            self._means.append(float(result))
            if len(self._means) == 4:
                self._means[0] *= 0.5  # TRL halves the value loss after its mean
                keys = ("vf_loss", "vf_clipfrac", "pg_loss", "pg_clipfrac")
                self.losses.append(dict(zip(keys, self._means, strict=True)))
                self._means.clear()
        return result

    def _keep(self, name: str, value: Tensor) -> None:
        """Store a copy of the tensor, unless the name has one from an earlier update."""
        self.first.setdefault(name, value.detach().clone().contiguous())


def fixed_response(rng: np.random.Generator, kind: int) -> list[int]:
    """Draw a response. kind: 0 = full length without EOS, 1 = EOS in the last slot, else earlier"""
    length = LONGEST_RESPONSE if kind < 2 else int(rng.integers(1, LONGEST_RESPONSE))
    tokens = rng.integers(3, VOCAB, size=length).tolist()
    return tokens if kind == 0 else [*tokens[:-1], EOS]


def record(name: str, settings: dict[str, Any], models: dict[str, Any]) -> None:
    """Train the models by TRL with a recorder, and write the trace."""
    from datasets import Dataset

    from trl.experimental.ppo import PPOConfig, PPOTrainer, ppo_trainer

    torch.manual_seed(7)
    np.random.seed(7)
    rng = np.random.default_rng(11)
    prompts = [
        rng.integers(3, VOCAB, size=rng.integers(2, LONGEST_PROMPT + 1)).tolist()
        for _ in range((UPDATES + 4) * BATCH)  # spare ones: TRL treats the last batch otherwise
    ]
    with tempfile.TemporaryDirectory() as output:
        config = PPOConfig(
            output_dir=output, per_device_train_batch_size=MICRO,
            gradient_accumulation_steps=BATCH // MICRO, num_mini_batches=MINI_BATCHES[name],
            num_ppo_epochs=EPOCHS, total_episodes=UPDATES * BATCH, response_length=LONGEST_RESPONSE,
            local_rollout_forward_batch_size=BATCH, stop_token_id=EOS, num_sample_generations=0,
            optim="adamw_torch", lr_scheduler_type="linear", bf16=False, use_cpu=True, report_to=[],
            save_strategy="no", seed=7, **{**SHARED, **settings},
        )  # fmt: skip
        trainer = PPOTrainer(
            args=config, processing_class=make_tokenizer(), model=models[START[name]],
            ref_model=copy.deepcopy(models[START[name]]), reward_model=models["reward"],
            value_model=models["value"], train_dataset=Dataset.from_dict({"input_ids": prompts}),
        )  # fmt: skip
        if name != "epoch":
            trainer.accelerator.gradient_accumulation_steps = BATCH // MINI_BATCHES[name] // MICRO
        recorder = Recorder(name, ppo_trainer, trainer, rng)
        with recorder.listening():
            trainer.train()
    write(name, settings, recorder, models)


def gradient_norm(model: torch.nn.Module) -> float:
    """Return the L2 norm of all gradients, computed in fp64."""
    squares = [p.grad.double().square().sum() for p in model.parameters() if p.grad is not None]
    return float(torch.stack(squares).sum().sqrt())


def write(name: str, settings: dict[str, Any], recorder: Recorder, models: dict[str, Any]) -> None:
    """Write the trained models, the tensors of the first update, and the trace to `traces/NAME`."""
    folder = TRACES / name
    models[START[name]].save_pretrained(folder / "policy")
    models["value"].save_pretrained(folder / "value")
    save_file(recorder.first, folder / "first_update.safetensors")
    trace = {
        "settings": {**SHARED, **settings}, "queries": recorder.queries,
        "responses": recorder.responses, "orders": recorder.orders, "losses": recorder.losses,
        "norms": recorder.norms,
    }  # fmt: skip
    (folder / "trace.json").write_text(json.dumps(trace) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
