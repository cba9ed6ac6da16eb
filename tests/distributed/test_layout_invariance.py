"""Three iterations on fixed responses end at the same weights in every layout, placement of the
roles and runtime."""

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mindspeed_rlxf.checkpoint.directory import RunDirectory
from mindspeed_rlxf.config.enums import CONFIGURED, RewardKind, Role
from mindspeed_rlxf.config.schema import (
    ArchitectureConfig,
    KlControlConfig,
    OptimizerConfig,
    RunConfig,
)
from mindspeed_rlxf.data.fixed_responses import FixedResponses
from mindspeed_rlxf.data.prompts import Prompt
from mindspeed_rlxf.trainer.preflight import Prepared
from tests.chaos.same_run import MACHINE_METRICS
from tests.distributed.cluster.test_local_runtime import torchrun
from tests.distributed.conftest import NUM_DEVICES
from tests.distributed.llamas import (
    MIXTRAL,
    PLAIN,
    QWEN2,
    QWEN3,
    QWEN3_MOE,
    QWEN3_ONE_GROUP,
    SHARES_GROUPS,
    TIED,
    make_models,
    run_config,
    with_fsdp,
)
from tests.processes import read_metrics, run_python
from tests.training import run
from tests.trl.record import make_tokenizer
from tests.unit.weights.folders_of import read_folder

ITERATIONS, BATCH, EOS = 5, 16, 2  # iterations of an epoch
COMPARED = 3  # iterations of a run that is compared with another one
TP2 = {"tensor_model_parallel_size": 2}
PP2 = {"pipeline_model_parallel_size": 2}
SP2 = {**TP2, "sequence_parallel": True}
VP2 = {**PP2, "num_layers_per_virtual_pipeline_stage": 1}  # for four layers
TOKENS = {"max_tokens_per_micro_batch": 40}  # a sample has 2 to 35
CP2 = {"context_parallel_size": 2}
FULL = {"recompute": "full"}
AWAY = {"offload": {"weights": True, "optimizer": True}}
IN_ORDER = {"balance_by_length": False}
EP2 = {"expert_model_parallel_size": 2}
WHITENED = {"algorithm": {"whiten_rewards": True}}  # its sums go over the replicas
SHARDED = {"optimizer": {"use_distributed_optimizer": True}}

# name -> processes, keys of every role, keys by section
LAYOUTS: dict[str, tuple[int, dict[str, Any], dict[str, Any]]] = {
    "dp2": (2, {}, {}),
    "dp4": (4, {}, {}),
    "tp2": (2, TP2, {}),
    "tp2 sequence parallel": (2, SP2, {}),
    "pp2": (2, PP2, {}),
    "cp2": (2, CP2, {}),
    "cp4 repeated keys": (4, {"context_parallel_size": 4}, {}),
    "cp2 by tokens": (2, {**CP2, **TOKENS}, {}),
    "cp2 distributed optimizer": (2, CP2, SHARDED),
    "cp2 dp2": (4, CP2, {}),
    "cp2 pp2": (4, {**CP2, **PP2}, {}),
    "cp2 tp2": (4, {**CP2, **TP2}, {}),
    "cp2 tp2 sequence parallel": (4, {**CP2, **SP2}, {}),
    "cp2 recompute": (2, {**CP2}, {"actor_rollout": FULL, "critic": FULL}),
    "cp2 offload": (2, {**CP2}, {"actor_rollout": AWAY, "critic": AWAY}),
    "cp2 dp2 tp2 sequence parallel distributed optimizer": (8, {**CP2, **SP2}, SHARDED),
    "virtual pipeline cp2": (4, {**CP2, **VP2}, {}),
    "virtual pipeline cp2 tp2 sequence parallel": (8, {**CP2, **VP2, **SP2}, {}),
    "actor cp2, critic tp2": (2, {}, {"actor_rollout": CP2, "ref": CP2, "critic": TP2}),
    "tp2 pp2": (4, {**TP2, **PP2}, {}),
    "tp2 dp2": (4, TP2, {}),
    "pp2 dp2": (4, PP2, {}),
    "dp2 distributed optimizer": (2, {}, SHARDED),
    "micro-batch 1": (1, {"micro_batch_size": 1}, {}),
    "micro-batch 4": (1, {"micro_batch_size": 4}, {}),
    "by tokens": (1, TOKENS, {}),
    "by tokens dp2": (2, TOKENS, {}),
    "by tokens dp2 in order": (2, TOKENS, {"actor_rollout": IN_ORDER, "critic": IN_ORDER}),
    "by tokens tp2 sequence parallel": (2, {**SP2, **TOKENS}, {}),
    "by tokens pp2 dp2": (4, {**PP2, **TOKENS}, {}),
    "virtual pipeline": (2, VP2, {}),
    "virtual pipeline by tokens": (2, {**VP2, **TOKENS}, {}),
    "virtual pipeline dp2 distributed optimizer": (4, VP2, SHARDED),
    "virtual pipeline tp2 sequence parallel": (4, {**VP2, **SP2}, {}),
    "padded": (1, {"packed_sequences": False}, {}),
    "padded pp2": (2, {**PP2, "packed_sequences": False}, {}),
    "actor tp2, critic pp2": (2, {}, {"actor_rollout": TP2, "critic": PP2}),
    "actor pp2, ref tp2": (2, {}, {"actor_rollout": PP2, "ref": TP2}),
}
if SHARES_GROUPS:  # each by two ranks
    LAYOUTS["tp4 sequence parallel"] = (4, {**SP2, "tensor_model_parallel_size": 4}, {})
