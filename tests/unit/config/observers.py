"""Functions that compute from a configuration what the package makes of it.

`test_every_key_works` changes one key and asserts that the result of a function changes too. Each
function runs the code of the package that reads certain keys, with stand-ins for all that needs a
device, and returns its results. No function returns the configuration itself.
"""

import contextlib
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock, patch

import numpy as np
import torch

from mindspeed_rlxf import device
from mindspeed_rlxf.algorithms.masked import alone
from mindspeed_rlxf.checkpoint.directory import RunDirectory
from mindspeed_rlxf.cluster import local
from mindspeed_rlxf.config.enums import DeviceKind
from mindspeed_rlxf.config.problems import UserError
from mindspeed_rlxf.config.schema import RunConfig
from mindspeed_rlxf.data.batch import ExperienceInputs, LogProbs, Scores, Values
from mindspeed_rlxf.data.indexed_prompts import IndexedPrompts
from mindspeed_rlxf.data.prompts import Prompt
from mindspeed_rlxf.engine import build, engine
from mindspeed_rlxf.engine.step_guard import SkippedSteps
from mindspeed_rlxf.engine.train_engine import TokenLogProbs
from mindspeed_rlxf.models.adapters import LinearAdapters
from mindspeed_rlxf.models.attention import inverse_frequencies
from mindspeed_rlxf.models.parameters import Head, stage_parameters
from mindspeed_rlxf.models.transformer import recompute_settings, transformer_config
from mindspeed_rlxf.ops.doctor import checks as doctor_checks
from mindspeed_rlxf.ops.planning import available
from mindspeed_rlxf.ops.planning.plan import plan
from mindspeed_rlxf.reporting.metric_table import validation_score
from mindspeed_rlxf.rewards import plans, sandbox as sandboxes
from mindspeed_rlxf.rewards.manager import RewardManager
from mindspeed_rlxf.rewards.sandbox import Sandbox
from mindspeed_rlxf.roles import actor, critic
from mindspeed_rlxf.roles.objectives import AdvantageComputer, make_objective
from mindspeed_rlxf.rollout.server_sizes import server_rows
from mindspeed_rlxf.rollout.vllm.server import server_command
from mindspeed_rlxf.trainer import ppo, preflight, recorder, run
from mindspeed_rlxf.trainer.prompt_source import PromptSource
from mindspeed_rlxf.trainer.stopping import Stopped
from mindspeed_rlxf.trainer.validation import Scored, measure
from tests.unit.roles.test_experience import HAS_EOS, LENGTHS, rollouts_of

Observer = Callable[[RunConfig], Any]
NUM_PROMPTS = 200


class Over(Exception):
    """Ends the observed code as soon as the observer has seen enough."""


def noise(seed: int, *shape: int) -> torch.Tensor:
    """Return random numbers in [0, 1) of this shape."""
    return torch.rand(*shape, generator=torch.Generator().manual_seed(seed))


def planned(config: RunConfig) -> str:
    """Return the text of the plan, on a host with fixed memory and disk."""
    disk = SimpleNamespace(free=2**40)
    with (
        patch.object(device, "host_memory", return_value=2**40),
        patch.object(available.shutil, "disk_usage", return_value=disk),
    ):
        return plan(config).text


def megatron(config: RunConfig) -> Any:
    """Return Megatron's configuration of the actor, its weight shapes and rotary frequencies."""
    architecture = config.actor_rollout.architecture
    fields = vars(transformer_config(architecture)).items()
    numbers = {key: value for key, value in fields if not callable(value)}
    shapes = [repr(part) for part in stage_parameters(architecture, Head.LANGUAGE_MODEL, 0, 1)]
    return repr(numbers), shapes, inverse_frequencies(architecture).tolist()


def recomputed(config: RunConfig) -> Any:
    """Return the settings for recomputing activations that Megatron gets for actor and critic."""
    return [recompute_settings(role) for role in (config.actor_rollout, config.value_model)]


def fresh_head(config: RunConfig) -> Any:
    """Return the weights of the critic's score head where its folder has none."""
    head = SimpleNamespace(weight=torch.zeros(1, 4))
    stub: Any = SimpleNamespace(
        weights=SimpleNamespace(load=lambda folder: ["score.weight"]),
        chunks=[SimpleNamespace(score=head)],
        role=config.value_model,
        source="",
    )
    with patch.object(engine, "open_weights"):
        engine.MegatronEngine._load_weights(stub, config.training.seed)
    return head.weight.tolist()


