"""Each version of megatron-core gets the patches that it needs."""

from types import SimpleNamespace
from typing import Any

import megatron.core
import pytest
from megatron.core import parallel_state
from megatron.core.dist_checkpointing.strategies import filesystem_async
from megatron.core.optimizer import distrib_optimizer
from torch.distributed.checkpoint import filesystem

from mindspeed_rlxf.device import megatron_versions
from mindspeed_rlxf.device.megatron_versions import (
    apply_patches,
    chunk_argument,
    current_chunk,
    quantize_if_any,
    write_in_torch_format,
)

OLDER = ("0.12.1", "0.12.0rc3")
NEWER = ("0.13.0", "0.16.1")


@pytest.fixture
def version(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> str:
    """The version that the imported megatron-core says it is."""
    monkeypatch.setattr(megatron.core, "__version__", request.param)
    return request.param


@pytest.mark.parametrize(
    ("version", "mended"),
    [*((older, True) for older in OLDER), *((newer, False) for newer in NEWER)],
    indirect=["version"],
)
def test_0_12_is_mended_in_two_places_and_later_versions_in_none(
    monkeypatch: pytest.MonkeyPatch, version: str, mended: bool
) -> None:
    def plain(model_params: Any, serialization_format: Any = None) -> None: ...

    monkeypatch.setattr(distrib_optimizer, "quantize_param_shard", plain)
    monkeypatch.setattr(filesystem_async, "_write_item", plain)
    formats = SimpleNamespace(TORCH_SAVE="torch_save")  # torch 2.7 has none, and asks for none
    monkeypatch.setattr(filesystem, "SerializationFormat", formats, raising=False)
    apply_patches.__wrapped__()
    assert (distrib_optimizer.quantize_param_shard is not plain) is mended
    assert (filesystem_async._write_item is not plain) is mended


@pytest.mark.parametrize(
    ("version", "own"),
    [("0.12.1", False), ("0.14.0", False), ("0.15.3", True), ("0.16.1", True)],
    indirect=["version"],
)
def test_results_of_writing_stay_in_the_process_where_nothing_forks(
    monkeypatch: pytest.MonkeyPatch, version: str, own: bool
) -> None:
    monkeypatch.setattr(megatron_versions, "is_before_0_13", lambda: False)
    monkeypatch.setattr(filesystem_async, "_results_queue", None)
    apply_patches.__wrapped__()
    assert (filesystem_async._results_queue is not None) is own


@pytest.mark.parametrize(
    ("version", "chunk", "argument", "inside"),
    [
        *((older, 1, {}, 1) for older in OLDER),
        *((older, None, {}, 0) for older in OLDER),
        *((newer, 1, {"vp_stage": 1}, 0) for newer in NEWER),
        *((newer, None, {"vp_stage": None}, 0) for newer in NEWER),
    ],
    indirect=["version"],
)
def test_0_12_reads_the_chunk_from_a_global_and_later_versions_from_a_keyword(
    monkeypatch: pytest.MonkeyPatch, version: str, chunk: int | None,
    argument: dict[str, int | None], inside: int,
) -> None:  # fmt: skip
    """inside: value of the global, which is 0 outside"""
    monkeypatch.setattr(parallel_state, "_VIRTUAL_PIPELINE_MODEL_PARALLEL_RANK", 0)
    assert chunk_argument(chunk) == argument
    with current_chunk(chunk):
        assert parallel_state.get_virtual_pipeline_model_parallel_rank() == inside
    assert parallel_state.get_virtual_pipeline_model_parallel_rank() == 0


def test_fp8_quantization_is_left_out_where_nothing_is_fp8() -> None:
    calls: list[tuple[Any, ...]] = []
    quantize = quantize_if_any(lambda *args: calls.append(args))
    quantize([], [], [], "group")
    assert calls == []
    quantize(["p"], ["main"], [0], "group")
    assert calls == [(["p"], ["main"], [0], "group")]


def test_only_a_writer_that_takes_a_format_gets_one(monkeypatch: pytest.MonkeyPatch) -> None:
    formats = SimpleNamespace(TORCH_SAVE="torch_save")  # older torch has none
    monkeypatch.setattr(filesystem, "SerializationFormat", formats, raising=False)

    def write(stream: str, item: str, serialization_format: Any) -> tuple[str, str, Any]:
        return stream, item, serialization_format

    def write_of_older_torch(stream: str, item: str) -> None: ...

    assert write_in_torch_format(write)("stream", "item") == ("stream", "item", "torch_save")
    assert write_in_torch_format(write_of_older_torch) is write_of_older_torch


def test_files_of_a_checkpoint_are_written_in_the_process_itself() -> None:
    apply_patches.__wrapped__()
    context = filesystem_async.mp.get_context("fork")
    results = context.Queue()
    worker = context.Process(target=lambda n, more: results.put((n, more)), args=(1,), kwargs={
        "more": 2
    })  # fmt: skip
    worker.start()
    worker.join()
    assert results.get_nowait() == (1, 2)
    assert context.Manager().Queue().empty()
