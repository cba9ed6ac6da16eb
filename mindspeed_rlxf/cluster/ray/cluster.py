"""Join a running Ray cluster, or start a private one, which ends with this process.

A private cluster listens on the loopback interface only (unless Ray was imported before), needs a
token made here, and keeps its files in one temporary folder closed to other users. `orphan_guard`
ends it if this process is killed. Ray is imported inside the functions, because it reads its
environment on import.
"""

import contextlib
import logging
import os
import secrets
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from mindspeed_rlxf import device as device_facade
from mindspeed_rlxf.config.problems import Problem, UserError, printable
from mindspeed_rlxf.config.ray_cluster import AUTO, choose_cluster, connect_once
from mindspeed_rlxf.config.schema import DeviceConfig

logger = logging.getLogger(__name__)

QUIET = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_IGNORE_UNHANDLED_ERRORS": "1",  # every failure is reported once, by us
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
    "RAY_enable_metrics_collection": "0",
}
OBJECT_STORE_LIMIT = 2 * 2**30  # bytes; what does not fit is spilled to disk
LOOPBACK = "127.0.0.1"
KNOCK_S = 10.0
GUARD = Path(__file__).with_name("orphan_guard.py")
GUARD_END_S = 30.0  # longest wait for the guard's end
GUARD_PAUSE_S = 0.5  # before a killed guard is replaced
# In what Ray raises when its processes do not answer within 30 s, most of which has no option.
START_TIMED_OUT = "timed out during startup", "Timed out waiting for file", "Failed to start GCS"
LOG_TAIL = 2_000  # characters of a log of Ray that did not start
_own_token: list[str] = []  # at most one: the token of all own clusters of this process
PREFIX, SESSIONS = "rlxf-ray-", "r"
SOCKET_BYTES = 107  # longest path of a unix socket
# The longest that Ray puts below its folder; the number is the pid of this process.
LONGEST_SOCKET = "session_2026-01-31_12-00-00_000000_4194304/sockets/plasma_store"


class OrphanGuard:
    """The `orphan_guard` process for a private cluster; a killed guard is replaced."""

    def __init__(self, temp_dir: Path) -> None:
        self._temp_dir = temp_dir
        self._ending = threading.Event()
        self.process = self._start()
        threading.Thread(target=self._replace_killed, name="orphan guard", daemon=True).start()

    def _start(self) -> subprocess.Popen[bytes]:
        return subprocess.Popen(
            [sys.executable, "-S", str(GUARD), str(self._temp_dir)],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,  # signals to the driver do not reach it
        )

    def _replace_killed(self) -> None:
        while not self._ending.is_set():
            self.process.wait()
            if not self._ending.wait(GUARD_PAUSE_S):
                self.process = self._start()

    def end(self) -> None:
        """Close the guard's pipe, so that it cleans up; wait for it, kill it after GUARD_END_S."""
        self._ending.set()
        try:
            self.process.communicate(timeout=GUARD_END_S)  # closes its standard input
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()


@dataclass
class RayCluster:
    """A connection to a Ray cluster, ended by `close`."""

    own: bool  # private: ends with the connection
    address: str
    shared: bool = False  # the script was connected before, and stays so
    temp_dir: Path | None = None
    guard: OrphanGuard | None = None

    def close(self) -> None:
        """Disconnect from Ray; for a private cluster the guard ends all processes and files."""
        import ray

        if not self.shared:
            ray.shutdown()
        if self.guard is not None:
            self.guard.end()


def resource_name(device: DeviceConfig) -> str:
    """Return Ray's device resource: `device.resource_name`, or the default for the device kind."""
    return device.resource_name or device_facade.facts(device.kind).ray_resource


def open_cluster(address: str | None, resources: dict[str, float]) -> RayCluster:
    """Join the cluster named by `choose_cluster`; if there is none, start a private one.

    Sets unset environment variables from QUIET, and patches Ray (`_keep_quiet`).

    Args:
        address: `runtime.address`.
        resources: Devices a private cluster registers beside those Ray finds.

    Raises:
        UserError: The cluster cannot be joined. A failed start raises Ray's error.
    """
    for name, value in QUIET.items():
        os.environ.setdefault(name, value)
    chosen = choose_cluster(address)
    if chosen.address is not None and chosen.address == connected_address():
        logger.info("uses the Ray cluster of the script at %s", chosen.address)
        return RayCluster(own=False, address=chosen.address, shared=True)
    if chosen.address is None:
        cluster = _start_own(resources)
        logger.info(
            "started a private Ray cluster at %s with %s (%s)",
            cluster.address, resources or "its devices", chosen.source,
        )  # fmt: skip
        return cluster
    cluster = _join_cluster(chosen.address)
    logger.info("joined the Ray cluster at %s (%s)", cluster.address, chosen.source)
    return cluster


def connected_address() -> str | None:
    """Return the address of the cluster that this process is connected to, None without one."""
    ray = sys.modules.get("ray")
    if ray is None or not ray.is_initialized():
        return None
    return str(ray.get_runtime_context().gcs_address)


def has_resource(name: str) -> bool:
    """Return whether the cluster that this process is connected to has a resource of this name."""
    import ray

    return name in ray.cluster_resources()


