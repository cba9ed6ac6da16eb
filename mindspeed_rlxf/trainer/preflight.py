"""Check a run's files, data and weights before a worker starts; needs no device."""

import contextlib
import logging
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from glob import glob
from itertools import chain
from pathlib import Path
from typing import Any, TypeVar

from mindspeed_rlxf.agents import programs  # noqa: F401  registers the agent `program`
from mindspeed_rlxf.agents.conversation import ChatTemplate
from mindspeed_rlxf.agents.session import AGENTS, GIVES_FIRST
from mindspeed_rlxf.agents.tools import show_tools, tool_schemas
from mindspeed_rlxf.checkpoint.directory import RunDirectory, check_save_folders
from mindspeed_rlxf.checkpoint.store import RunStore, check_chosen, check_resume
from mindspeed_rlxf.config.enums import RewardKind, Role
from mindspeed_rlxf.config.hf_config import WEIGHTS_FOLDER, find_disagreements, read_hf_config
from mindspeed_rlxf.config.problems import MissingFile, Problem, UserError, closest
from mindspeed_rlxf.config.rollout_section import (
    AGENT_COLUMN,
    BY_ROW,
    PROGRAM_AGENT,
    TOOL_AGENT,
)
from mindspeed_rlxf.config.schema import RoleConfig, RunConfig
from mindspeed_rlxf.data.decoding import special_ids
from mindspeed_rlxf.data.files import describe_keys, find_row_without, list_keys
from mindspeed_rlxf.data.fixed_responses import FixedResponses, load_fixed_responses
from mindspeed_rlxf.data.indexed_prompts import IndexedPrompts, load_indexed_prompts
from mindspeed_rlxf.data.prompt_store import reward_style
from mindspeed_rlxf.data.prompts import Prompt, load_prompts
from mindspeed_rlxf.data.template_dates import template_arguments
from mindspeed_rlxf.data.tokenizer import (
    check_vocabulary,
    describe_stop_tokens,
    eos_token_ids,
    load_tokenizer,
)
from mindspeed_rlxf.models.parameter_counts import HEADS
from mindspeed_rlxf.models.parameters import Head, hf_shapes
from mindspeed_rlxf.reporting import trackers
from mindspeed_rlxf.rewards.classifier import check_classifier
from mindspeed_rlxf.rewards.manager import RewardManager
from mindspeed_rlxf.rewards.plans import (
    check_functions,
    needs_processes,
    rule_decides,
    scores_row,
)
from mindspeed_rlxf.rewards.sandbox import Sandbox
from mindspeed_rlxf.roles.own_roles import OWN_ROLES
from mindspeed_rlxf.rollout.rollout_engine import ENGINES, NATIVE, TRANSFORMERS, VLLM
from mindspeed_rlxf.trainer.prompt_source import PromptSource
from mindspeed_rlxf.weights.chunks import StoredWeights
from mindspeed_rlxf.weights.folders import find_description, open_weights
from mindspeed_rlxf.weights.hf_folder import open_hf_folder
from mindspeed_rlxf.weights.tensor_checks import tensor_problems, tied_names

T = TypeVar("T")
logger = logging.getLogger(__name__)


@dataclass
class Prepared:
    """Inputs read and checked by the driver before the start."""

    tokenizer: Any = None
    eos_token_ids: tuple[int, ...] = ()
    train_prompts: Sequence[Prompt] = ()
    val_prompts: Sequence[Prompt] = ()
    fixed_responses: FixedResponses | None = None
    scores_in_processes: bool = False  # by functions or slow rules, see `rewards.workers`
    notices: list[str] = field(default_factory=list)  # printed before the run


