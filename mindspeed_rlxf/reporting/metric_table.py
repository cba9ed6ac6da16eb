"""Metric table: meaning, unit, healthy range and a hint for unhealthy values.

`python -m mindspeed_rlxf.reporting.metric_table docs/metrics.md` writes the table into the
document.
"""

import functools
import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

Range = tuple[float | None, float | None]
"""Smallest and largest healthy value; None = no limit on that side."""


@dataclass(frozen=True)
class Metric:
    """One metric or metric family; `<word>` in the name stands for any text.

    The healthy range is None if it depends on the task; `remedy` says what to do outside it.
    """

    name: str
    unit: str
    meaning: str
    healthy: Range | None = None
    remedy: str = ""

    @functools.cached_property
    def pattern(self) -> re.Pattern[str]:
        """Return a regular expression for matching names."""
        pattern = ""
        for piece in re.split(r"(<[^>]+>)", self.name):
            pattern += ".+" if piece.startswith("<") else re.escape(piece)
        return re.compile(pattern)


def _spread(name: str, unit: str, meaning: str) -> tuple[Metric, ...]:
    words = {"mean": "mean", "max": "largest", "min": "smallest"}
    return tuple(Metric(f"{name}/{end}", unit, f"{word} {meaning}") for end, word in words.items())


