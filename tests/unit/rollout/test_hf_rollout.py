"""The engine `transformers` draws what one forward pass per token draws."""

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, GPT2Config, LlamaConfig

from mindspeed_rlxf import device
from mindspeed_rlxf.config.lora import LoraConfig
from mindspeed_rlxf.rollout.hf_rollout import TransformersRollout
from mindspeed_rlxf.rollout.rollout_engine import GenerationRequest
from mindspeed_rlxf.rollout.sampling import SamplingSettings, choose_tokens, uniform_numbers

VOCAB, EOS, SEED = 40, tuple(range(3, 9)), 5
CONFIGS = {
    "llama": LlamaConfig(
        vocab_size=VOCAB, hidden_size=32, intermediate_size=48, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, tie_word_embeddings=True,
    ),
    "gpt2": GPT2Config(vocab_size=VOCAB, n_positions=64, n_embd=32, n_layer=2, n_head=4),
}  # fmt: skip
SAMPLED = SamplingSettings(True, 0.8, 0, 1.0, 2, 10, EOS)
GREEDY = replace(SAMPLED, do_sample=False, max_new_tokens=6)


@pytest.fixture(params=CONFIGS)
def pair(request: Any, tmp_path: Path, monkeypatch: Any) -> tuple[TransformersRollout, Any]:
    """An engine with three rows, and the model whose weights it has."""
    monkeypatch.setattr(device, "current_device", lambda: torch.device("cpu"))
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(CONFIGS[request.param])
    for parameter in model.parameters():
        parameter.data.normal_(std=0.3)
    model.eval().save_pretrained(tmp_path)
    actor = SimpleNamespace(load=tmp_path, bf16=False, num_samples_per_step=3, lora=LoraConfig(), has_fp32_logits=False)
    engine = TransformersRollout(actor)  # type: ignore[arg-type]
    engine.update_weights(model.named_parameters(), 7)
    engine.wake()
    return engine, model


def requests() -> list[GenerationRequest]:
    draw = np.random.default_rng(1)
    prompts = [draw.integers(4, VOCAB, size) for size in (1, 9, 4, 4, 7, 2, 5, 3, 8, 6, 5, 2)]
    return [
        GenerationRequest(i, 10 + i, prompt, GREEDY if i % 3 == 0 else SAMPLED, SEED)
        for i, prompt in enumerate(prompts)
    ]


def draw_alone(model: Any, request: GenerationRequest) -> tuple[list[int], list[float]]:
    asked, tokens, logs = request.settings, list[int](), list[float]()
    for uniform in uniform_numbers(request.seed, request.sample_id, asked.max_new_tokens):
        with torch.no_grad():
            logits = model(torch.tensor([[*request.prompt, *tokens]])).logits[:, -1]
        at = torch.tensor([uniform]), torch.tensor([len(tokens)])
        token, log_prob = choose_tokens(logits, *at, asked)
        tokens.append(int(token))
        logs.append(float(log_prob))
        if asked.ends_with(tokens):
            break
    return tokens, logs


def test_batches_draw_what_each_sample_draws_alone(pair) -> None:
    engine, model = pair
    asked = requests()
    results = {result.place: result for result in engine.generate(asked)}
    assert len({len(result.tokens) for result in results.values()}) > 2, "some end early"
    for request in asked:
        tokens, logs = draw_alone(model, request)
        result = results[request.place]
        assert (result.tokens, result.weights_version) == (tokens, 7)
        assert result.log_probs == pytest.approx(logs, abs=1e-5)
    assert engine.stats().sampled_tokens == sum(len(r.tokens) for r in results.values())


def test_scores_are_the_log_probs_of_generation(pair) -> None:
    engine, _ = pair
    asked = [replace(request, settings=SAMPLED) for request in requests()]
    results = sorted(engine.generate(asked), key=lambda result: result.place)
    given = [r.prompt for r in asked], [r.tokens for r in results]
    scored = engine.score(*given, SAMPLED.temperature)
    for result, logs in zip(results, scored, strict=True):
        assert result.log_probs == pytest.approx(logs, abs=1e-5)


@pytest.mark.parametrize("fault", ["missing", "unknown", "twice", "shape"])
def test_weights_of_another_model_are_refused(pair, fault: str) -> None:
    engine, model = pair
    tensors = list(model.named_parameters())
    name, tensor = tensors[-1]
    wrong = {
        "missing": tensors[:-1],
        "unknown": [*tensors, ("other.weight", tensor)],
        "twice": [*tensors, (name, tensor)],
        "shape": [*tensors[:-1], (name, tensor.data[:-1])],
    }[fault]
    with pytest.raises(ValueError, match="other.weight" if fault == "unknown" else name):
        engine.update_weights(wrong, 8)
    with pytest.raises(AssertionError):
        engine.weights_version  # noqa: B018