def adapted(config: RunConfig) -> Any:
    """Return what the adapters of an actor's linear add to its output, in training."""
    actor = config.actor_rollout
    table = stage_parameters(actor.architecture, Head.LANGUAGE_MODEL)
    row = next(each for each in table if each.name.endswith("linear_fc1.weight"))
    linear = torch.nn.Linear(actor.architecture.hidden_size, 1)
    linear.sequence_parallel = False
    adapters = LinearAdapters(linear, row, actor.architecture, 1, actor.lora)
    for seed, parameter in enumerate(adapters.parameters()):
        parameter.data.copy_(noise(seed, *parameter.shape))
    with (
        patch.object(LinearAdapters, "_exchange", lambda _, inner: inner),
        torch.random.fork_rng(devices=[]),
    ):
        torch.manual_seed(1)
        return adapters(noise(9, 3, 1, actor.architecture.hidden_size)).tolist()


def rates(config: RunConfig) -> list[Any]:
    """Return the learning rate and weight decay of the actor in each iteration."""
    keys = config.actor_rollout.optimizer
    stub: Any = SimpleNamespace(param_groups=[{"lr": -1.0, "weight_decay": -1.0}])
    schedule = build.build_scheduler(keys, stub, config.training.train_iters)
    found = []
    for _ in range(config.training.train_iters):
        found.append(dict(stub.param_groups[0]))
        schedule.step(1)
    return found


def adam(config: RunConfig) -> Any:
    """Return the configuration of the actor's optimizer that Megatron gets."""
    with patch.object(build, "get_megatron_optimizer") as made:
        build.build_optimizer(config.actor_rollout.optimizer, [], torch.float32)
    fields = vars(made.call_args.args[0])
    return {key: value for key, value in fields.items() if not callable(value)}


def wrapped(config: RunConfig) -> Any:
    """Return the configuration of the actor's data parallelism that Megatron gets."""
    chunk = MagicMock(**{"parameters.return_value": []})
    with patch.object(build, "DistributedDataParallel") as made:
        build.wrap(chunk, config.actor_rollout.optimizer)
    return vars(made.call_args.args[1])


def experience(config: RunConfig) -> Any:
    """Return the experience of four responses, two to each prompt, or the message of an error."""
    maker = AdvantageComputer(config, make_objective(config, alone), alone)
    rollouts = rollouts_of(LENGTHS, HAS_EOS)
    shape = rollouts.response_ids.shape
    old, ref = (LogProbs(-noise(seed, *shape)) for seed in (1, 2))
    scores = Scores(torch.tensor([1.0, 0.0, 0.25, 2.0]))
    if config.training.max_skipped == 77:  # the table sets 77 to observe an infinite score
        scores = Scores(torch.tensor([1.0, float("inf"), 0.25, 2.0]))
    greedy = rollouts, Scores(torch.tensor([0.5, 0.25, 0.0, 1.0]))
    try:
        values = Values(noise(3, shape[0], shape[1] + 1)) if config.critic else None
        given = rollouts, old, ref, scores, values, *greedy
        made = maker.make(ExperienceInputs(*given, 0.1, 8))
    except ValueError as error:
        return str(error)
    rows: Any = made.rows
    return (
        rows,
        [t.tolist() for t in (rows.advantages, rows.returns, rows.ref_log_probs)],
        str(made.report),
    )


def learnt(config: RunConfig) -> Any:
    """Return the actor's loss on the four responses of `experience`, its metrics, and the
    arguments of its engine."""
    rows: Any = experience(config)[0]
    flat, numbers = -noise(4, sum(LENGTHS)), [0, 1, 2, 3]

    def train_step(batches: Any, step: Any) -> Any:
        return step.loss(numbers, TokenLogProbs(flat / step.temperature, flat.square()))

    with contextlib.ExitStack() as stack:
        made = stack.enter_context(patch.object(engine, "MegatronEngine"))
        made.return_value.sum_over_replicas = alone
        role = actor.ActorRole(config)
        role.engine.train_step = train_step  # type: ignore[method-assign]
        role.engine.end_iteration = lambda: 0.0  # type: ignore[method-assign]
        report: Any = role.update_policy(rollouts_of(LENGTHS, HAS_EOS), rows, [numbers], 0.1)
    (output,) = report.report.steps
    given = [*made.call_args.args, *made.call_args.kwargs.values()]
    arguments: list[Any] = [vars(value) for value in given if isinstance(value, SkippedSteps)]
    arguments += [value for value in given if isinstance(value, (int, type(None)))]
    return float(output.loss), output.weight, str(output.metrics), arguments


def loss(config: RunConfig) -> Any:
    """Return the actor's loss on the four responses of `experience`."""
    return learnt(config)[0]


