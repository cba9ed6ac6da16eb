"""Decide whether a Ray cluster may be joined: its users can run code in every process of the run.

A cluster that asks for a token may be joined. A cluster without tokens may be joined if this user
started it and it has this host only; any other only if the configuration allows it.
"""

from __future__ import annotations

import json
import logging
import os
import signal
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from mindspeed_rlxf.config.cluster import find_owners, host_and_port, is_here
from mindspeed_rlxf.config.errors import Problem, UserError, ref

logger = logging.getLogger(__name__)

PROBE_S = 60.0
ROOT = 0
KEY = "runtime.allow_unauthenticated"
TURN_ON = (
    "turn tokens on: `(umask 077; ray get-auth-token --generate)` once, its file ~/.ray/auth_token "
    "on every node, and `export RAY_AUTH_MODE=token` before every `ray start`"
)


@dataclass(frozen=True)
class View:
    """The answer of a cluster to a request without a token.

    tokens: the cluster refused, as it asks for one; nodes: else the addresses of its live nodes
    """

    tokens: bool
    nodes: tuple[str, ...] = ()


def check_trust(address: str, allow_unauthenticated: bool) -> bool:
    """Return whether the cluster asks for a token.

    `allow_unauthenticated` permits any cluster. Without it, UserError where other users than this
    one and root listen at an address of this host; and for a cluster without tokens unless this
    user started it and all its nodes are this host. Logs a warning for a cluster without tokens.
    Raises OSError or ValueError where nothing answers as Ray does.
    """
    view, here = ask_without_token(address), is_here(host_and_port(address)[0])
    strangers = find_owners(address) - {os.getuid(), ROOT} if here else frozenset()
    if strangers and not allow_unauthenticated:
        raise UserError(
            Problem(
                "runtime.address",
                "must be a Ray cluster of this user on this host, and user id "
                f"{min(strangers)} listens there",
                address,
                f"correct it, or set {ref(KEY)}=true if you trust that user with everything you "
                "may do",
            )
        )
    if view.tokens:
        return True
    alone = here and find_owners(address) == {os.getuid()} and all(map(is_here, view.nodes))
    if not alone and not allow_unauthenticated:
        raise UserError(
            Problem(
                "runtime.address",
                "must be a Ray cluster that asks for a token, or one that you started and that has "
                "this host only, because whoever reaches it can run code in this run",
                address,
                f"{TURN_ON}; or set {ref(KEY)}=true where the network keeps others out",
            )
        )
    others = "every user of this host" if alone else "whoever reaches it"
    logger.warning(
        "the Ray cluster at %s asks for no token: %s can run code in this run", address, others
    )
    return False


def ask_without_token(address: str) -> View:
    """Ask the cluster for its nodes without a token, in a child process; return its answer.

    Raises ConnectionError where it does not answer as Ray does, or not within PROBE_S.
    """
    private = ("RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH", "RAY_ADDRESS")
    environment = {name: value for name, value in os.environ.items() if name not in private}
    script = Path(__file__).with_name("probe.py")
    try:
        found = subprocess.run(
            [sys.executable, str(script), address],
            env={**environment, "RAY_AUTH_MODE": "disabled"},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=PROBE_S,
        )
        if found.returncode == -signal.SIGALRM:
            raise ConnectionError("it does not answer as Ray does")
        answer = json.loads(found.stdout.splitlines()[-1])
        return View(answer["tokens"], tuple(answer["nodes"]))
    except subprocess.TimeoutExpired:
        raise ConnectionError(f"no answer within {PROBE_S:g} s") from None
    except (LookupError, ValueError):
        said = found.stderr.strip().splitlines()[-1:] or ["it gave no message"]
        raise ConnectionError(said[0][:300]) from None
