"""Keys that earlier versions had, with what to do now; `unknown_key` refuses them by name."""

from __future__ import annotations

REMOVED: dict[str, str] = {
    "logging.samples_file_mb": "remove it: sample files are not compressed",
    "plan.calibration": "remove it: a plan predicts no times",
    "plan.device": "remove it: a plan predicts no times",
    "plan.prompt_tokens": "remove it: a plan predicts no times",
    "plan.response_tokens": "remove it: a plan predicts no times",
    "reward.sandbox.level": "remove it: programs run in bubblewrap",
    "reward.sandbox.weak": "use reward.sandbox.unsafe=true, which runs programs without isolation",
    "runtime.allow_unauthenticated": "remove it: any cluster that you name is joined",
    "training.file_mode": "remove it: files have the modes that the umask gives them",
    "training.no_shared_storage": "remove it: all nodes must share training.output_dir",
}
"""`section.key` -> fix, a clause such as "remove it: output_dir must be on shared storage"."""
