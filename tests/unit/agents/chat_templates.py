"""Six families of chat templates, each with a small tokenizer that reads text as its own does."""

from collections.abc import Callable
from functools import cache
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers
from tokenizers.trainers import BpeTrainer
from transformers import PreTrainedTokenizerFast

CORPUS = [
    "What is 2 + 2? It is 4, as two and two make four.\n\nNo. Try again, and think about it.\n",
    '{"name": "search", "arguments": {"query": "weather in Paris", "days": 3}}\n',
    "user assistant system tool model <think>\nI add the numbers.\n</think>\n\nThe answer is 12.",
] * 4

# Thoughts of turns before the last question of a user are dropped; tool messages are a user's.
QWEN3 = """
{%- if tools %}<|im_start|>system\n# Tools{% for t in tools %}\n{{ t | tojson }}{% endfor %}
{{- '<|im_end|>\n' }}{% endif %}
{%- set ns = namespace(last=-1) %}
{%- for m in messages %}
{%- if m.role == 'user' %}{% set ns.last = loop.index0 %}{% endif %}{% endfor %}
{%- for m in messages %}
{%- if m.role == 'assistant' %}
{%- set said = m.content.split('</think>')[-1].lstrip('\n') %}
{%- set thought = m.content.split('</think>')[0].split('<think>')[-1].strip('\n') %}
{%- if '</think>' not in m.content %}{% set thought = '' %}{% endif %}
{{- '<|im_start|>assistant\n' }}
{%- if loop.index0 > ns.last and (loop.last or thought) %}
{{- '<think>\n' + thought + '\n</think>\n\n' }}{% endif %}
{{- said + '<|im_end|>\n' }}
{%- elif m.role == 'tool' %}
{%- if messages[loop.index0 - 1].role != 'tool' %}{{ '<|im_start|>user' }}{% endif %}
{{- '\n<tool_response>\n' + m.content + '\n</tool_response>' }}
{%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}{{ '<|im_end|>\n' }}{% endif %}
{%- else %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}
{%- endif %}{% endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"""

# A date in the system header, tools in the first message of a user, and stripped contents.
LLAMA3 = """{{ bos_token }}<|start_header_id|>system<|end_header_id|>
{{- '\n\nToday: ' + strftime_now('%d %b %Y') + '<|eot_id|>' }}
{%- for m in messages %}
{%- if m.role == 'tool' %}<|start_header_id|>ipython<|end_header_id|>
{{- '\n\n' + m.content | tojson + '<|eot_id|>' }}
{%- else %}{{ '<|start_header_id|>' + m.role + '<|end_header_id|>\n\n' }}
{%- if tools and loop.first %}
{%- for t in tools %}{{ t | tojson }}{{ '\n\n' }}{% endfor %}{% endif %}
{{- m.content | trim + '<|eot_id|>' }}
{%- endif %}{% endfor %}
{%- if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>
{{- '\n\n' }}{% endif %}"""

CHATML = """{% for m in messages %}
{{- '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{% endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"""

# Its special tokens strip the blanks behind them. Messages of other roles than three are dropped.
PHI = """{% for m in messages %}{% if m.role in ('system', 'user', 'assistant') %}
{{- '<|' + m.role + '|>\n' + m.content + '<|end|>\n' }}{% endif %}{% endfor %}
{%- if add_generation_prompt %}{{ '<|assistant|>\n' }}{% endif %}"""

# Roles must alternate, beginning with the user.
GEMMA = """{{ bos_token }}{% for m in messages %}
{%- if (m.role == 'user') != (loop.index0 % 2 == 0) %}
{{- raise_exception('roles must alternate') }}{% endif %}
{{- '<start_of_turn>' + ('model' if m.role == 'assistant' else m.role) }}
{{- '\n' + m.content | trim + '<end_of_turn>\n' }}
{%- endfor %}{% if add_generation_prompt %}{{ '<start_of_turn>model\n' }}{% endif %}"""

# Begins the thought itself, and drops every thought of an answer.
THINK = """{{ bos_token }}{% for m in messages %}
{%- if m.role == 'user' %}{{ '<|User|>' + m.content }}
{%- elif m.role == 'assistant' %}{{ '<|Assistant|>' + m.content.split('</think>')[-1] + '<|end|>' }}
{%- elif m.role == 'tool' %}{{ '<|tool|>' + m.content + '<|/tool|>' }}
{%- else %}{{ raise_exception('unknown role ' + m.role) }}
{%- endif %}{% endfor %}{% if add_generation_prompt %}{{ '<|Assistant|><think>\n' }}{% endif %}"""


def bytes_with_merges() -> Tokenizer:
    """Reads UTF-8 bytes, as the tokenizers of Qwen and Llama 3 do."""
    core = Tokenizer(models.BPE())
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    core.train_from_iterator(CORPUS, BpeTrainer(vocab_size=400, initial_alphabet=alphabet))
    return core


def blank_first() -> Tokenizer:
    """Begins a text with a blank, as the tokenizers of Llama 2 and Phi 3 do."""
    core = Tokenizer(models.BPE(unk_token="<unk>"))
    core.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    core.decoder = decoders.Metaspace(prepend_scheme="first", split=False)
    return _trained(core)


def blanks_as_letters() -> Tokenizer:
    """Replaces blanks before everything else, as the tokenizer of Gemma does."""
    core = Tokenizer(models.BPE(unk_token="<unk>"))
    core.normalizer = normalizers.Replace(" ", "▁")
    core.decoder = decoders.Replace("▁", " ")
    return _trained(core)


def _trained(core: Tokenizer) -> Tokenizer:
    letters = [*map(chr, range(32, 127)), "\n", "▁"]
    trainer = BpeTrainer(vocab_size=300, initial_alphabet=letters, special_tokens=["<unk>"])
    core.train_from_iterator(CORPUS, trainer)
    return core


Family = tuple[str, Callable[[], Tokenizer], list[str], str, bool]
IM = ["<|im_start|>", "<|im_end|>"]
FAMILIES: dict[str, Family] = {
    # template, tokenizer, special tokens, EOS, whether special tokens strip blanks behind them
    "qwen3": (QWEN3, bytes_with_merges, IM, IM[1], False),
    "llama3": (
        LLAMA3,
        bytes_with_merges,
        ["<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"],
        "<|eot_id|>",
        False,
    ),
    "chatml": (CHATML, bytes_with_merges, IM, IM[1], False),
    "phi": (
        PHI,
        blank_first,
        ["<|endoftext|>", "<|system|>", "<|user|>", "<|assistant|>", "<|end|>"],
        "<|end|>",
        True,
    ),
    "gemma": (
        GEMMA,
        blanks_as_letters,
        ["<bos>", "<start_of_turn>", "<end_of_turn>"],
        "<end_of_turn>",
        False,
    ),
    "think": (
        THINK,
        bytes_with_merges,
        ["<|begin|>", "<|User|>", "<|Assistant|>", "<|tool|>", "<|/tool|>", "<|end|>"],
        "<|end|>",
        False,
    ),
}


@cache
def tokenizer_of(family: str) -> Any:
    """Make a family's tokenizer, with its chat template."""
    template, make_core, special, eos, strips = FAMILIES[family]
    core = make_core()
    core.add_special_tokens(
        [
            AddedToken(token, rstrip=strips and token != "<|endoftext|>", normalized=False)
            for token in special
        ]
    )
    core.add_tokens([AddedToken(token, normalized=False) for token in ("<think>", "</think>")])
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=core, bos_token=special[0], eos_token=eos, pad_token=special[0]
    )
    tokenizer.chat_template = template
    return tokenizer