def _join_cluster(address: str) -> RayCluster:
    """Connect this process to a running cluster, with the user's token if it asks for one.

    Raises UserError if none answers (also if `auto` found none), or it refuses.
    """
    try:
        if address == AUTO:
            raise ValueError("no `ray start` of this user runs on this host")
        connect_once(address, KNOCK_S)
        asks = asks_for_token(address)  # also if it is Ray: `ray.init` tries for many minutes
        if asks and "RAY_AUTH_MODE" not in os.environ:
            logger.info("the cluster asks for a token: that of this user is given")
            _set_token_mode()  # Ray looks for the user's token by itself for `auto` only
        import ray

        _keep_quiet()
        with _own_signals():
            context = ray.init(address=address, log_to_driver=False, logging_level=logging.ERROR)
    except Exception as error:
        # Another version of Ray or Python is a RuntimeError, a wrong token an error of Ray's own.
        expected = isinstance(error, (OSError, ValueError, RuntimeError))
        of_ray = type(error).__module__.startswith("ray.")
        if isinstance(error, UserError) or not (expected or of_ray):
            raise
        raise UserError(
            Problem(
                "runtime.address",
                f"must be that of a running Ray cluster ({error})",
                address,
                "start one, correct it, give the token of the cluster as ~/.ray/auth_token or "
                "RAY_AUTH_TOKEN_PATH if it asks for one, or runtime.address=local for a "
                "private cluster",
            )
        ) from error
    return RayCluster(own=False, address=context.address_info["address"])


def asks_for_token(address: str) -> bool:
    """Ask a cluster for its nodes without a token; return whether it refuses.

    A client with a token cannot use a cluster without (Ray 2.60): its actors never start. Raises a
    Ray error after 40 s if no Ray answers.
    """
    from ray._raylet import GcsClient  # type: ignore[attr-defined]

    try:
        GcsClient(address=address).get_all_node_info(timeout=KNOCK_S)
    except Exception as error:  # the class is Ray's own, and its text gRPC's in the first versions
        if type(error).__name__ != "AuthenticationError" and "Unauthenticated" not in str(error):
            raise
        return True
    return False


def _set_token_mode(**token: str) -> None:
    os.environ.update(RAY_AUTH_MODE="token", **token)
    if "ray" in sys.modules:  # it has read its environment
        from ray._raylet import (  # type: ignore[attr-defined]
            AuthenticationTokenLoader,
            Config,
        )

        Config.initialize("")
        AuthenticationTokenLoader.instance().reset_cache()


def _start_own(resources: dict[str, float]) -> RayCluster:
    """Start a private cluster, with a token and an orphan guard; return it.

    Sets Ray environment variables in this process. If Ray's processes do not answer in time, as on
    a busy host, tries once more.
    """
    if "ray" not in sys.modules:  # too late otherwise: Ray's own defaults hold
        os.environ["RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"] = "0"  # Ray's word for: loopback only
        os.environ.setdefault("RAY_worker_niceness", "0")  # its 15 slows the workers down
    if not _own_token:  # one for the whole process
        _own_token.append(secrets.token_hex(32))
    _set_token_mode(RAY_AUTH_TOKEN=_own_token[0])
    _keep_quiet()
    try:
        return _try_to_start(resources)
    except Exception as error:  # Ray raises this type itself
        if not any(text in str(error) for text in START_TIMED_OUT):
            raise
        logger.warning("Ray did not start, as on a busy host, and is started again: %s", error)
    return _try_to_start(resources)


def _try_to_start(resources: dict[str, float]) -> RayCluster:
    """Start a private cluster; after an error log the ends of Ray's error logs and clean up."""
    import ray

    root = os.environ.get("RAY_TMPDIR") or tempfile.gettempdir()
    longest_path = f"{root}/{PREFIX}12345678/{SESSIONS}/{LONGEST_SOCKET}"
    if len(os.fsencode(longest_path)) > SOCKET_BYTES:
        root = "/tmp"
    temp_dir = Path(tempfile.mkdtemp(prefix=PREFIX, dir=root))
    guard = OrphanGuard(temp_dir)
    try:
        with _own_signals():
            context = ray.init(
                address="local",
                include_dashboard=False,
                log_to_driver=False,
                logging_level=logging.ERROR,
                num_cpus=1,
                resources=resources,
                object_store_memory=object_store_bytes(),
                # Ray opens the folder that it is given, and all below, to every user of the host.
                _temp_dir=str(temp_dir / SESSIONS),
            )
    except BaseException:
        ray.shutdown()
        for file in sorted(temp_dir.glob(f"{SESSIONS}/session_2*/logs/*.err")):
            text = file.read_text(encoding="utf-8", errors="replace").strip()
            if text:
                logger.warning("Ray's %s ends with:\n%s", file.name, printable(text[-LOG_TAIL:]))
        guard.end()
        raise
    address = context.address_info["address"]
    return RayCluster(own=True, address=address, temp_dir=temp_dir, guard=guard)


def _keep_quiet() -> None:
    # Ray prints when a worker dies, and shows the arguments of this process.
    import ray._private.utils
    import ray._private.worker

    ray._private.utils.get_entrypoint_name = lambda: Path(sys.argv[0]).name
    ray._private.worker.listen_error_messages = lambda *args, **kwargs: None


def object_store_bytes() -> int:
    """Return the object store size for a private cluster: a tenth of host memory, bytes."""
    tenth = device_facade.host_memory() // 10
    return max(min(OBJECT_STORE_LIMIT, tenth), 100 * 2**20)


@contextlib.contextmanager
def _own_signals() -> Iterator[None]:
    # `ray.init` replaces the handler of SIGTERM. Ray's processes share this one's group and inherit
    # the mask: a closed terminal must not end them before the run is saved.
    handler = signal.getsignal(signal.SIGTERM)
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGHUP})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, handler)