POLICY = (
    Metric("actor/pg_loss", "", "loss of the policy, mean over optimizer steps; near 0 with "
           "whitened advantages"),
    Metric("actor/pg_loss_abs", "", "absolute value of the policy's loss, mean over optimizer "
                                    "steps"),
    Metric("actor/pg_clipfrac", "fraction", "tokens whose probability ratio was clipped",
           (0.0, 0.3), "lower actor_rollout.lr or ppo_epochs"),
    Metric("actor/ppo_kl", "nats", "mean of old minus new log-prob over tokens of the updates",
           (-0.1, 0.1), "lower actor_rollout.lr or ppo_epochs"),
    Metric("actor/entropy", "nats", "mean entropy of the next token of the policy", (0.02, None),
           "raise actor_rollout.entropy_coeff, algorithm.kl_ctrl.kl_coef or "
           "actor_rollout.clip_ratio_high; lower actor_rollout.lr"),
    Metric("actor/kl_loss", "nats", "KL to the reference as a part of the loss, before its "
           "coefficient"),
    Metric("actor/grad_norm", "", "norm of the policy's gradient before clipping, mean over steps",
           None, "where it grows over many iterations, lower actor_rollout.lr"),
    Metric("actor/lr", "", "learning rate of the policy in this iteration"),
    Metric("actor/skipped_steps", "steps", "optimizer steps skipped because of NaN or inf",
           (0.0, 0.0), "look for the first sample that logs/driver.log names"),
    Metric("actor/dpo_loss", "", "preference loss, mean over pairs that differ"),
    Metric("actor/dpo_accuracy", "fraction", "pairs whose better response is the likelier one"),
    Metric("actor/dpo_margin", "", "implicit reward of the better response minus the other's"),
    Metric("actor/dpo_decided", "fraction", "pairs whose scores differ", (0.1, None),
           "use prompts of another difficulty"),
)  # fmt: skip
CRITIC = (
    Metric("critic/vf_loss", "", "loss of the value model, mean over optimizer steps"),
    Metric("critic/vf_clipfrac", "fraction", "values whose change was clipped", (0.0, 0.3),
           "raise critic.cliprange_value or lower critic.lr"),
    Metric("critic/vpred_mean", "", "mean value predicted in the updates"),
    Metric("critic/explained_variance", "", "1 - Var(return - value) / Var(return), values from "
           "before the updates; 1 = they predict the returns, 0 = as good as a constant",
           (0.0, 1.0), "train the critic first (critic.warmup_iters), raise critic.lr, start a new "
           "score head nearer to 0 (critic.init_method_std)"),
    Metric("critic/grad_norm", "", "norm of the critic's gradient before clipping, mean over "
           "steps", None, "where it grows over many iterations, lower critic.lr"),
    Metric("critic/lr", "", "learning rate of the critic in this iteration"),
    Metric("critic/skipped_steps", "steps", "optimizer steps skipped because of NaN or inf",
           (0.0, 0.0), "look for the first sample that logs/driver.log names"),
    Metric("critic/kl", "nats per token", "KL to the reference by algorithm.kl_penalty, mean "
           "over samples of the mean over tokens", (None, 1.0),
           "raise algorithm.kl_ctrl.kl_coef or lower actor_rollout.lr"),
    Metric("critic/kl_coeff", "", "coefficient of the KL penalty in this iteration"),
    *_spread("critic/score", "", "score of a response, penalties included"),
    *_spread("critic/rewards", "", "sum of the token rewards of a response, KL penalty included"),
    *_spread("critic/advantages", "", "advantage of a token"),
    *_spread("critic/returns", "", "return of a token"),
    *_spread("critic/values", "", "value of a token, from before the updates"),
)  # fmt: skip
SAMPLES = (
    Metric("train/<data_source>/score", "", "mean score of the responses to this data source"),
    Metric("train/<data_source>/<part>", "", "mean of a part of the score, by data source"),
    Metric("reward/<part>", "", "mean of a part of the score over all responses"),
    Metric("reward/failed", "responses", "responses that could not be scored", (0.0, 0.0),
           "see the cause in reward/failed_<cause>"),
    Metric("reward/failed_<cause>", "responses", "responses that could not be scored for this "
                                                 "cause", (0.0, 0.0),
           "timeout: raise the function's time; else correct the function"),
    Metric("reward/masked", "responses", "responses that are not trained on, because the cause of "
                                         "the failure is not theirs (remote, exit)", (0.0, 0.0),
           "see reward/failed_<cause>"),
    *_spread("prompt_length", "tokens", "length of a prompt"),
    *_spread("response_length", "tokens", "length of a response"),
    Metric("response_length/p50", "tokens", "median length of a response"),
    Metric("response_length/p90", "tokens", "length that 90% of the responses do not exceed"),
    Metric("response_length/eos_fraction", "fraction", "responses ended by EOS or a stop string"),
    Metric("response_length/truncated_fraction", "fraction", "responses truncated at the limit",
           (0.0, 0.5), "raise actor_rollout.max_new_tokens, or set "
           "algorithm.missing_eos_penalty or overlong_buffer_len"),
    Metric("rollout/equal_score_groups", "fraction", "prompts whose responses all score the same: "
                                                  "estimators that compare responses learn "
                                                  "nothing from them", (0.0, 0.8),
           "use prompts of another difficulty, algorithm.filter_groups=true, or more samples"),
    Metric("rollout/gen_batches", "batches", "batches generated for the iteration "
           "(algorithm.filter_groups)"),
    Metric("rollout/alike_groups", "prompts", "prompts kept although their responses score the "
           "same (algorithm.filter_groups)", (0.0, 0.0),
           "raise algorithm.max_num_gen_batches, or use other prompts"),
    Metric("rollout/turns/mean", "turns", "mean over conversations of the turns that an agent led "
           "(rollout.agent)"),
    Metric("rollout/turns/max", "turns", "most turns of a conversation"),
    Metric("rollout/tool_calls/mean", "calls", "mean over conversations of the tool calls"),
    Metric("rollout/agent_failures", "responses", "conversations that failed and are not trained",
           (0.0, 0.0), "see the cause in rollout/agent_failures/<cause>"),
    Metric("rollout/agent_failures/<cause>", "responses", "the same, by cause: exception, timeout, "
           "tool, no_turn, program, or rewrite", (0.0, 0.0), "timeout: raise "
           "rollout.turn_timeout_s; else correct the agent, the tool or the program"),
    Metric("rollout/log_prob_gap_mean", "nats", "mean distance of the log-probs of generation and "
           "training, over tokens", (0.0, 0.05),
           "in bf16 fp32_head=true; algorithm.rollout_is_threshold corrects for it"),
    Metric("rollout/log_prob_gap_max", "nats", "largest distance of a token", None,
           "algorithm.max_log_prob_gap stops the run there"),
    *_spread("rollout/is_weight", "", "weight of a token by algorithm.rollout_is_threshold"),
    Metric("rollout/rejected_tokens", "fraction", "tokens that algorithm.rollout_rejection masks "
           "out", (0.0, 0.5), "widen its bounds, or compare precision and layout"),
    Metric("staleness/mean", "updates", "mean over tokens of the updates between the weights that "
           "sampled a token and those that train it (rollout.max_staleness)"),
    Metric("staleness/max", "updates", "the same, of the token from the oldest weights; at most "
           "rollout.max_staleness"),
    Metric("val/<data_source>/score", "", "mean score of the validation prompts of this source"),
    Metric("val/<data_source>/response_length", "tokens", "mean length of the responses"),
    Metric("val/agent_failures", "responses", "conversations of a validation that failed, and have "
           "reward.failed_score", (0.0, 0.0), "see the cause in val_samples.jsonl"),
    Metric("val/<data_source>/<metric>", "", "another metric of validation, see running.md"),
)  # fmt: skip
SPEED = (
    Metric("timing/gen", "s", "generation, all batches"),
    Metric("timing/reward", "s", "scoring, without the part that overlaps with generation"),
    Metric("timing/old_log_prob", "s", "log-probs of the policy before its updates"),
    Metric("timing/ref", "s", "log-probs of the reference"),
    Metric("timing/values", "s", "values of the critic"),
    Metric("timing/adv", "s", "rewards and advantages"),
    Metric("timing/update_critic", "s", "all optimizer steps of the critic"),
    Metric("timing/update_actor", "s", "all optimizer steps of the policy"),
    Metric("timing/sync", "s", "time that generation waits for weights"),
    Metric("timing/wait_rollout", "s", "time that training waits for the next batch, where both "
           "run at the same time", None, "give generation more devices; raise "
           "rollout.max_staleness where few long responses are waited for"),
    Metric("timing/wait_trainer", "s", "time that generation waits for the updates, where both run "
           "at the same time", None, "give training more devices"),
    Metric("timing/all", "s", "the iteration, without validation and saving"),
    Metric("timing/save", "s", "time that the iteration waits for its checkpoint"),
    Metric("timing/save_wait", "s", "time that the iteration waits until the "
           "checkpoint before is complete, with rollout.max_staleness", None, "save less often"),
    Metric("timing/val", "s", "validation"),
    Metric("throughput/tokens_per_s", "tokens/s", "prompt and response tokens per second of "
           "the iteration"),
    Metric("throughput/tokens_per_s_per_device", "tokens/s", "the same per device"),
    Metric("throughput/tflops_per_device", "TFLOP/s", "operations that the models need, of "
           "generation, forward passes and updates, per second and device; recomputation does not "
           "count"),
    Metric("throughput/computed_tokens", "tokens", "prompt and response tokens that the passes of "
           "training engines computed, a shared prompt once; without generation and padding"),
    Metric("throughput/mfu", "fraction", "the same over the peak of the device; absent where the "
           "peak is not known", (0.05, 1.0),
           "see timing/, idle/ and skew/ for where the time goes"),
    Metric("memory/<phase>", "GiB", "largest peak of device memory among the ranks of a phase of "
           "timing/; on CPU resident memory of the process", None,
           "models_and_weights.md says what each part takes"),
    Metric("idle/<pool>", "fraction", "time of the iteration in which ranks of the pool ran "
           "nothing", (0.0, 0.6), "give the pool fewer devices, or put more roles on it"),
    Metric("idle/<pool>/<subpool>", "fraction", "the same for the training (train) and generating "
           "(rollout) ranks of a disaggregated pool", (0.0, 0.6), "give it fewer devices; "
           "rollout.max_staleness=1 lets both work at the same time"),
    Metric("skew/<phase>", "fraction", "time of the slowest rank over the mean of ranks, minus 1; "
           "ranks that wait for each other in collectives are equal", (0.0, 0.5),
           "if it is always the same rank, check its host with mindspeed-rlxf doctor"),
    Metric("slowest_rank/<phase>", "rank", "number of the slowest rank within its pool"),
)  # fmt: skip
SECTIONS = {
    "The policy": POLICY,
    "KL, rewards and the critic": CRITIC,
    "Responses and scores": SAMPLES,
    "Time, devices and memory": SPEED,
}
METRICS = tuple(metric for section in SECTIONS.values() for metric in section)

