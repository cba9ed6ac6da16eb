"""Make a section of docs/results.md from the lines of `on_device.py`."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

Line = Mapping[str, Any]


class Row(NamedTuple):
    """A row of the table: what was measured, the result, and what stands beside it."""

    what: str
    result: str
    beside: str = ""


def table(lines: Sequence[Line], stages: Sequence[Any]) -> str:
    """Return Markdown: a row for each line of a stage that ran, then those that did not."""
    row_of = {stage.name: stage.row for stage in stages}
    rows = ["| what | result | beside |", "|---|---|---|"]
    missing = []
    for line in lines:
        name = line["stage"]
        if "error" in line:
            missing.append(f"- `{name}` failed: {line['error']}")
        elif "skipped" in line:
            missing.append(f"- `{name}` was not measured: {line['skipped']}")
        else:
            rows.append("| " + " | ".join(row_of[name](line)) + " |")
    traces = [line for line in lines if "kernels" in line]
    compared = [line for line in lines if "options" in line]
    tables = [*kernel_table(traces), *options_table(compared)]
    return "\n".join([*rows, *tables, *([""] * bool(missing)), *missing])


def kernel_table(traces: Sequence[Line]) -> list[str]:
    """Return the lines of a table of the longest kernels and gaps of each trace."""
    lines = []
    for trace in traces:
        lines += ["", f"`{trace['stage']}`:", "", "| kernel or gap | calls | ms |", "|---|---|---|"]
        lines += [f"| `{k['name']}` | {k['calls']} | {k['ms']:.2f} |" for k in trace["kernels"]]
        lines += [
            f"| gap after `{gap['after']}` | | {gap['us'] / 1e3:.2f} |"
            for gap in trace["longest_gaps"]
        ]
    return lines


def options_table(lines: Sequence[Line]) -> list[str]:
    """Return the lines of a table of updates with and without each option."""
    rows = []
    for line in lines:
        head = "| options | s | gradient norm | mean log-prob | agrees |"
        rows += ["", f"`{line['stage']}`:", "", head, "|---|---|---|---|---|"]
        for name, figures in line["options"].items():
            if "error" in figures:
                rows.append(f"| {name} | | | | {figures['error']} |")
                continue
            numbers = f"{figures['update_s']} | {figures['grad_norm']:.5g}"
            agrees = "yes" if figures["agrees"] else "no"
            rows.append(f"| {name} | {numbers} | {figures['log_prob']:.5g} | {agrees} |")
    return rows


def environment_row(line: Line) -> Row:
    """Describe the device and what computes on it."""
    packages = ("torch", "cuda", "transformers", "megatron-core", "mindspeed", "torch_npu")
    versions = ", ".join(f"{name} {line[name]}" for name in packages if line.get(name))
    quick = "; tiny sizes, which say nothing about speed" if line["is_quick"] else ""
    size = f"{line['name']}, {line['memory_gib']:.0f} GiB, {line['cores']} cores"
    return Row("device", f"{size}, {line['date']}{quick}", versions)


def bring_up_row(line: Line) -> Row:
    """Say how far off each stage of the bring-up was."""
    agreed = [f"{name} {text.partition('off by ')[2]}" for name, text in line["stages"].items()]
    return Row(
        f"`{line['stage']}`, beside a CPU", "all stages agree", "off by: " + ", ".join(agreed)
    )


def update_row(line: Line) -> Row:
    """Say how fast an update is, and its memory beside the plan."""
    mfu = f"MFU {line['update_mfu']:.1%}, " if line["update_mfu"] else ""
    rate = line["tokens"] / line["update_s"]
    result = f"{mfu}{line['update_tflops']:.3g} TFLOP/s, {rate:,.0f} tokens/s, {line['update_s']} s"
    peak = f"peak {line['update_peak_gib']} GiB, " if "update_peak_gib" in line else ""
    what = f"`{line['stage']}`: {line['tokens']:,} tokens in micro-batches of "
    what += f"{line['micro_batch_tokens']:,}"
    return Row(what, result, f"{peak}planned {line['planned_gib']} GiB")


def decode_row(line: Line) -> Row:
    """Say how fast both generate."""
    return Row(
        f"`{line['stage']}`: {line['rows']} rows of {line['new_tokens']} tokens",
        f"{line['tokens_per_s']:,.0f} tokens/s, {line['step_ms']} ms a step",
        f"transformers {line['transformers_tokens_per_s']:,.0f} tokens/s, "
        f"{line['transformers_step_ms']} ms a step",
    )


def graphs_row(line: Line) -> Row:
    """Say how long a decode step takes with and without graphs, and whether both agree."""
    same = f"{line['equal_tokens']:.1%} equal tokens, log-probs off by {line['off_by']:.2g}"
    return Row(
        f"`{line['stage']}`: {line['rows']} rows of {line['new_tokens']} tokens",
        f"with graphs {line['graphs_step_ms']} ms a step; {same}",
        f"without {line['step_ms']} ms a step",
    )


def _grpo_name(line: Line) -> str:
    sizes = f"{line['prompts']} prompts x {line['samples']} samples"
    return f"`{line['stage']}`: {sizes}, {line['prompt']} + {line['response']} tokens"


def grpo_row(line: Line) -> Row:
    """Say how long an iteration takes, and its parts."""
    phases = {n: s for n, s in line["phases"].items() if n.startswith("timing/")}
    longest = sorted(phases.items(), key=lambda item: -item[1])[:4]
    parts = ", ".join(f"{name.removeprefix('timing/')} {s:.2f} s" for name, s in longest)
    return Row(_grpo_name(line), f"{line['iteration_s']:.2f} s", parts)


def trl_row(line: Line) -> Row:
    """Say how long TRL's iteration takes."""
    return Row(_grpo_name(line), "", f"TRL {line['iteration_s']:.2f} s")


def resume_row(line: Line) -> Row:
    """Say that the resumed run is the uninterrupted one."""
    what = f"`{line['stage']}`: GRPO with offload, killed in iteration {line['killed_in']}"
    what += f" of {line['iterations']}"
    return Row(what, "metrics and weights of the uninterrupted run", f"digest {line['digest']}")


def head_row(line: Line) -> Row:
    """Say how long log-probs of labels take, beside a library's."""
    both = {}
    for name in ("ours", "liger"):
        times = line[name]
        both[name] = times.get("error") or f"{times['forward_s']} s, update {times['update_s']} s"
    what = f"`{line['stage']}`: log-probs of {line['tokens']:,} tokens"
    return Row(what, f"forward {both['ours']}", f"Liger: {both['liger']}")


def options_row(line: Line) -> Row:
    """Say how long an update takes with all options and without any."""
    times = {name: figures.get("update_s", "failed") for name, figures in line["options"].items()}
    return Row(f"`{line['stage']}`", f"all {times['all']} s", f"none {times['none']} s")


def servers_row(line: Line) -> Row:
    """Say how fast vLLM generates with graphs and without, and how far off each is."""
    both = [
        f"{line[name]['tokens_per_s']:,.0f} tokens/s, off by {line[name]['off_by']:.3g}"
        for name in ("graphs", "eager")
    ]
    what = f"`{line['stage']}`: {line['rows']} rows of {line['new_tokens']} tokens"
    return Row(what, f"graphs {both[0]}", f"eager {both[1]}")


def trace_row(line: Line) -> Row:
    """Say how much of an update no kernel runs."""
    gaps = f"{line['gaps']} gaps over {line['gaps_over_us']:.0f} us, {line['gaps_ms']:.1f} ms"
    return Row(f"`{line['stage']}`", f"{gaps} of {line['window_ms']:.1f} ms")
