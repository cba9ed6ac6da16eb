"""Check files, data and weights of a run before a worker starts; needs no device."""

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from pathlib import Path
from typing import Any, TypeVar

from mindspeed_rlxf.checkpoint.directory import RunDirectory
from mindspeed_rlxf.checkpoint.driver_state import (
    check_resume,
    find_resumable,
)
from mindspeed_rlxf.checkpoint.exports import check_save_folders
from mindspeed_rlxf.config.enums import RewardKind, Role
from mindspeed_rlxf.config.hf_config import OF_WEIGHTS, find_disagreements, read_hf_config
from mindspeed_rlxf.config.problems import Problem, UserError, closest
from mindspeed_rlxf.config.schema import RoleConfig, RunConfig
from mindspeed_rlxf.data.fixed_responses import FixedResponses, load_fixed_responses
from mindspeed_rlxf.data.indexed_prompts import IndexedPrompts, load_indexed_prompts
from mindspeed_rlxf.data.prompt_store import reward_style
from mindspeed_rlxf.data.prompts import Prompt, load_prompts
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
    find_idle_sources,
    needs_processes,
    rule_decides,
    scores_row,
)
from mindspeed_rlxf.rewards.sandbox import Sandbox
from mindspeed_rlxf.rollout.rollout_engine import ENGINES, NATIVE
from mindspeed_rlxf.trainer.prompt_source import PromptSource, find_order_problems
from mindspeed_rlxf.weights.chunks import StoredWeights
from mindspeed_rlxf.weights.folders import find_description, open_weights
from mindspeed_rlxf.weights.hf_folder import shape_problems

T = TypeVar("T")
MAX_SHAPE_PROBLEMS = 3  # of one folder: the first few show which model it is
UNNAMED = "unnamed"  # data source of rows without one that a model scores


@dataclass
class Prepared:
    """Inputs of a run that the driver has read and checked before the start."""

    tokenizer: Any = None
    eos_token_ids: tuple[int, ...] = ()
    train_prompts: Sequence[Prompt] = ()
    val_prompts: Sequence[Prompt] = ()
    fixed_responses: FixedResponses | None = None
    scores_in_processes: bool = False  # by functions or slow rules, see `rewards.workers`
    sandbox: list[str] = field(default_factory=list)  # a line about its level and weaknesses
    notices: list[str] = field(default_factory=list)  # printed before the run


def prepare(config: RunConfig) -> Prepared:
    """Load tokenizer, prompts and fixed responses; check all files that the run reads or writes.

    Writes nothing but temporary files for the prompts (`PromptStore`); may run a program in the
    sandbox.

    Raises:
        UserError: with all problems. If the tokenizer cannot be loaded, these are the problems
            found before it and the prompt files that are missing.
    """
    directory, data = RunDirectory.choose(config), config.data
    problems = [
        *RunDirectory.check(config),
        *check_resume(config, directory),
    ]
    if not config.validation.only:
        problems += check_save_folders(config, directory)
    for role in config.roles:
        problems += check_weights(config, role)
    problems += [*_check_engine(config), *trackers.find_problems(config.logging.trackers)]
    actor, prepared = config.actor_rollout, Prepared()
    vocab_size = actor.architecture.vocab_size
    prepared.tokenizer = _attempt(
        problems, lambda: load_tokenizer(config.training.tokenizer_name_or_path)
    )
    if prepared.tokenizer is None:  # nothing can be tokenized, but missing files can be reported
        files = {"data.train_files": data.train_files, "data.val_files": data.val_files}
        problems += [
            Problem(key, "no such file", name, "correct the path", colon=True)
            for key, names in files.items()
            for name in names
            if not Path(name).exists()
        ]
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
    found = _attempt(problems, lambda: eos_token_ids(prepared.tokenizer, described, stop_ids))
    prepared.eos_token_ids = found or ()
    remedy = "correct actor_rollout.stop_token_ids, or the generation_config.json of its load"
    problems += [
        Problem(f"EOS id {i}", f"must be below vocab_size={vocab_size}", remedy=remedy)
        for i in prepared.eos_token_ids
        if i >= vocab_size
    ]
    problems += _check_rewards(config, prepared)
    problems += _check_best_metric(config, prepared)
    problems += _load_fixed_responses(config, prepared, directory)
    if problems:
        raise UserError(problems)
    stops = describe_stop_tokens(prepared.tokenizer, described, data_stops, actor.stop_token_ids)
    prepared.notices = [stops, *prepared.sandbox, *_list_notices(config)]
    if config.reward.rules or any(part.data_sources for part in config.reward.parts):
        prompts = chain(prepared.train_prompts, prepared.val_prompts)
        sources = {prompt.data_source for prompt in prompts}
        prepared.notices += find_idle_sources(config.reward, sources)
    return prepared


