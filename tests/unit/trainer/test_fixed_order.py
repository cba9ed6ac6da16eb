"""Fixed responses and the prompts of the sampler are compared before a worker starts."""

import json
from pathlib import Path
from typing import Any

import numpy as np

from mindspeed_rlxf.data.fixed_responses import FixedResponses
from mindspeed_rlxf.data.prompts import Prompt
from mindspeed_rlxf.data.sampler import PromptSampler
from mindspeed_rlxf.trainer.preflight import prepare
from mindspeed_rlxf.trainer.prompt_source import PromptSource, find_order_problems
from tests.unit.trainer import test_bad_files

good, problems = test_bad_files.good, test_bad_files.problems  # fixtures
PROMPTS = [Prompt(i, f"<{i}>", np.array([i, i + 1]), "", "") for i in range(5)]


def source() -> PromptSource:
    return PromptSource(PROMPTS, PromptSampler(5, 2, 3, shuffle=True), 2)


def in_order(iterations: int) -> list[Prompt]:
    """The prompt of each sample."""
    drawn = source()
    for _ in range(iterations):
        drawn.next_prompts()
    return [PROMPTS[i] for i in drawn.pop_consumed().prompts for _ in range(2)]


def check(prompts: Any = None, after: int = 0) -> list[str]:
    """Problems of four iterations less those that a checkpoint has."""
    fixed = FixedResponses({i: [1] for i in range(16)}, prompts or {})
    resumed, drawn = source(), source()
    for _ in range(after):
        drawn.next_prompts()
    resumed.load_state_dict(drawn.state_dict())
    return [str(found) for found in find_order_problems(fixed, resumed, 4 - after)]


def test_responses_to_other_prompts_are_counted_and_the_first_is_named() -> None:
    """Samples 4 and 5 belong to one prompt, 6 and 7 to the next."""
    samples = in_order(4)
    samples[5], samples[6] = samples[6], samples[5]
    (problem,) = check(dict(enumerate(p.token_ids.tolist() for p in samples)))
    assert "the response to sample 5 must answer its prompt" in problem
    assert "(2 samples differ)" in problem


def test_samples_before_the_checkpoint_are_left_alone() -> None:
    samples = [p.token_ids.tolist() for p in in_order(4)]
    wrong = {**dict(enumerate(samples)), 5: [99]}  # of the second iteration
    assert check(prompts=wrong, after=2) == []
    assert "sample 5" in check(prompts=wrong, after=1)[0]


def test_preflight_refuses_responses_in_another_order(
    good: Path, tmp_path: Path, problems: test_bad_files.Problems
) -> None:
    rows = [{"prompt": f"{i} 1", "ground_truth": "3", "data_source": "a"} for i in range(4)]
    data = tmp_path / "train.jsonl"
    data.write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
    file = tmp_path / "given.jsonl"
    words = [f"data.train_files={data}", "training.train_iters=3"]
    words.append(f"+actor_rollout.fixed_responses={file}")
    order = PromptSampler(4, 2, 1234, shuffle=True)
    drawn = [i for _ in range(3) for i in order.next_batch()]

    def write(indices: list[int]) -> None:
        lines = [{"prompt_ids": [i + 2, 3], "response_ids": [4, 1]} for i in indices]
        file.write_text("\n".join(map(json.dumps, lines)), encoding="utf-8")

    write(drawn)
    assert prepare(test_bad_files.load_config(good, *words)).fixed_responses
    write([*drawn[:4], drawn[5], drawn[4]])
    (line,) = problems(*words)
    assert "the response to sample 4 must answer its prompt" in line
