"""Hostile checkpoints end in one ValueError, run nothing, and cost seconds at most.

All are made here, by code: programs for the pickle machine, archives that two readers see
differently, tensors that lie about their data.
"""

from __future__ import annotations

import io
import pickle
import random
import struct
import zipfile
from pathlib import Path

import pytest

from mindspeed_rlxf.weights.inert_pickle import read_pickle
from tests.hostile.watched import canaries, outcome, read_all

# Programs for the pickle machine --------------------------------------------------------------

P = b"\x80\x04"


def text(value: str) -> bytes:
    return b"X" + struct.pack("<I", len(value)) + value.encode()


def named(module: str, name: str) -> bytes:
    return text(module) + text(name) + b"\x93"


NAMESPACE = named("argparse", "Namespace")
CALLS = [
    *(("os", "system"), ("posix", "system"), ("nt", "system"), ("subprocess", "Popen")),
    *(("builtins", "eval"), ("builtins", "exec"), ("builtins", "getattr"), ("builtins", "open")),
    *(
        ("builtins", "__import__"),
        ("builtins", "map"),
        ("builtins", "print"),
        ("runpy", "run_path"),
    ),
    *(("operator", "attrgetter"), ("functools", "partial"), ("functools", "reduce")),
    *(("importlib", "import_module"), ("pickle", "loads"), ("_pickle", "loads"), ("torch", "load")),
    *(("torch.storage", "_load_from_bytes"), ("torch._utils", "_rebuild_tensor_v3")),
    *(("torch.jit", "load"), ("torch.hub", "load"), ("torch.utils.data", "get_worker_info")),
    *(("numpy", "load"), ("numpy", "fromfile"), ("numpy.f2py.crackfortran", "getlincoef")),
    *(("collections", "defaultdict"), ("collections", "Counter"), ("ctypes", "CDLL")),
    *(("pathlib", "Path.unlink"), ("argparse", "Namespace.__init__"), ("torch", "os.system")),
    *(
        ("torch", "nn.Module"),
        ("types", "CodeType"),
        ("types", "FunctionType"),
        ("code", "interact"),
    ),
    *(("socket", "socket"), ("shutil", "rmtree"), ("webbrowser", "open"), ("pty", "spawn")),
    *(("site", "main"), ("timeit", "timeit"), ("mindspeed_rlxf.cli.convert", "main")),
]
HASH = (1 << 61) - 1  # of integers, a multiple of which has the hash 0
HUGE = struct.pack("<Q", (1 << 62) - 1)
PROGRAMS = {
    **{
        f"{module}.{name} {form}": data
        for module, name in CALLS
        for form, data in {
            "reduced": P + named(module, name) + text("true") + b"\x85R.",
            "as a class": P + named(module, name) + text("true") + b"\x85\x81.",
            "by protocol 0": f"c{module}\n{name}\n(S'true'\ntR.".encode(),
            "by a line": b"\x80\x02" + f"c{module}\n{name}\n".encode() + text("true") + b"\x85R.",
        }.items()
    },
    "tuples that share their parts, as a key": P
    + b"})\x94"
    + b"".join(b"h" + bytes([i]) + b"h" + bytes([i]) + b"\x86\x94" for i in range(75))
    + b"Ns.",
    "shared tuples beyond any depth": P
    + b"})\x94"
    + b"".join(b"h" + bytes([i]) + b"h" + bytes([i]) + b"\x86\x94" for i in range(150))
    + b"Ns.",
    "deep tuples": P + b"N" + b"\x85" * 200_000 + b".",
    "deep lists": P + b"]" * 200_000 + b"a" * 199_999 + b".",
    "deep dicts": P + b"}N" * 200_000 + b"s" * 199_999 + b".",
    "deep marks": P + b"(" * 200_000 + b"t" * 200_000 + b".",
    "deep objects": P + NAMESPACE + b"\x94" + b"h\x00)\x81}N" * 5000 + b"sb" * 5000 + b".",
    "deep from the top": P + b"]\x94]\x94\x86\x94h\x00h\x01ah\x01]a.",
    "a place in the memo of 1.2 GB": P + b"Nr\xff\xff\xff\x0900.",
    "bytes of 4 EB": P + b"\x8e" + HUGE + b".",
    "text of 4 EB": P + b"\x8d" + HUGE + b".",
    "a bytearray of 4 EB": P + b"\x96" + HUGE + b".",
    "a frame of 4 EB": P + b"\x95" + HUGE + b".",
    "an integer of 2 GB": P + b"\x8b\xff\xff\xff\x7f.",
    "an integer of 255 bytes": P + b"\x8a\xff" + b"\x7f" * 255 + b".",
    "keys of one hash": P
    + b"}("
    + b"".join(b"\x8a\x0a" + (i * HASH).to_bytes(10, "little") + b"N" for i in range(999))
    + b"u.",
    "a key that is a list": P + b"}]Ns.",
    "a key that is a number of many": P + b"}G" + struct.pack(">d", 1e300) + b"Ns.",
    "two entries of one name": P + b"}" + (text("a") + b"Ns") * 2 + b".",
    "a list in itself": P + b"]\x94h\x00a.",
    "a dict in itself": P + b"}\x94" + text("a") + b"h\x00s.",
    "an object in itself": P + NAMESPACE + b")\x81\x94}" + text("a") + b"h\x00sb.",
    "a tuple that changes": P + b"]\x94\x85h\x00Na0.",
    "a value remembered twice": P + b"]q\x00Nq\x00a.",
    "an extension": P + b"\x82\x01.",
    "an extension of 2 bytes": P + b"\x83\x01\x00.",
    "an extension of 4 bytes": P + b"\x84\x01\x00\x00\x00.",
    "a persistent id": P + text("x") + b"Q.",
    "a persistent id of a line": b"Px\n.",
    "a storage of a bool": P + b"(" + text("storage") + b"\x88\x88\x88\x88tQ.",
    "items for an object": P + NAMESPACE + b")\x81" + text("a") + b"Ns.",
    "items for a string": P + text("a") + b"Na.",
    "items for a class": P + NAMESPACE + text("__eq__") + b"Ns.",
    "attributes for a class": P + NAMESPACE + b"}" + text("__eq__") + b"\x88sb.",
    "attributes for a list": P + b"]}" + text("a") + b"Nsb.",
    "attributes for a tensor type": P + named("torch", "Tensor") + b"}b.",
    "attributes twice": P + NAMESPACE + b")\x81}b}b.",
    "special attributes": P + NAMESPACE + b")\x81}" + text("__class__") + b"Nsb.",
    "slots": P + NAMESPACE + b")\x81N}" + text("__class__") + b"Ns\x86b.",
    "a dict with a reduced class": P + named("collections", "OrderedDict") + b"]\x85R.",
    "a size of floats": P + named("torch", "Size") + b"G" + bytes(8) + b"\x85\x85R.",
    "a size of bools": P + named("torch", "Size") + b"\x88\x85\x85R.",
    "objects in an array": P + named("numpy", "dtype") + text("O8") + b"\x89\x88\x87R.",
    "another codec": P + named("_codecs", "encode") + text("x") + text("rot13") + b"\x86R.",
    "keywords": P + NAMESPACE + b")}" + text("a") + b"Ns\x92.",
    "a buffer": P + b"\x97.",
    "text that is none": P + b"\x8c\x01\xff.",
    "half of a pair of surrogates": P + b"\x8c\x03\xed\xa0\x80.",
    "bytes after the end": P + b"N.N.",
    "nothing": b"",
    "an end alone": b".",
    "parts left over": P + b"NN.",
    "an open mark": P + b"(N.",
    "protocol 0": b"I1\n.",
    "protocol 9": b"\x80\x09N.",
    "names without an end": b"\x80\x02c" + b"a" * 100_000,
    "a name of control characters": b"\x80\x02c\x1b[2J\nx\n.",
}  # fmt: skip


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_hostile_program_is_refused(name: str) -> None:
    assert outcome(lambda: read_pickle(PROGRAMS[name]))


