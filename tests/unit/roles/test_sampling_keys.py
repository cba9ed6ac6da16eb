"""The sampling keys of the configuration reach generation."""

from types import SimpleNamespace
from typing import Any

from mindspeed_rlxf.config.schema import ValidationConfig
from mindspeed_rlxf.roles.rollout import sampling_settings, validation_settings
from mindspeed_rlxf.rollout.sampling import SamplingSettings


def test_every_sampling_key_reaches_generation() -> None:
    keys = {
        "temperature": 0.7, "top_k": 5, "top_p": 0.9, "min_new_tokens": 2, "max_new_tokens": 8,
    }  # fmt: skip
    actor: Any = SimpleNamespace(**keys)
    found = sampling_settings(actor, [3, 4], True)
    assert found == SamplingSettings(do_sample=True, eos_token_ids=(3, 4), **keys)
    assert found.logit_temperature == 0.7  # of the log-probs in training too
    assert sampling_settings(actor, [3, 4], False).logit_temperature == 1.0


def test_every_sampling_key_of_validation_reaches_its_generation() -> None:
    greedy = SamplingSettings(
        False, 0.7, 5, 0.9, min_new_tokens=2, max_new_tokens=8, eos_token_ids=(3,)
    )
    keys = {"do_sample": True, "temperature": 0.6, "top_k": 9, "top_p": 0.5}
    found = validation_settings(ValidationConfig(**keys), greedy)  # type: ignore[arg-type]
    assert found == SamplingSettings(**keys, min_new_tokens=2, max_new_tokens=8, eos_token_ids=(3,))  # type: ignore[arg-type]
    assert validation_settings(ValidationConfig(), greedy).do_sample is False