MARK = "<!-- Everything below is made by: python -m mindspeed_rlxf.reporting.metric_table -->"


@functools.cache
def find_metric(name: str) -> Metric | None:
    """Return a metric's row, None if unknown.

    If several rows match, the one with the most literal characters wins.
    """
    matches = [metric for metric in METRICS if metric.pattern.fullmatch(name)]
    return max(matches, key=lambda metric: len(re.sub("<[^>]+>", "", metric.name)), default=None)


def validation_score(measured: Mapping[str, float | None], metric: str) -> float | None:
    """Return a validation metric from an iteration's metrics, None if missing.

    The metric is `val/<data source>/<name>`, or a bare name to average over data sources.
    """
    if metric.startswith("val/"):
        return measured.get(metric)
    scores = []
    for name, score in measured.items():
        is_named = name.startswith("val/") and name.endswith(f"/{metric}")
        if is_named and score is not None:
            scores.append(score)
    return sum(scores) / len(scores) if scores else None


def tables() -> str:
    """Return one Markdown table per section."""
    paragraphs = []
    for title, metrics in SECTIONS.items():
        rows = [_row("metric", "unit", "meaning", "healthy", "otherwise"), "|---|---|---|---|---|"]
        for m in metrics:
            rows.append(_row(f"`{m.name}`", m.unit, m.meaning, show_range(m.healthy), m.remedy))
        paragraphs += [f"## {title}", "\n".join(rows)]
    return "\n\n".join(paragraphs) + "\n"


def replace_tables(text: str) -> str:
    """Return the document with everything after its `MARK` line replaced by the tables."""
    head, mark, _ = text.partition(MARK)
    assert mark, f"the document has no line {MARK}"
    return f"{head}{MARK}\n\n{tables()}"


def _row(*cells: str) -> str:
    """Return a table row with backticks around dotted keys, `a.b` or `a.b=c`."""
    keys = r"(?<![\w/`])([a-z_]+(?:\.[a-z_]+)+(?:=\w+)?)"
    quoted = (cell if "`" in cell else re.sub(keys, r"`\1`", cell) for cell in cells)
    return f"| {' | '.join(quoted)} |"


def show_range(healthy: Range | None) -> str:
    """Format a range: `0 to 0.3`, `at most 1`, `at least 0.02`, `0`; "" for None."""
    low, high = healthy or (None, None)
    if low is None:
        return "" if high is None else f"at most {high:g}"
    if high is None:
        return f"at least {low:g}"
    return f"{low:g}" if low == high else f"{low:g} to {high:g}"


if __name__ == "__main__":
    document = Path(sys.argv[1])
    document.write_text(replace_tables(document.read_text(encoding="utf-8")), encoding="utf-8")
