"""Runs whose samples are conversations: the same run with any timing, layout and after kills."""

import asyncio
import json
import math
import shutil
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from mindspeed_rlxf.agents.endpoint import Endpoint
from mindspeed_rlxf.agents.gateway import open_endpoint
from mindspeed_rlxf.agents.session import AGENTS, Session
from mindspeed_rlxf.cluster.interface import ColocatedRole
from mindspeed_rlxf.config.enums import Role
from mindspeed_rlxf.config.schema import RolloutConfig
from mindspeed_rlxf.data.batch import RoleOutput
from mindspeed_rlxf.data.tokenizer import load_tokenizer
from mindspeed_rlxf.roles.reward import RewardsFailed
from mindspeed_rlxf.roles.rollout import RolloutRole
from tests.distributed import agents, programs
from tests.distributed.groups import build_policy
from tests.distributed.llamas import MIXTRAL, QWEN3_MOE, make_llama, run_config
from tests.distributed.test_experts import EP2, TP2
from tests.distributed.test_parity_with_transformers import SP, make_prompts
from tests.distributed.test_slices import APART, Outcome, assert_same, run, run_with_kills
from tests.golden.runs import START
from tests.unit.agents.served import Client

LONG = pytest.mark.long
ITERATIONS = 3
KEYS = {
    "training.plugins": f"[{agents.__file__}]",
    "training.train_iters": ITERATIONS,
    "training.seq_length": 24,
    "actor_rollout.max_prompt_length": 6,  # of all prompts
    "actor_rollout.max_new_tokens": 16,
    "+reward.rules": "{arithmetic: agent}",
}
OF_AGENTS = ("rollout/turns", "rollout/tool_calls", "rollout/agent_failures", "reward/failed")


def lead(out: Path, runtime: Any, agent: str, name: str = "ppo", **more: Any) -> Outcome:
    return run(name, out, runtime, **{**KEYS, "rollout.agent": agent, **more})


@pytest.fixture(autouse=True)
def _registries(registries: None) -> None: ...


def test_an_agent_of_one_turn_trains_the_run_of_no_agent(warm_runtime: Any, tmp_path: Path) -> None:
    by_text = {"+reward.rules": "{arithmetic: exact_match}"}
    ours = lead(tmp_path / "agent", warm_runtime, "one_turn", **by_text)
    theirs = lead(tmp_path / "none", warm_runtime, "null", **by_text)
    for sample in ours.samples:
        assert sample.pop("turns") == [[0, len(sample["response_ids"])]]
    assert ours.samples == theirs.samples and ours.weights == theirs.weights
    assert {line["metrics"].pop("rollout/turns/max") for line in ours.metrics} == {1.0}
    for one, other in zip(ours.metrics, theirs.metrics, strict=True):
        kept = {k: v for k, v in one["metrics"].items() if not k.startswith(OF_AGENTS)}
        assert kept == other["metrics"]


def test_delays_of_agents_change_nothing(warm_runtime: Any, tmp_path: Path) -> None:
    one = lead(tmp_path / "one", warm_runtime, "two_turns")
    late = lead(tmp_path / "late", warm_runtime, "late")
    assert_same(one, late)
    assert one.metrics[0]["metrics"]["rollout/turns/mean"] == 2.0
    assert one.metrics[0]["metrics"]["critic/score/max"] > 0.0


@pytest.mark.parametrize(
    "keys", [{}, pytest.param({**APART, "rollout.max_staleness": 1}, marks=LONG)], ids=["0", "1"]
)
def test_a_program_leads_the_run_of_an_agent_in_the_process(
    warm_runtime: Any, tmp_path: Path, keys: dict[str, Any]
) -> None:
    keys = {"rollout.agent_lag": 2, "algorithm.turn_rewards": True, **keys}
    ours = lead(tmp_path / "agent", warm_runtime, "two_turns", **keys)
    program = {"rollout.program": f"{programs.__file__}:two_turns", "rollout.program_processes": 16}
    theirs = lead(tmp_path / "program", warm_runtime, "null", **keys, **program)
    assert_same(ours, theirs)
    assert ours.metrics[0]["metrics"]["rollout/turns/mean"] == 2.0