def micro_batches(config: RunConfig) -> Any:
    """Return the token ids of each role's micro-batches, of a short and a long response."""
    rollouts, found = rollouts_of([1, 5], [True, True]), []
    for role in config.roles:
        stub: Any = SimpleNamespace(
            groups=MagicMock(**{"tp.size.return_value": 1, "cp.size.return_value": 1}),
            config=SimpleNamespace(sequence_parallel=False),
            role=config.role(role),
            _shares=False,
        )
        one_group = patch.object(engine, "group_rows", lambda role, rows, *_: [rows])
        cpu = patch.object(engine.device, "current_device", lambda: torch.device("cpu"))
        with one_group, cpu:
            made = engine.MegatronEngine.micro_batches(stub, rollouts, [0, 1])
        found.append([batch.token_ids.tolist() for batch in made])
    return found


def orders(config: RunConfig) -> Any:
    """Return the order of the samples in the updates of actor and critic."""
    found: Any = []
    rows: Any = MagicMock(num_rows=config.samples_per_iteration)
    for module, group in ((actor, actor.ActorGroup), (critic, critic.CriticGroup)):
        steps = patch.object(
            module, "balanced_steps", side_effect=lambda c, r, o, *_: found.append(o) or []
        )
        with steps:
            stub: Any = MagicMock(run=config, seed=1)
            is_actor = module is actor
            stub.config = config.actor_rollout if is_actor else config.value_model
            update: Any = group.update_policy if is_actor else group.update_critic  # type: ignore[attr-defined]
            update(stub, rows, rows, MagicMock(), 1, *([0.1] if is_actor else []))
    return [[list(order) for order in each] for each in found]


def valued(config: RunConfig) -> Any:
    """Return the critic's loss on the four responses of `experience`, and its weight."""
    rows: Any = experience(config)[0]
    values = rows.values[rows.value_mask] + 1.0
    with patch.object(engine, "MegatronEngine"):
        output = critic.CriticRole(config).loss(rows, [0, 1, 2, 3], values)
    return float(output.loss), output.weight


def loop(config: RunConfig) -> Any:
    """Return the trainer of the configuration with stand-ins for all roles and writers."""
    roles = SimpleNamespace(
        actor=MagicMock(), rollout=MagicMock(), ref=MagicMock(), critic=None, reward=MagicMock()
    )
    source = PromptSource.from_config(config, [prompt(i) for i in range(NUM_PROMPTS)])
    return ppo.PpoTrainer(config, roles, source, *(MagicMock() for _ in range(4)))  # type: ignore[arg-type]


def prompt(index: int) -> Prompt:
    """Return a prompt of one token."""
    return Prompt(index, "", np.array([1]), "", "a")


def driven(config: RunConfig) -> Any:
    """Return the first batch of prompts, the KL coefficient after an iteration, whether old
    log-probs are recomputed, and the limit of slots."""
    trainer = loop(config)
    trainer.kl.update(3.0, 100)
    responses = SimpleNamespace(responses=[3, 6])
    slots = trainer._slot_limit(SimpleNamespace(responses=lambda: responses))
    return trainer.prompts.sampler.next_batch(), trainer.kl.value, trainer._recompute, slots


def validated(config: RunConfig) -> list[Any]:
    """Return the arguments of each call of the validator: the iterations with a validation."""
    trainer = loop(config)
    trainer.validator = MagicMock(validate=MagicMock(return_value={}))
    trainer.samples = MagicMock(generate=MagicMock(side_effect=Over))
    with contextlib.suppress(Over):
        trainer.fit()
    trainer.stop.is_due.return_value = trainer.stop.agree.return_value = False
    trainer.recorder.check_health.return_value = None
    with patch.object(ppo, "iteration_metrics"), patch.object(ppo, "generation_flops"):
        for trainer.iteration in range(1, config.training.train_iters + 1):
            with contextlib.suppress(Stopped):
                trainer._run_hooks(ppo.Iteration(MagicMock(), {}, {}, 1.0))
    return [call.args for call in trainer.validator.validate.call_args_list]


def measured(config: RunConfig) -> Any:
    """Return the validation metrics of one prompt whose responses score 0.5 and 0 in turn."""
    keys = config.validation
    group = [Scored(0.5 * (i % 2), 3, {}, "a") for i in range(1, keys.n_samples + 1)]
    return measure([group], ["mine"], keys)


def compared(config: RunConfig) -> Any:
    """Return the number by which the best checkpoint is chosen."""
    found = {"val/a/score": 0.5, "val/a/mean@1": 0.75}
    return validation_score(found, config.validation.best_metric)


