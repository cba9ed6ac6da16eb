"""Whole PPO runs on random Llamas: what must hold from the first iteration on."""

import json
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from mindspeed_rlxf.checkpoint.directory import RunDirectory
from mindspeed_rlxf.config.schema import ArchitectureConfig, RunConfig
from tests.distributed.llamas import PLAIN, make_pair, run_config
from tests.processes import read_lines
from tests.training import run

VOCAB = 384


def test_kl_to_the_reference_starts_at_zero_and_saves_are_kept(warm_runtime, tmp_path):
    architecture = PLAIN.model_copy(update={"vocab_size": VOCAB})
    lm, scored = make_pair(tmp_path, architecture)
    write_prompts(tmp_path / "train.jsonl", [f"count to {n}" for n in range(40)])
    write_tokenizer(tmp_path / "tokenizer", [f"count to {n}" for n in range(40)])
    saving = {"save_interval": 2}
    config = small_run(tmp_path, lm, scored, architecture, training=saving)
    first = metrics_of(config, warm_runtime)
    saved = tmp_path / "run" / "checkpoints"
    pointer = "latest_checkpointed_iteration.txt"
    names = ["exported_iteration.txt", "iter_0000002", "iter_0000003", pointer]
    assert sorted(path.name for path in saved.iterdir()) == names
    assert (saved / pointer).read_text() == "3\n"
    for role in ("actor", "critic"):
        assert any((saved / "iter_0000002" / role).glob("state_*.safetensors"))
    assert [("timing/save" in metrics) for metrics in first] == [False, True, True]
    (timeline,) = (tmp_path / "run" / "timeline").iterdir()
    events = {event["name"] for event in json.loads(timeline.read_text()) if event["ph"] == "X"}
    calls = {"rollout.generate", "reward.score", "ref.log_probs", "actor_rollout.update_policy"}
    assert {"iteration", "save", *calls} < events
    assert_tokens_are_those_of_the_samples(RunDirectory(tmp_path / "run"))
    assert abs(first[0]["critic/kl"]) <= 1e-5
    assert first[0]["rollout/log_prob_gap_max"] < 1e-4


def assert_tokens_are_those_of_the_samples(made: RunDirectory) -> None:
    """Every logged sample has a line, with one number for each token of its response."""
    samples = read_lines(made.samples)
    lengths = {(s["iteration"], s["sample_id"]): len(s["response_ids"]) for s in samples}
    (file,) = made.samples_tokens.iterdir()
    lines = read_lines(file)
    assert [(line["iteration"], line["sample_id"]) for line in lines] == list(lengths)
    for line in lines:
        counts = {len(line[name]) for name in ("advantage", "kl", "value")}
        assert counts == {lengths[line["iteration"], line["sample_id"]]}


def small_run(
    folder: Path, lm: Path, scored: Path, architecture: ArchitectureConfig, pool: int = 1,
    **sections: Any,
) -> RunConfig:  # fmt: skip
    """Three iterations of eight prompts, two optimizer steps each, in `run` below the folder."""
    merged: dict[str, Any] = {
        "training": {
            "train_iters": 3,
            "global_batch_size": 8,
            "tokenizer_name_or_path": str(folder / "tokenizer"),
            "output_dir": str(folder / "run"),
            **sections.pop("training", {}),
        },
        "data": {"train_files": str(folder / "train.jsonl"), **sections.pop("data", {})},
        "actor_rollout": {"do_sample": True, "ppo_mini_batch_size": 4},
        "critic": {"critic_mini_batch_size": 4},
        **sections,
    }
    return run_config(lm, scored, architecture, {}, pool, None, **merged)


def metrics_of(config: RunConfig, warm_runtime: Any) -> list[dict[str, float]]:
    """The metrics of every iteration of a run on warm workers."""
    directory = run(config, warm_runtime)
    lines = read_lines(directory.metrics)
    assert [line["iteration"] for line in lines] == list(range(1, len(lines) + 1))
    for part in ("actor_hf", "actor_megatron", "critic_hf", "critic_megatron"):
        assert any((directory.path / "final" / part).iterdir())
    return [line["metrics"] for line in lines]


def write_prompts(file: Path, prompts: list[str]) -> None:
    rows = [{"prompt": p, "ground_truth": "1", "data_source": "arithmetic"} for p in prompts]
    file.write_text("\n".join(json.dumps(row) for row in rows), encoding="utf-8")


def write_tokenizer(folder: Path, texts: list[str]) -> None:
    """A byte-level BPE of `VOCAB` tokens trained on the texts."""
    core = Tokenizer(models.BPE())
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB,
        special_tokens=["<pad>", "<eos>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    core.train_from_iterator(texts, trainer)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=core, pad_token="<pad>", eos_token="<eos>")
    tokenizer.save_pretrained(folder)