def test_log_probs_of_observations_change_no_bit_of_the_weights(
    warm_runtime: Any, tmp_path: Path
) -> None:
    """Though they are the old ones, weigh tokens, and may reject them."""
    reads = {
        "algorithm.old_log_probs": "recompute",
        "algorithm.rollout_is_threshold": 2.0,
        "+algorithm.rollout_rejection": "{seq_mean_k1: [0.9, 1.1]}",
    }
    one = lead(tmp_path / "one", warm_runtime, "two_turns", **reads)
    noisy = lead(tmp_path / "noisy", warm_runtime, "noisy", **reads)
    assert_same(one, noisy)


@pytest.mark.parametrize(
    ("name", "staleness"),
    [
        ("ppo", 0),
        ("ppo", 1),
        pytest.param("remax", 1, marks=LONG),
        pytest.param("filter_groups", 1, marks=LONG),
        pytest.param("filter_groups", 0, marks=LONG),
    ],
)
def test_ranks_that_generate_apart_give_the_run_of_one_process(
    warm_runtime: Any, tmp_path: Path, name: str, staleness: int
) -> None:
    ahead = {"rollout.max_staleness": staleness}
    leads = {"rollout.lead": 1} if staleness else {}
    one = lead(tmp_path / "one", warm_runtime, "two_turns", name, **ahead, **leads)
    other = lead(tmp_path / "other", warm_runtime, "late", name, **ahead, **APART)
    assert_same(one, other)
    assert max(one.ages) == staleness


@LONG
def test_a_replica_of_two_ranks_apart_leads_the_conversations_of_one_process(
    warm_runtime: Any, tmp_path: Path
) -> None:
    apart = {
        **APART,
        "+resource_pool.actor": 3,
        "actor_rollout.num_gpus_for_infer": 2,
        "rollout.tensor_model_parallel_size": 2,
    }
    first = {"training.train_iters": 1}
    one = lead(tmp_path / "one", warm_runtime, "two_turns", **first)
    other = lead(tmp_path / "other", warm_runtime, "late", **first, **apart)
    ids = [[sample["response_ids"] for sample in each.samples] for each in (one, other)]
    assert ids[0] == ids[1]


@pytest.mark.parametrize("keys", [{}, {**APART, "rollout.max_staleness": 1}], ids=["0", "1"])
def test_a_killed_run_goes_on_with_every_sample_once(
    warm_runtime: Any, tmp_path: Path, keys: dict[str, Any]
) -> None:
    keys = {**KEYS, "rollout.agent": "two_turns", "training.save_interval": 1, **keys}
    whole = run("ppo", tmp_path / "whole", warm_runtime, **keys)
    killed = run_with_kills("ppo", tmp_path / "killed", warm_runtime, [1, 2], **keys)
    assert_same(killed, whole)
    ids = [sample["sample_id"] for sample in killed.samples]
    assert sorted(ids) == list(range(16 * ITERATIONS))


@pytest.mark.parametrize("name", ["grpo", pytest.param("filter_groups", marks=LONG),
                                  pytest.param("remax", marks=LONG),
                                  pytest.param("online_dpo", marks=LONG)])  # fmt: skip
def test_other_algorithms_and_the_engine_of_transformers_lead_the_same_conversations(
    warm_runtime: Any, tmp_path: Path, name: str
) -> None:
    native = lead(tmp_path / "native", warm_runtime, "two_turns", name)
    whole = lead(
        tmp_path / "whole", warm_runtime, "two_turns", name, **{"rollout.engine": "transformers"}
    )
    first = [
        [s["response_ids"] for s in run.samples if s["iteration"] == 1] for run in (native, whole)
    ]
    assert first[0] == first[1]
    gaps = [line["metrics"].get("rollout/log_prob_gap_max", 0.0) for line in native.metrics]
    assert max(gaps) < 1e-4


