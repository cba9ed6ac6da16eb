"""The configurations of MindSpeed-LLM run: paths, tokenizer, sizes and length are ours."""

import json
import math
import shutil
from pathlib import Path
from typing import Any

import pytest

from mindspeed_rlxf.config.schema import ArchitectureConfig
from mindspeed_rlxf.data.handlers import MapKeys
from mindspeed_rlxf.data.preprocessing.pipeline import PreprocessOptions, preprocess
from tests.distributed.llamas import make_llama
from tests.older_yaml import EVERY, models, write_one
from tests.processes import ROOT, read_metrics, run_python
from tests.unit.data.byte_tokenizer import write_tokenizer

pytestmark = pytest.mark.long

TINY = {"num_layers": 2, "hidden_size": 32, "ffn_hidden_size": 48, "num_attention_heads": 4}
VOCAB = 384
PROMPTS = [f"say {n} in words" for n in range(64)]
OF_ARCHITECTURE = ArchitectureConfig.model_fields.keys()


def tiny_models() -> dict[str, Any]:
    """Their model files with smaller sizes."""
    small = models()
    for keys in small.values():
        keys |= TINY
        keys |= {"num_query_groups": 4} if "num_query_groups" in keys else {}
        keys |= {key: VOCAB for key in ("vocab_size", "padded_vocab_size") if key in keys}
    return small


def make_weights(folder: Path, keys: dict[str, Any]) -> None:
    """`sft` and `rm`, and a tokenizer beside the config.json of the model, as they have it."""
    own = {key: value for key, value in keys.items() if key in OF_ARCHITECTURE}
    architecture = ArchitectureConfig(**{**own, "vocab_size": VOCAB})
    make_llama(folder / "sft", architecture)
    make_llama(folder / "rm", architecture, scored=True)
    write_tokenizer(folder / "tokenizer")
    shutil.copy(folder / "sft" / "config.json", folder / "tokenizer" / "config.json")


def make_data(folder: Path) -> None:
    rows = [json.dumps({"prompt": prompt}) for prompt in PROMPTS]
    (folder / "rows.jsonl").write_text("\n".join(rows), encoding="utf-8")
    prefix = folder / "data" / "descriptiveness"
    prefix.parent.mkdir()
    keys = MapKeys(prompt="prompt")
    files, tokenizer = (str(folder / "rows.jsonl"),), str(folder / "tokenizer")
    preprocess(PreprocessOptions(files, str(prefix), tokenizer, map_keys=keys))


def converted(folder: Path, name: str, tp: int, pp: int, orm: bool) -> str:
    """The weights in Megatron's folders, for a layout."""
    target = folder / f"{name}_tp{tp}_pp{pp}"
    if not target.exists():
        words = [
            ROOT / "convert_ckpt.py", "--model-type", "GPT",
            "--load-model-type", "hf", "--save-model-type", "mg", "--model-type-hf", "llama2",
            "--load-dir", str(folder / name), "--save-dir", str(target), "--use-mcore-models",
            "--target-tensor-parallel-size", str(tp), "--target-pipeline-parallel-size", str(pp),
            "--tokenizer-model", str(folder / "tokenizer" / "tokenizer.json"),
        ]  # fmt: skip
        run_python(*words, *["--orm"] * orm, timeout_s=300)
        for file in ("config.json", "generation_config.json"):  # their tool writes neither
            (target / file).unlink(missing_ok=True)
    return str(target)


def with_our_paths(folder: Path, tree: dict[str, Any], megatron: bool) -> None:
    """Changes paths, tokenizer and the number of iterations, nothing else."""
    tree["training"]["tokenizer_name_or_path"] = str(folder / "tokenizer")
    tree["training"]["train_iters"] = 3
    nested = tree["actor_rollout_ref"]
    nested["actor_rollout"]["data_path"] = str(folder / "data" / "descriptiveness")
    roles = {**nested, **{name: tree[name] for name in ("critic", "reward") if name in tree}}
    for name, section in roles.items():
        scored = name in ("critic", "reward")
        weights = "rm" if scored else "sft"
        layout = section["tensor_model_parallel_size"], section["pipeline_model_parallel_size"]
        section["load"] = str(folder / weights)
        if megatron:
            section["load"] = converted(folder, weights, *layout, scored)


@pytest.mark.parametrize("megatron", [False, True], ids=["huggingface", "megatron"])
@pytest.mark.parametrize("name", EVERY)
def test_their_configuration_trains(tmp_path, name, megatron, monkeypatch):
    tree, small = EVERY[name](), tiny_models()
    (model,) = tree["defaults"][0]["model"]
    make_weights(tmp_path, small[model])
    make_data(tmp_path)
    with_our_paths(tmp_path, tree, megatron)
    write_one(tmp_path / "theirs", name, tree, small)
    words = ["--config-dir", tmp_path / "theirs", "--config-name", name, "device.kind=cpu"]
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    script = ROOT / "ray_gpt.py", *words, "training.output_dir=out"
    said = run_python(*script, folder=tmp_path, timeout_s=900)
    metrics = read_metrics(tmp_path / "out")
    assert len(metrics) == 3
    for iteration in metrics:
        assert all(math.isfinite(value) for value in iteration.values())
    assert abs(metrics[0]["critic/kl"]) < 1e-2  # bf16; the reference has the same weights
    parts = ("actor", "critic") if "critic" in tree else (".",)  # one `save` for both
    for part in parts:
        assert any((tmp_path / "ckpt" / part / "hf").glob("*.safetensors"))
    assert "is over training.train_iters=3: checkpoints are saved by" in said
