"""A whole run with FSDP of a family that Megatron's engine lacks."""

import shutil
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, Qwen3_5TextConfig

from tests.chaos.tiny_run import START, settings
from tests.processes import read_metrics, run_python

pytestmark = pytest.mark.long


def test_a_tiny_qwen3_5_trains_by_ppo_with_a_critic(tmp_path: Path) -> None:
    """Generation and training give equal log-probs, or the run ends with an error."""
    start, out = tmp_path / "start", tmp_path / "run"
    tokenizer = AutoTokenizer.from_pretrained(START)
    config = Qwen3_5TextConfig(
        vocab_size=len(tokenizer), hidden_size=64, intermediate_size=128, num_hidden_layers=4,
        num_attention_heads=4, num_key_value_heads=2, head_dim=16, max_position_embeddings=128,
        pad_token_id=tokenizer.pad_token_id, eos_token_id=tokenizer.eos_token_id,
        bos_token_id=None, linear_num_key_heads=2, linear_num_value_heads=4,
        linear_key_head_dim=16, linear_value_head_dim=16,
    )  # fmt: skip
    torch.manual_seed(0)
    for each in (AutoModelForCausalLM.from_config(config), tokenizer):
        each.save_pretrained(start)
    shutil.copy(START / "prompts.jsonl", start)
    keys = ["training.backend=fsdp", "training.train_iters=10", "algorithm.max_log_prob_gap=1e-3"]
    where = ["device.kind=cpu", "runtime.address=local", "algorithm.old_log_probs=recompute"]
    command = ["ray_gpt.py", "--config-name", "ppo_trainer_tiny", *settings(out, 2, start)]
    said = run_python(*command, *keys, *where, timeout_s=300)
    assert "done: 10 iterations" in said, said
    assert len(read_metrics(out)) == 10
