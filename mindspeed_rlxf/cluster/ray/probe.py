"""Ask a Ray cluster for its nodes without a token: `python probe.py HOST:PORT`.

Prints one line of JSON: {"tokens": true} where the cluster refuses, else the addresses of the live
nodes. It runs in a process of its own, because Ray authenticates in one way per process. Only
messages of the protocol are read, nothing is unpickled.
"""

import json
import signal
import sys

ANSWER_S = 8


def main(address: str) -> None:
    """Ask a cluster for its nodes without a token; print the answer as JSON.

    It is {"tokens": false, "nodes": addresses of the living nodes}, or, of a cluster that refuses
    for lack of a token, {"tokens": true, "nodes": []}. Other errors are raised. A cluster that does
    not answer in ANSWER_S ends the process by SIGALRM.
    """
    from ray._raylet import GcsClient  # type: ignore[attr-defined]
    from ray.core.generated.gcs_pb2 import GcsNodeInfo

    signal.alarm(ANSWER_S)  # ends the process: Ray itself would wait for 40 s
    try:
        found = GcsClient(address=address).get_all_node_info(timeout=ANSWER_S)
    except Exception as error:  # the class is Ray's own, and its text gRPC's in the first versions
        if type(error).__name__ != "AuthenticationError" and "Unauthenticated" not in str(error):
            raise
        print(json.dumps({"tokens": True, "nodes": []}))
        return
    nodes = [n.node_manager_address for n in found.values() if n.state == GcsNodeInfo.ALIVE]
    print(json.dumps({"tokens": False, "nodes": nodes}))


if __name__ == "__main__":
    del sys.path[0]  # this folder: its modules have names that others have too
    main(sys.argv[1])
