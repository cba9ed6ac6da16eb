"""Ids of a conversation only grow, and are those that the chat template would write."""

import random
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
            observation = template.observation_ids(messages, ended)
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
        assert template.observation_ids(messages, ended_with_eos=False) == tail_ids
        assert template.observation_ids(messages, ended_with_eos=True) == tail_ids[1:]


@pytest.mark.parametrize("family", FAMILIES)
def test_special_tokens_in_an_observation_are_text(family: str) -> None:
    rng = random.Random(family)
    template, special = template_of(family), set(tokenizer_of(family).all_special_ids)
    special |= set(tokenizer_of(family).added_tokens_decoder)
    plain = template.observation_ids([user("a")], True)
    for _ in range(50):
        spelled = template.observation_ids([user(draw_text(rng, SPELLED))], True)
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
    continued = template.observation_ids([{"role": "assistant", "content": text}], False)
    tokens = "".join(tokenizer_of(family).convert_ids_to_tokens(continued))
    assert tokens.replace("▁", " ").replace("Ġ", " ") == text, "no blank comes before it"
    with pytest.raises(ValueError, match="assistant"):
        template.observation_ids([{"role": "assistant", "content": text}], True)
    assert template.observation_ids([], ended_with_eos=False) == []


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