def prepare(config: RunConfig) -> Prepared:
    """Load tokenizer, prompts and fixed responses; check all files the run reads or writes.

    Writes nothing but temporary prompt files (`PromptStore`); may run a program in the sandbox.
    Raises UserError with all problems; if the tokenizer cannot be loaded, only those found before,
    and missing files.
    """
    directory, data = RunDirectory.choose(config), config.data
    problems = [*RunDirectory.check(config), *check_resume(config, directory)]
    problems += check_chosen(config)
    if not config.validation.only:
        problems += check_save_folders(config, directory)
    unread = {Role.REF} if config.shares_reference else set()
    unread |= {Role.CRITIC, Role.REF} if config.validation.only else set()
    for role in [role for role in config.roles if role not in unread]:
        problems += check_weights(config, role)
    problems += [*_check_engine(config), *trackers.find_problems(config.logging.trackers)]
    actor, prepared = config.actor_rollout, Prepared()
    vocab_size = actor.architecture.vocab_size
    prepared.tokenizer = _attempt(
        problems, lambda: load_tokenizer(config.training.tokenizer_name_or_path)
    )
    if prepared.tokenizer is None:  # nothing can be tokenized
        problems += _missing_data(config)
        raise UserError(problems)
    problems += check_vocabulary(prepared.tokenizer, vocab_size)
    training = _load_prompts(config, prepared, data.train_files, data.data_path, problems)
    validation = _load_prompts(config, prepared, data.val_files, data.val_data_path, problems)
    prepared.train_prompts = training.prompts
    prepared.val_prompts = validation.prompts[: config.validation.max_samples]
    # The folder with generation_config.json: `load`, or the tokenizer's beside Megatron weights.
    described = actor.load
    with contextlib.suppress(ValueError):  # reported with the weights
        described = described and str(
            find_description(described, config.training.tokenizer_name_or_path)
        )
    data_stops = sorted({*training.stop_token_ids, *validation.stop_token_ids})
    stop_ids = sorted({*actor.stop_token_ids, *data_stops})
    prepared.eos_token_ids = (
        _attempt(problems, lambda: eos_token_ids(prepared.tokenizer, described, stop_ids)) or ()
    )
    remedy = (
        "correct actor_rollout.stop_token_ids, or generation_config.json or config.json of its load"
    )
    problems += [
        Problem(f"EOS id {i}", f"must be below vocab_size={vocab_size}", remedy=remedy)
        for i in prepared.eos_token_ids
        if i >= vocab_size
    ]
    missing_truths: list[str] = []  # warnings
    problems += _check_truths(config, missing_truths)
    problems += _check_rewards(config, prepared)
    problems += _check_agents(config, prepared)
    problems += _check_best_metric(config, prepared)
    prepared.fixed_responses = _attempt(problems, lambda: _load_fixed_responses(config, prepared))
    if problems:
        raise UserError(problems)
    for warning in missing_truths:
        logger.warning("%s", warning)
    stops = describe_stop_tokens(prepared.tokenizer, described, data_stops, actor.stop_token_ids)
    spelled = [s for s in actor.stop_strings if s in special_ids(prepared.tokenizer).values()]
    if spelled:
        stops += f"; special tokens of actor_rollout.stop_strings: {', '.join(map(repr, spelled))}"
    prepared.notices = [stops, *prepared.notices, *list_notices(config)]
    return prepared


def list_notices(config: RunConfig) -> list[str]:
    """Return warnings about legal but suspicious settings; the weights have been checked."""
    actor, notices = config.actor_rollout, []
    if not actor.do_sample and "do_sample" in actor.model_fields_set:
        notices.append("actor_rollout.do_sample=false: greedy responses do not explore")
    if actor.do_sample and (actor.top_k or actor.top_p < 1.0):
        notices.append(
            "actor_rollout.top_k/top_p filter the sampled tokens; log-probs are of the unfiltered "
            "distribution"
        )
    critic = None if config.validation.only else config.critic
    store = RunStore(RunDirectory.choose(config).checkpoints)
    loads_checkpoint = bool(store.newest_first())  # the critic's is loaded instead
    if critic and critic.load and not loads_checkpoint and not _has_score_head(critic):
        notices.append(f"critic.load={critic.load} has no score head: it starts untrained")
    return notices


def _has_score_head(critic: RoleConfig) -> bool:
    return "score.weight" in _open_weights(critic)


def _missing_data(config: RunConfig) -> list[MissingFile]:
    """Return a problem for each data file, or indexed data set, that is not there."""
    data, remedy = config.data, "correct the path"
    files = [name for name in (*data.train_files, *data.val_files) if not Path(name).exists()]
    prefixes = [name for name in (*data.data_path, *data.val_data_path) if not glob(f"{name}*")]
    problems = [MissingFile(name, "no such file", remedy=remedy, colon=True) for name in files]
    rule = "no such indexed data set"
    return problems + [MissingFile(name, rule, remedy=remedy, colon=True) for name in prefixes]


def _open_weights(section: RoleConfig) -> StoredWeights:
    assert section.load is not None and section.architecture is not None, "checked beforehand"
    if section.backend == "fsdp":
        return open_hf_folder(section.load, section.trust_files)
    return open_weights(section.load, section.architecture, section.trust_files)


