"""What each version of megatron-core is given, whichever of them is installed."""

from __future__ import annotations

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
    chunk_argument,
    current_chunk,
    mend,
    mends,
    quantize_if_any,
    write_in_torch_format,
)

OLDER = pytest.mark.parametrize("version", ["0.12.1", "0.12.3", "0.12.0rc3"], indirect=True)
NEWER = pytest.mark.parametrize(
    "version", ["0.13.0", "0.13.1", "0.14.0", "0.15.3", "0.16.1"], indirect=True
)


@pytest.fixture
def version(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> str:
    """The version that the imported megatron-core says it is."""
    monkeypatch.setattr(megatron.core, "__version__", request.param)
    return request.param


@OLDER
def test_0_12_is_mended_in_two_places(version: str) -> None:
    assert [(module.__name__, name) for module, name, _ in mends()] == [
        ("megatron.core.optimizer.distrib_optimizer", "quantize_param_shard"),
        ("megatron.core.dist_checkpointing.strategies.filesystem_async", "_write_item"),
    ]


@NEWER
def test_later_versions_are_left_alone(version: str) -> None:
    assert mends() == ()


@pytest.mark.parametrize(
    ("version", "mended"), [("0.12.1", True), ("0.16.1", False)], indirect=["version"]
)
def test_the_version_that_is_imported_decides(
    monkeypatch: pytest.MonkeyPatch, version: str, mended: bool
) -> None:
    def plain(model_params: Any, serialization_format: Any = None) -> None: ...

    monkeypatch.setattr(distrib_optimizer, "quantize_param_shard", plain)
    monkeypatch.setattr(filesystem_async, "_write_item", plain)
    formats = SimpleNamespace(TORCH_SAVE="torch_save")  # torch 2.7 has none, and asks for none
    monkeypatch.setattr(filesystem, "SerializationFormat", formats, raising=False)
    mend.__wrapped__()
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
    monkeypatch.setattr(megatron_versions, "mends", lambda: ())
    monkeypatch.setattr(filesystem_async, "_results_queue", None)
    mend.__wrapped__()
    assert (filesystem_async._results_queue is not None) is own


def test_a_process_is_mended_once(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []
    monkeypatch.setattr(megatron_versions, "mends", lambda: asked.append("mends") or ())
    mend.cache_clear()
    mend()
    mend()
    mend.cache_clear()
    assert asked == ["mends"]


@OLDER
def test_0_12_reads_the_chunk_from_a_global(monkeypatch: pytest.MonkeyPatch, version: str) -> None:
    monkeypatch.setattr(parallel_state, "_VIRTUAL_PIPELINE_MODEL_PARALLEL_RANK", 0)
    assert chunk_argument(1) == {}
    with current_chunk(1):
        assert parallel_state.get_virtual_pipeline_model_parallel_rank() == 1
    assert parallel_state.get_virtual_pipeline_model_parallel_rank() == 0


@NEWER
def test_later_versions_are_given_the_chunk(monkeypatch: pytest.MonkeyPatch, version: str) -> None:
    monkeypatch.setattr(parallel_state, "_VIRTUAL_PIPELINE_MODEL_PARALLEL_RANK", 0)
    assert chunk_argument(1) == {"vp_stage": 1} and chunk_argument(None) == {"vp_stage": None}
    with current_chunk(1):
        assert parallel_state.get_virtual_pipeline_model_parallel_rank() == 0


@OLDER
def test_a_model_of_one_chunk_leaves_the_global_alone(
    monkeypatch: pytest.MonkeyPatch, version: str
) -> None:
    monkeypatch.setattr(parallel_state, "_VIRTUAL_PIPELINE_MODEL_PARALLEL_RANK", 0)
    with current_chunk(None):
        assert parallel_state.get_virtual_pipeline_model_parallel_rank() == 0


def test_fp8_quantization_is_left_out_where_nothing_is_fp8() -> None:
    calls: list[tuple[Any, ...]] = []
    quantize = quantize_if_any(lambda *args: calls.append(args))
    quantize([], [], [], "group")
    assert calls == []
    quantize(["p"], ["main"], [0], "group")
    assert calls == [(["p"], ["main"], [0], "group")]


def test_a_writer_that_asks_for_a_format_gets_torchs_own(monkeypatch: pytest.MonkeyPatch) -> None:
    formats = SimpleNamespace(TORCH_SAVE="torch_save")  # older torch has none
    monkeypatch.setattr(filesystem, "SerializationFormat", formats, raising=False)

    def write(stream: str, item: str, serialization_format: Any) -> tuple[str, str, Any]:
        return stream, item, serialization_format

    assert write_in_torch_format(write)("stream", "item") == ("stream", "item", "torch_save")


def test_a_writer_of_older_torch_stays_as_it_is() -> None:
    def write(stream: str, item: str) -> None: ...

    assert write_in_torch_format(write) is write


def test_files_of_a_checkpoint_are_written_in_the_process_itself() -> None:
    mend.__wrapped__()
    context = filesystem_async.mp.get_context("fork")
    results = context.Queue()
    worker = context.Process(target=lambda n, more: results.put((n, more)), args=(1,), kwargs={
        "more": 2
    })  # fmt: skip
    worker.start()
    worker.join()
    assert results.get_nowait() == (1, 2)
    assert context.Manager().Queue().empty()
