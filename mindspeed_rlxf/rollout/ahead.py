"""The folder `ahead` of a checkpoint: what was generated for later iterations.

    replica_00003.json            {"samples": [{"sample_id": 70, "sampling": "training",
                                  "num_tokens": 2, "finish_reason": null, "outcomes": null}, ...]}
                                  of conversations also "trained": [1, 0] and "record": {...}
    replica_00003.safetensors     tokens, log_probs, versions: of these samples, one after the other

Each replica writes what it knows, and each rank reads everything, so that the layout may change.
Prompts are not stored, as a resumed run draws the same ones.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import load_file, save

from mindspeed_rlxf.data.agent_record import AgentRecord
from mindspeed_rlxf.rollout.rollout_engine import Begun, FinishReason
from mindspeed_rlxf.rollout.sampling import Sampling
from mindspeed_rlxf.weights.atomic import replace_file
from mindspeed_rlxf.weights.state_files import Entry, entry_of, write_text

DTYPES = {"tokens": np.int64, "log_probs": np.float32, "versions": np.int32}


@dataclass(frozen=True, eq=False)
class SavedResponse:
    """What an earlier run sampled of a response: arrays, as every rank reads all responses.

    Attributes:
        tokens: [response] int64.
        log_probs: [response] fp32.
        versions: [response] int32.
        finish_reason: None = it has not ended.
        trained: As in `GenerationResult`.
        record: What the agent has left of a conversation that has ended; None = no agent.
    """

    tokens: np.ndarray
    log_probs: np.ndarray
    versions: np.ndarray
    finish_reason: FinishReason | None
    trained: list[bool] | None = None
    record: AgentRecord | None = None

    @classmethod
    def of(
        cls,
        begun: Begun,
        finish_reason: FinishReason | None,
        trained: list[bool] | None = None,
        record: AgentRecord | None = None,
    ) -> SavedResponse:
        """Return the same tokens in arrays."""
        return cls(
            np.array(begun.tokens, np.int64),
            np.array(begun.log_probs, np.float32),
            np.array(begun.versions, np.int32),
            finish_reason,
            trained,
            record,
        )

    @property
    def begun(self) -> Begun:
        """The tokens in lists, as an engine takes them."""
        return Begun(self.tokens.tolist(), self.log_probs.tolist(), self.versions.tolist())


@dataclass(frozen=True)
class SavedSample:
    """A sample with some tokens.

    Attributes:
        sample_id: With `sampling` it identifies the sample within a run.
        sampling: How its tokens are chosen.
        response: The tokens.
        outcomes: Those of its scoring (JSON); None = not finished.
    """

    sample_id: int
    sampling: Sampling
    response: SavedResponse
    outcomes: Any


def write_ahead(folder: Path, replica: int, samples: Sequence[SavedSample]) -> list[Entry]:
    """Write a replica's samples; return the files' manifest entries, relative to `folder`."""
    columns = {}
    for name, dtype in DTYPES.items():
        arrays = [getattr(sample.response, name) for sample in samples]
        columns[name] = np.concatenate([np.zeros(0, dtype), *arrays])
    about = [_describe(sample) for sample in samples]
    file = folder / f"replica_{replica:05d}.json"
    tensors = file.with_suffix(".safetensors")
    write_text(file, json.dumps({"samples": about}))
    replace_file(tensors, save(columns))
    return [entry_of(folder, file), entry_of(folder, tensors)]


def _describe(sample: SavedSample) -> dict[str, Any]:
    response = sample.response
    about: dict[str, Any] = {
        "sample_id": sample.sample_id,
        "sampling": sample.sampling.value,
        "num_tokens": len(response.tokens),
        "finish_reason": response.finish_reason,
        "outcomes": sample.outcomes,
    }
    if response.trained is not None:
        about["trained"] = [int(flag) for flag in response.trained]
    if response.record is not None:
        about["record"] = asdict(response.record)
    return about


def read_ahead(folder: Path) -> Iterator[SavedSample]:
    """Yield the samples of all replicas."""
    for file in sorted(folder.glob("replica_*.json")):
        about = json.loads(file.read_text(encoding="utf-8"))["samples"]
        stored = load_file(file.with_suffix(".safetensors"))
        tokens, log_probs, versions = (stored[name] for name in DTYPES)
        ends = accumulate(sample["num_tokens"] for sample in about)
        for sample, end in zip(about, ends, strict=True):
            of_sample = slice(end - sample["num_tokens"], end)
            reason = FinishReason(sample["finish_reason"]) if sample["finish_reason"] else None
            trained = sample.get("trained")
            record = sample.get("record")
            response = SavedResponse(
                tokens[of_sample],
                log_probs[of_sample],
                versions[of_sample],
                reason,
                None if trained is None else [bool(flag) for flag in trained],
                None if record is None else AgentRecord.from_json(record),
            )
            sampling = Sampling(sample["sampling"])
            yield SavedSample(sample["sample_id"], sampling, response, sample["outcomes"])
