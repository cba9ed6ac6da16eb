"""The report keeps its form."""

import json

from mindspeed_rlxf.device.findings import Finding, error, ok
from mindspeed_rlxf.ops.doctor.output import Report, merge


def test_equal_findings_of_hosts_become_one() -> None:
    both = ok("a", "1")
    found = merge([both.on("h1"), error("b", "x", "y").on("h1"), both.on("h2"), both.on("h1")])
    assert [(f.check, f.hosts) for f in found] == [("a", ("h1", "h2")), ("b", ("h1",))]


def report(*findings: Finding) -> Report:
    return Report("here", "0.1.0, sources 0", "2026-01-01T00:00:00+00:00", findings)


def test_the_report_for_programs_keeps_its_keys() -> None:
    made = report(ok("a", "1"), error("b", "2", "c").on("h")).as_json()
    assert json.loads(json.dumps(made)) == {
        "schema": 1,
        "host": "here",
        "build": "0.1.0, sources 0",
        "time": "2026-01-01T00:00:00+00:00",
        "exit_code": 1,
        "counts": {"ok": 1, "warning": 0, "error": 1},
        "findings": [
            {"check": "a", "status": "ok", "value": "1", "remedy": "", "hosts": ["here"]},
            {"check": "b", "status": "error", "value": "2", "remedy": "c", "hosts": ["h"]},
        ],
    }


def test_the_worst_comes_first_with_its_remedy_below() -> None:
    lines = report(ok("a", "1"), error("area.b", "missing x", "copy it")).as_text().splitlines()
    assert lines[0] == "error    area.b  missing x" and lines[1].strip() == "-> copy it"
    assert lines[2].split() == ["ok", "a", "1"]
    assert lines[-1] == "here: 1 error, 0 warnings, 1 ok  (0.1.0, sources 0)"
