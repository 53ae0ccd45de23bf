"""nki.isa: the instructions, one file an engine, and the enumerations they take."""

from typing import NoReturn

from nki_sim.constants import dge_mode, dma_engine, engine, matmul_perf_mode, nc_version, oob_mode, reduce_cmd
from nki_sim.errors import NkiError as NkiValidationError
from nki_sim.errors import unsupported
from nki_sim.isa.control import core_barrier, register_alloc, register_load, register_move, register_store, sendrecv
from nki_sim.isa.dma import dma_compute, dma_copy, dma_transpose
from nki_sim.isa.gpsimd import (
    affine_select,
    iota,
    local_gather,
    nc_n_gather,
    nonzero_with_count,
    tensor_partition_reduce,
)
from nki_sim.isa.scalar import activation, activation_reduce
from nki_sim.isa.tensor import nc_matmul, nc_transpose
from nki_sim.isa.vector import (
    bn_aggr,
    bn_stats,
    max8,
    memset,
    nc_find_index8,
    nc_match_replace8,
    nc_stream_shuffle,
    range_select,
    reciprocal,
    scalar_tensor_tensor,
    select_reduce,
    tensor_copy,
    tensor_copy_predicated,
    tensor_reduce,
    tensor_scalar,
    tensor_scalar_cumulative,
    tensor_scalar_reduce,
    tensor_tensor,
    tensor_tensor_scan,
)
from nki_sim.program import Instr as NkiInstruction
from nki_sim.tensor import VirtualRegister

__all__ = [
    "NkiInstruction",
    "NkiValidationError",
    "VirtualRegister",
    "activation",
    "activation_reduce",
    "affine_select",
    "bn_aggr",
    "bn_stats",
    "core_barrier",
    "dge_mode",
    "dma_compute",
    "dma_copy",
    "dma_engine",
    "dma_transpose",
    "engine",
    "get_nc_version",
    "iota",
    "local_gather",
    "matmul_perf_mode",
    "max8",
    "memset",
    "nc_find_index8",
    "nc_match_replace8",
    "nc_matmul",
    "nc_n_gather",
    "nc_stream_shuffle",
    "nc_transpose",
    "nc_version",
    "nonzero_with_count",
    "oob_mode",
    "range_select",
    "reciprocal",
    "reduce_cmd",
    "register_alloc",
    "register_load",
    "register_move",
    "register_store",
    "scalar_tensor_tensor",
    "select_reduce",
    "sendrecv",
    "tensor_copy",
    "tensor_copy_predicated",
    "tensor_partition_reduce",
    "tensor_reduce",
    "tensor_scalar",
    "tensor_scalar_cumulative",
    "tensor_scalar_reduce",
    "tensor_tensor",
    "tensor_tensor_scan",
]

tensor_engine, vector_engine, scalar_engine = engine.tensor, engine.vector, engine.scalar
gpsimd_engine, unknown_engine = engine.gpsimd, engine.unknown
TRN3_ONLY = ("nc_matmul_mx", "quantize_mx", "activate2", "exponential", "rand2", "dma_gather_transpose_mx")


def get_nc_version() -> nc_version:
    """The generation modelled: gen3 (Trn2)."""
    return nc_version.gen3


def get_nc_sub_version() -> int:
    """The first silicon revision."""
    return 0


def __getattr__(name: str) -> NoReturn:
    if name.startswith("__"):
        raise AttributeError(name)
    unsupported(
        f"nisa.{name}",
        "target: needs NeuronCore-v4 (Trn3), and trn2 is modelled" if name in TRN3_ONLY else "not modelled by nki-sim",
    )
