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
    batch = source(per_prompt=3).next_groups(2)
    assert [ids.tolist() for ids in batch.token_ids] == [[0, 1]] * 3 + [[1, 2]] * 3
    assert batch.ground_truths == ["truth 0"] * 3 + ["truth 1"] * 3
    assert batch.data_sources == ["source 0"] * 3 + ["source 1"] * 3
    assert batch.extra_infos == [{"row": 0}] * 3 + [{"row": 1}] * 3


def test_consumed_prompts_are_those_that_training_has_passed():
    prompts_of_run = source(per_prompt=2)
    prompts_of_run.next_groups(3)
    prompts_of_run.next_groups(4)  # further than is trained
    assert prompts_of_run.consume(4) == ConsumedPrompts(0, 2, [0, 1, 2, 3])
    assert prompts_of_run.consume(1) == ConsumedPrompts(8, 2, [4])
    assert prompts_of_run.consume(2) == ConsumedPrompts(10, 2, [0, 1])


@pytest.mark.parametrize("weights", [(), (1.0, 2.0)])
def test_the_state_is_the_first_group_that_is_not_consumed(weights):
    """Wherever the groups drawn and consumed end inside the sampler's batches."""

    def start() -> PromptSource:
        return PromptSource(prompts(5), make_sampler((2, 3), weights, 3, 1, True), 2)

    everything = start().next_groups(40)
    run, passed = start(), 0
    for drawn, consumed in [(1, 0), (4, 2), (3, 3), (7, 10), (2, 0), (5, 1), (0, 6)]:
        run.next_groups(drawn)
        run.read_ahead(drawn)
        assert run.consume(consumed).first_sample_id == 2 * passed
        passed += consumed
        resumed = start()
        resumed.read_ahead(2)
        resumed.load_state_dict(run.state_dict())
        again = resumed.next_groups(4)
        rows = range(2 * passed, 2 * passed + 8)
        assert again.sample_ids == list(rows)
        assert again.ground_truths == [everything.ground_truths[row] for row in rows]
        assert resumed.state_dict() == run.state_dict()


def test_train_weights_are_shares_of_the_files(make_config):
    store = PromptStore()
    for name in ("a", "b"):
        for _ in range(6):
            store.add(name, [1], Labels("", name))
        store.end_file()
    files = {"train_files": ["a.jsonl", "b.jsonl"], "shuffle": False}
    config = make_config(global_batch_size=4)
    for weights, sources in (((3.0, 1.0), "aaba" * 2), ((), "aaaaaabb")):
        data = DataConfig(**files, train_weights=weights)
        source = PromptSource.from_config(config.model_copy(update={"data": data}), store)
        found = [name for _ in range(2) for name in source.next_groups(4).data_sources]
        assert "".join(found) == sources


def test_every_file_has_a_weight():
    with pytest.raises(ValidationError, match="must have one for each of the 2 files or data sets"):
        DataConfig(train_files=["a", "b"], train_weights=[1.0])
