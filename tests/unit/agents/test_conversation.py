"""Ids of a conversation only grow, and are those that the chat template would write."""

import random
from contextlib import nullcontext
from typing import Any

import pytest
from transformers import PreTrainedTokenizerFast

from mindspeed_rlxf.agents.conversation import ChatTemplate
from tests.unit.agents.chat_templates import FAMILIES, tokenizer_of

NUM_CONVERSATIONS = 1000
SEARCH = {
    "type": "function",
    "function": {"name": "search", "description": "Search.", "parameters": {"type": "object"}},
}
WORDS = (
    "What", " is", " 4", ".", "\n", "\n\n", " the answer", "  ", "{", '"name": "search"', "}", ", ",
    "<b>",
)  # fmt: skip
SPELLED = (*WORDS, "<|im_end|>", "<end_of_turn>", "<|end|>", "<|eot_id|>", "<|User|>")


def template_of(family: str, tools: Any = None) -> ChatTemplate:
    tokenizer = tokenizer_of(family)
    return ChatTemplate(tokenizer, [tokenizer.eos_token_id], tools)


def user(content: str) -> dict[str, Any]:
    return {"role": "user", "content": content}


def draw_text(rng: random.Random, words: tuple[str, ...]) -> str:
    """Draw words between two letters, as some templates strip what they render."""
    return "".join(["a", *rng.choices(words, k=rng.randint(0, 6)), "z"])


def render(family: str, messages: list[dict[str, Any]]) -> str:
    return str(
        tokenizer_of(family).apply_chat_template(
            messages, tokenize=False, add_generation_prompt=True
        )
    )


def ids_of(family: str, text: str) -> list[int]:
    return list(tokenizer_of(family)(text, add_special_tokens=False)["input_ids"])


@pytest.mark.parametrize("family", FAMILIES)
def test_grown_ids_are_those_of_the_complete_chat(family: str) -> None:
    """For canonical answers without thoughts, which every one of these templates only appends to.

    The template that begins thoughts itself is compared from the last answer on.
    """
    rng = random.Random(family)
    template, eos = template_of(family), tokenizer_of(family).eos_token_id
    roles = ["user"] if family in ("gemma", "phi") else ["user", "tool"]
    for _ in range(NUM_CONVERSATIONS):
        chat = [user(draw_text(rng, WORDS))]
        text = render(family, chat)
        ids = ids_of(family, text)
        for _ in range(rng.randint(1, 3)):
            answer = draw_text(rng, WORDS)
            answered = ids_of(family, text + answer)
            assert answered[: len(ids)] == ids
            messages = [{"role": rng.choice(roles), "content": draw_text(rng, WORDS)}]
            ended = rng.random() < 0.7
            observation = template.observation_ids(messages, eos if ended else None)
            ids = answered + [eos] * ended + observation
            chat += [{"role": "assistant", "content": answer}, *messages]
            text = render(family, chat)
            complete = ids_of(family, text)
            if family == "think":
                assert complete[-len(observation) :] == observation
                text, ids = text, complete
            assert ids == complete


@pytest.mark.parametrize("family", FAMILIES)
def test_what_follows_does_not_depend_on_what_was_sampled(family: str) -> None:
    """After any ids, thoughts and spelled special tokens the template's own text follows."""
    rng = random.Random(family)
    template, tokenizer = template_of(family, [SEARCH]), tokenizer_of(family)
    for _ in range(100):
        messages = [user(draw_text(rng, WORDS))]
        answer = tokenizer.decode(rng.choices(range(len(tokenizer)), k=5)) + "zqz"
        chat = [user("Go."), {"role": "assistant", "content": answer}, *messages]
        tail_ids = ids_of(family, render(family, chat).rpartition("zqz")[2])
        assert tail_ids[0] == tokenizer.eos_token_id
        assert template.observation_ids(messages, None) == tail_ids
        assert template.observation_ids(messages, tokenizer.eos_token_id) == tail_ids[1:]


