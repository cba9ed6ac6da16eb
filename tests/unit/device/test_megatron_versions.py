"""Each version of megatron-core gets the patches that it needs."""

from types import SimpleNamespace
from typing import Any

import megatron.core
import pytest
from megatron.core import parallel_state
from megatron.core.dist_checkpointing.strategies import filesystem_async
from megatron.core.optimizer import distrib_optimizer
from torch.distributed.checkpoint import filesystem

from mindspeed_rlxf.device.megatron_versions import (
    apply_patches,
    chunk_argument,
    current_chunk,
    quantize_if_any,
    write_in_torch_format,
)


@pytest.mark.parametrize(("version", "mended", "own_queue"), [
    ("0.12.0rc3", True, False), ("0.12.1", True, False), ("0.13.0", False, False),
    ("0.15.3", False, True), ("0.16.1", False, True),
])  # fmt: skip
def test_a_version_is_mended_where_it_needs_it(monkeypatch, version, mended, own_queue):
    def plain(model_params: Any, serialization_format: Any = None) -> None: ...

    monkeypatch.setattr(megatron.core, "__version__", version)
    monkeypatch.setattr(distrib_optimizer, "quantize_param_shard", plain)
    monkeypatch.setattr(filesystem_async, "_write_item", plain)
    monkeypatch.setattr(filesystem_async, "_results_queue", None)
    formats = SimpleNamespace(TORCH_SAVE="torch_save")  # torch 2.7 has none, and asks for none
    monkeypatch.setattr(filesystem, "SerializationFormat", formats, raising=False)
    apply_patches.__wrapped__()
    assert (distrib_optimizer.quantize_param_shard is not plain) is mended
    assert (filesystem_async._write_item is not plain) is mended
    assert (filesystem_async._results_queue is not None) is own_queue


@pytest.mark.parametrize(("version", "chunk", "argument", "inside"), [
    ("0.12.1", 1, {}, 1), ("0.12.1", None, {}, 0), ("0.13.0", 1, {"vp_stage": 1}, 0),
    ("0.16.1", None, {"vp_stage": None}, 0),
])  # fmt: skip
def test_the_chunk_is_a_global_in_0_12_alone(monkeypatch, version, chunk, argument, inside):
    """inside: value of the global, which is 0 outside"""
    monkeypatch.setattr(megatron.core, "__version__", version)
    monkeypatch.setattr(parallel_state, "_VIRTUAL_PIPELINE_MODEL_PARALLEL_RANK", 0)
    assert chunk_argument(chunk) == argument
    with current_chunk(chunk):
        assert parallel_state.get_virtual_pipeline_model_parallel_rank() == inside
    assert parallel_state.get_virtual_pipeline_model_parallel_rank() == 0


def test_fp8_quantization_is_left_out_where_nothing_is_fp8():
    calls: list[tuple[Any, ...]] = []
    quantize = quantize_if_any(lambda *args: calls.append(args))
    quantize([], [], [], "group")
    quantize(["p"], ["main"], [0], "group")
    assert calls == [(["p"], ["main"], [0], "group")]


def test_only_a_writer_that_takes_a_format_gets_one(monkeypatch):
    formats = SimpleNamespace(TORCH_SAVE="torch_save")  # older torch has none
    monkeypatch.setattr(filesystem, "SerializationFormat", formats, raising=False)

    def write(stream: str, item: str, serialization_format: Any) -> tuple[str, str, Any]:
        return stream, item, serialization_format

    def write_of_older_torch(stream: str, item: str) -> None: ...

    assert write_in_torch_format(write)("stream", "item") == ("stream", "item", "torch_save")
    assert write_in_torch_format(write_of_older_torch) is write_of_older_torch


def test_files_of_a_checkpoint_are_written_in_the_process_itself():
    apply_patches.__wrapped__()
    context = filesystem_async.mp.get_context("fork")
    results = context.Queue()
    worker = context.Process(
        target=lambda n, more: results.put((n, more)), args=(1,), kwargs={"more": 2}
    )
    worker.start()
    worker.join()
    assert results.get_nowait() == (1, 2)
    assert context.Manager().Queue().empty()
