"""Chat templates that print the day, and those that refuse system messages."""

import datetime
import json
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from mindspeed_rlxf.config.schema import DataConfig
from mindspeed_rlxf.data.prompts import load_prompts
from mindspeed_rlxf.data.template_dates import DIRECTIVES, fix_date
from tests.unit.data.byte_tokenizer import byte_tokenizer

DATED = (
    "{% if strftime_now is defined %}{{ strftime_now('%d %b %Y') }}{% else %}no day{% endif %}"
    "{% for m in messages %} {{ m.content }}{% endfor %}"
)
USERS_ONLY = (
    "{% for m in messages %}{% if m.role != 'user' %}{{ raise_exception('roles') }}{% endif %}"
    "<{{ m.content }}>{% endfor %}"
)
CHAT = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}]


def text_of(folder: Path, template: str, prompt: list[dict[str, str]], **keys: Any) -> str:
    file = folder / "rows.jsonl"
    row = {"prompt": prompt, "ground_truth": "", "data_source": "a"}
    file.write_text(json.dumps(row), encoding="utf-8")
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = template
    (loaded,) = load_prompts(str(file), tokenizer, DataConfig(train_files=[str(file)], **keys), 99)
    return tokenizer.decode([int(i) for i in loaded.token_ids])


def test_a_template_prints_the_day_of_the_configuration(tmp_path: Path) -> None:
    assert text_of(tmp_path, DATED, CHAT[1:], template_date="2026-07-04") == "04 Jul 2026 Hi"
    assert text_of(tmp_path, DATED, CHAT[1:]) == "01 Jan 2025 Hi"
    with pytest.raises(ValidationError, match="must be a day"):
        DataConfig(train_files=["a"], template_date="yesterday")


def test_every_directive_of_a_clock_is_of_the_day() -> None:
    day = datetime.date(2026, 7, 4)
    tokenizer = byte_tokenizer()
    formats = " ".join(f"%{letter}" for letter in DIRECTIVES) + " %-d %-m"
    tokenizer.chat_template = fix_date("{{ strftime_now('" + formats + "') }}", day)
    assert tokenizer.apply_chat_template(CHAT, tokenize=False) == day.strftime(formats)


def test_a_refused_system_message_joins_the_first_of_the_user(tmp_path: Path) -> None:
    assert text_of(tmp_path, USERS_ONLY, CHAT) == "<Be brief.\n\nHi>"