@pytest.mark.parametrize("family", FAMILIES)
def test_special_tokens_in_an_observation_are_text(family: str) -> None:
    rng = random.Random(family)
    template, special = template_of(family), set(tokenizer_of(family).all_special_ids)
    special |= set(tokenizer_of(family).added_tokens_decoder)
    eos = tokenizer_of(family).eos_token_id
    plain = template.observation_ids([user("a")], eos)
    for _ in range(50):
        spelled = template.observation_ids([user(draw_text(rng, SPELLED))], eos)
        assert [i for i in spelled if i in special] == [i for i in plain if i in special]


def test_messages_of_refused_roles_become_a_users() -> None:
    messages = [
        {"role": "tool", "content": "3", "name": "add"},
        {"role": "system", "content": "4"},
        user("5"),
    ]
    for family in ("gemma", "phi", "chatml"):
        fitted = [(m["role"], m["content"]) for m in template_of(family).fit_roles(messages)]
        expected = {
            "gemma": [("user", "3\n4\n5")],
            "phi": [("user", "3"), ("system", "4"), ("user", "5")],
            "chatml": [("tool", "3"), ("system", "4"), ("user", "5")],
        }
        assert fitted == expected[family]


def test_a_probe_says_what_a_template_does_to_conversations() -> None:
    words = ("role tool", "role system", "show tools", "the day", "drops <think>", "rewrites")
    found = {}
    for family in FAMILIES:
        notes = " ".join(template_of(family, [SEARCH]).check())
        found[family] = [word for word in words if word in notes]
    assert found == {
        "qwen3": ["drops <think>"],
        "llama3": ["the day"],
        "chatml": ["show tools"],
        "phi": ["role tool", "show tools"],
        "gemma": ["role tool", "role system", "show tools"],
        "think": ["role system", "show tools", "rewrites"],
    }


def special(family: str, template: str, **tokens: str) -> Any:
    """A family's tokenizer with another template."""
    changed = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer_of(family).backend_tokenizer, **tokens
    )
    changed.chat_template = template
    return changed


def test_an_eos_that_begins_the_next_message_is_not_said_twice() -> None:
    """The template ends no message: a model of GLM ends a turn by the mark of who speaks next."""
    tokenizer = special(
        "think",
        "{% for m in messages %}{{ {'user': '<|User|>', 'tool': '<|tool|>', 'assistant': "
        "'<|Assistant|>'}[m.role] + m.content }}{% endfor %}"
        "{% if add_generation_prompt %}<|Assistant|>{% endif %}",
    )
    user_id, tool_id, end_id = tokenizer.convert_tokens_to_ids(["<|User|>", "<|tool|>", "<|end|>"])
    template = ChatTemplate(tokenizer, [user_id, tool_id, end_id])
    for role, eos_id in (("user", user_id), ("tool", tool_id)):
        messages = [{"role": role, "content": "a"}]
        ids = template.observation_ids(messages, None)
        assert ids[0] == eos_id
        assert template.observation_ids(messages, eos_id) == ids[1:]
        assert template.observation_ids(messages, end_id) == ids
    assert not any("EOS" in note for note in template.check())


def test_a_complete_chat_may_be_refused_where_a_turn_can_be_followed() -> None:
    """As in Mistral: users and answers alternate, but for calls; tool messages have ids."""
    template = (
        "{% for t in tools %}{{ t | tojson }}{% endfor %}{% set ns = namespace(n=0) %}"
        "{% for m in messages %}{% if m.role == 'tool' %}"
        "{% if m.tool_call_id | length != 9 %}{{ raise_exception('no id') }}{% endif %}"
        "{{ '<|tool|>' + m.content }}{% else %}"
        "{% if (m.role == 'user') != (ns.n % 2 == 0) %}{{ raise_exception('turns') }}{% endif %}"
        "{% set ns.n = ns.n + 1 %}{{ m.content }}{% if m.role == 'assistant' %}<|end|>{% endif %}"
        "{% endif %}{% endfor %}"
    )
    tokenizer = special("think", template)
    end_id = tokenizer.convert_tokens_to_ids("<|end|>")
    notes = ChatTemplate(tokenizer, [end_id], [SEARCH]).check()
    assert [
        word for word in ("role tool", "show tools", "the day") if word in " ".join(notes)
    ] == []
    with pytest.raises(ValueError, match="chat template"):  # one for chats with tools alone
        ChatTemplate(tokenizer, [end_id]).check()


