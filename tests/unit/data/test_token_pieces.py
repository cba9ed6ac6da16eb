"""The texts of tokens are the response again, whatever the kind of tokenizer."""

from typing import Any

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from mindspeed_rlxf.data.tokenizer import token_pieces

TEXT = "Beijing 北京 is \U0001f600 \n the 首都, naïve \x85!"


def byte_level() -> PreTrainedTokenizerFast:
    """A GPT-2 tokenizer of bytes with few merges, so that characters are cut."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=262, initial_alphabet=alphabet, special_tokens=["<eos>"]
    )
    tokenizer.train_from_iterator(["the the is is"], trainer)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<eos>")


def sentence_piece() -> PreTrainedTokenizerFast:
    vocabulary = {"<unk>": 0, "<eos>": 1, **{f"<0x{i:02X}>": i + 2 for i in range(256)}}
    vocabulary |= {"\u2581": 258, "i": 259, "s": 260, "is": 261, "\u2581is": 262}
    merges = [("i", "s"), ("\u2581", "is")]
    tokenizer = Tokenizer(models.BPE(vocabulary, merges, unk_token="<unk>", byte_fallback=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<eos>")


@pytest.mark.parametrize("tokenizer", [byte_level(), sentence_piece()], ids=["bytes", "pieces"])
def test_pieces_are_the_response_with_a_text_for_each_token(tokenizer: Any) -> None:
    ids = [*tokenizer(TEXT)["input_ids"], tokenizer.eos_token_id]
    pieces = token_pieces(tokenizer, ids)
    assert len(pieces) == len(ids)
    assert "".join(pieces).removeprefix(" ") == f"{TEXT}<eos>"
    assert "北" in pieces and "" in pieces, "a character of three tokens is with the last of them"


def test_a_response_that_ends_inside_a_character() -> None:
    tokenizer = byte_level()
    ids = tokenizer("北")["input_ids"]
    assert token_pieces(tokenizer, ids[:2]) == ["", "\ufffd"]
    broken = token_pieces(tokenizer, [ids[1]] * 9)
    assert len(broken) == 9 and "".join(broken).strip("\ufffd") == ""