def test_canaries_detect_payloads() -> None:
    """The payloads work where they are let, and the tests would see it."""
    with pytest.raises(pytest.exit.Exception, match="CANARY"), canaries():
        pickle.loads(PROGRAMS["os.system reduced"])
    with pytest.raises(pytest.exit.Exception, match="CANARY"), canaries():
        Path("x").write_text("")


def test_random_programs_of_known_operations_end() -> None:
    """Whatever operations do with each other: no exception but ValueError."""
    rng = random.Random(0)
    pieces = [
        *(b"N", b"]", b"}", b")", b"(", b"K\x01", b"a", b"e", b"s", b"u", b"t", b"\x85", b"\x86"),
        *(b"\x87", b"R", b"\x81", b"b", b"Q", b"\x94", b"h\x00", b"h\x01", b"q\x05", b"\x8f"),
        *(b"\x90", b"\x91", text("a"), text("storage"), NAMESPACE, b"\x88", b"C\x01a"),
        named("torch", "Size"),
        *(named("collections", "OrderedDict"), named("torch", "float32"), named("torch", "device")),
        *(named("torch._utils", "_rebuild_tensor_v2"), named("numpy", "dtype"), text("f4")),
        *(named("_codecs", "encode"), text("latin1"), named("_io", "BytesIO")),
    ]  # fmt: skip
    for _ in range(4000):
        program = P + b"".join(rng.choices(pieces, k=rng.randint(2, 25))) + b"."
        try:
            read_pickle(program)
        except ValueError:
            continue


