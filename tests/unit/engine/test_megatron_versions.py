"""Which versions of megatron-core are mended, and what the mends do."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import megatron.core
import pytest
from megatron.core.dist_checkpointing.strategies import filesystem_async
from megatron.core.optimizer import distrib_optimizer
from torch.distributed.checkpoint import filesystem

from mindspeed_rlxf.engine import megatron_versions
from mindspeed_rlxf.engine.megatron_versions import (
    adapt,
    mends,
    quantize_if_any,
    write_in_torch_format,
)


@pytest.mark.parametrize("version", ["0.12.1", "0.12.3", "0.12.0rc3"])
def test_0_12_is_mended_in_two_places(version: str) -> None:
    assert [(module.__name__, name) for module, name, _ in mends(version)] == [
        ("megatron.core.optimizer.distrib_optimizer", "quantize_param_shard"),
        ("megatron.core.dist_checkpointing.strategies.filesystem_async", "_write_item"),
    ]


@pytest.mark.parametrize("version", ["0.13.0", "0.13.1", "0.14.0", "0.15.3", "0.16.1"])
def test_later_versions_are_left_alone(version: str) -> None:
    assert mends(version) == ()


@pytest.mark.parametrize(("version", "mended"), [("0.12.1", True), ("0.16.1", False)])
def test_the_version_that_is_imported_decides(
    monkeypatch: pytest.MonkeyPatch, version: str, mended: bool
) -> None:
    def plain(model_params: Any, serialization_format: Any = None) -> None: ...

    monkeypatch.setattr(megatron.core, "__version__", version)
    monkeypatch.setattr(distrib_optimizer, "quantize_param_shard", plain)
    monkeypatch.setattr(filesystem_async, "_write_item", plain)
    adapt.__wrapped__()
    assert (distrib_optimizer.quantize_param_shard is not plain) is mended
    assert (filesystem_async._write_item is not plain) is mended


def test_a_process_is_mended_once(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []
    monkeypatch.setattr(megatron_versions, "mends", lambda version: asked.append(version) or ())
    adapt.cache_clear()
    adapt()
    adapt()
    adapt.cache_clear()
    assert asked == [megatron.core.__version__]


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
