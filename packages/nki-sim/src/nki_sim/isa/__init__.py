"""nki.isa: the instructions, one file an engine, and the enumerations they take."""

from typing import Any

from nki_sim import errors
from nki_sim.constants import dge_mode, dma_engine, engine, matmul_perf_mode, nc_version, oob_mode, reduce_cmd
from nki_sim.errors import NkiError as NkiValidationError
from nki_sim.instruction import INSTRUCTIONS
from nki_sim.isa import control, dma, gpsimd, scalar, scalars, tensor, vector  # noqa: F401  (they declare INSTRUCTIONS)
from nki_sim.isa.control import register_alloc
from nki_sim.isa.scalars import NkiScalar, scalar_load
from nki_sim.program import Instr as NkiInstruction
from nki_sim.tensor import VirtualRegister

__all__ = [
    "NkiInstruction",
    "NkiScalar",
    "NkiValidationError",
    "VirtualRegister",
    "register_alloc",
    "scalar_load",
]  # and INSTRUCTIONS
__all__ += ["dge_mode", "dma_engine", "engine", "matmul_perf_mode", "nc_version", "oob_mode", "reduce_cmd"]

tensor_engine, vector_engine, scalar_engine = engine.tensor, engine.vector, engine.scalar
gpsimd_engine, unknown_engine = engine.gpsimd, engine.unknown
TRN3_ONLY = ("nc_matmul_mx", "quantize_mx", "activate2", "exponential", "rand2")

UNMODELLED = (
    "tensor_scalar_cumulative",
    "rng",
    "dropout",
    "set_rng_seed",
    "rand_set_state",
    "rand_get_state",
    "sequence_bounds",
    "topk",
)


def get_nc_version() -> nc_version:
    """The generation modelled: gen3 (Trn2)."""
    return nc_version.gen3


def get_nc_sub_version() -> int:
    """The first silicon revision."""
    return 0


def __dir__() -> list[str]:
    return sorted({*globals(), *INSTRUCTIONS})


def __getattr__(name: str) -> Any:
    if name in INSTRUCTIONS:
        return INSTRUCTIONS[name]
    if name.startswith("__"):
        raise AttributeError(name)
    meant = errors.near(name, [*INSTRUCTIONS, *__all__])
    if name in TRN3_ONLY:
        why = "target: needs NeuronCore-v4 (Trn3); trn2 is modelled"
    elif name in UNMODELLED:
        why = "an instruction of NKI that nki-sim does not model"
    else:
        why = f"no instruction of NKI 0.7{meant}"
    errors.unsupported(f"nisa.{name}", why)