# Archives that two readers could see differently ----------------------------------------------


def archive(names: dict[str, bytes], method: int = zipfile.ZIP_STORED) -> bytes:
    stream = io.BytesIO()
    with zipfile.ZipFile(stream, "w", method) as file:
        for name, data in names.items():
            file.writestr(name, data)
    return stream.getvalue()


MODEL = pickle.dumps({"model": {}}, 2)
GOOD = archive({"a/data.pkl": MODEL, "a/version": b"3\n"})
END = GOOD.rindex(b"PK\x05\x06")
DIRECTORY = GOOD.index(b"PK\x01\x02")


def patched(offset: int, form: str, *numbers: int) -> bytes:
    data = bytearray(GOOD)
    struct.pack_into(form, data, offset, *numbers)
    return bytes(data)


ARCHIVES = {
    "bytes before the first record": b"MZ" + GOOD,
    "bytes after the end": GOOD + b"\0",
    "a comment": GOOD[:-2] + b"\4\0abcd",
    "an archive behind another": GOOD + GOOD,
    "a directory of 4 GB": patched(END + 12, "<L", 0xFFFFFFF0),
    "a directory elsewhere": patched(END + 16, "<L", 0),
    "markers of zip64 without it": patched(END + 12, "<2L", 0xFFFFFFFF, 0xFFFFFFFF),
    "counts of zip64 without it": patched(END + 8, "<2H", 0xFFFF, 0xFFFF),
    "a wrong count": patched(END + 8, "<2H", 1, 1),
    "two disks": patched(END + 4, "<2H", 1, 1),
    "a size of zip64 without it": patched(DIRECTORY + 20, "<2L", 0xFFFFFFFF, 0xFFFFFFFF),
    "an offset of zip64 without it": patched(DIRECTORY + 42, "<L", 0xFFFFFFFF),
    "a size beyond the file": patched(DIRECTORY + 20, "<2L", 1 << 30, 1 << 30),
    "a shorter size in the directory": patched(DIRECTORY + 20, "<2L", 3, 3),
    "a shorter size in the header": patched(18, "<2L", 3, 3),
    "another sum in the header": patched(14, "<L", 1),
    "another method in the header": patched(8, "<H", 8),
    "another method in the directory": patched(DIRECTORY + 10, "<H", 8),
    "encrypted": patched(DIRECTORY + 8, "<H", 1),
    "another name in the header": GOOD.replace(b"a/data.pkl", b"a/data.txt", 1),
    "an offset into another record": patched(DIRECTORY + 42, "<L", 5),
    "names of two cases": archive({"a/data.pkl": MODEL, "a/DATA.PKL": MODEL}),
    "two pickles": archive({"a/data.pkl": MODEL, "a/b/data.pkl": MODEL}),
    "two folders": archive({"a/data.pkl": MODEL, "b/version": b"3"}),
    "a program of TorchScript": archive({"a/data.pkl": MODEL, "a/constants.pkl": MODEL}),
    "compressed": archive({"a/data.pkl": MODEL * 9}, zipfile.ZIP_DEFLATED),
    "a bomb": archive({"a/data.pkl": bytes(50 << 20)}, zipfile.ZIP_DEFLATED),
    "no pickle": archive({"a/version": b"3"}),
    "big-endian": archive({"a/data.pkl": MODEL, "a/byteorder": b"big"}),
    "a long byte order": archive({"a/data.pkl": MODEL, "a/byteorder": b"x" * 100}),
    "a name with a zero": GOOD.replace(b"a/data.pkl", b"a/data\0pkl"),
    "a name with a backslash": GOOD.replace(b"a/data.pkl", b"a\\data.pkl"),
    "a name of control characters": GOOD.replace(b"a/data.pkl", b"a/\x1b[2Jx.pk"),
    "the end alone": GOOD[END:],
    "a tar": b"ustar" + bytes(1 << 12),
    "nothing": b"",
}  # fmt: skip


