"""Ask a Ray cluster for its nodes without a token: `python probe.py HOST:PORT`.

Prints "tokens" if the cluster refuses for lack of a token, else "open"; other errors are raised. It
runs in a process of its own, because Ray authenticates in one way per process.
"""

import signal
import sys

ANSWER_S = 8


def main(address: str) -> None:
    from ray._raylet import GcsClient  # type: ignore[attr-defined]

    signal.alarm(ANSWER_S)  # ends the process: Ray itself would wait for 40 s
    try:
        GcsClient(address=address).get_all_node_info(timeout=ANSWER_S)
    except Exception as error:  # the class is Ray's own, and its text gRPC's in the first versions
        if type(error).__name__ != "AuthenticationError" and "Unauthenticated" not in str(error):
            raise
        print("tokens")
    else:
        print("open")


if __name__ == "__main__":
    del sys.path[0]  # this folder: its modules have names that others have too
    main(sys.argv[1])