def _attempt(problems: list[Problem], action: Callable[[], T]) -> T | None:
    try:
        return action()
    except UserError as error:
        problems += error.problems
        return None


def _check_engine(config: RunConfig) -> list[Problem]:
    key, name, known = (
        "rollout.engine",
        config.rollout.engine,
        [NATIVE, VLLM, TRANSFORMERS, *ENGINES],
    )
    if name not in known:
        remedy = f"use {closest(name, known) or NATIVE}, or add its file to training.plugins"
        return [Problem(key, f"must be one of {', '.join(known)}", name, remedy)]
    if name not in (NATIVE, VLLM) and config.train_rollout_split:
        rule = "cannot generate on ranks of its own (num_gpus_for_infer)"
        return [Problem(key, rule, name, f"use {NATIVE}, or remove num_gpus_for_infer")]
    folder = Path(config.actor_rollout.load or "")
    has_folder = folder.is_dir()  # its absence is reported with the weights
    if name in (TRANSFORMERS, VLLM) and has_folder and not (folder / "config.json").is_file():
        rule = "needs config.json in the folder actor_rollout.load"
        return [Problem(key, rule, name, f"use {NATIVE}, or load a Hugging Face folder")]
    if name == VLLM:
        looks = "import importlib.util as u, sys; sys.exit(u.find_spec('vllm') is None)"
        python = config.rollout.vllm.python or sys.executable
        try:
            there = subprocess.run([python, "-c", looks], timeout=60, check=False).returncode == 0
        except (OSError, subprocess.SubprocessError):
            there = False
        if not there:
            rule, remedy = "must have vLLM", "run `make install STACK=vllm`, and name its python"
            return [MissingFile("rollout.vllm.python", rule, python, remedy)]
    return []


def _load_prompts(
    config: RunConfig,
    prepared: Prepared,
    files: tuple[str, ...],
    prefixes: tuple[str, ...],
    problems: list[Problem],
) -> IndexedPrompts:
    """Load the prompts in the indexed data sets `prefixes` if there are any, else in `files`.

    Only indexed data sets have stop tokens. Errors are added to `problems`, with an empty result.
    """
    data = show_tools(config.data, config.rollout)
    if not config.reward.needs_data_source and data.default_data_source is None:
        data = data.model_copy(update={"default_data_source": "unnamed"})
    arguments = prepared.tokenizer, data, config.actor_rollout.max_prompt_length
    if prefixes:
        indexed = _attempt(problems, lambda: load_indexed_prompts(prefixes, *arguments))
        return indexed or IndexedPrompts()
    # A classifier's template may be another one, and an agent's session has the messages.
    keeps = config.reward.kind is RewardKind.HUGGING_FACE or config.rollout.runs_agents
    rollout = config.rollout

    def gives_first(extra_info: Mapping[str, Any]) -> bool:
        return rollout.agent_of(extra_info) in GIVES_FIRST

    agents = gives_first if rollout.runs_agents else None
    prompts = _attempt(problems, lambda: load_prompts(files, *arguments, keeps, agents))
    return IndexedPrompts(prompts or ())