# For mixtures of experts.
SPARSE: dict[str, tuple[int, dict[str, Any], dict[str, Any]]] = {
    "dp2 ep2": (2, EP2, {}),
    "dp4 ep2": (4, EP2, {}),
    "dp2 ep2 distributed optimizer": (2, EP2, SHARDED),
    "tp2 dp2 ep2": (4, {**TP2, **EP2, "sequence_parallel": True}, {}),
    "pp2 dp2 ep2": (4, {**PP2, **EP2}, {}),
    "cp2 ep2": (2, {**CP2, **EP2}, {}),
    "cp2 dp2 ep4": (4, {**CP2, "expert_model_parallel_size": 4}, {}),
    "cp2 tp2 ep2 distributed optimizer": (4, {**CP2, **SP2, **EP2}, SHARDED),
    "dp2 ep2 padded": (2, {**EP2, "packed_sequences": False}, {}),
}
# Four responses to a prompt.
FOUR: dict[str, dict[str, Any]] = {
    "training": {"global_batch_size": BATCH // 4},
    "actor_rollout": {"n_samples_per_prompt": 4},
}
UNSHUFFLED = {
    **FOUR,
    "actor_rollout": {**FOUR["actor_rollout"], "shuffle_minibatch": False},
    "critic": {"shuffle_minibatch": False},
}
RECOMPUTED = {
    section: keys if section == "training" else {**keys, "recompute": "full"}
    for section, keys in UNSHUFFLED.items()
}
FOURS, APART = {"micro_batch_size": 4}, {"micro_batch_size": 4, "share_prompts": False}
GROUPS = {
    "shuffled, apart": (1, APART, FOUR),
    "shuffled": (1, FOURS, FOUR),
    "shuffled dp2": (2, FOURS, FOUR),
    "apart": (1, APART, UNSHUFFLED),
    "in order": (1, FOURS, UNSHUFFLED),
    "in order dp2": (2, FOURS, UNSHUFFLED),
    "in order cp2": (2, {**FOURS, **CP2}, UNSHUFFLED),
    "in order by tokens cp2 tp2": (4, {**TOKENS, **CP2, **SP2}, UNSHUFFLED),
    "in order tp2 sequence parallel pp2": (4, {**FOURS, **SP2, **PP2}, UNSHUFFLED),
    "in order by tokens dp2": (2, TOKENS, UNSHUFFLED),
    "in order, recompute": (1, FOURS, RECOMPUTED),
}
ALONE = ("dp2", "pp2", "tp2 pp2")  # what the other architectures are run in
PAIRWISE = [
    ("untied", "dp2 distributed optimizer"),
    ("untied", "cp2"),
    ("qwen3", "cp2 tp2 sequence parallel"),
    ("qwen3, one group" if SHARES_GROUPS else "qwen3", "tp2 pp2"),
]
FOUR_LAYERS = {
    "untied, 4 layers": PLAIN.model_copy(update={"num_layers": 4}),
    "tied, 4 layers": TIED.model_copy(update={"num_layers": 4}),
}
ARCHITECTURES = FOUR_LAYERS | {
    "untied": PLAIN,
    "tied": TIED,
    "qwen2": QWEN2,
    "qwen3": QWEN3,
    "qwen3, one group": QWEN3_ONE_GROUP,
    "qwen3-moe": QWEN3_MOE,
    "mixtral": MIXTRAL,
}


def partitions(roles: list[Role]) -> Iterator[list[list[Role]]]:
    """Every way to put roles on pools: the last one joins a pool of the others, or has its own."""
    if not roles:
        yield []
        return
    *others, last = roles
    for pools in partitions(others):
        for i in range(len(pools)):
            yield [*pools[:i], [*pools[i], last], *pools[i + 1 :]]
        yield [*pools, [last]]


PLACEMENTS = {
    " | ".join(" ".join(role.value for role in pool) for pool in pools): pools
    for pools in partitions(list(CONFIGURED))
}


def fixed_run(
    folder: Path, out: Path, architecture: ArchitectureConfig, size: int,
    layout: dict[str, Any], sections: dict[str, Any],
) -> tuple[RunConfig, Prepared]:  # fmt: skip
    """Two epochs of two steps in each iteration, adaptive KL, shuffled mini-batches."""
    # adam_eps: above a gradient's rounding (1e-10) and below the gradients (1e-4). With 1e-8 Adam
    # makes a step of 1e-4 of a single weight whose gradient is nothing but rounding.
    usual = {"lr": 1e-3, "lr_decay_style": "linear", "adam_eps": 1e-6}
    optimizer = OptimizerConfig(**{**usual, **sections.get("optimizer", {})})
    merged: dict[str, dict[str, Any]] = {
        "training": {
            "train_iters": COMPARED,
            "global_batch_size": BATCH,
            "output_dir": str(out),
            "tokenizer_name_or_path": str(folder / "tokenizer"),
        },
        "actor_rollout": {
            "ppo_mini_batch_size": 8, "ppo_epochs": 2, "do_sample": True, "shuffle_minibatch": True,
        },
        "critic": {
            "critic_mini_batch_size": 8, "critic_update_epochs": 2, "shuffle_minibatch": True,
            "cliprange_value": 0.2,
        },
        "algorithm": {
            "kl_ctrl": KlControlConfig(type="adaptive", kl_coef=0.05, target_kl=0.01, horizon=100),
            "missing_eos_penalty": 1.0,
        },
        "reward": {"kind": RewardKind.MODEL, "load": str(folder / "reward")},
        "ref": {},
    }  # fmt: skip
    for name, keys in sections.items():
        if name != "optimizer":
            merged[name] = merged[name] | keys
    config = run_config(
        folder / "lm", folder / "value", architecture,
        {"micro_batch_size": 2, **layout}, size, optimizer, **merged,
    )  # fmt: skip
    rng = np.random.default_rng(5)
    count = ITERATIONS * BATCH
    prompts = [
        Prompt(i, "", rng.integers(3, 32, size=rng.integers(1, 20)), "", "test")
        for i in range(count)
    ]
    assert architecture.vocab_size >= 32
    return config, Prepared(
        tokenizer=make_tokenizer(),
        eos_token_ids=(EOS,),
        train_prompts=prompts,
        fixed_responses=FixedResponses({i: response(rng) for i in range(count)}),
    )


def response(rng: np.random.Generator) -> list[int]:
    """1 to 16 tokens, half of them ended by EOS."""
    tokens = rng.integers(3, 32, size=rng.integers(1, 17)).tolist()
    return [*tokens[:-1], EOS] if rng.random() < 0.5 else tokens


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Folders with policy, value and reward model of each architecture."""
    return {
        name: make_models(tmp_path_factory.mktemp(name), architecture)
        for name, architecture in ARCHITECTURES.items()
    }


START = {"actor": "lm", "critic": "value"}  # role -> folder of the model that it starts from


class Outcome:
    """Metrics of every iteration and the final weights of the trained roles."""

    def __init__(self, directory: RunDirectory) -> None:
        self.metrics = read_metrics(directory.path)
        folders = {role: directory.path / "final" / f"{role}_hf" for role in START}
        self.weights = {r: load_folder(folder) for r, folder in folders.items() if folder.exists()}


def load_folder(folder: Path) -> dict[str, Any]:
    return {name: tensor.double() for name, tensor in read_folder(folder).items()}


_outcomes: dict[str, Outcome] = {}


def outcome(
    runtime: Any, folder: Path, out: Path, name: str, layout: str | None = None,
    pools: list[list[Role]] | None = None,
) -> Outcome:  # fmt: skip
    """pools: the roles of each pool, which get equal parts of the devices; None = one pool."""
    size, keys, sections = (LAYOUTS | SPARSE | GROUPS)[layout] if layout else (1, {}, {})
    config, prepared = fixed_run(
        folder, out, ARCHITECTURES[name], size, keys, {**sections, **WHITENED}
    )
    if pools is not None:
        placed = {role: f"pool{i}" for i, pool in enumerate(pools) for role in pool}
        sizes = {pool: [NUM_DEVICES // len(pools)] for pool in placed.values()}
        config = config.model_copy(update={"placement": placed, "resource_pool": sizes})
    return Outcome(run(config, runtime, prepared))


def cases() -> list[Any]:
    """Every layout of PLAIN and some of the others; what pairs of keys leave out takes longer."""
    deep = [layout for layout in LAYOUTS if "virtual pipeline" in layout]
    found = [("untied", layout) for layout in LAYOUTS if layout not in deep]
    found += [(name, layout) for name in FOUR_LAYERS for layout in ["pp2", *deep]]
    found += [(name, layout) for name in ("tied", "qwen2", "qwen3") for layout in ALONE]
    found += [("qwen3", "cp2 tp2 sequence parallel")]
    shared = ("tp2 pp2", "tp2 dp2") if SHARES_GROUPS else ()
    found += [("qwen3, one group", layout) for layout in shared]
    found += [
        (name, layout)
        for name in ("qwen3-moe", "mixtral")
        for layout in (*SPARSE, "tp2 sequence parallel")
    ]
    return [
        pytest.param(*case, marks=() if case in PAIRWISE else pytest.mark.long) for case in found
    ]


@pytest.mark.parametrize(("name", "layout"), cases())
def test_the_layout_changes_nothing(warm_runtime, tmp_path, models, name, layout):
    one = one_process(warm_runtime, tmp_path, models[name], name)
    other = outcome(warm_runtime, models[name], tmp_path / "other", name, layout)
    compare(one, other, models[name])


@pytest.mark.long
@pytest.mark.parametrize("placement", PLACEMENTS)
def test_the_placement_changes_nothing(warm_runtime, tmp_path, models, placement):
    one = one_process(warm_runtime, tmp_path, models["untied"], "untied")
    pools = PLACEMENTS[placement]
    other = outcome(warm_runtime, models["untied"], tmp_path / "other", "untied", pools=pools)
    compare(one, other, models["untied"])


@pytest.mark.parametrize(
    "roles",
    [
        pytest.param([Role.ACTOR_ROLLOUT, Role.REF], id="actor"),
        pytest.param(CONFIGURED, id="all", marks=pytest.mark.long),
    ],
)
def test_the_training_engine_changes_nothing(warm_runtime, tmp_path, models, roles):
    """The other roles are Megatron's, on a pool of their own."""
    one = one_process(warm_runtime, tmp_path, models["untied"], "untied")
    config, prepared = fixed_run(models["untied"], tmp_path / "other", PLAIN, 1, {}, WHITENED)
    config = with_fsdp(config, roles, size=2)
    compare(one, Outcome(run(config, warm_runtime, prepared)), models["untied"])


@pytest.mark.long
@pytest.mark.parametrize("ranks", [1, 2])
def test_the_local_runtime_changes_nothing(warm_runtime, tmp_path, models, ranks):
    one = one_process(warm_runtime, tmp_path, models["untied"], "untied")
    launcher = torchrun() if ranks > 1 else []
    words = "tests.distributed.local_run", models["untied"], tmp_path / "other", ranks
    run_python(*launcher, "-m", *words, timeout_s=120)
    compare(one, Outcome(RunDirectory(tmp_path / "other")), models["untied"])


@pytest.mark.long
def test_balance_by_length_changes_nothing(warm_runtime, tmp_path, models):
    """Other samples on each rank, in other micro-batches, in forward passes and updates."""
    balanced, in_order = (
        outcome(warm_runtime, models["untied"], tmp_path / layout, "untied", layout)
        for layout in ("by tokens dp2", "by tokens dp2 in order")
    )
    compare(in_order, balanced, models["untied"])
    for role, weights in in_order.weights.items():
        for name, tensor in weights.items():
            assert (balanced.weights[role][name] - tensor).abs().max() < 1e-5, name


@pytest.mark.parametrize(
    ("name", "apart", "shared"),
    [
        ("untied", "apart", "in order dp2"),
        *(
            pytest.param(*case, marks=pytest.mark.long)
            for case in (
                ("untied", "apart", "in order"),
                ("untied", "apart", "in order, recompute"),
                ("untied", "apart", "in order tp2 sequence parallel pp2"),
                ("untied", "apart", "in order by tokens dp2"),
                ("untied", "apart", "in order cp2"),
                ("untied", "apart", "in order by tokens cp2 tp2"),
                ("untied", "shuffled, apart", "shuffled"),
                ("untied", "shuffled, apart", "shuffled dp2"),
                ("qwen3-moe", "apart", "in order"),
            )
        ),
    ],
)
def test_sharing_prompts_changes_nothing(warm_runtime, tmp_path, models, name, apart, shared):
    one, other = (
        outcome(warm_runtime, models[name], tmp_path / layout, name, layout)
        for layout in (apart, shared)
    )
    compare(one, other, models[name])
    computed = [
        sum(line["throughput/computed_tokens"] for line in each.metrics) for each in (one, other)
    ]
    assert computed[1] < 0.9 * computed[0]


def one_process(runtime: Any, tmp_path: Path, folder: Path, name: str) -> Outcome:
    """What all others are compared with, made once for each architecture."""
    if name not in _outcomes:
        _outcomes[name] = outcome(runtime, folder, tmp_path / "one", name)
    return _outcomes[name]


def compare(one: Outcome, other: Outcome, folder: Path, roles: Iterable[str] = START) -> None:
    """folder: the models that both started from; roles: that have learnt"""
    assert one.weights.keys() == other.weights.keys() == set(roles)
    for role in roles:
        before = load_folder(folder / START[role])
        ours, theirs = one.weights[role], other.weights[role]
        moved = distance(ours, before)
        assert moved > 1e-3 * distance(before, {k: 0 * v for k, v in before.items()})
        assert distance(theirs, ours) < 1e-4 * moved, role
    compare_metrics(one.metrics, other.metrics)


def distance(a: dict[str, Any], b: dict[str, Any]) -> float:
    assert a.keys() == b.keys()
    return float(sum((a[k] - b[k]).square().sum() for k in a) ** 0.5)


def compare_metrics(one: list[dict[str, float]], other: list[dict[str, float]]) -> None:
    """1e-5 relative on average, 1e-4 at most, 1e-6 absolute near zero; clips within one token."""
    assert len(one) == len(other) == COMPARED
    for line in one + other:  # the weights that generation received are those that learn
        gap = "rollout/log_prob_gap_"  # without a pass before the update there is the mean alone
        assert line.get(f"{gap}max", line[f"{gap}mean"]) < 1e-4
    names = [n for n in one[0] if not n.startswith((*MACHINE_METRICS, "rollout/"))]
    for name in names:
        ours, theirs = (np.array([line[name] for line in lines]) for lines in (one, other))
        if name.endswith("clipfrac"):
            # One token of one of the four steps, each of at least 32 tokens.
            assert ours[0] > 0.01, f"{name}: nothing is clipped here"
            assert np.abs(ours - theirs).max() <= 1 / 32 / 4, name
            continue
        error = np.abs(ours - theirs)
        relative = error / np.maximum(np.abs(ours), 1e-12)
        bad = (relative > 1e-4) & (error > 1e-6)
        assert not bad.any(), (name, ours, theirs)
        assert relative.mean() < 1e-5 or error.mean() < 1e-6, (name, ours, theirs)
