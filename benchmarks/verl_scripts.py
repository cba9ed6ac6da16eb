"""Count which of verl's example scripts translate and plan, by their option lists.

    git clone https://github.com/verl-project/verl
    python benchmarks/verl_scripts.py verl

Each shell script in the folder runs in bash's restricted mode, without programs, files and
environment: a call of Python only reports its arguments. A list counts for each script that has it,
in each release of the folder, and once among the distinct ones. Models are stand-ins: Qwen3 8B, its
kind with experts, or one with images, so neither memory nor the longest sequence is judged. Files
of data have 100,000 rows. Prints a table by kind, and the most frequent problems.
"""

import argparse
import contextlib
import json
import os
import re
import shutil
import subprocess
import tempfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from mindspeed_rlxf.compat.verl.files import read_verl
from mindspeed_rlxf.compat.verl.translate import translate_verl
from mindspeed_rlxf.config.load import resolve_raw
from mindspeed_rlxf.config.problems import ConfigError, UserError
from mindspeed_rlxf.config.raw_config import RawConfig
from mindspeed_rlxf.ops.planning.plan import plan

NUM_ROWS, TIMEOUT_S, NUM_SHOWN = 100_000, 5, 40
ENVIRONMENT = {"PATH": "/nonexistent", "HOME": "/root"}
DENSE = {
    "model_type": "qwen3", "hidden_size": 4096, "num_hidden_layers": 36, "num_attention_heads": 32,
    "num_key_value_heads": 8, "intermediate_size": 12288, "vocab_size": 151936, "head_dim": 128,
    "rms_norm_eps": 1e-6, "max_position_embeddings": 262144,
}  # fmt: skip
WITH_EXPERTS = {
    **DENSE, "model_type": "qwen3_moe", "num_hidden_layers": 48, "num_experts": 128,
    "num_experts_per_tok": 8, "moe_intermediate_size": 768, "norm_topk_prob": True,
    "decoder_sparse_step": 1, "mlp_only_layers": [],
}  # fmt: skip
FUNCTIONS = r"""
report() { printf 'CALL\0'; for word in "$@"; do printf '%s\0' "$word"; done; printf 'END\0'; }
python() { report "$@"; }
python3() { report "$@"; }
python3.10() { report "$@"; }
torchrun() { report "$@"; }
ray() { report "$@"; }
command_not_found_handle() { return 0; }
cd() { :; }
source() { :; }
exec() { :; }
kill() { :; }
nproc() { echo 8; }
"""
"""Functions in place of programs; bash calls the handler for all others."""
REDIRECTION = re.compile(r"(?:\d|&)?>{1,2}\s*(?:&\d|\S+)|\|\s*tee\b[^\n\\]*|<<<\S+")
IMAGES = re.compile(r"image|[-_.]?VL\b|-VL-|vl[-_]|_vl|omni|video|vision|diffusion|wan2", re.I)
EXPERTS = re.compile(r"A3B|A22B|moe|mixtral|671b|deepseek-?v|expert_model_p\w+=[2-9]", re.I)
KINDS = {
    "generation without training": re.compile(r"data\.output_path="),
    "images": IMAGES,
    "SGLang or TensorRT-LLM": re.compile(r"rollout\.name=(sglang|trtllm)|engine_kwargs\.sglang"),
    "several turns, tools, agents": re.compile(r"multi_turn\.enable=[Tt]rue|agent_loop_config"),
    "fully asynchronous": re.compile(r"async_\w+\.|total_rollout_steps"),
    "Megatron": re.compile(r"strategy=megatron|megatron\."),
    "FSDP": re.compile(""),
}
"""Kind -> what the lists of it have; the first that fits counts."""


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description="Count verl's scripts that translate.")
    parser.add_argument("folder", type=Path)
    folder = parser.parse_args().folder.resolve()
    scripts = sorted(folder.rglob("*.sh"))
    lists = Counter(options for script in scripts for options in option_lists(script))
    counts = list(lists.values())
    with tempfile.TemporaryDirectory() as empty:
        os.chdir(empty)
        os.environ["HOME"] = empty
        judged = [(kind_of(options), *judge(options)) for options in lists]
    print(f"{len(scripts)} scripts, {sum(counts)} option lists, {len(lists)} distinct ones\n")
    print("| kind | lists | translate and plan | distinct | translate and plan |")
    print("| --- | --- | --- | --- | --- |")
    rows = {kind: (kind,) for kind in KINDS}
    rows["without the first three"] = tuple([*KINDS][3:])
    for title, kinds in rows.items():
        chosen = [
            (number, not problems)
            for number, (kind, problems, _) in zip(counts, judged, strict=True)
            if kind in kinds
        ]
        figures = [
            sum(number for number, _ in chosen),
            sum(number for number, is_right in chosen if is_right),
            len(chosen),
            sum(is_right for _, is_right in chosen),
        ]
        print(f"| {title} | {' | '.join(map(str, figures))} |")
    others = [problems for kind, problems, _ in judged if kind in [*KINDS][3:]]
    silent = [1 for kind, found, notes in judged if kind == "images" and not (found or notes)]
    print(f"Lists with images that are neither refused nor noted: {len(silent)}")
    keys = Counter(
        re.sub(r"=.*", "", problem.split(" ")[0]) for found in others for problem in {*found}
    )
    print("\nKeys with problems, without the first three kinds:")
    for key, number in keys.most_common(NUM_SHOWN):
        print(f"{number:5} {key}")


