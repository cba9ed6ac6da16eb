"""What follows a sampled turn, as token ids: the ids of a conversation only grow.

What was sampled is never tokenized again. New messages are rendered once, behind a placeholder that
stands for the turn before them, and tokenized from the end of that turn on. In ChatML:

    ...<|im_start|>assistant
    PLACEHOLDER<|im_end|>             <- the observation's ids begin behind the placeholder
    <|im_start|>user
    No.<|im_end|>
    <|im_start|>assistant             <- and end with the header of the next turn
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any

from mindspeed_rlxf.agents.session import Message, ToolCall
from mindspeed_rlxf.agents.tool_calls import parse_tool_calls
from mindspeed_rlxf.data.tokenizer import SpecialTokens

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

USER: Message = {"role": "user", "content": "What is 2 + 2?"}
PROBED_ANSWERS = ("4", "It is 4, as 2 + 2 = 4.\nIs it?", "4.\n\n- one\n- two")
OTHER_DATE = "{% macro strftime_now(format) %}1 January 1{% endmacro %}"
THOUGHT = "<think>\nI add them.\n</think>\n\n4"


class ChatTemplate:
    """A tokenizer's chat template, for messages that follow a sampled turn."""

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        eos_token_ids: Sequence[int],
        tools: Sequence[Mapping[str, Any]] | None = None,
        *,
        template_kwargs: Mapping[str, Any] | None = None,
        allow_special_tokens: bool = False,
    ) -> None:
        """Keep what renders messages; templates are probed when they are first used.

        Args:
            tokenizer: One without a chat template serves `text_ids` alone.
            eos_token_ids: Tokens that end a turn.
            tools: JSON schemas that the template shows to the model.
            template_kwargs: Further keywords of the template (`template_arguments`).
            allow_special_tokens: Read special tokens spelled in messages as tokens, not as text.
        """
        self._tokenizer = tokenizer
        self._eos_token_ids = frozenset(eos_token_ids)
        self._tools = [dict(tool) for tool in tools or ()]
        self._template_kwargs = dict(template_kwargs or {})
        self._allow_special_tokens = allow_special_tokens
        self._special = SpecialTokens(tokenizer)
        self._placeholder = f"zq{secrets.token_hex(12)}z"  # no text contains it
        self._accepted_roles: dict[tuple[str, ...], bool] = {}

    def observation_ids(self, messages: Sequence[Message], eos_id: int | None) -> list[int]:
        """Return the ids between a sampled turn and the next one.

        They are the template's end of the turn (without the EOS if it was sampled), the messages,
        and the header of the next turn. Messages of the role `assistant` alone continue the turn:
        their text follows it. Without messages the next turn follows one that ended by an EOS, and
        continues another.

        Args:
            messages: What was given.
            eos_id: The EOS that ended the turn, which may begin what follows, as in GLM; None = a
                stop string or a limit ended it.

        Raises:
            ValueError: The turn to continue was ended by an EOS.
        """
        if all(message["role"] == "assistant" for message in messages):
            if eos_id is None:
                return self.text_ids(messages)
            if messages:
                raise ValueError(
                    "a message of the role assistant must follow a turn that a stop string or its "
                    "limit ended, this turn was ended by an EOS; give it as user or tool"
                )
        ids = self._tail_ids(self._render_tail(self.fit_roles(messages)))
        if eos_id is None:
            return ids
        is_next_header = self._num_end_ids == 0 and ids[:1] == [eos_id]
        return ids[1 if is_next_header else self._num_end_ids :]

    def opening_ids(self, messages: Sequence[Message]) -> list[int]:
        """Return the ids between a prompt without the header of an answer and the first turn."""
        tail = self._render_tail(self.fit_roles(messages))
        if not tail.startswith(self._closing):
            raise ValueError("the chat template must close a turn alike, whatever follows it")
        return self._tail_ids(tail.removeprefix(self._closing))

    @cached_property
    def opens_thought(self) -> bool:
        """Whether the header of an answer begins a thought."""
        header = self._render_tail([])
        return header.rfind("<think>") > header.rfind("</think>")

    def text_ids(self, messages: Sequence[Message]) -> list[int]:
        """Return the ids of the messages' contents as they are, for prompts that are plain text."""
        text = "".join(str(message["content"]) for message in messages)
        return self._tail_ids(text if self._allow_special_tokens else self._special.hide(text))

    def fit_roles(self, messages: Sequence[Message]) -> list[Message]:
        """Return the messages with roles that the template takes.

        A role that it refuses becomes `user`; what it refuses twice in a row is joined.
        """
        fitted: list[Message] = []
        for message in messages:
            role = message["role"]
            if not self._accepts(role):
                role = "user"
            if fitted and fitted[-1]["role"] == role and not self._accepts(role, role):
                content = f"{fitted[-1]['content']}\n{message['content']}"
                fitted[-1] = {**fitted[-1], "content": content}
            else:
                fitted.append({**message, "role": role})
        return fitted

    def check(self, gives_first: bool = False, reads_calls: bool = False) -> list[str]:
        """Probe the template with this tokenizer; return notes for the log.

        Args:
            gives_first: Some agent gives messages before its first turn.
            reads_calls: The agent `tools` reads the model's calls.

        Raises:
            ValueError: It cannot follow a turn: there is none, it raises, or it changes answers. Or
                the model's calls of tools would not be read.
        """
        if self._tokenizer.chat_template is None:
            raise ValueError(
                "the tokenizer must have a chat template for agents whose prompts are messages; "
                "give it one, or write the prompts as text"
            )
        try:
            following_ids = self._tail_ids(self._render_tail([USER]))
            ends = self._num_end_ids > 0 or following_ids[0] in self._eos_token_ids
        except Exception as error:  # any type: a template is a program
            raise ValueError(
                "the chat template must render a user's message after an answer: "
                f"{(str(error).splitlines() or [type(error).__name__])[0]}"
            ) from error
        if gives_first:
            self.opening_ids([USER])
        unread_call = self._unread_call() if reads_calls and self._tools else ""
        if unread_call:
            raise ValueError(
                "the chat template must write calls of tools as docs/agents.md#tools has them, not "
                f"{unread_call!r:.300}"
            )
        notes = []
        if not ends:
            notes.append("the chat template ends answers with no EOS; turns may not end by one")
        for role in ("tool", "system"):
            if not self._accepts(role):
                notes.append(f"the chat template refuses messages of the role {role}: user instead")
        if self._tools and self._renders_alike(tools=None):
            notes.append("the chat template does not show tools: describe them in a message")
        template = self._tokenizer.get_chat_template(tools=self._tools or None)
        dated = f"{OTHER_DATE}{template}"
        if not self._renders_alike(chat_template=dated):
            notes.append("the chat template prints the day: data.template_date on every day")
        return notes + self._probe_prefixes()

    def _unread_call(self) -> str:
        """Return a call as the template writes it, if that is not read as one; else ""."""
        values = {"query": self._placeholder}
        call = ToolCall(self._tools[0]["function"]["name"], values)
        unread_call = ""
        for arguments in (values, json.dumps(values)):
            function = {"name": call.name, "arguments": arguments}
            entry = {"id": "call00001", "type": "function", "function": function}
            message = {"role": "assistant", "content": "", "tool_calls": [entry]}
            try:
                header = self._render([USER])
                text = self._render([USER, message], add_generation_prompt=False)
            except Exception:  # any type: a template is a program
                continue
            if self._placeholder not in text:
                continue
            if not text.startswith(header):  # it may begin a thought that the template drops
                return ""
            turn = text.removeprefix(header)
            if call in parse_tool_calls(turn, self._tools):
                return ""
            unread_call = turn
        return unread_call

    def _probe_prefixes(self) -> list[str]:
        """Compare grown ids with those of the complete chat, for answers and observations."""
        roles = [role for role in ("user", "tool") if self._accepts(role)]
        observations = [[_probe_message(role, USER["content"])] for role in roles]
        observations += [self.fit_roles([*messages, *messages]) for messages in observations]
        rewrites_thoughts = rewrites = differs = False
        for answer in (*PROBED_ANSWERS, THOUGHT):
            for observation in observations:
                chat: list[Message] = [USER]
                text = self._render(chat)
                ids = self._special.token_ids(text)
                for _ in range(2):
                    answered = self._special.token_ids(text + answer)
                    if answered[: len(ids)] != ids:  # the header and the answer make one token
                        break
                    end_ids = self._closing_ids[: self._num_end_ids]
                    ids = answered + end_ids
                    ids += self.observation_ids(observation, end_ids[-1] if end_ids else None)
                    chat += [{"role": "assistant", "content": answer}, *observation]
                    before = text
                    try:
                        text = self._render(chat)
                    except Exception:  # it takes messages of tools behind calls alone
                        break
                    if not text.startswith(before + answer):
                        rewrites_thoughts |= answer == THOUGHT
                        rewrites |= answer != THOUGHT
                        break
                    differs |= ids != self._special.token_ids(text)
        notes = []
        if rewrites:
            notes.append("the chat template rewrites earlier turns; here they stay as sampled")
        elif rewrites_thoughts:
            notes.append("the chat template drops <think> from earlier turns; here they stay")
        if differs:
            notes.append("a complete chat is tokenized in another way than its turns one by one")
        return notes

    def _renders_alike(self, **changes: Any) -> bool:
        try:
            return self._render([USER]) == self._render([USER], **changes)
        except Exception:  # some templates are for chats with tools alone
            return False

    @cached_property
    def _closing(self) -> str:
        """What the template writes behind an answer, whatever follows it."""
        closing = self._render_tail([], add_generation_prompt=False)
        if self._render_tail([USER]).startswith(closing):
            return closing
        # Phi 3 ends a complete chat with an EOS.
        return closing.removesuffix(self._tokenizer.eos_token or "") or closing

    @cached_property
    def _closing_ids(self) -> list[int]:
        return self._tail_ids(self._closing)

    @cached_property
    def _num_end_ids(self) -> int:
        """How many of `_closing_ids` are up to its EOS; 0 without one."""
        for index, token_id in enumerate(self._closing_ids):
            if token_id in self._eos_token_ids:
                return index + 1
        return 0

    @cached_property
    def _anchor(self) -> str:
        """A special token that a text can follow without losing its blanks."""
        added = self._tokenizer.added_tokens_decoder.values()
        plain = (str(token) for token in added if token.special and not token.rstrip)
        return next(plain, "")

    def _tail_ids(self, text: str) -> list[int]:
        """Tokenize a part that begins inside a text: some tokenizers begin a text with a blank."""
        num_anchor_ids = len(self._special.token_ids(self._anchor))
        return self._special.token_ids(self._anchor + text)[num_anchor_ids:]

    def _accepts(self, *roles: str) -> bool:
        """Whether the template takes messages of these roles, in a row, after an answer."""
        if roles not in self._accepted_roles:
            contents = [f"{self._placeholder}{index}" for index in range(len(roles))]
            messages = [*map(_probe_message, roles, contents)]
            try:
                tail = self._render_tail(messages)
                self._accepted_roles[roles] = all(content in tail for content in contents)
            except Exception:  # any type: a template is a program
                self._accepted_roles[roles] = False
        return self._accepted_roles[roles]

    def _render_tail(self, messages: Sequence[Message], **changes: Any) -> str:
        """Return what the template writes behind an answer. Raises ValueError if it changes it."""
        answer = {"role": "assistant", "content": self._placeholder}
        text = self._render([USER, answer, *messages], **changes)
        if self._placeholder not in text:
            raise ValueError("it must write answers as they are")
        return text.partition(self._placeholder)[2]

    def _render(self, messages: Sequence[Message], **changes: Any) -> str:
        """Render messages; words replace special tokens that they spell (`SpecialTokens`)."""
        chat: Any = list(messages)
        if not self._allow_special_tokens:
            chat = self._special.hide(chat)
        settings: dict[str, Any] = {
            "add_generation_prompt": True,
            "tools": self._tools or None,
            **self._template_kwargs,
            **changes,
        }
        return str(self._tokenizer.apply_chat_template(chat, tokenize=False, **settings))


def _probe_message(role: str, content: str) -> Message:
    """Return a message with what some templates want of a tool's."""
    return {"role": role, "content": content, "name": "f", "tool_call_id": "call00001"}
