"""The stage that compares a vLLM server that compiles graphs with one that does not."""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from typing import Any

from .engines import joined, model_folder, seconds
from .settings import Figures, Settings

PROMPT_TOKENS = 64
SEED = 1


def servers(settings: Settings, shape: str) -> Figures:
    """Measure generation by both servers after an update of the weights, bf16.

    `off_by` is the largest difference between the log-probs that a server gave with its responses
    and those that the server without graphs computes in one pass. Graphs that read older weights
    are off by much more than the other server.
    """
    if settings.vllm is None:
        return {"skipped": "no --vllm PYTHON"}
    with joined(settings):
        compared = Servers(settings, shape)
        with_graphs, graphs = compared.generate(enforce_eager=False)
        without, eager = compared.generate(enforce_eager=True)
        graphs["off_by"] = compared.largest_difference(with_graphs)
        eager["off_by"] = compared.largest_difference(without)
        compared.end()
    rows, new_tokens = settings.sizes.decode
    return {"rows": rows, "new_tokens": new_tokens, "graphs": graphs, "eager": eager}


class Servers:
    """The engine `vllm`, with one server after the other."""

    def __init__(self, settings: Settings, shape: str) -> None:
        import numpy as np

        self.settings, self.folder = settings, model_folder(settings, shape)
        self.engine: Any = None
        rows, self.new_tokens = settings.sizes.decode
        draw = np.random.default_rng(SEED)
        vocabulary = settings.sizes.shapes[shape]["vocab_size"]
        self.prompts = draw.integers(2, vocabulary, (rows, PROMPT_TOKENS))

    def generate(self, enforce_eager: bool) -> tuple[list[Any], Figures]:
        """Start a server, send it weights twice, and measure it; return its last responses."""
        from mindspeed_rlxf.rollout.vllm.engine import VllmRollout

        self.end()
        self.engine = VllmRollout(self._config(enforce_eager), str(self.settings.folder))
        self._send_weights(version=0)
        self._ask()  # a graph is compiled at the latest now
        self._send_weights(version=1)
        times = [seconds(self._ask) for _ in range(self.settings.sizes.repeats)]
        responses = self._ask()
        num_tokens = sum(len(response.tokens) for response in responses)
        return responses, {"tokens_per_s": round(num_tokens / statistics.median(times), 1)}

    def largest_difference(self, responses: list[Any]) -> float:
        """Return how far the responses' log-probs are from those of one pass of this server."""
        tokens = [response.tokens for response in responses]
        scored = self.engine.score([self.prompts[r.place] for r in responses], tokens)
        return max(
            abs(given - computed)
            for response, log_probs in zip(responses, scored, strict=True)
            for given, computed in zip(response.log_probs, log_probs, strict=True)
        )

    def end(self) -> None:
        """End the server that runs."""
        if self.engine is not None:
            self.engine.server.end()

    def _config(self, enforce_eager: bool) -> Any:
        from mindspeed_rlxf.config.compose import compose
        from mindspeed_rlxf.config.load import resolve

        roles = ("actor_rollout", "ref", "critic")
        keys = {
            "training.model": "auto",
            "training.seq_length": PROMPT_TOKENS + self.new_tokens,
            "training.bf16": True,
            "training.tokenizer_name_or_path": self.folder / "tokenizer",
            **{f"{role}.load": self.folder / "policy" for role in roles},
            "resource_pool.main": 1,
            "device.kind": self.settings.device,
            "device.cpu_threads": self.settings.threads,
            "rollout.engine": "vllm",
            "rollout.vllm.python": self.settings.vllm,
            "rollout.vllm.enforce_eager": str(enforce_eager).lower(),
        }
        tree = compose("ppo_trainer_tiny", [f"{key}={value}" for key, value in keys.items()])
        tree.pop("model")
        return resolve(tree, "on_device")

    def _send_weights(self, version: int) -> None:
        self.engine.update_weights(self._weights(version), version)
        self.engine.wake()

    def _weights(self, version: int) -> Iterator[tuple[str, Any]]:
        """Return the model's weights; the rows of version 1 are in reverse order."""
        import torch
        from transformers import AutoModelForCausalLM

        from mindspeed_rlxf import device

        model = AutoModelForCausalLM.from_pretrained(self.folder / "policy", dtype=torch.bfloat16)
        for name, parameter in model.to(device.current_device()).named_parameters():
            yield name, parameter.data.flip(0) if version else parameter.data

    def _ask(self) -> list[Any]:
        from mindspeed_rlxf.rollout.rollout_engine import GenerationRequest
        from mindspeed_rlxf.rollout.sampling import SamplingSettings

        wanted = SamplingSettings(True, 1.0, 0, 1.0, 0, self.new_tokens, ())
        requests = [
            GenerationRequest(row, row, prompt, wanted, SEED)
            for row, prompt in enumerate(self.prompts)
        ]
        return list(self.engine.generate(requests))