def test_a_template_whose_calls_are_not_read_is_refused() -> None:
    template = (
        "{{ tools | tojson if tools }}{% for m in messages %}{{ m.content }}"
        "{% for c in m.tool_calls or () %}CALL{% endfor %}<|end|>{% endfor %}"
    )
    forms = {
        "{{ '<tool_call>' + c.function | tojson + '</tool_call>' }}": True,
        "{{ '[TOOL_CALLS]' + c.function.name + c.function.arguments }}": True,  # JSON as text
        "{{ c.function.name + '(' + c.function.arguments.items() | list | string + ')' }}": False,
    }
    for form, is_read in forms.items():
        tokenizer = special("think", template.replace("CALL", form))
        ChatTemplate(tokenizer, []).check()
        with nullcontext() if is_read else pytest.raises(ValueError, match="calls"):
            ChatTemplate(tokenizer, [], [SEARCH]).check(reads_calls=True)
        ChatTemplate(tokenizer, [], [SEARCH]).check()  # an agent of the user's may read them


def test_an_eos_behind_a_complete_chat_is_not_in_a_chat_that_goes_on() -> None:
    """The template of Phi 3 writes one where no answer follows."""
    ending = "{% if not add_generation_prompt %}{{ eos_token }}{% endif %}"
    tokenizer = special(
        "phi", tokenizer_of("phi").chat_template + ending, eos_token="<|endoftext|>"
    )
    end_id = tokenizer.convert_tokens_to_ids("<|end|>")
    template = ChatTemplate(tokenizer, [tokenizer.eos_token_id, end_id])
    plain = template_of("phi")
    assert template.opening_ids([user("a")]) == plain.opening_ids([user("a")])
    followed = plain.observation_ids([user("a")], end_id)
    assert template.observation_ids([user("a")], end_id) == followed
    tokenizer.chat_template = (
        "{% for m in messages %}{{ m.content }}{{ '<|endoftext|>' if loop.last and not "
        "add_generation_prompt else '<|end|>' }}{% endfor %}"
    )
    unclosed = ChatTemplate(tokenizer, [end_id])
    unclosed.check()
    with pytest.raises(ValueError, match="close a turn"):
        unclosed.check(gives_first=True)


def test_a_template_that_changes_answers_is_refused() -> None:
    tokenizer = tokenizer_of("chatml")
    for chat_template in (None, "{{ messages[0].content }}", "{{ raise_exception('no') }}"):
        changed = PreTrainedTokenizerFast(tokenizer_object=tokenizer.backend_tokenizer)
        changed.chat_template = chat_template
        with pytest.raises(ValueError, match="chat template"):
            ChatTemplate(changed, []).check()


@pytest.mark.parametrize("family", FAMILIES)
def test_a_message_of_the_assistant_continues_an_open_turn(family: str) -> None:
    template, text = template_of(family), "= 4, or"
    continued = template.observation_ids([{"role": "assistant", "content": text}], None)
    tokens = "".join(tokenizer_of(family).convert_ids_to_tokens(continued))
    assert tokens.replace("▁", " ").replace("Ġ", " ") == text, "no blank comes before it"
    with pytest.raises(ValueError, match="assistant"):
        template.observation_ids(
            [{"role": "assistant", "content": text}], tokenizer_of(family).eos_token_id
        )
    assert template.observation_ids([], None) == []


@pytest.mark.parametrize("family", FAMILIES)
def test_a_prompt_without_a_header_goes_on_with_what_is_given_first(family: str) -> None:
    """As the complete chat does, where roles need not alternate."""
    template, first, second = template_of(family), user("What is 2?"), user("And 3?")
    tokenizer = tokenizer_of(family)
    prompt = tokenizer.apply_chat_template([first], tokenize=False)
    for given in ([], [second]):
        ids = ids_of(family, prompt) + template.opening_ids(given)
        if family == "gemma" and given:
            expected = prompt + render(family, given).removeprefix("<bos>")
        else:
            expected = render(family, [first, *given])
        assert ids == ids_of(family, expected)
    assert template.opens_thought == (family == "think")
