"""Every choice of the configuration; the value is the word that stands in the YAML."""

from __future__ import annotations

from enum import Enum


class Role(str, Enum):
    """A model with a place in the loop; rollout is generation by the actor's own ranks."""

    ACTOR_ROLLOUT = "actor_rollout"
    REF = "ref"
    CRITIC = "critic"
    REWARD = "reward"


class Stage(str, Enum):
    """Training algorithm."""

    RAY_PPO = "ray_ppo"


class AdvEstimator(str, Enum):
    """How advantages are estimated."""

    GAE = "gae"


class KlPenalty(str, Enum):
    """Per-token estimate of the KL divergence; d = log_prob - ref_log_prob."""

    KL = "kl"  # d
    ABS = "abs"  # |d|
    MSE = "mse"  # d^2 / 2
    LOW_VAR_KL = "low_var_kl"  # exp(-d) - 1 + d


class KlControl(str, Enum):
    """How the KL coefficient moves."""

    FIXED = "fixed"
    ADAPTIVE = "adaptive"


class AdvantageWhiten(str, Enum):
    """Over which tokens advantages are whitened."""

    BATCH = "batch"
    MINIBATCH = "minibatch"
    NONE = "none"


class ScorePosition(str, Enum):
    """Which slot takes the score of a response that ended."""

    AFTER_EOS = "after_eos"
    EOS = "eos"


class ScoreSlotLimit(str, Enum):
    """Up to which width the slot after EOS exists."""

    MAX_NEW_TOKENS = "max_new_tokens"
    BATCH_WIDTH = "batch_width"


class LossNormalizer(str, Enum):
    """What the token losses are divided by."""

    MINIBATCH_TOKENS = "minibatch_tokens"
    MICRO_BATCH_MEAN = "micro_batch_mean"


class OldLogProbs(str, Enum):
    """Where the log-probs of the behaviour policy come from."""

    RECOMPUTE = "recompute"
    ROLLOUT = "rollout"


class RewardKind(str, Enum):
    """What gives the score."""

    RULE = "rule"
    MODEL = "model"


class LrDecayStyle(str, Enum):
    """Shape of the learning-rate schedule after warm-up."""

    CONSTANT = "constant"
    LINEAR = "linear"
    COSINE = "cosine"


class RopeScaling(str, Enum):
    """How rotary frequencies are stretched for long contexts."""

    LINEAR = "linear"
    LLAMA3 = "llama3"


class OverlongPrompts(str, Enum):
    """What becomes of a prompt longer than `max_prompt_length`."""

    ERROR = "error"
    DROP = "drop"
    KEEP_HEAD = "keep_head"
    KEEP_TAIL = "keep_tail"


class RuntimeKind(str, Enum):
    """What starts the workers."""

    RAY = "ray"
    LOCAL = "local"


class DeviceKind(str, Enum):
    """What the workers compute on."""

    AUTO = "auto"
    CPU = "cpu"
    CUDA = "cuda"
    NPU = "npu"