def option_lists(script: Path) -> Iterator[tuple[str, ...]]:
    """Yield the options of each call of a trainer in a script."""
    text = REDIRECTION.sub("", script.read_text("utf-8", "replace"))
    command = [str(shutil.which("bash")), "--restricted", "-c", f"{FUNCTIONS}\n{text}", script.name]
    with tempfile.TemporaryFile() as output:
        with contextlib.suppress(subprocess.TimeoutExpired):  # it waits for a server
            subprocess.run(
                command, env=ENVIRONMENT, stdin=subprocess.DEVNULL, stdout=output,
                stderr=subprocess.DEVNULL, timeout=TIMEOUT_S,
            )  # fmt: skip
        output.seek(0)
        calls = output.read().decode("utf-8", "replace").split("CALL\0")[1:]
    for call in calls:
        words = call.partition("END\0")[0].split("\0")
        options = [word for word in words if re.match(r"[+~]*[a-z_]+[\w./@]*=", word)]
        if not any("actor_rollout_ref." in option for option in options):
            continue
        if re.search(r"--config-name[= ]\S*megatron", " ".join(words)):
            options.insert(0, "actor_rollout_ref.actor.strategy=megatron")
        if re.search(r"--config-name[= ]\S*multiturn", " ".join(words)):
            options.insert(0, "actor_rollout_ref.rollout.multi_turn.enable=True")
        yield tuple(options)


def kind_of(options: tuple[str, ...]) -> str:
    """Return the row of a list in the table."""
    text = " ".join(options)
    return next(kind for kind, pattern in KINDS.items() if pattern.search(text))


def judge(options: tuple[str, ...]) -> tuple[list[str], list[str]]:
    """Return the problems of translating and planning a list, and its notes about images."""
    Path("base.yaml").write_text("dry_run: true\ndevice: {kind: npu, memory_gib: 64}\n")
    notes: list[str] = []
    options = with_stand_ins(options)
    try:
        raw = translate_verl(read_verl("base.yaml", options), lambda _: NUM_ROWS)
        notes = [note for note in raw.list_notes() if "images" in note]
        add_function(raw)
        config, _ = resolve_raw(raw, "base")
        problems = plan(config, False).problems
    except (ConfigError, UserError) as error:
        problems = error.problems
    return [str(problem) for problem in problems if "GiB" not in str(problem)], notes


def with_stand_ins(options: tuple[str, ...]) -> tuple[str, ...]:
    """Return the options with folders in place of models, which are made here."""
    text = " ".join(options)
    config = WITH_EXPERTS if EXPERTS.search(text) else DENSE
    config = {**config, "model_type": "qwen2_5_vl"} if IMAGES.search(text) else config
    replaced = []
    for option in options:
        key, _, value = option.partition("=")
        if re.search(r"model(_|\.)path$", key) and value not in ("null", "None"):
            folder = Path("models") / (Path(value).name or "unset")
            folder.mkdir(parents=True, exist_ok=True)
            (folder / "config.json").write_text(json.dumps(config))
            option = f"{key}={folder}"
        replaced.append(option)
    return tuple(replaced)


def add_function(raw: RawConfig) -> None:
    """Make the file of the reward function that a list names."""
    function = raw.sections["reward"].get("function")
    if isinstance(function, dict):
        name = function["function"].rpartition(":")[2]
        code = f"def {name}(solution_str, ground_truth, **_):\n    return 0\n"
        Path("scores.py").write_text(code)
        function["function"] = f"scores.py:{name}"


if __name__ == "__main__":
    main()