def _list_notices(config: RunConfig) -> list[str]:
    """Return warnings about legal but suspicious settings; the weights have been checked."""
    actor, notices = config.actor_rollout, []
    if not actor.do_sample:
        notices.append("actor_rollout.do_sample=false: greedy responses do not explore")
    if actor.do_sample and (actor.top_k or actor.top_p < 1.0):
        notices.append(
            "actor_rollout.top_k/top_p filter the sampled tokens; log-probs are of the unfiltered "
            "distribution"
        )
    if actor.stop_strings:
        shown = ", ".join(map(repr, actor.stop_strings))
        notices.append(f"responses also end with the text: {shown}")
    if config.critic and "score.weight" not in _open_weights(config.critic):
        notices.append(f"critic.load={config.critic.load} has no score head: it starts untrained")
    return notices


def _open_weights(section: RoleConfig) -> StoredWeights:
    assert section.load is not None and section.architecture is not None, "checked beforehand"
    return open_weights(section.load, section.architecture, section.trust_files)


def _attempt(problems: list[Problem], action: Callable[[], T]) -> T | None:
    """Return the result of `action`; on a UserError add its problems to `problems`, return None."""
    try:
        return action()
    except UserError as error:
        problems += error.problems
        return None


def _check_engine(config: RunConfig) -> list[Problem]:
    """Return a problem if the rollout engine is unknown, or cannot run in a disaggregated pool."""
    key, name, known = "rollout.engine", config.rollout.engine, [NATIVE, *ENGINES]
    if name not in known:
        remedy = f"use {closest(name, known) or NATIVE}, or add its file to training.plugins"
        return [Problem(key, f"must be one of {', '.join(known)}", name, remedy)]
    if name != NATIVE and config.parts:
        rule = "cannot generate on ranks of its own (num_gpus_for_infer)"
        return [Problem(key, rule, name, f"use {NATIVE}, or remove num_gpus_for_infer")]
    return []


def _load_prompts(
    config: RunConfig,
    prepared: Prepared,
    files: tuple[str, ...],
    prefixes: tuple[str, ...],
    problems: list[Problem],
) -> IndexedPrompts:
    """Load the prompts of the indexed data sets `prefixes` if there are any, else of `files`.

    Only indexed data sets have stop tokens. Errors are added to `problems`; the result is empty
    then.
    """
    data = config.data
    if config.reward.kind is not RewardKind.RULE and data.default_data_source is None:
        data = data.model_copy(update={"default_data_source": UNNAMED})  # a model needs none
    arguments = prepared.tokenizer, data, config.actor_rollout.max_prompt_length
    if prefixes:
        indexed = _attempt(problems, lambda: load_indexed_prompts(prefixes, *arguments))
        return indexed or IndexedPrompts()
    return IndexedPrompts(_attempt(problems, lambda: load_prompts(files, *arguments)) or ())


def check_weights(config: RunConfig, role: Role) -> list[Problem]:
    """Return problems of a role's `load` folder: not set, missing, damaged, of another model.

    Reads headers only.
    """
    section = config.role(role)
    if role is Role.REWARD and config.reward.kind is RewardKind.RULE:
        return []
    if role is Role.REWARD and config.reward.kind is RewardKind.HUGGING_FACE:
        return check_classifier(config.reward.load)
    key = f"{role.value}.load"
    if section.load is None:
        rule = "must name a folder of weights, Hugging Face's or Megatron's"
        return [Problem(key, rule, remedy=f"set {key}=FOLDER")]
    try:
        rules, remedy = _find_broken_rules(section, role, config.training.tokenizer_name_or_path)
    except ValueError as error:
        rules, remedy, folder = [str(error)], "", Path(section.load)
        if not folder.exists() and folder.parts[-4:-1] == ("outputs", "tiny", "models"):
            more = " --reward-model" if folder.name == "rm" else ""
            remedy = f"or make the tiny one with `python examples/tiny/make.py{more}`"
    return [Problem(key, rule, section.load, remedy, colon=True) for rule in rules]


def _find_broken_rules(section: RoleConfig, role: Role, tokenizer: str) -> tuple[list[str], str]:
    """Return a text for each way in which a role's weights differ from its model, and one remedy.

    One text if config.json differs, else one for each of the first tensors of another shape. A
    critic's folder may lack the score head.

    Args:
        tokenizer: folder with config.json if the weights have none.

    Raises:
        ValueError: a file is missing or cannot be read.
    """
    assert section.load is not None and section.architecture is not None
    head = HEADS[role]
    described = find_description(section.load, tokenizer)
    hf_config = read_hf_config(described, OF_WEIGHTS)
    differing = find_disagreements(section.architecture, hf_config, scored=head is Head.SCORE)
    if differing:
        fields = f"(field: model.{section.model}, config.json): {'; '.join(differing)}"
        return [
            f"config.json must agree with the model YAML {fields}"
        ], "correct the YAML or give the folder of that model"
    folder = _open_weights(section)  # a Megatron folder is read by the config.json checked above
    expected = hf_shapes(section.architecture, head)
    if role is Role.CRITIC and "score.weight" not in folder:
        del expected["score.weight"]  # a language model; the head starts untrained
    found = shape_problems(folder, expected)
    shown = found[:MAX_SHAPE_PROBLEMS]
    if len(found) > len(shown):
        shown.append(f"and {len(found) - len(shown)} more tensors")
    return shown, f"give the folder of model.{section.model}"


