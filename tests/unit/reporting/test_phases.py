"""Phases: the outermost one of the main thread is the current one."""

import threading

from mindspeed_rlxf.reporting.phases import Phases


def test_phases_of_other_threads_are_not_shown() -> None:
    made, seen = Phases(), list[object]()

    def work() -> None:
        with made.phase("beside"):
            seen.append(made.current)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert seen == [None]
