"""Record golden traces again, and print which metrics have changed.

    python -m tests.golden.record [--start] [NAME ...]

NAME is a key of `runs.SETTINGS`, default all. --start first trains the start weights again, which
changes every trace.
"""

import argparse
import sys
import tempfile
from pathlib import Path

from mindspeed_rlxf.cluster.ray.runtime import RayRuntime
from mindspeed_rlxf.config.enums import DeviceKind
from mindspeed_rlxf.config.schema import DeviceConfig, RuntimeConfig
from tests.distributed.conftest import KeptPools
from tests.golden.runs import SETTINGS, START, TRACES, Curves, read_trace, run, write_trace

NUM_PROMPTS, STEPS = 1000, 400


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--start", action="store_true")
    parser.add_argument("names", nargs="*", metavar="NAME")
    arguments = parser.parse_args()
    if arguments.start:
        make_start()
    ray_runtime = RayRuntime(
        DeviceConfig(kind=DeviceKind.CPU),
        RuntimeConfig(timeout_s=60.0, start_timeout_s=120.0),
        1,
        log_dir=Path(tempfile.mkdtemp()),
    )
    runtime = KeptPools(ray_runtime)
    try:
        for name in arguments.names or SETTINGS:
            with tempfile.TemporaryDirectory() as folder:
                curves = run(name, Path(folder) / "run", runtime)
            print(f"{name}: {describe_change(name, curves)}", flush=True)
            write_trace(name, curves)
    finally:
        ray_runtime.shutdown()


def describe_change(name: str, curves: Curves) -> str:
    """Say from which iteration on, and by how much, each metric differs from the stored trace."""
    if not (TRACES / f"{name}.json").exists():
        return "recorded for the first time"
    _, before = read_trace(name)
    if before == curves:
        return "unchanged"
    lines = [f"\n  {key}: new" for key in curves.keys() - before.keys()]
    lines += [f"\n  {key}: gone" for key in before.keys() - curves.keys()]
    for key in sorted(curves.keys() & before.keys()):
        pairs = list(zip(before[key], curves[key], strict=True))
        first = next((i for i, (old, new) in enumerate(pairs, 1) if old != new), None)
        if first is not None:
            most = max(abs(new - old) for old, new in pairs)
            lines.append(f"\n  {key}: from iteration {first} on, by {most:.2e} at most")
    return "changed" + "".join(lines)


def make_start() -> None:
    """Train a policy of 42,480 parameters until it solves about half of the problems.

    Writes the policy, its tokenizer and the prompts to START.
    """
    sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "examples" / "tiny"))
    import tiny_task
    import torch
    import train_models
    from transformers import LlamaConfig, LlamaForCausalLM

    def small_policy() -> LlamaForCausalLM:
        config = LlamaConfig(
            vocab_size=len(tiny_task.TOKENS), hidden_size=48, intermediate_size=96,
            num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
            max_position_embeddings=64, tie_word_embeddings=True, rms_norm_eps=1e-5,
            initializer_range=0.1, pad_token_id=tiny_task.PAD_ID, bos_token_id=tiny_task.BOS_ID,
            eos_token_id=tiny_task.EOS_ID,
        )  # fmt: skip
        return LlamaForCausalLM(config)

    torch.set_num_threads(1)
    train_models.new_policy = small_policy
    split = tiny_task.make_split(1)
    pretrained = train_models.pretrain_policy(split, 1, STEPS)
    pretrained.model.save_pretrained(START)
    tiny_task.make_tokenizer().save_pretrained(START)
    tiny_task.write_jsonl(START / "prompts.jsonl", split.train[:NUM_PROMPTS])
    print(f"start: solves {pretrained.accuracy:.1%} of the validation problems")


if __name__ == "__main__":
    main()
