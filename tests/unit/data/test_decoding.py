"""Texts that rewards read."""

from transformers import PreTrainedTokenizerFast

from mindspeed_rlxf.data.decoding import RewardTexts, decode, decode_without_special
from tests.unit.data.byte_tokenizer import byte_tokenizer

SPECIAL = ["<pad>", "<s>", "</s>", "<|end|>", "<think>", "</think>", "<answer>", "</answer>"]
TOKENIZER = byte_tokenizer(SPECIAL, "<s> $A", "</s>")
TOKENIZER.bos_token = "<s>"
RESPONSE = "<think>\n2+2=4\n</think>\n<answer>4</answer>"


def ids_of(text: str) -> list[int]:
    ids: list[int] = TOKENIZER(text, add_special_tokens=False)["input_ids"]
    return ids


def test_special_tokens_stay_in_the_text_without_what_frames_it() -> None:
    texts = RewardTexts(TOKENIZER)
    for behind in ("", "</s>", "</s><pad><pad>"):
        assert texts.response(ids_of(RESPONSE + behind), False) == RESPONSE
    assert texts.response(ids_of(RESPONSE + "<|end|>"), True) == RESPONSE, "an EOS of the model"
    assert texts.response(ids_of(RESPONSE), False) == RESPONSE, "truncated there"
    assert texts.response(ids_of("a</s>b"), False) == "a</s>b"
    assert texts.prompt(ids_of("<pad><s><|end|>1+1=</s><think>")) == "<|end|>1+1=</s><think>"
    assert texts.response([], True) == texts.prompt(ids_of("<s>")) == ""


def test_a_stop_string_stays_at_the_end() -> None:
    texts = RewardTexts(TOKENIZER, ("2</answer>", "</s>"))
    assert texts.response(ids_of(RESPONSE), True) == RESPONSE
    assert texts.response(ids_of("4</s>"), True) == "4</s>"
    assert texts.response(ids_of("4<|end|>"), True) == "4"


def test_blanks_before_punctuation_are_kept() -> None:
    cleaning = byte_tokenizer()
    cleaned = PreTrainedTokenizerFast(
        tokenizer_object=cleaning.backend_tokenizer,
        eos_token="</s>",
        clean_up_tokenization_spaces=True,
    )
    for text in ("a != b", "print('a , b')", "the word 'social'", "Hello !"):
        ids = cleaned(text)["input_ids"]
        assert decode(cleaned, ids) == decode_without_special(cleaned, ids) == text
        assert RewardTexts(cleaned).response(ids, False) == text