def _load_fixed_responses(
    config: RunConfig, prepared: Prepared, directory: RunDirectory
) -> list[Problem]:
    """Load the fixed responses into `prepared`, if any; return the problems of their file.

    It must include every sample of the run, and answer the prompts that the run will draw. A
    resumed run is checked from its newest checkpoint on.
    """
    actor, training = config.actor_rollout, config.training
    if actor.fixed_responses is None:
        return []
    try:
        fixed = load_fixed_responses(
            actor.fixed_responses,
            prepared.tokenizer,
            prepared.eos_token_ids,
            actor.architecture.vocab_size,
            actor.max_new_tokens,
            training.train_iters * config.samples_per_iteration,
        )
    except UserError as error:
        return error.problems
    prepared.fixed_responses = fixed
    if not prepared.train_prompts:
        return []
    source, done = PromptSource.from_config(config, prepared.train_prompts), 0
    if resumable := find_resumable(config, directory)[0]:
        done = resumable[0].checkpoint.iteration
        try:
            source.load_state_dict(resumable[0].state["trainer"]["prompts"])
        except ValueError:  # other data or seed than those of the run: reported when it resumes
            return []
    return find_order_problems(fixed, source, training.train_iters - done)


def _check_rewards(config: RunConfig, prepared: Prepared) -> list[Problem]:
    """Return problems of the reward rules and functions, alone and with the prompts they score.

    Stops at the first kind that has any: rules and the sandbox, the functions, the prompts. Sets
    `sandbox` and `scores_in_processes` of `prepared`. May run a program in the sandbox.
    """
    try:
        manager = RewardManager(dict(config.reward.rules), config.verifiers)
        if config.reward.runs_programs:
            prepared.sandbox = [Sandbox.choose(config.reward.sandbox).describe()]
    except UserError as error:
        return error.problems
    reward, parts = config.reward, (prepared.train_prompts, prepared.val_prompts)
    if problems := list(check_functions(reward)):
        return problems
    by_rule = reward.kind is RewardKind.RULE
    validates_by_rule = by_rule or config.validation.reward is RewardKind.RULE
    validated = prepared.val_prompts if validates_by_rule else ()
    scored = chain(*parts) if by_rule else validated
    prepared.scores_in_processes = needs_processes(reward, {p.data_source for p in scored})
    by_label = (p for p in prepared.train_prompts if scores_row(reward, p.extra_info))
    prepared.scores_in_processes |= reward.chooses_by_label and any(True for _ in by_label)
    if reward.parts:
        found = manager.check(
            p
            for p in chain(*parts)
            if scores_row(reward, p.extra_info)
            and rule_decides(reward, p.data_source, reward_style(p.extra_info))
        )
        if by_rule:
            return found
        rule = (
            "of the validation prompts must have a function in reward.functions, as "
            "validation.reward=rule leaves out the model"
        )
        remedy = "add one for it, or use validation.reward=model"
        return found + [
            Problem(f"data source {source!r}", rule, remedy=remedy)
            for source in dict.fromkeys(prompt.data_source for prompt in validated)
            if not any(part.applies_to(source) for part in reward.parts)
        ]
    if by_rule:
        return manager.check(chain(*parts))
    if reward.chooses_by_label and (
        found := manager.check(p for p in parts[0] if scores_row(reward, p.extra_info))
    ):
        return found
    remedy = "use validation.reward=model"
    return [replace(p, remedy=f"{p.remedy}, or {remedy}") for p in manager.check(validated)]


def _check_best_metric(config: RunConfig, prepared: Prepared) -> list[Problem]:
    """Return a problem if `best_metric` names a data source that no validation prompt has."""
    metric = config.validation.best_metric
    source = metric.removeprefix("val/").rpartition("/")[0]
    known = list(dict.fromkeys(prompt.data_source for prompt in prepared.val_prompts))
    if not known or not source or source in known:
        return []
    rule = f"must be a metric of a data source of the validation prompts ({', '.join(known)})"
    near = closest(source, known) or known[0]
    remedy = f"use val/{near}/{metric.rpartition('/')[2]}"
    return [Problem("validation.best_metric", rule, metric, remedy)]