def supervised(config: RunConfig) -> Any:
    """Return what the supervisor gets about restarts, and the limits that StopRequest gets."""
    with patch.object(run.supervised, "report_facts") as report:
        run.report_for_restart(config, MagicMock(path="here"))
    stops = patch.object(run, "StopRequest", side_effect=Over)
    with stops as stop, contextlib.suppress(Over):
        run.Ending(config, MagicMock())
    return report.call_args, stop.call_args.args[:2]


def recorded(config: RunConfig) -> Any:
    """Return how many of 100 samples are logged, which by token, and the console's metrics."""
    made = recorder.Recorder(config, RunDirectory(Path("nowhere")), None, writes=False)
    tokens = made.token_log(1, range(100))
    return made._num_logged(100), tokens, made.console._names


def prepared(config: RunConfig) -> Any:
    """Return the number of validation prompts, the configured stop tokens, and whether fixed
    responses are loaded."""
    given = IndexedPrompts([prompt(i) for i in range(NUM_PROMPTS)])
    names = (
        "RunDirectory", "check_resume", "check_save_folders", "check_weights", "load_tokenizer",
        "check_vocabulary", "eos_token_ids", "describe_stop_tokens", "load_fixed_responses",
        "PromptSource", "_check_rewards", "list_notices",
    )  # fmt: skip
    with contextlib.ExitStack() as stack:
        mocks = {n: stack.enter_context(patch.object(preflight, n)) for n in names}
        stack.enter_context(patch.object(preflight, "_load_prompts", lambda *_: given))
        mocks["RunDirectory"].check.return_value = []
        for name in names:
            if "check_" in name or "problems" in name:
                mocks[name].return_value = []
        mocks["eos_token_ids"].return_value = (2,)
        found = preflight.prepare(config)
    responses = mocks["load_fixed_responses"].call_args
    return len(found.val_prompts), mocks["eos_token_ids"].call_args.args[2], responses is not None


def scored(config: RunConfig) -> Any:
    """Return the scores of two answers by rule, and whether the rule is one of the YAML."""
    manager = RewardManager(dict(config.reward.rules), config.verifiers)
    texts, truths = ["#### 4", r"\boxed{4}"], ["4", "4"]
    known = "mine" if "mine" in config.reward.rules else "openai/gsm8k"
    return known, [result.score for result in manager.score(texts, truths, [known] * 2)]


def scoring(config: RunConfig) -> Any:
    """Return the arguments of the pool that scores: processes, deadline, memory."""
    with patch.object(plans, "WorkerPool") as pool:
        plans.StreamingRewards(config.reward)
    return pool.call_args.args[1:]


def sandboxed(config: RunConfig) -> list[Any]:
    """Return commands and limits of each sandbox tried, as none works."""
    tried: list[Any] = []

    def refuse(sandbox: Sandbox, program: str, stdin: str, wall_s: float) -> None:
        limit = sandboxes._Run(sandbox.config, MagicMock(), 0, True).limit
        tried.append([sandbox._options(0, 0, 0), sandbox._command("p"), wall_s, limit])
        raise sandboxes.SandboxError("not here")

    done = SimpleNamespace(returncode=0, stdout='["/python", "/usr", "/usr"]')
    with (
        patch.object(sandboxes.shutil, "which", return_value="/usr/bin/bwrap"),
        patch.object(sandboxes.subprocess, "run", return_value=done),
        patch.object(Sandbox, "_run", refuse),
        contextlib.suppress(UserError),
    ):
        tried.append(Sandbox.choose(config.reward.sandbox).describe())
    return tried


def started(config: RunConfig) -> Any:
    """Return how the local runtime starts its world, and the resource that the doctor looks for."""
    with patch.object(local.LocalRuntime, "__init__", return_value=None) as made:
        local.LocalRuntime.from_config(config)
    kind = DeviceKind.AUTO
    return made.call_args.args, doctor_checks.choose_subject(config, kind).resource


def served(config: RunConfig) -> Any:
    """Return how a vLLM server is started."""
    max_rows = server_rows(config, on_cpu=True, device_bytes=None)
    return server_command(config, max_rows, on_cpu=True, on_npu=False)


def joined(config: RunConfig) -> Any:
    """Return how the Ray runtime opens a cluster, checks nodes, and sets deadlines, threads and
    environment."""
    from mindspeed_rlxf.cluster.ray import node_tools, runtime as ray_runtime

    cluster = SimpleNamespace(own=False, address="head:1")
    opens = patch.object(ray_runtime, "open_cluster", return_value=cluster)
    with opens as opened, patch.object(node_tools, "DeviceClaim") as claim:
        made: Any = ray_runtime.RayRuntime.from_config(config, Path("logs"), Path("file"))
    waits = made.timeout_s, made.start_timeout_s
    environment = sorted(made._environment.items())
    return opened.call_args, claim.call_args, waits, made._threads, environment
