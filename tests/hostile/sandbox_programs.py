"""Hostile programs, each with the threat that it stands for.

The test replaces `@VICTIM@`, `@PORT@`, `@HOME@` and the like by processes, ports and folders of the
host. A program that succeeds prints HARM, or a secret of the host. A program that is stopped prints
`stopped: ...` for each attempt, or is ended by a limit.
"""

from dataclasses import dataclass
from enum import Enum

TIME = ("cpu_time", "wall_time")
ENDED = (*TIME, "killed", "memory", "processes", "files", "output")

PRELUDE = """
import ctypes, os, signal, socket, subprocess, sys, time
libc = ctypes.CDLL(None, use_errno=True)
def attempt(action, *arguments, **more):
    try:
        result = action(*arguments, **more)
    except (OSError, ValueError, MemoryError, RuntimeError, subprocess.SubprocessError) as error:
        print("stopped:", type(error).__name__, flush=True)
    else:
        print("HARM", result, flush=True)
def call(number, *arguments):
    if libc.syscall(number, *arguments) == -1:
        raise OSError(ctypes.get_errno(), "refused")
X86 = os.uname().machine == "x86_64"
def mark():
    libc.prctl(15, b"@MARK@")
def read(path):
    with open(path, "rb") as file:
        return file.read()
"""


class Threat(str, Enum):
    """An attack that a hostile program may try; the value is its description for messages."""

    CPU_TIME = "computing without end"
    MEMORY = "filling the memory"
    OUTPUT = "output without end"
    FILE_SIZE = "a large file"
    DISK = "many files, and so a full disk"
    PROCESSES = "many processes or threads"
    STAYING = "processes that outlive the run"
    FILES = "reading or changing files of the host, of the user and of other samples"
    OTHERS = "signals to other processes, reading or tracing them"
    SHARED_MEMORY = "shared memory and message queues"
    SECRETS = "reading secrets of the environment and of open files"
    PRIVILEGES = "more privileges, by setuid programs, namespaces, mounts or devices"
    NETWORK = "network, loopback and abstract sockets included"


@dataclass(frozen=True)
class Hostile:
    """A program. causes: limits that may end it; without one all its attempts have to fail"""

    name: str
    threat: Threat
    program: str
    causes: tuple[str, ...] = ()

    @property
    def takes_time(self) -> bool:
        """Whether the program runs until its time limit."""
        return bool(set(self.causes) & set(TIME))