def check_weights(config: RunConfig, role: Role) -> list[Problem]:
    """Return problems in a role's `load` folder: not set, missing, damaged, another model.

    With backend fsdp the folder must have the tensors of transformers' model.

    Those about a folder that is not there are MissingFile.

    Reads headers only. Tensor shapes are compared if config.json agrees with the model YAML. A
    critic's folder may lack the score head.
    """
    section = config.role(role)
    if role is Role.REWARD and config.reward.kind is RewardKind.RULE:
        return []
    if role is Role.REWARD and config.reward.kind is RewardKind.ROLE:
        rule, remedy = "needs a class for the role", "add its file to training.plugins"
        return [] if role in OWN_ROLES else [Problem("reward.kind", rule, "role", remedy)]
    if role is Role.REWARD and config.reward.kind is RewardKind.HUGGING_FACE:
        return _as_missing(check_classifier(config.reward.load), config.reward.load)
    key, head = f"{role.value}.load", HEADS[role]
    if section.load is None:
        rule = "must name a folder of weights, Hugging Face's or Megatron's"
        return [Problem(key, rule, remedy=f"set {key}=FOLDER")]
    assert section.architecture is not None
    if section.backend == "fsdp":
        from mindspeed_rlxf.engine.fsdp.weights import check_folder  # imports for seconds
    remedy = f"give the folder of model.{section.model}"
    try:
        if section.backend == "fsdp":
            try:
                check_folder(section, head)
            except UserError as error:  # about other keys of the role
                problems = [p.rename_keys(lambda k: f"{role.value}.{k}") for p in error.problems]
                return _as_missing(problems, section.load)
            return []
        described = find_description(section.load, config.training.tokenizer_name_or_path)
        hf_config = read_hf_config(described, WEIGHTS_FOLDER)
        rules = find_disagreements(section.architecture, hf_config, scored=head is Head.SCORE)
        if rules:
            fields = f"(field: model.{section.model}, config.json): {'; '.join(rules)}"
            rules = [f"config.json must agree with the model YAML {fields}"]
            remedy = "correct the YAML or give the folder of that model"
        else:
            folder = _open_weights(section)  # a Megatron folder is read by that config.json
            expected = hf_shapes(section.architecture, head)
            if role is Role.CRITIC and "score.weight" not in folder:
                del expected["score.weight"]  # a language model; the head starts untrained
            tied = tied_names(section.architecture, head)
            # The first three show which model it is.
            rules = tensor_problems(section.load, folder, expected, head, tied)[:3]
    except ValueError as error:
        rules, remedy, path = [str(error)], "", Path(section.load)
        if not path.exists() and path.parts[-4:-1] == ("outputs", "tiny", "models"):
            more = " --reward-model" if path.name == "rm" else ""
            remedy = f"or make the tiny one with `python examples/tiny/make.py{more}`"
    problems = [Problem(key, rule, section.load, remedy, colon=True) for rule in rules]
    return _as_missing(problems, section.load)


def _as_missing(problems: Sequence[Problem], folder: str | None) -> list[Problem]:
    """Return the problems of a folder, as MissingFile if it is not there."""
    if folder is None or Path(folder).exists():
        return [*problems]
    return [MissingFile(**vars(problem)) for problem in problems]


def _load_fixed_responses(config: RunConfig, prepared: Prepared) -> FixedResponses | None:
    """Load the fixed responses, if any, and compare them with all prompts the run will draw.

    Raises UserError if the file lacks samples, or answers other prompts.
    """
    actor, training = config.actor_rollout, config.training
    if actor.fixed_responses is None:
        return None
    fixed = load_fixed_responses(
        actor.fixed_responses,
        prepared.tokenizer,
        prepared.eos_token_ids,
        actor.architecture.vocab_size,
        actor.max_new_tokens,
        training.train_iters * config.samples_per_iteration,
    )
    if prepared.train_prompts:
        source = PromptSource.from_config(config, prepared.train_prompts, fixed)
        for _ in range(training.train_iters):
            source.next_groups(training.global_batch_size)
            source.consume(training.global_batch_size)
    return fixed


def _check_truths(config: RunConfig, warnings: list[str]) -> Iterator[Problem]:
    """Yield a problem for each data file without ground truths, if the user named their key.

    It is one of `warnings` if nothing reads them, or if functions may do without.
    """
    data, reward = config.data, config.reward
    key = data.ground_truth_key
    is_named = "ground_truth_key" in data.model_fields_set
    is_read = reward.kind is RewardKind.RULE or bool(reward.scoring_functions)
    if not is_named and not reward.scoring_functions:  # rules say which rows lack one
        return
    for file in (*data.train_files, *data.val_files):
        row = None
        with contextlib.suppress(UserError):  # reported with the prompts
            row = find_row_without(file, key)
        if row is None:
            continue
        near = closest(key, list_keys(row))
        remedy = f"did you mean {near}?" if near else f"it has {describe_keys(row)}"
        if is_named and is_read:
            yield Problem("data.ground_truth_key", f"must be in {file}", key, remedy)
        else:
            rule = f"no row has data.ground_truth_key={key}, so all ground truths are empty"
            warnings.append(f"{file}: {rule}; {remedy}")


