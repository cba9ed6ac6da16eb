"""Phases: the outermost one of the main thread is the current one."""

from __future__ import annotations

import threading

from mindspeed_rlxf.reporting.phases import Phases


def test_the_outermost_phase_is_current_and_printed_once() -> None:
    made, lines = Phases(), list[str]()
    made.write = lines.append
    with made.phase("outer", 4) as outer, made.phase("inner"):
        outer.advance()
        assert made.current is outer and str(outer) == "outer, 1 of 4, 0 s"
    with made.phase("generate", prints=False):
        pass
    assert made.current is None and lines == ["outer ..."]


def test_phases_of_other_threads_are_not_shown() -> None:
    made, seen = Phases(), list[object]()

    def work() -> None:
        with made.phase("beside"):
            seen.append(made.current)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert seen == [None]
