"""Chat templates that print the day, as Llama 3.2's: a run prints the same on every day."""

from __future__ import annotations

import datetime
from typing import TYPE_CHECKING, Any

from mindspeed_rlxf.config.sections import DataConfig

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

CLOCK = "strftime_now"
"""The function that transformers gives to templates."""
DIRECTIVES = "aAbBdeHIjmMpSuUwyYZ"


def template_arguments(tokenizer: PreTrainedTokenizerBase, data: DataConfig) -> dict[str, Any]:
    """Return the keywords of `apply_chat_template` for a run's chats.

    They are `data.chat_template_kwargs`, and for a template that prints the day another one, which
    prints `data.template_date`.
    """
    arguments = dict(data.chat_template_kwargs)
    if tokenizer.chat_template is not None:
        template = tokenizer.get_chat_template(tools=arguments.get("tools"))
        if CLOCK in template:
            day = datetime.date.fromisoformat(data.template_date)
            arguments["chat_template"] = fix_date(template, day)
    return arguments


def fix_date(template: str, day: datetime.date) -> str:
    """Return a template whose clock stands still at midnight of a day."""
    directives = [f"%{letter}" for letter in DIRECTIVES]
    directives += [f"%-{letter}" for letter in "dmHIMSj"]
    filters = [f"replace('{directive}', '{day.strftime(directive)}')" for directive in directives]
    clock = f"{{% macro {CLOCK}(format) %}}{{{{ format | {' | '.join(filters)} }}}}{{% endmacro %}}"
    return f"{clock}{template}"