def _check_rewards(config: RunConfig, prepared: Prepared) -> list[Problem]:
    """Return problems with the reward rules and functions, alone and with the prompts they score.

    Stops at the first kind with any: rules and the sandbox, functions, prompts. Sets
    `scores_in_processes` in `prepared`. May run a program in the sandbox.
    """
    try:
        manager = RewardManager(dict(config.reward.rules), config.verifiers)
        if config.runs_programs:  # a line about its level and weaknesses
            prepared.notices.append(Sandbox.choose(config.reward.sandbox).describe())
    except UserError as error:
        return error.problems
    reward = config.reward
    train = prepared.train_prompts
    val = prepared.val_prompts
    function_problems = list(check_functions(reward))
    if function_problems:
        return function_problems
    by_rule = reward.kind is RewardKind.RULE
    validated = val if by_rule or config.validation.reward is RewardKind.RULE else ()
    scored = chain(train, val) if by_rule else validated
    prepared.scores_in_processes = needs_processes(reward, {p.data_source for p in scored})
    if reward.chooses_by_label:
        prepared.scores_in_processes |= any(scores_row(reward, p.extra_info) for p in train)

    def scored_by_rules() -> Iterator[Prompt]:
        for prompt in chain(train, val) if by_rule or reward.scoring_functions else train:
            style = reward_style(prompt.extra_info)
            is_ruled = rule_decides(reward, prompt.data_source, style)
            if scores_row(reward, prompt.extra_info) and is_ruled:
                yield prompt

    problems = manager.check(scored_by_rules())
    if prepared.scores_in_processes and not problems:
        prepared.notices += manager.find_unparsed(scored_by_rules())
    if by_rule:
        return problems
    by_model = "or use validation.reward=model"
    if not reward.scoring_functions:
        if not problems:
            for problem in manager.check(validated):
                problems.append(replace(problem, remedy=f"{problem.remedy}, {by_model}"))
        return problems
    rule = (
        "of the validation prompts must have a function in reward.functions, as "
        "validation.reward=rule leaves out the model"
    )
    for source in dict.fromkeys(prompt.data_source for prompt in validated):
        if not any(function.applies_to(source) for function in reward.scoring_functions):
            remedy = f"add one for it, {by_model}"
            problems.append(Problem(f"data source {source!r}", rule, remedy=remedy))
    return problems


def _check_agents(config: RunConfig, prepared: Prepared) -> list[Problem]:
    """Return a problem for each unknown agent that the configuration or a row names."""
    rollout = config.rollout
    if not rollout.runs_agents:
        return []
    names: set[str] = set()
    has_chats = False
    for prompt in chain(prepared.train_prompts, prepared.val_prompts):
        names.add(rollout.agent_of(prompt.extra_info))
        has_chats = has_chats or bool(prompt.messages)
    if rollout.agent == BY_ROW and names <= {""}:
        remedy = f"add the column {AGENT_COLUMN} to rows, or name an agent"
        return [Problem("rollout.agent", "must be named by some row", BY_ROW, remedy)]
    if PROGRAM_AGENT in names and rollout.program is None:
        remedy = "name a function or a command"
        rule = f"must be given for the agent {PROGRAM_AGENT}"
        return [Problem("rollout.program", rule, remedy=remedy)]
    gives_first = not names.isdisjoint(GIVES_FIRST)
    reads_calls = TOOL_AGENT in names
    names -= {"", *AGENTS}
    registered = ", ".join(sorted(AGENTS)) or "none is registered"
    remedy = "add the file that registers it to training.plugins"
    rule = f"must be {BY_ROW}, or one of {registered}"
    problems = []
    for name in sorted(names):
        key = "rollout.agent" if name == rollout.agent else f"column {AGENT_COLUMN}"
        guess = closest(name, AGENTS)
        problems.append(Problem(key, rule, name, f"use {guess}, or {remedy}" if guess else remedy))
    if has_chats:
        template = ChatTemplate(
            prepared.tokenizer,
            prepared.eos_token_ids,
            tool_schemas(rollout),
            template_kwargs=template_arguments(prepared.tokenizer, config.data),
            allow_special_tokens=config.data.allow_special_tokens,
        )
        try:
            prepared.notices += template.check(gives_first, reads_calls)
        except ValueError as error:
            remedy = "give the tokenizer's folder a fitting one"
            problems.append(Problem("training.tokenizer_name_or_path", str(error), remedy=remedy))
    return problems


def _check_best_metric(config: RunConfig, prepared: Prepared) -> list[Problem]:
    """Return a problem if `best_metric` names a data source without validation prompts."""
    metric = config.validation.best_metric
    source = metric.removeprefix("val/").rpartition("/")[0]
    sources = list(dict.fromkeys(prompt.data_source for prompt in prepared.val_prompts))
    if not sources or not source or source in sources:
        return []
    rule = f"must be a metric of a data source of the validation prompts ({', '.join(sources)})"
    near = closest(source, sources) or sources[0]
    remedy = f"use val/{near}/{metric.rpartition('/')[2]}"
    return [Problem("validation.best_metric", rule, metric, remedy)]
