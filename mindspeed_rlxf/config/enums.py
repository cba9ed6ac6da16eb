"""Configuration choices; each value is the word in the YAML."""

from enum import Enum
from typing import Literal, TypeAlias


class Role(str, Enum):
    """A model or function in the PPO loop, running in worker processes."""

    ACTOR_ROLLOUT = "actor_rollout"  # the policy that learns
    ROLLOUT = "rollout"  # generates with the actor's weights, in the actor's pool
    REF = "ref"
    CRITIC = "critic"
    REWARD = "reward"
    SCORER = "scorer"  # scores responses as they finish, in the processes of ROLLOUT


CONFIGURED = tuple(role for role in Role if role not in (Role.ROLLOUT, Role.SCORER))
"""Roles with a section and a placement."""


class Stage(str, Enum):
    """Training algorithm."""

    RAY_PPO = "ray_ppo"  # with a critic
    RAY_GRPO = "ray_grpo"  # no critic: advantages from several responses, or from returns alone
    RAY_ONLINE_DPO = "ray_online_dpo"  # the better of two responses is preferred to the other


class AdvEstimator(str, Enum):
    """Built-in advantage estimators; `estimator_traits` lists what each needs."""

    GAE = "gae"  # needs a critic
    GRPO = "grpo"  # z-score within the group of a prompt
    DR_GRPO = "dr_grpo"  # GRPO without division by the standard deviation
    RLOO = "rloo"  # minus the mean of the other responses to the prompt
    REINFORCE_PLUS_PLUS = "reinforce_plus_plus"  # rewards to go, whitened over the batch
    REINFORCE_PLUS_PLUS_BASELINE = (
        "reinforce_plus_plus_baseline"  # minus the group's mean, whitened
    )
    REMAX = "remax"  # rewards to go, minus the score of the greedy response
    OPO = "opo"  # minus the group's mean weighted by length
    GPG = "gpg"  # minus the group's mean, times responses / responses with a score
    GRPO_BATCH = "grpo_batch"  # minus the group's mean, divided by the batch's deviation


class KlPenalty(str, Enum):
    """Per-token KL divergence estimate; d = log_prob - ref_log_prob."""

    KL = "kl"  # d
    ABS = "abs"  # |d|
    MSE = "mse"  # d^2 / 2
    LOW_VAR_KL = "low_var_kl"  # exp(-d) - 1 + d
    FULL = "full"  # sum over the vocabulary, not an estimate


class AdvantageWhiten(str, Enum):
    """Token set for whitening advantages."""

    BATCH = "batch"
    MINIBATCH = "minibatch"
    NONE = "none"


class LossNormalizer(str, Enum):
    """Divisor for token losses."""

    MINIBATCH_TOKENS = "minibatch_tokens"
    MICRO_BATCH_MEAN = "micro_batch_mean"
    SEQUENCE_MEANS = "sequence_means"  # mean over responses of their means
    SEQUENCE_TOTALS = "sequence_totals"  # mean over responses of their sums
    SEQUENCE_SUMS = "sequence_sums"  # mean over responses of their sums / max_new_tokens


class OldLogProbs(str, Enum):
    """Source for the behaviour policy's log-probs."""

    AUTO = "auto"  # the update itself where it is one step and nothing else reads them
    RECOMPUTE = "recompute"  # a forward pass before the update
    ROLLOUT = "rollout"  # those of generation


class Recompute(str, Enum):
    """Activations recomputed in the backward pass instead of kept."""

    NONE = "none"
    ELEMENTWISE = "elementwise"  # those of norms and of gated activations, without a GEMM
    SELECTIVE = "selective"  # those of the MLP or of the experts
    FULL = "full"  # those of whole layers


class RewardKind(str, Enum):
    """What scores responses."""

    RULE = "rule"
    MODEL = "model"  # a model of Megatron
    HUGGING_FACE = "huggingface"  # a sequence classifier of any architecture
    ROLE = "role"  # a class of the user


class Verifier(str, Enum):
    """A rule in `algorithm.verifier_function`."""

    ACC = "acc"  # the boxed answer: 1 right, -0.5 wrong, -1 none
    BASE_ACC = "base_acc"  # the final answer, boxed or not: 1 right, 0 wrong
    FORMAT = "format"  # 1: <think> part, then <answer> part
    STRICT_FORMAT = "strict_format"  # 1: each once, nothing around them, a boxed answer; else -1
    STEP = "step"  # up to 1 for three words that mark steps


class OverlongPrompts(str, Enum):
    """Treatment for prompts longer than `max_prompt_length`."""

    ERROR = "error"
    DROP = "drop"
    KEEP_HEAD = "keep_head"
    KEEP_TAIL = "keep_tail"
    KEEP_ENDS = "keep_ends"


class DeviceKind(str, Enum):
    """The workers' device kind."""

    AUTO = "auto"
    CPU = "cpu"
    CUDA = "cuda"
    NPU = "npu"


class HealthRule(str, Enum):
    """Training problems detected by `reporting.health_rules`."""

    ENTROPY_COLLAPSE = "entropy_collapse"  # the policy has become certain of nearly every token
    KL_RUNAWAY = "kl_runaway"  # the policy has left the reference
    VALIDATION_FALLS = "validation_falls"  # scores of training rise while those of validation fall
    VALIDATION_PLATEAU = "validation_plateau"  # no new best; read only where it ends the run
    ALL_CUT = "all_cut"  # nearly all responses are cut at the limit
    CRITIC_EXPLAINS_NOTHING = "critic_explains_nothing"
    EQUAL_SCORES = "equal_scores"  # prompts whose responses all score the same
    LOG_PROB_GAP = "log_prob_gap"  # generation and training disagree
    LAGGING_RANK = "lagging_rank"  # one rank is the slowest all the time


Rejection: TypeAlias = Literal[
    "token_k1", "token_k2", "token_k3", "seq_sum_k1", "seq_sum_k2", "seq_sum_k3", "seq_mean_k1",
    "seq_mean_k2", "seq_mean_k3", "seq_max_k1", "seq_max_k2", "seq_max_k3",
]  # fmt: skip
"""Statistics of `algorithms.rejection`."""