def test_failed_conversations_are_counted_and_not_trained(
    warm_runtime: Any, tmp_path: Path
) -> None:
    keys = {"rollout.turn_timeout_s": 1.0, "training.train_iters": 1}
    outcome = lead(tmp_path / "some", warm_runtime, "failing", **keys, **{"reward.max_failed": 3})
    metrics = outcome.metrics[0]["metrics"]
    assert metrics["rollout/agent_failures/exception"] == 2.0  # samples 4 and 13 of 16
    assert metrics["rollout/agent_failures/timeout"] == 1.0
    assert metrics["rollout/agent_failures"] == metrics["reward/masked"] == 3.0
    with pytest.raises(RewardsFailed, match="no database") as raised:
        lead(tmp_path / "too_many", warm_runtime, "failing", **keys, **{"reward.max_failed": 1})
    assert "raise OSError" in raised.value.failed_sample


def test_rewards_at_their_turns_train_another_critic(warm_runtime: Any, tmp_path: Path) -> None:
    keys = {"training.train_iters": 1}
    at_end = lead(tmp_path / "end", warm_runtime, "two_turns", **keys)
    at_turns = lead(
        tmp_path / "turns", warm_runtime, "two_turns", **keys, **{"algorithm.turn_rewards": True}
    )
    one, other = at_end.metrics[0]["metrics"], at_turns.metrics[0]["metrics"]
    assert [s["response_ids"] for s in at_end.samples] == [
        s["response_ids"] for s in at_turns.samples
    ]
    assert math.isclose(one["critic/rewards/mean"], other["critic/rewards/mean"], abs_tol=1e-6)
    assert one["critic/returns/mean"] > other["critic/returns/mean"], "less is ahead of a token"


# A turn ends by <eos>; another role's message stands between plus signs.
TEMPLATE = """{% for message in messages -%}
{% if message.role == 'assistant' %}{{ message.content }}<eos>
{%- elif message.role == 'tool' %}+{{ message.content }}+
{%- else %}{{ message.content }}{% endif %}
{%- endfor %}"""


def test_an_agent_reads_a_chat_and_calls_a_tool(warm_runtime: Any, tmp_path: Path) -> None:
    """The tool's answer is 2 to 3 digits behind the end of a turn, which had none."""
    shutil.copytree(START, tmp_path / "chat")
    tokenizer = load_tokenizer(str(tmp_path / "chat"))
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(tmp_path / "chat")
    lines = (START / "prompts.jsonl").read_text().splitlines()
    rows = [json.loads(line) for line in lines]
    chats = [{**row, "prompt": [{"role": "user", "content": row["prompt"]}]} for row in rows]
    file = tmp_path / "chats.jsonl"
    file.write_text("".join(json.dumps(chat) + "\n" for chat in chats))
    keys = {
        "training.tokenizer_name_or_path": tmp_path / "chat",
        "data.train_files": file,
        "rollout.tools": f"[{agents.__file__}:add]",
        "training.train_iters": 2,
    }
    outcome = lead(tmp_path / "run", warm_runtime, "calculates", **keys)
    for sample in outcome.samples:
        (_, end), (start, _) = sample["turns"]
        text = tokenizer.decode(sample["response_ids"][end:start])
        ending = "" if sample["response_ids"][end - 1] == 2 else "<eos>"
        assert text == f"{ending}+{sample['ground_truth']}+"
    assert {s["response_ids"][s["turns"][0][1] - 1] == 2 for s in outcome.samples} == {True, False}


class Talk:
    """Two turns, on tokens whose text does not matter."""

    async def run(self, session: Session) -> None:
        await session.say(2 + session.sample_id % 4)
        session.give([{"role": "user", "content": "12"}])
        await session.say(3)


NUM_CLIENTS = 64


class TalkByGateway:
    """The same by HTTP, all conversations at once."""

    def __init__(self) -> None:
        self.clients = ThreadPoolExecutor(NUM_CLIENTS)

    async def run(self, session: Session) -> None:
        async with open_endpoint(session) as endpoint:
            talked = self.clients.submit(self.talk, endpoint, session.sample_id)
            await asyncio.wrap_future(talked)

    def talk(self, endpoint: Endpoint, sample_id: int) -> None:
        client, messages = Client(endpoint.base_url, endpoint.api_key), endpoint.messages
        answer = client.say(messages, max_tokens=2 + sample_id % 4)
        client.say([*messages, answer, {"role": "user", "content": "12"}], max_tokens=3)


