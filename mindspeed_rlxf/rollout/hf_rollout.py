"""The rollout engine `transformers`, which generates with the model that transformers has.

It is slower than the native engine: rows that end leave a batch, but no others enter.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence
from transformers import AutoModelForCausalLM

from mindspeed_rlxf import device
from mindspeed_rlxf.config.hf_config import read_text_config
from mindspeed_rlxf.config.lora import LoraConfig
from mindspeed_rlxf.config.schema import ActorConfig
from mindspeed_rlxf.models.adapter_parameters import A, B
from mindspeed_rlxf.models.heads import fp32_linear
from mindspeed_rlxf.models.hf_adapters import linear_modules
from mindspeed_rlxf.models.hf_names import FileTensor, find_pieces, stored_tensors
from mindspeed_rlxf.rollout.rollout_engine import (
    FinishReason,
    GenerationRequest,
    GenerationResult,
    GenerationStats,
)
from mindspeed_rlxf.rollout.sampling import SamplingSettings, choose_tokens, uniform_numbers

MOST_ROWS = 64  # in a batch, where `num_samples_per_step` sets none


class TransformersRollout:
    """One rank with the whole model; the ranks of a replica all compute the same."""

    def __init__(self, actor: ActorConfig) -> None:
        """Build the model of the actor's `load` on the host, without its weights."""
        described = read_text_config(Path(actor.load or ""))
        dtype = torch.bfloat16 if actor.bf16 else torch.float32
        self.model = AutoModelForCausalLM.from_config(described, dtype=dtype).eval()
        self.model.requires_grad_(False)
        if actor.has_fp32_logits:
            head = self.model.get_output_embeddings()
            head.forward = lambda hidden: fp32_linear(hidden.flatten(0, 1), head.weight).unflatten(
                0, hidden.shape[:2]
            )
        tensors, pieces = stored_tensors(self.model), find_pieces(self.model)
        # Name in a file -> that part of the model, which shares its memory.
        self._places = {piece.name: (name, piece) for name in tensors for piece in pieces[name]}
        self.base_names = {*self._places}  # of the tensors in a folder of the model
        self._has_base = False  # whether a whole model was sent
        for name in attach_adapters(self.model, actor.lora):
            self._places[name] = name, FileTensor(name)
        self.max_rows = actor.num_samples_per_step or MOST_ROWS
        self._stats = GenerationStats()
        self._version: int | None = None

    @torch.no_grad()
    def update_weights(self, tensors: Iterable[tuple[str, Tensor]], version: int) -> None:
        """Replace all weights, or once they are there the adapters alone.

        After an error the engine has no version and cannot generate.
        """
        self._version = None
        parameters, sent = stored_tensors(self.model), set[str]()
        for name, tensor in tensors:
            if name not in self._places or name in sent:
                reason = "was sent already" if name in sent else "is no tensor of this model"
                raise ValueError(f"{name} {reason}; send each tensor of the model once")
            parameter, piece = self._places[name]
            place = piece.view(parameters[parameter])
            if tensor.shape != place.shape:
                shape = tuple(place.shape)
                raise ValueError(f"{name} must have the shape {shape}, not {tuple(tensor.shape)}")
            place.copy_(tensor)
            sent.add(name)
        missing = self._places.keys() - sent
        adapters_alone = self._has_base and missing == self.base_names
        if missing and not adapters_alone:
            raise ValueError(f"{min(missing)} was not sent; send each tensor of the model once")
        self._has_base = True
        self._version = version

    @property
    def weights_version(self) -> int:
        """Version of the loaded weights."""
        assert self._version is not None, "the rollout has not received its weights"
        return self._version

    def stats(self) -> GenerationStats:
        """Return the counts for the current or last call."""
        return self._stats

    def wake(self) -> None:
        """Bring the weights to the device."""
        self.model.to(device.current_device())

    def sleep(self) -> None:
        """Bring the weights to the host."""
        self.model.to("cpu")

    def generate(self, requests: Sequence[GenerationRequest]) -> Iterator[GenerationResult]:
        """Generate as `RolloutEngine.generate` says, in batches of equal settings but the limit."""
        self._stats = GenerationStats()
        by_settings: dict[SamplingSettings, list[GenerationRequest]] = {}
        for request in requests:
            without_limit = replace(request.settings, max_new_tokens=0)
            by_settings.setdefault(without_limit, []).append(request)
        for settings, same in by_settings.items():
            same.sort(key=lambda request: len(request.prompt))  # batches with little padding
            for start in range(0, len(same), self.max_rows):
                yield from self._generate_batch(same[start : start + self.max_rows], settings)

    def _generate_batch(
        self, requests: list[GenerationRequest], settings: SamplingSettings
    ) -> Iterator[GenerationResult]:
        """Yield results as responses end; their rows leave the batch and its cache."""
        rows = [(request, list[int](), list[float]()) for request in requests]
        most = max(request.settings.max_new_tokens for request in requests)
        numbers = [
            uniform_numbers(r.seed, r.sample_id, r.turn_start + most)[r.turn_start :]
            for r in requests
        ]
        uniforms = torch.from_numpy(np.stack(numbers))
        ids, mask = _pad([request.prompt for request in requests], left=True)
        self._stats.prompt_tokens += int(mask.sum())
        positions, cache = (mask.cumsum(1) - 1).clamp(min=0), None
        for step in range(most):
            with torch.no_grad():
                found = self._forward(ids, mask, positions, cache)
                count = torch.full((len(rows),), step)
                tokens, log_probs = choose_tokens(
                    found.logits[:, -1].float(), uniforms[:, step], count, settings
                )
            cache, going = found.past_key_values, []
            self._stats.sampled_tokens += len(rows)
            self._stats.decoded_tokens += len(rows) if step else 0
            drawn = zip(rows, tokens.tolist(), log_probs.tolist(), strict=True)
            for i, ((request, response, logs), token, log_prob) in enumerate(drawn):
                response.append(token)
                logs.append(log_prob)
                limit = request.settings.max_new_tokens
                if len(response) == limit or settings.ends_with(response):
                    reason = FinishReason.of(response, settings)
                    version = self.weights_version
                    yield GenerationResult(request.place, response, logs, reason, version)
                else:
                    going.append(i)
            if not going:
                return
            if len(going) < len(rows):
                cache.reorder_cache(torch.tensor(going, device=tokens.device))
                rows, uniforms = [rows[i] for i in going], uniforms[going]
            ids = tokens.cpu()[going, None]
            mask = torch.cat((mask[going], torch.ones_like(ids)), dim=1)
            positions = positions[going, -1:] + 1

    def _forward(self, ids: Tensor, mask: Tensor, positions: Tensor, cache: Any) -> Any:
        where = device.current_device()
        return self.model(
            input_ids=ids.to(where),
            attention_mask=mask.to(where),
            position_ids=positions.to(where),
            past_key_values=cache,
            use_cache=True,
            logits_to_keep=1,
        )

    @torch.no_grad()
    def score(
        self,
        prompts: Sequence[np.ndarray],
        responses: Sequence[Sequence[int]],
        temperature: float = 1.0,
    ) -> list[list[float]]:
        """Score as `RolloutEngine.score` says, in padded batches."""
        self._stats, where = GenerationStats(), device.current_device()
        found: list[list[float]] = []
        both = list(zip(prompts, responses, strict=True))
        for start in range(0, len(both), self.max_rows):
            batch = both[start : start + self.max_rows]
            ids, mask = _pad([np.concatenate(pair) for pair in batch], left=False)
            self._stats.prompt_tokens += int(mask.sum())
            logits = self.model(input_ids=ids.to(where), attention_mask=mask.to(where)).logits
            for (prompt, response), row in zip(batch, logits, strict=True):
                first = len(prompt) - 1
                logs = row[first : first + len(response)].float() / temperature
                chosen = torch.tensor(response, device=where)[:, None]
                found.append(logs.log_softmax(-1).gather(1, chosen)[:, 0].tolist())
        return found


