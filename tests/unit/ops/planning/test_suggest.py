"""Suggested layouts of real models: what they promise holds when they are pasted."""

import re

import pytest

from mindspeed_rlxf.config.compose import compose
from mindspeed_rlxf.config.load import resolve
from mindspeed_rlxf.config.schema import RunConfig
from mindspeed_rlxf.ops.planning.memory import cache_rows, pool_memories
from mindspeed_rlxf.ops.planning.plan import Plan, plan
from mindspeed_rlxf.ops.planning.suggest import usable_bytes
from mindspeed_rlxf.ops.sizes import GIB, format_bytes

CLUSTER = ["device.kind=npu", "device.memory_gib=64", "runtime.address=head:6379"]
SUGGESTED = re.compile(r"\d\. ([\d.]+ GiB) of a device, rounds of generation: (\d+)$")


def planned(name: str, *overrides: str, told: list[str] | None = None) -> Plan:
    note = told.append if told is not None else (lambda _: None)
    return plan(configured(name, *overrides), note=note)


def configured(name: str, *overrides: str) -> RunConfig:
    return resolve(compose(name, [*CLUSTER, *overrides]), name)


def largest(config: RunConfig) -> int:
    return max(each.total for pool in config.resource_pool for each in pool_memories(config, pool))


@pytest.mark.parametrize(
    ("name", "overrides"),
    [
        ("grpo_trainer_llama31_8b_1node", ()),  # one pool, no critic
        ("ppo_trainer_llama32_1b", ()),  # a pool for each role
    ],
)
def test_every_suggestion_is_accepted_when_it_is_pasted_and_reaches_its_figures(
    name: str, overrides: tuple[str, ...]
) -> None:
    text = planned(name, *overrides, "plan.suggest=true").text
    lines = text.partition("Suggested layouts\n")[2].splitlines()
    assert len(lines) == 6
    sizes = []
    for title, words in zip(lines[::2], lines[1::2], strict=True):
        found = SUGGESTED.search(title)
        assert found is not None, title
        pasted = configured(name, *overrides, *words.split())
        assert format_bytes(largest(pasted)) == found[1]
        assert largest(pasted) <= usable_bytes(64 * GIB)
        replicas = pasted.rollout_layout.dp
        rows = cache_rows(pasted)
        assert int(found[2]) == -(-pasted.samples_per_iteration // replicas // rows)
        actor = pasted.actor_rollout
        sizes.append(actor.tensor_model_parallel_size * actor.pipeline_model_parallel_size)
    assert sizes == sorted(sizes), "the plainest come first"


def test_the_search_is_the_same_twice_and_tells_how_far_it_is(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from mindspeed_rlxf.ops.planning import available, suggest

    monkeypatch.setattr(suggest, "REPORT_EVERY_S", 0.0)
    monkeypatch.setattr(available, "free_disk", lambda folder: 2**40)  # other programs write, too
    told: list[str] = []
    runs = [
        planned("ppo_trainer_llama32_1b", "plan.suggest=true", told=told).text for _ in range(2)
    ]
    assert runs[0] == runs[1]
    assert told[0] == "suggest: 0 of 72 layouts, 0 fit"


def test_suggestions_need_the_memory_of_a_device() -> None:
    name = "ppo_trainer_llama32_1b"
    config = resolve(compose(name, [CLUSTER[0], CLUSTER[2], "plan.suggest=true"]), name)
    (problem,) = (each for each in plan(config).problems if each.key == "plan.suggest")
    assert str(problem) == (
        "plan.suggest=true needs device.memory_gib, which is unknown here; set it"
    )


def test_keys_are_spelled_as_the_file_nests_them() -> None:
    config = configured("ppo_trainer_llama32_1b", "plan.suggest=true")
    text = plan(config, nested=True).text.partition("Suggested layouts\n")[2]
    assert " actor_rollout_ref.actor_rollout." in text and " actor_rollout." not in text
    assert " critic." in text
