"""The section `reward.sandbox`: limits of programs that rules run."""

from __future__ import annotations

from mindspeed_rlxf.config.fields import Section, key


class SandboxConfig(Section):
    """Limits of programs that rules run in bubblewrap (docs/sandbox.md)."""

    section_used_if = "reward.runs_programs"

    unsafe: bool = key(
        False, "where bubblewrap does not work, run programs without isolation", "free"
    )
    python: str | None = key(
        None, "interpreter of programs, with its packages; null = Python's standard library alone"
    )
    cpu_s: float = key(6.0, "CPU time of one program, seconds", gt=0)
    wall_s: float = key(12.0, "wall-clock time of one program, seconds", gt=0)
    response_s: float = key(
        20.0, "time of all test cases of a response, seconds; the rest count as failed", gt=0
    )
    memory_mb: int = key(512, "memory of one program with its children, MiB", ge=32)
    file_mb: int = key(16, "size of a file, and of all files of a program, MiB", ge=1)
    files: int = key(64, "open files of a process; a program may make 100 x as many", ge=16)
    processes: int = key(16, "processes and threads of one program", ge=1)
    output_kb: int = key(256, "standard output of one program, KiB", ge=1)
