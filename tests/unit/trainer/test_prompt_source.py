"""The training prompts of each iteration, and the numbers of their samples."""

import numpy as np
import pytest
from pydantic import ValidationError

from mindspeed_rlxf.config.schema import DataConfig
from mindspeed_rlxf.data.prompt_store import Labels, PromptStore
from mindspeed_rlxf.data.prompts import Prompt
from mindspeed_rlxf.data.sampler import ConsumedPrompts, PromptSampler, make_sampler
from mindspeed_rlxf.trainer.prompt_source import PromptSource


def prompts(count: int) -> list[Prompt]:
    return [
        Prompt(i, f"{i}", np.array([i, i + 1]), f"truth {i}", f"source {i % 2}", {"row": i})
        for i in range(count)
    ]


def source(per_prompt: int = 1, shuffle: bool = False) -> PromptSource:
    sampler = PromptSampler(num_prompts=5, batch_size=2, seed=1, shuffle=shuffle)
    return PromptSource(prompts(5), sampler, per_prompt)


def test_each_prompt_is_repeated_n_times_with_its_truth_and_source():
    batch = source(per_prompt=3).next_prompts()
    assert [ids.tolist() for ids in batch.token_ids] == [[0, 1]] * 3 + [[1, 2]] * 3
    assert batch.ground_truths == ["truth 0"] * 3 + ["truth 1"] * 3
    assert batch.data_sources == ["source 0"] * 3 + ["source 1"] * 3
    assert batch.extra_infos == [{"row": 0}] * 3 + [{"row": 1}] * 3


def test_consumed_prompts_are_returned_once():
    prompts_of_run = source(per_prompt=2)
    prompts_of_run.next_prompts()
    prompts_of_run.next_prompts()  # an iteration may draw twice
    assert prompts_of_run.pop_consumed() == ConsumedPrompts(0, 2, [0, 1, 2, 3])
    prompts_of_run.next_prompts()
    assert prompts_of_run.pop_consumed() == ConsumedPrompts(8, 2, [4, 0])


@pytest.mark.parametrize("weights", [(), (1.0, 2.0)])
def test_a_batch_that_was_read_ahead_is_the_next_and_no_part_of_the_state(weights):
    def start() -> PromptSource:
        return PromptSource(prompts(5), make_sampler((2, 3), weights, 3, 1, True), 2)

    plain, reads, resumed = start(), start(), start()
    for _ in range(5):
        reads.read_ahead()
        reads.read_ahead()
        assert reads.state_dict() == plain.state_dict()
        resumed.read_ahead()
        resumed.load_state_dict(reads.state_dict())
        expected = plain.next_prompts()
        for source_ in (reads, resumed):
            found = source_.next_prompts()
            assert found.sample_ids == expected.sample_ids
            assert found.ground_truths == expected.ground_truths
        assert reads.pop_consumed() == plain.pop_consumed()
        assert reads.state_dict() == plain.state_dict() == resumed.state_dict()


def test_train_weights_are_shares_of_the_files(make_config):
    store = PromptStore()
    for name in ("a", "b"):
        for _ in range(6):
            store.add(name, [1], Labels("", name))
        store.end_part()
    files = {"train_files": ["a.jsonl", "b.jsonl"], "shuffle": False}
    config = make_config(global_batch_size=4)
    for weights, sources in (((3.0, 1.0), "aaba" * 2), ((), "aaaaaabb")):
        data = DataConfig(**files, train_weights=weights)
        source = PromptSource.from_config(config.model_copy(update={"data": data}), store)
        found = [name for _ in range(2) for name in source.next_prompts().data_sources]
        assert "".join(found) == sources


def test_every_file_has_a_weight():
    with pytest.raises(ValidationError, match="must have one for each of the 2 files or data sets"):
        DataConfig(train_files=["a", "b"], train_weights=[1.0])