AGENTS.setdefault("talk", Talk)
AGENTS.setdefault("talk_by_gateway", TalkByGateway)


class WatchedRollout(RolloutRole):
    """Shows the rows that a rank knows."""

    def show(self) -> RoleOutput:
        """Report: sample id -> (tokens, whether they are trained, log-probs)."""
        rows = {}
        for sample in self.samples.known:
            result = sample.result
            assert result is not None
            rows[sample.request.sample_id] = result.tokens, result.trained, result.log_probs
        return RoleOutput(report=rows)


def talk(
    runtime: Any,
    folder: Path,
    architecture: Any,
    size: int,
    keys: Any,
    count: int = 8,
    by_gateway: bool = False,
) -> list[Any]:
    """Lead conversations in slices of three steps; return the rows of each replica."""
    policy = {"num_samples_per_step": 2, "do_sample": True, "temperature": 1.3}
    training = {"tokenizer_name_or_path": str(START)}
    config = run_config(
        folder, folder, architecture, keys, pool=size, actor_rollout=policy, training=training
    )
    agent = "talk_by_gateway" if by_gateway else "talk"
    section = RolloutConfig(agent=agent, gateway=by_gateway, slice_steps=3)
    config = config.model_copy(update={"rollout": section})
    pool = runtime.create_pools({"main": [size]})["main"]
    eos = [3, 8, 14]
    actor, rollout = build_policy(config, pool, eos)
    peer = ColocatedRole(Role.ACTOR_ROLLOUT)
    rollout.group.build(WatchedRollout, config, tuple(eos), peer, None).result()
    rollout._version = None
    rollout.update_weights(actor, 0)
    prompts = make_prompts(8).select([sample_id % 8 for sample_id in range(count)])
    rollout.add(replace(prompts, sample_ids=list(range(count))), 5).result()
    unfinished = 1
    while unfinished:
        unfinished = sum(report.unfinished for report in rollout.advance(3).result())
    replies = rollout.group.call(WatchedRollout.show).replies()
    return [reply.report for reply in replies if reply.report is not None]


SHARED_LAYOUTS = [
    pytest.param(QWEN3_MOE, 2, EP2, id="ep2"),
    pytest.param(MIXTRAL, 2, {**TP2, **SP}, id="tp2"),
    pytest.param(MIXTRAL, 4, {**TP2, **EP2, **SP}, id="tp2-ep2", marks=LONG),
]


@pytest.mark.parametrize(("architecture", "size", "keys"), SHARED_LAYOUTS)
def test_ranks_that_share_a_replica_or_experts_lead_the_conversations_of_one(
    warm_runtime: Any, tmp_path: Path, architecture: Any, size: int, keys: Any
) -> None:
    make_llama(tmp_path, architecture)
    [one] = talk(warm_runtime, tmp_path, architecture, 1, {})
    same_rows(talk(warm_runtime, tmp_path, architecture, size, keys), one)
    assert any(trained is not None for _, trained, _ in one.values())


def same_rows(replicas: list[Any], one: Any) -> None:
    assert set().union(*replicas) == one.keys()
    for rows in replicas:
        for sample_id, (tokens, trained, log_probs) in rows.items():
            expected = one[sample_id]
            assert (tokens, trained) == expected[:2]
            assert log_probs == pytest.approx(expected[2], abs=1e-5)


@pytest.mark.parametrize(
    ("architecture", "size", "keys"),
    [pytest.param(MIXTRAL, 1, {}, id="one"), *SHARED_LAYOUTS],
)
def test_the_gateway_leads_sixty_four_conversations_at_once_as_agents_of_one_process(
    warm_runtime: Any, tmp_path: Path, architecture: Any, size: int, keys: Any
) -> None:
    make_llama(tmp_path, architecture)
    [one] = talk(warm_runtime, tmp_path, architecture, 1, {}, NUM_CLIENTS)
    gateway = talk(warm_runtime, tmp_path, architecture, size, keys, NUM_CLIENTS, by_gateway=True)
    same_rows(gateway, one)
    assert len({tuple(tokens) for tokens, _, _ in one.values()}) > NUM_CLIENTS / 2
