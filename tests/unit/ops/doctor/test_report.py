"""The report keeps its form."""

import json

import pytest

from mindspeed_rlxf.device.findings import error, ok
from mindspeed_rlxf.ops.doctor import output


def test_equal_findings_of_hosts_become_one() -> None:
    both = ok("a", "1")
    merged = output.merge([both.on("h1"), error("b", "x", "y").on("h1"), both.on("h2")])
    assert [(f.check, f.hosts) for f in merged] == [("a", ("h1", "h2")), ("b", ("h1",))]


def test_the_report_for_programs_keeps_its_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(output.socket, "gethostname", lambda: "here")
    made = output.as_json([ok("a", "1"), error("b", "2", "c").on("h")])
    assert made.pop("time").endswith("+00:00") and ", sources " in made.pop("build")
    assert json.loads(json.dumps(made)) == {
        "schema": 1,
        "host": "here",
        "exit_code": 1,
        "counts": {"ok": 1, "warning": 0, "error": 1},
        "findings": [
            {"check": "a", "status": "ok", "value": "1", "remedy": "", "hosts": ["here"]},
            {"check": "b", "status": "error", "value": "2", "remedy": "c", "hosts": ["h"]},
        ],
    }


def test_the_worst_comes_first_with_its_remedy_below() -> None:
    lines = output.as_text([ok("a", "1"), error("area.b", "missing x", "copy it")]).splitlines()
    assert lines[0] == "error    area.b  missing x" and lines[1].strip() == "-> copy it"
    assert lines[2].split() == ["ok", "a", "1"]
    assert ": 1 error, 0 warnings, 1 ok  (" in lines[-1]
