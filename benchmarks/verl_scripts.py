"""Count which of verl's scripts translate and plan: the option lists in the shell scripts of a folder.

    git clone https://github.com/verl-project/verl && python benchmarks/verl_scripts.py verl

A script runs in bash's restricted mode with no programs, no files and an empty environment: a call
of Python only reports its arguments. A list counts once, however many scripts have it. Models are
stand-ins: Qwen3 8B, or its kind with experts, and files of data have 100,000 rows. Prints a table by
kind, with the number of lists of each, then the problems by frequency.
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

from mindspeed_rlxf.config.keys import Given
from mindspeed_rlxf.config.load import resolve_given
from mindspeed_rlxf.config.problems import ConfigError, UserError
from mindspeed_rlxf.config.verl import read_verl, translate_verl
from mindspeed_rlxf.ops.planning.plan import plan

NUM_ROWS, TIMEOUT_S = 100_000, 5
ENVIRONMENT = {"PATH": "/nonexistent", "HOME": "/root"}
DENSE = {
    "model_type": "qwen3", "hidden_size": 4096, "num_hidden_layers": 36, "num_attention_heads": 32,
    "num_key_value_heads": 8, "intermediate_size": 12288, "vocab_size": 151936, "head_dim": 128,
    "rms_norm_eps": 1e-6, "max_position_embeddings": 40960,
}  # fmt: skip
WITH_EXPERTS = {
    **DENSE, "model_type": "qwen3_moe", "num_hidden_layers": 48, "num_experts": 128,
    "num_experts_per_tok": 8, "moe_intermediate_size": 768, "norm_topk_prob": True,
    "decoder_sparse_step": 1, "mlp_only_layers": [],
}  # fmt: skip
REPORT = r"""
report() { printf 'CALL\0'; for argument in "$@"; do printf '%s\0' "$argument"; done; printf 'END\0'; }
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


def main() -> None:
    """Print the table and the problems as text, or every list's problems as JSON with --json."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--json", type=Path, help="also write each list with its problems")
    arguments = parser.parse_args()
    scripts = sorted(arguments.folder.rglob("*.sh"))
    lists: dict[tuple[str, ...], str] = {}
    for script in scripts:
        for options in option_lists(script):
            lists.setdefault(options, str(script.relative_to(arguments.folder)))
    records = []
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        os.environ["HOME"] = folder
        for options, name in lists.items():
            problems = find_problems(options)
            records.append(
                {"script": name, "kind": kind_of(options), "problems": problems, "options": options}
            )
    if arguments.json:
        arguments.json.write_text(json.dumps(records, indent=1))
    print(f"{len(scripts)} scripts, {len(lists)} different option lists\n")
    print("| kind | lists | translate and plan |\n| --- | --- | --- |")
    for kind, number in Counter(record["kind"] for record in records).most_common():
        runs = [r for r in records if r["kind"] == kind and not r["problems"]]
        print(f"| {kind} | {number} | {len(runs)} |")
    keys = Counter(
        (record["kind"], re.sub(r"=.*", "", problem.split(" ")[0]))
        for record in records
        for problem in set(record["problems"])
    )
    print("\nProblems, with the number of lists:")
    for (kind, key), number in keys.most_common(60):
        print(f"{number:5} {kind}: {key}")


def option_lists(script: Path) -> Iterator[tuple[str, ...]]:
    """Yield the options of each call of a trainer in a script, sorted."""
    text = REDIRECTION.sub("", script.read_text("utf-8", "replace"))
    command = [shutil.which("bash"), "--restricted", "-c", f"{REPORT}\n{text}", script.name]
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
        base = " ".join(words)
        if "megatron" in "".join(w for w in words if "config" in w.split("=")[0]) or (
            "--config-name" in base and "megatron" in base.split("--config-name")[1][:40]
        ):
            options.insert(0, "actor_rollout_ref.actor.strategy=megatron")
        yield tuple(options)


def kind_of(options: tuple[str, ...]) -> str:
    """Return the group of a list in the table."""
    text = " ".join(options)
    if re.search(r"image|[-_.]?VL\b|-VL-|vl[-_]|_vl|omni|video|vision|diffusion|wan2", text, re.I):
        return "images"
    if re.search(r"rollout\.name=(sglang|trtllm)", text) or "engine_kwargs.sglang" in text:
        return "SGLang or TensorRT-LLM"
    return "text"


def find_problems(options: tuple[str, ...]) -> list[str]:
    """Return the problems of translating and planning a list, [] if it would start."""
    Path("base.yaml").write_text("dry_run: true\ndevice: {kind: npu, memory_gib: 64}\n")
    text = " ".join(options)
    needs_experts = re.search(
        r"A3B|A22B|moe|mixtral|671b|deepseek-?v|expert_model_p\w+=[2-9]", text, re.I
    )
    try:
        given = translate_verl(read_verl("base.yaml", options), lambda _: NUM_ROWS)
        for section in given.sections.values():
            load = section.get("load") if isinstance(section, dict) else None
            if isinstance(load, str):
                folder = Path(os.path.expanduser(load))
                if not folder.is_absolute() or str(folder).startswith(os.environ["HOME"]):
                    pass
                else:
                    folder = Path("models") / folder.name
                    section["load"] = str(folder)
                folder.mkdir(parents=True, exist_ok=True)
                config = WITH_EXPERTS if needs_experts else DENSE
                (folder / "config.json").write_text(json.dumps(config))
        stand_in_function(given)
        config, _ = resolve_given(given, "base")
        problems = plan(config, False).problems
    except (ConfigError, UserError) as error:
        problems = error.problems
    # Memory depends on the model, which is a stand-in.
    return [str(problem) for problem in problems if "GiB" not in str(problem)]


def stand_in_function(given: Given) -> None:
    """Write a file with the reward function that a list names, as its file is not here."""
    function = given.sections["reward"].get("function")
    if isinstance(function, dict):
        name = function["function"].rpartition(":")[2]
        Path("scores.py").write_text(
            f"def {name}(solution_str, ground_truth, **_):\n    return 0\n"
        )
        function["function"] = f"scores.py:{name}"


if __name__ == "__main__":
    main()
