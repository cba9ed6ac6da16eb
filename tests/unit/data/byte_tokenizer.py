"""A tokenizer with one id per byte, and the special tokens of all prompt templates."""

from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

SPECIAL = [
    "<pad>", "<s>", "</s>", "<|im_start|>", "<|im_end|>", "<|begin_of_text|>", "<|end_of_text|>",
    "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>",
]  # fmt: skip


def byte_tokenizer(
    special: list[str] = SPECIAL, frame: str = "$A", eos: str = "<|end_of_text|>"
) -> PreTrainedTokenizerFast:
    """Make the tokenizer. frame: special tokens around a text `$A`; eos: a token of `special`"""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    ids = {token: i for i, token in enumerate([*special, *alphabet])}
    core = Tokenizer(models.BPE(vocab=ids, merges=[]))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    named = [(token, ids[token]) for token in special]
    core.post_processor = processors.TemplateProcessing(single=frame, special_tokens=named)
    return PreTrainedTokenizerFast(
        tokenizer_object=core,
        eos_token=eos,
        pad_token=special[0],
        additional_special_tokens=[token for token in special[1:] if token != eos],
    )


def write_tokenizer(folder: Path, **settings: object) -> str:
    """Write a byte tokenizer to a folder; return its path. settings: as `byte_tokenizer`"""
    byte_tokenizer(**settings).save_pretrained(folder)  # type: ignore[arg-type]
    return str(folder)
