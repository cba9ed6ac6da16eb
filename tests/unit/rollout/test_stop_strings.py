"""A stop string ends a response wherever token borders cut the string."""

import pytest

from mindspeed_rlxf.rollout.rollout_engine import FinishReason
from mindspeed_rlxf.rollout.sampling import SamplingSettings, StopStrings
from tests.unit.data.byte_tokenizer import byte_tokenizer

TOKENIZER = byte_tokenizer()
SPECIAL: int = TOKENIZER.convert_tokens_to_ids("<|im_end|>")


def ids(text: str) -> list[int]:
    found: list[int] = TOKENIZER(text, add_special_tokens=False)["input_ids"]
    return found


@pytest.mark.parametrize(
    ("strings", "text", "ended"),
    [
        (("</answer>",), "<answer>4</answer>", "<answer>4</answer>"),
        (("\n\n", "##"), "a\nb##c\n\n", "a\nb##"),
        (("größe",), "die größe x", "die größe"),
        (("aa",), "baaaa", "baa"),
        (("b",), "x" * 99 + "b", "x" * 99 + "b"),
        (("never",), "ever nevr", None),
    ],
)
def test_the_first_token_that_completes_a_string_ends_the_response(
    strings: tuple[str, ...], text: str, ended: str | None
) -> None:
    stop, tokens = StopStrings(strings, TOKENIZER), ids(text)
    ends = [n for n in range(1, len(tokens) + 1) if stop.is_completed_by(tokens[:n])]
    assert ends[:1] == ([] if ended is None else [len(ids(ended))])


def test_special_tokens_are_not_part_of_the_text() -> None:
    stop = StopStrings(("ab", "<|im_end|>"), TOKENIZER)
    assert stop.is_completed_by([*ids("a"), SPECIAL, *ids("b")])
    assert not stop.is_completed_by([*ids("b"), SPECIAL])


def test_only_a_new_occurrence_of_a_stop_string_ends_a_response() -> None:
    """As it does below `min_new_tokens`."""
    stop = StopStrings(("ab",), TOKENIZER)
    assert not stop.is_completed_by(ids("abc")) and stop.is_completed_by(ids("abcab"))


def test_the_finish_reason_is_that_of_an_end() -> None:
    keys = {"do_sample": True, "temperature": 1.0, "top_k": 0, "top_p": 1.0, "max_new_tokens": 9}
    stop = StopStrings(("ab",), TOKENIZER)
    for shortest, reason in ((0, FinishReason.STOP), (3, FinishReason.LENGTH)):
        settings = SamplingSettings(
            **keys, min_new_tokens=shortest, eos_token_ids=(SPECIAL,), stop=stop
        )  # type: ignore[arg-type]
        assert FinishReason.of(ids("ab"), settings) is reason
        assert FinishReason.of([SPECIAL], settings) is FinishReason.STOP