@pytest.mark.parametrize("name", ARCHIVES)
def test_an_ambiguous_archive_is_refused(tmp_path: Path, name: str) -> None:
    write_rank(tmp_path, GOOD)
    assert "layers, the model has" in outcome(lambda: read_all(tmp_path)), "the valid one is read"
    write_rank(tmp_path, ARCHIVES[name])
    said = outcome(lambda: read_all(tmp_path))
    assert said and "layers, the model has" not in said, "refused where it is read"


def write_rank(folder: Path, data: bytes) -> None:
    (folder / "mp_rank_00").mkdir(exist_ok=True)
    (folder / "mp_rank_00" / "model_optim_rng.pt").write_bytes(data)


def tensor_program(
    offset: bytes = b"K\x00",
    shape: bytes = b"K\x02\x85",
    stride: bytes = b"K\x01\x85",
    elements: bytes = b"K\x02",
    key: bytes = text("0"),
    hooks: bytes = named("collections", "OrderedDict") + b")R",
    kind: str = "FloatStorage",
) -> bytes:
    storage = b"(" + text("storage") + named("torch", kind) + key + text("cpu") + elements + b"tQ"
    rebuild = named("torch._utils", "_rebuild_tensor_v2")
    tensor = rebuild + b"(" + storage + offset + shape + stride + b"\x89" + hooks + b"tR"
    return b"\x80\x02}" + text("model") + b"}" + text("rm_head.bias") + tensor + b"ss."


LONG = b"\x8a\x09" + (1 << 64).to_bytes(9, "little")
TENSORS = {
    "a negative offset": {"offset": b"J\xff\xff\xff\xff"},
    "an offset beyond": {"offset": b"K\x01"},
    "an offset of 2**64": {"offset": LONG},
    "an offset that is a bool": {"offset": b"\x88"},
    "a negative size": {"shape": b"J\xff\xff\xff\xff\x85"},
    "a size beyond": {"shape": b"K\x03\x85"},
    "a size that is a bool": {"shape": b"\x88\x85"},
    "a size that is a float": {"shape": b"G" + bytes(8) + b"\x85"},
    "sizes in a list": {"shape": b"]K\x02a"},
    "a size of 2**64": {"shape": LONG + b"\x85", "stride": b"K\x00\x85"},
    "a number repeated 10**9 times": {"shape": b"J\x00\xca\x9a\x3b\x85", "stride": b"K\x00\x85"},
    "a negative stride": {"stride": b"J\xff\xff\xff\xff\x85"},
    "more strides than axes": {"stride": b"K\x01K\x01\x86"},
    "40 axes": {"shape": b"(" + b"K\x01" * 40 + b"t", "stride": b"(" + b"K\x01" * 40 + b"t"},
    "more elements than bytes": {"elements": b"K\x03"},
    "negative elements": {"elements": b"J\xff\xff\xff\xff"},
    "elements that are a bool": {"elements": b"\x88"},
    "a record that is not there": {"key": text("1")},
    "a record elsewhere": {"key": text("../data.pkl")},
    "a key that is a number": {"key": b"K\x00"},
    "hooks": {"hooks": named("collections", "OrderedDict") + b")RK\x01K\x02s"},
    "hooks of another kind": {"hooks": b"]"},
    "an untyped storage": {"kind": "UntypedStorage"},
    "a storage that is none": {"kind": "os"},
}  # fmt: skip


@pytest.mark.parametrize("name", TENSORS)
def test_a_tensor_that_lies_about_its_data_is_refused(tmp_path: Path, name: str) -> None:
    data = {"a/data.pkl": tensor_program(), "a/data/0": bytes(8)}
    write_rank(tmp_path, archive(data))
    assert "layers, the model has" in outcome(lambda: read_all(tmp_path)), "the valid one is read"
    write_rank(tmp_path, archive({**data, "a/data.pkl": tensor_program(**TENSORS[name])}))  # type: ignore[arg-type]
    said = outcome(lambda: read_all(tmp_path))
    assert said and "layers, the model has" not in said, "refused where it is read"