PROGRAMS: dict[Threat, dict[str, str | tuple[str, tuple[str, ...]]]] = {
    Threat.CPU_TIME: {
        "an endless loop": ("while True: pass", TIME),
        "waits without end": ("time.sleep(1000)", TIME),
        "one long operation inside the interpreter": ("9 ** (10 ** 9)", TIME),
        "ignores the signals that end a program": (
            "for number in (1, 2, 15, 24): signal.signal(number, signal.SIG_IGN)\nwhile True: pass",
            TIME,
        ),
        "computes in children": (
            "for _ in range(3):\n    if not os.fork():\n        while True: pass\ntime.sleep(1000)",
            TIME,
        ),
    },
    Threat.MEMORY: {
        "fills the memory step by step": (
            "kept = []\nwhile True: kept.append(b'x' * (8 << 20))",
            ("memory",),
        ),
        "asks for 64 GiB at once": "attempt(bytearray, 64 << 30)",
        "fills the memory in children": (
            "for _ in range(3): os.fork()\nkept = b'x' * (40 << 20)\ntime.sleep(1000)",
            ("memory",),
        ),
        "fills memory that children share": (
            "import mmap\nkept = []\nwhile True:\n    kept.append(mmap.mmap(-1, 8 << 20))\n"
            "    kept[-1].write(b'x' * (8 << 20))",
            ("memory",),
        ),
        "raises its own limits": (
            "import resource\nfor kind in (resource.RLIMIT_AS, resource.RLIMIT_CPU, "
            "resource.RLIMIT_FSIZE):\n    attempt(resource.setrlimit, kind, (1 << 40, 1 << 40))"
        ),
    },
    Threat.OUTPUT: {
        "prints without end": ("while True: print('x' * 1000)", ("output",)),
        "prints errors without end": ("while True: sys.stderr.write('x' * 1000)", TIME),
    },
    Threat.FILE_SIZE: {
        "writes one large file": (
            "def fill():\n    with open('big', 'wb') as file:\n        while True:\n"
            "            file.write(b'x' * (1 << 20))\nattempt(fill)",
            ("files",),
        ),
        "makes a sparse file of 1 TiB": (
            "attempt(lambda: os.truncate(os.open('big', os.O_CREAT | os.O_RDWR), 1 << 40))"
        ),
        "reserves 1 GiB for a file": (
            "attempt(lambda: os.posix_fallocate(os.open('big', os.O_CREAT | os.O_RDWR), "
            "0, 1 << 30))"
        ),
    },
    Threat.DISK: {
        "fills the disk with many files": (
            "def fill():\n    for i in range(10_000):\n        with open(f'f{i}', 'wb') as file:\n"
            "            file.write(b'x' * 500_000)\nattempt(fill)",
            ("files",),
        ),
        "makes a million empty files": (
            "def fill():\n    for i in range(1_000_000):\n"
            "        os.close(os.open(f'f{i}', os.O_CREAT))\nattempt(fill)",
            ("files", "memory"),
        ),
    },
    Threat.PROCESSES: {
        "fork bomb": (
            "while True:\n    try:\n        os.fork()\n    except OSError:\n        pass",
            ENDED,
        ),
        "fork bomb whose parents end": (
            "mark()\nwhile True:\n    try:\n        os.fork() and os.fork() and os._exit(0)\n"
            "    except OSError:\n        pass",
            (*ENDED, "ok"),
        ),
        "a thousand processes": (
            "def spawn():\n    for _ in range(1000):\n        if not os.fork(): time.sleep(1000)\n"
            "attempt(spawn)",
            ("processes",),
        ),
        "a thousand zombies": (
            "def spawn():\n    for _ in range(1000):\n        if not os.fork(): os._exit(0)\n"
            "attempt(spawn)",
            ("processes",),
        ),
        "a thousand threads": (
            "import threading\nthreading.stack_size(1 << 16)\ndef spawn():\n"
            "    for _ in range(1000):\n"
            "        threading.Thread(target=time.sleep, args=(1000,), daemon=True).start()\n"
            "attempt(spawn)",
            ("processes",),
        ),
    },
    Threat.STAYING: {
        "a daemon in a session of its own": (
            "ready, told = os.pipe()\nif not os.fork():\n    os.setsid()\n"
            "    if os.fork(): os._exit(0)\n    mark()\n    for fd in (0, 1, 2): os.close(fd)\n"
            "    os.write(told, b'x')\n"
            "    time.sleep(1000)\nos.read(ready, 1)\nprint('stopped: is killed')"
        ),
        "a child that ignores every signal and holds the output": (
            "ready, told = os.pipe()\nif not os.fork():\n    mark()\n"
            "    for number in range(1, 65):\n"
            "        try:\n            signal.signal(number, signal.SIG_IGN)\n"
            "        except (OSError, ValueError):\n            pass\n    os.write(told, b'x')\n"
            "    time.sleep(1000)\nos.read(ready, 1)\nprint('stopped: is killed', flush=True)"
        ),
        "a child that becomes another process all the time": (
            "ready, told = os.pipe()\nif not os.fork():\n    mark()\n    os.setsid()\n"
            "    os.write(told, b'x')\n    while True:\n        if os.fork(): os._exit(0)\n"
            "os.read(ready, 1)\nprint('stopped: is killed')"
        ),
    },
    Threat.FILES: {
        "reads a file that all may read": "attempt(read, '@HOME@/secret.txt')",
        "writes where all may write": (
            "for path in ('@HOME@/open/new', '/var/tmp/@MARK@', '/dev/shm/../../var/tmp/@MARK@'):\n"
            "    attempt(open, path, 'w')"
        ),
        "follows links that lead outside": (
            "def follow(target):\n    os.symlink(target, 'link')\n    return read('link')\n"
            "attempt(follow, '@HOME@/secret.txt')\n"
            "attempt(read, '/proc/1/root@HOME@/secret.txt')\n"
            "attempt(read, '/proc/self/cwd/../..@HOME@/secret.txt')"
        ),
        "breaks out of its root folder": (
            "attempt(os.chroot, '.')\nfor _ in range(100): os.chdir('..')\n"
            "attempt(read, '.@HOME@/secret.txt')\nattempt(read, 'etc/passwd')"
        ),
        "changes its program, Python and the system": (
            "for path in (os.__file__, __file__, sys.executable, '/usr/lib/x', '/dev/x', '/etc/x',"
            " '/x', '/box/x', '/bin/x'):\n    attempt(open, path, 'ab')\nattempt(os.mkdir, '/tmp2')"
        ),
        "looks for files of earlier samples": (
            "found = []\nfor top in ('/tmp', '/box', '/dev/shm', '/var/tmp', '/run', '/home'):\n"
            "    for folder, _, files in os.walk(top):\n"
            "        for name in files:\n            path = os.path.join(folder, name)\n"
            "            if path != __file__: found.append(path)\n"
            "print(('HARM', found) if found else 'stopped: nothing there')"
        ),
    },
    Threat.OTHERS: {
        "kills its parent and all others": (
            "signal.signal(15, signal.SIG_IGN)\nprint('stopped: see the host', flush=True)\n"
            "for pid in (os.getppid(), 1, @VICTIM@, @WARDEN@, -1):\n    try:\n"
            "        os.kill(pid, 9)\n    except OSError:\n        pass",
            ("ok", "killed"),
        ),
        "signals a process of this host": (
            "for pid in (@VICTIM@, @WARDEN@): attempt(os.kill, pid, 0)"
        ),
        "reads what /proc says of others": "for name in ('environ', 'cmdline', 'maps', 'status'):\n"
        "    for pid in (@VICTIM@, @WARDEN@, os.getppid()): attempt(read, f'/proc/{pid}/{name}')",
        "traces others and reads their memory": "for pid in (@VICTIM@, @WARDEN@, os.getppid()):\n"
        "    attempt(call, 101 if X86 else 117, 16, pid, 0, 0)\n"
        "    attempt(call, 310 if X86 else 270, pid, 0, 0, 0, 0, 0)",
    },
    Threat.SHARED_MEMORY: {
        "writes to a file of shared memory": "attempt(open, '/dev/shm/@MARK@', 'r+b')",
        "attaches a segment of shared memory": (
            "attempt(call, 29 if X86 else 194, @SEGMENT@, 0, 0)\n"
            "attempt(call, 29 if X86 else 194, 0, 1 << 20, 0o1600)"
        ),
        "keeps memory in files without a name and in queues": (
            "attempt(os.memfd_create, 'x')\nattempt(call, 240 if X86 else 180, b'q', 64, 0o600, 0)"
        ),
    },
    Threat.SECRETS: {
        "prints its environment": (
            "print(dict(os.environ), sys.argv)\nprint('stopped: see the output')"
        ),
        "reads open files that it was not given": (
            "for descriptor in range(3, 1100): attempt(os.pread, descriptor, 100, 0)"
        ),
        "changes its input": (
            "attempt(os.pwrite, 0, b'x' * 100, 0)\nattempt(os.ftruncate, 0, 1 << 30)"
        ),
    },
    Threat.PRIVILEGES: {
        "becomes root": "attempt(os.setuid, 0)\nattempt(os.setgroups, [0])\n"
        "for path in ('/usr/bin/su', '/usr/bin/sudo', '/bin/su'):\n"
        "    attempt(subprocess.run, [path, '-c', 'id'], check=True, stdin=subprocess.DEVNULL, "
        "stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)",
        "makes a setuid program of its own": (
            "def become():\n    import shutil\n    shutil.copy(sys.executable, 'mine')\n"
            "    os.chmod('mine', 0o6755)\n    os.chown('mine', 0, 0)\nattempt(become)",
            ("files",),
        ),
        "makes namespaces and mounts": "for flag in (0x10000000, 0x20000, 0x40000000):\n"
        "    attempt(call, 272 if X86 else 97, flag)\n"
        "    attempt(call, 56 if X86 else 220, flag | 17, 0, 0, 0, 0)\n"
        "attempt(call, 435, 0, 0)\n"
        "attempt(call, 165 if X86 else 40, b'x', b'/tmp', b'tmpfs', 0, 0)",
        "opens and makes devices": (
            "for name in ('mem', 'kmsg', 'sda', 'vda', 'kvm', 'fuse', 'ptmx', 'tty'):\n"
            "    attempt(open, f'/dev/{name}', 'rb')\n"
            "attempt(os.mknod, 'disk', 0o60600, os.makedev(8, 0))"
        ),
        "uses rare doors into the kernel": (
            "for number in (425, 321 if X86 else 280, 250 if X86 else 219, 298 if X86 else 241, "
            "323 if X86 else 282, 304 if X86 else 265, 428):\n"
            "    attempt(call, number, 0, 0, 0, 0, 0)"
        ),
    },
    Threat.NETWORK: {
        "connects to a server on loopback": (
            "attempt(socket.create_connection, ('127.0.0.1', @PORT@), 1)\n"
            "attempt(socket.create_connection, ('::1', @PORT@), 1)"
        ),
        "sends datagrams": (
            "attempt(lambda: socket.socket(socket.AF_INET, socket.SOCK_DGRAM).sendto(b'x', "
            "('127.0.0.1', @PORT@)))\nattempt(socket.getaddrinfo, 'localhost.example', 80)"
        ),
        "connects to abstract and named sockets": (
            "for name in ('\\0@MARK@', '@HOME@/socket', '/var/run/docker.sock'):\n"
            "    attempt(lambda: socket.socket(socket.AF_UNIX).connect(name))"
        ),
        "opens raw sockets and talks to the kernel": (
            "for family, kind in ((2, 3), (17, 3), (16, 3), (40, 1), (38, 5)):\n"
            "    attempt(socket.socket, family, kind)"
        ),
        "serves on a port": "attempt(socket.create_server, ('0.0.0.0', 0))",
    },
}
HOSTILE = [
    Hostile(name, threat, *([each] if isinstance(each, str) else each))
    for threat, programs in PROGRAMS.items()
    for name, each in programs.items()
]
