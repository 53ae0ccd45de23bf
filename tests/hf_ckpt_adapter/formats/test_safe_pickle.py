"""Contract of safe_pickle.py: listed records and opcodes, and nothing else, in bounded memory."""

import tracemalloc

import pytest
import torch
from hf_ckpt_adapter.formats.safe_pickle import safe_unpickle

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


@pytest.mark.parametrize(
    "data",
    [
        b"\x80\x02r\xff\xff\xff\x7fN.",  # LONG_BINPUT 2^31 - 1: would reserve 16 GB of memo
        b"\x80\x05\x96\xff\xff\xff\xff\xff\xff\xff\x7f.",  # BYTEARRAY8 of 2^63 - 1 bytes
        b"\x80\x04\x8d\xff\xff\xff\xff\xff\xff\xff\x7f.",  # BINUNICODE8
        b"\x80\x02\x82\x01.",  # an extension code
        b"\x80\x02" + b"(" * 10,
        b"",
        b"PK\x03\x04",
    ],
)
def test_pickles_that_ask_for_memory_or_odd_opcodes_are_refused_before_they_run(data: bytes) -> None:
    with pytest.raises(ValueError, match=r"somewhere"):
        safe_unpickle(data, {}, "somewhere")


def class_named(module: str, name: str) -> bytes:
    return b"c" + f"{module}\n{name}\n".encode()


def test_a_pickle_cannot_change_the_classes_that_it_may_name() -> None:
    from hf_ckpt_adapter.formats.dcp_records import RECORDS, StorageInfo

    before = dict(vars(StorageInfo))
    name = class_named("torch.distributed.checkpoint.filesystem", "_StorageInfo")
    with pytest.raises(ValueError, match="somewhere"):
        safe_unpickle(b"\x80\x02" + name + b"N}X\x08\x00\x00\x00__init__Ns\x86b.", RECORDS, "somewhere")
    assert dict(vars(StorageInfo)) == before


def test_one_list_named_many_times_is_not_copied_each_time() -> None:
    from hf_ckpt_adapter.formats.dcp_records import RECORDS

    count = 100_000
    sizes = (class_named("torch", "Size") + b"h\x00\x85R") * 1000
    tracemalloc.start()
    with pytest.raises(ValueError, match=r"somewhere.*100000 dimensions"):
        safe_unpickle(b"\x80\x02(](" + b"N" * count + b"eq\x00" + sizes + b"t.", RECORDS, "somewhere")
    assert tracemalloc.get_traced_memory()[1] < 100 * count
    tracemalloc.stop()


def test_a_name_in_torch_that_is_no_dtype_is_not_even_looked_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "__getattr__", lambda name: pytest.fail(f"torch.{name} would be imported"))
    with pytest.raises(ValueError, match=r"torch\._dynamo"):
        safe_unpickle(b"\x80\x02" + class_named("torch", "_dynamo") + b".", {}, "somewhere")
