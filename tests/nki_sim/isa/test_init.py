"""The contract: nki.isa's names are complete for dir(), completion and type checkers: its stub is what the instructions declare.

uv run python tests/nki_sim/isa/test_init.py    # writes the stub anew
"""

import inspect
from enum import Enum
from pathlib import Path

import nki_sim
import nki_sim.isa as nisa
import nki_sim.language as nl
import pytest
from nki_sim.instruction import INSTRUCTIONS
from nki_sim.ops import Op

STUB = Path(nisa.__file__).with_suffix(".pyi")
HEAD = """# fmt: off
# Written by tests/nki_sim/isa/test_init.py from what the instructions declare.
from typing import Any

from nki_sim.constants import dge_mode as dge_mode
from nki_sim.constants import dma_engine as dma_engine
from nki_sim.constants import engine as engine
from nki_sim.constants import matmul_perf_mode as matmul_perf_mode
from nki_sim.constants import nc_version as nc_version
from nki_sim.constants import oob_mode as oob_mode
from nki_sim.constants import reduce_cmd as reduce_cmd
from nki_sim.errors import NkiError as _Error
from nki_sim.isa.control import register_alloc as register_alloc
from nki_sim.isa.scalars import NkiScalar as NkiScalar
from nki_sim.isa.scalars import scalar_load as scalar_load
from nki_sim.ops import Op
from nki_sim.program import Instr as NkiInstruction
from nki_sim.tensor import NkiTensor
from nki_sim.tensor import VirtualRegister as VirtualRegister

__all__: list[str]
NkiValidationError = _Error
tensor_engine: engine
vector_engine: engine
scalar_engine: engine
gpsimd_engine: engine
unknown_engine: engine
TRN3_ONLY: tuple[str, ...]
UNMODELLED: tuple[str, ...]

def get_nc_version() -> nc_version: ...
def get_nc_sub_version() -> int: ...
def __getattr__(name: str) -> Any: ...
"""


def kind(name: str, tile: object, default: object) -> str:
    """A parameter's type: from what its operand may be, else from its default."""
    if tile is not None:
        words = ["list[NkiTensor]" if name == "srcs" else "NkiTensor"]
        words += ["float"] * tile.scalar + ["None"] * (tile.optional and default is None)
        return " | ".join(words)
    if name.startswith(("op", "reduce_op", "comp_op", "cmp_op")):
        return "Op | None" if default is None else "Op"
    if isinstance(default, Enum):
        return type(default).__name__
    return {bool: "bool", int: "int"}.get(type(default), "Any")


def stub() -> str:
    """The text of the stub."""
    lines = []
    for name, call in sorted(INSTRUCTIONS.items()):
        parts = []
        for p in inspect.signature(call).parameters.values():
            has = p.default is not p.empty
            parts.append(f"{p.name}: {kind(p.name, call.tiles.get(p.name), p.default)}" + (" = ..." if has else ""))
        body = " ".join((call.__doc__ or "").split()).replace('"', "'")
        lines.append(f'def {name}({", ".join(parts)}, name: str | None = ...) -> NkiInstruction:\n    """{body}"""\n')
    return HEAD + "\n".join(["", *lines])


def test_the_stub_is_what_the_instructions_declare() -> None:
    assert stub() == STUB.read_text()


def test_names_are_listed_and_found() -> None:
    assert {"tensor_copy", "nc_matmul", "register_alloc", "scalar_load", "engine"} <= set(dir(nisa))
    assert set(nki_sim.__all__) <= set(dir(nki_sim)) and all(hasattr(nki_sim, n) for n in nki_sim.__all__)
    assert callable(nki_sim.report) and inspect.ismodule(nki_sim.reporting) and isinstance(nl.add, Op)
    assert nki_sim.__version__.count(".") == 2
    with pytest.raises(AttributeError, match="no_such_name"):
        _ = nki_sim.no_such_name


def test_an_instruction_shows_its_parameters_and_what_it_does() -> None:
    assert list(inspect.signature(nisa.tensor_copy).parameters) == ["dst", "src", "engine"]
    assert "same bits" in (nisa.tensor_copy.__doc__ or "")


if __name__ == "__main__":
    STUB.write_text(stub())