def attach_adapters(model: Any, lora: LoraConfig) -> list[str]:
    """Give the selected linears adapters that compute beside them; return their tensors' names."""
    names = []
    for name in linear_modules(model) if lora.rank else ():
        if lora.selects(name):
            linear = model.get_submodule(name)
            dtype = linear.weight.dtype
            for child, inputs, outputs in (
                (A, linear.in_features, lora.rank),
                (B, lora.rank, linear.out_features),
            ):
                linear.add_module(child, nn.Linear(inputs, outputs, bias=False, dtype=dtype))
                names.append(f"{name}.{child}.weight")
            linear.requires_grad_(False)
            linear.register_forward_hook(partial(_add_adapter, lora.scale))
    return names


def _add_adapter(scale: float, linear: Any, inputs: tuple[Tensor, ...], output: Tensor) -> Tensor:
    added: Tensor = linear.lora_B(linear.lora_A(inputs[0]))
    return output + added * scale


def _pad(rows: Sequence[np.ndarray], left: bool) -> tuple[Tensor, Tensor]:
    """Return token ids [rows, longest] int64, padded with 0, and their mask of 0 and 1."""
    side = "left" if left else "right"
    ids = pad_sequence([torch.from_numpy(r) for r in rows], True, padding_side=side)
    ones = [torch.ones(len(row), dtype=torch.long) for row in rows]
    return ids, pad_sequence(ones, True, padding_side=side)
