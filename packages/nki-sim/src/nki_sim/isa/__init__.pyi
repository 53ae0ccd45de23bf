# fmt: off
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

def activation(dst: NkiTensor, op: Op, data: NkiTensor, bias: NkiTensor | float | None = ..., scale: NkiTensor | float = ..., reduce_op: Op | None = ..., reduce_res: NkiTensor | None = ..., reduce_cmd: reduce_cmd = ..., name: str | None = ...) -> NkiInstruction:
    """dst = op(data * scale + bias); the result can be summed over the free axes into the reduce registers."""

def activation_reduce(dst: NkiTensor, op: Op, data: NkiTensor, reduce_op: Op, reduce_res: NkiTensor | None = ..., bias: NkiTensor | float | None = ..., scale: NkiTensor | float = ..., name: str | None = ...) -> NkiInstruction:
    """activation with reduce_cmd.reset_reduce."""

def affine_select(dst: NkiTensor, pattern: Any, channel_multiplier: Any, on_true_tile: NkiTensor, on_false_value: Any, cmp_op: Op = ..., offset: int = ..., name: str | None = ...) -> NkiInstruction:
    """on_true_tile where cmp_op(affine value, 0) holds, else on_false_value."""

def bn_aggr(dst: NkiTensor, data: NkiTensor, name: str | None = ...) -> NkiInstruction:
    """Mean and variance from (count, mean, variance * count) triples."""

def bn_stats(dst: NkiTensor, data: NkiTensor, name: str | None = ...) -> NkiInstruction:
    """Count, mean and variance * count of the even elements of each partition, then of the odd ones."""

def core_barrier(data: NkiTensor, cores: Any, engine: engine = ..., name: str | None = ...) -> NkiInstruction:
    """Both cores wait for each other; accesses to shared memory before it happen before those after it."""

def device_print(prefix: Any, tensor: NkiTensor, name: str | None = ...) -> NkiInstruction:
    """Print values as the program reaches this point (nl.device_print)."""

def dma_compute(dst: NkiTensor, srcs: list[NkiTensor], reduce_op: Op, scales: Any = ..., unique_indices: bool = ..., oob_mode: oob_mode = ..., name: str | None = ...) -> NkiInstruction:
    """dst = sum of srcs in float32. With a vector_offset: dst[rows] += src (scatter) or dst += src[rows] (gather)."""

def dma_copy(dst: NkiTensor, src: NkiTensor, priority: Any = ..., oob_mode: oob_mode = ..., dge_mode: dge_mode = ..., engine: engine = ..., name: str | None = ...) -> NkiInstruction:
    """dst = src, elements in order, converted through float32; gather or scatter when one side has a vector_offset."""

def dma_transpose(dst: NkiTensor, src: NkiTensor, axes: Any = ..., priority: Any = ..., dge_mode: dge_mode = ..., oob_mode: oob_mode = ..., name: str | None = ...) -> NkiInstruction:
    """dst = src with its first and last dimension exchanged; with a vector_offset, rows are gathered first."""

def iota(dst: NkiTensor, pattern: Any, offset: int = ..., channel_multiplier: int = ..., name: str | None = ...) -> NkiInstruction:
    """Integers by an affine pattern, converted to dst's dtype. The offset may be a register."""

def local_gather(dst: NkiTensor, src_buffer: NkiTensor, index: NkiTensor, num_elem_per_idx: int = ..., num_valid_indices: Any = ..., name: str | None = ...) -> NkiInstruction:
    """Each group of 16 partitions gathers by its own indices, read down its partitions first."""

def max8(dst: NkiTensor, src: NkiTensor, name: str | None = ...) -> NkiInstruction:
    """The eight largest values of each partition, descending."""

def memset(dst: NkiTensor, value: Any, engine: engine = ..., name: str | None = ...) -> NkiInstruction:
    """Fill with a constant of the tile's kind."""

def nc_find_index8(dst: NkiTensor, data: NkiTensor, vals: NkiTensor, name: str | None = ...) -> NkiInstruction:
    """Where the eight vals of each partition stand in data; equal vals take successive occurrences."""

def nc_match_replace8(dst: NkiTensor, data: NkiTensor, vals: NkiTensor, imm: Any, dst_idx: NkiTensor | None = ..., name: str | None = ...) -> NkiInstruction:
    """data with one occurrence of each val replaced by imm; equal vals take occurrences from the last val backwards."""

def nc_matmul(dst: NkiTensor, stationary: NkiTensor, moving: NkiTensor, is_stationary_onezero: bool = ..., is_moving_onezero: bool = ..., is_transpose: bool = ..., accumulate: Any = ..., tile_position: Any = ..., tile_size: Any = ..., perf_mode: matmul_perf_mode = ..., name: str | None = ...) -> NkiInstruction:
    """dst[M, N] (+)= stationary[K, M].T @ moving[K, N], K on partitions (double_row: and on a first free dimension of 2). accumulate=None overwrites what no matmul has written and adds to what one has."""

def nc_n_gather(dst: NkiTensor, data: NkiTensor, indices: NkiTensor, name: str | None = ...) -> NkiInstruction:
    """dst[p, i] = data[p, indices[p, i]], free dimensions flattened."""

def nc_stream_shuffle(dst: NkiTensor, src: NkiTensor, shuffle_mask: Any, name: str | None = ...) -> NkiInstruction:
    """Shuffle within each 32 partitions: dst partition i takes src partition mask[i]; 255 leaves it as it is."""

def nc_transpose(dst: NkiTensor, data: NkiTensor, engine: engine = ..., name: str | None = ...) -> NkiInstruction:
    """dst[F, P] = data[P, F].T: to 128 x 128 from SBUF to PSUM on the Tensor Engine, to 32 x 32 on the Vector Engine."""

def nonzero_with_count(dst: NkiTensor, src: NkiTensor, index_offset: int = ..., padding_val: int = ..., name: str | None = ...) -> NkiInstruction:
    """Positions of nonzero elements, padding, and their count last; partitions 0, 16, ... only, the others stay."""

def range_select(dst: NkiTensor, on_true_tile: NkiTensor, comp_op0: Op, comp_op1: Op, bound0: NkiTensor, bound1: NkiTensor, reduce_cmd: reduce_cmd = ..., reduce_res: NkiTensor | None = ..., reduce_op: Op = ..., range_start: int = ..., on_false_value: Any = ..., name: str | None = ...) -> NkiInstruction:
    """Keep elements whose index (range_start + position) satisfies both comparisons; the others become the lowest float32."""

def reciprocal(dst: NkiTensor, data: NkiTensor, name: str | None = ...) -> NkiInstruction:
    """dst = 1 / data."""

def register_load(dst: Any, src: NkiTensor, name: str | None = ...) -> NkiInstruction:
    """Put a tensor's single integer in a register."""

def register_move(dst: Any, src: Any, name: str | None = ...) -> NkiInstruction:
    """Put a constant or another register's value in a register."""

def register_store(dst: NkiTensor, src: Any, name: str | None = ...) -> NkiInstruction:
    """Write a register's value to a tensor of one element."""

def scalar_store(dst: NkiTensor, src: Any, name: str | None = ...) -> NkiInstruction:
    """Write a scalar to a tensor of one int32."""

def scalar_tensor_tensor(dst: NkiTensor, data: NkiTensor, op0: Op, operand0: NkiTensor | float, op1: Op, operand1: NkiTensor, reverse0: bool = ..., reverse1: bool = ..., name: str | None = ...) -> NkiInstruction:
    """dst = (data <op0> operand0) <op1> operand1, operand1 a tile."""

def select_reduce(dst: NkiTensor, predicate: NkiTensor, on_true: NkiTensor, on_false: NkiTensor | float, reduce_res: NkiTensor | None = ..., reduce_cmd: reduce_cmd = ..., reduce_op: Op = ..., reverse_pred: bool = ..., name: str | None = ...) -> NkiInstruction:
    """dst = on_true where the predicate holds, else on_false; optionally the maximum over the free axes."""

def sendrecv(src: NkiTensor, dst: NkiTensor, send_to_rank: Any, recv_from_rank: Any, pipe_id: Any, dma_engine: dma_engine = ..., name: str | None = ...) -> NkiInstruction:
    """Send src to the other core's dst and receive its src into our dst."""

def tensor_copy(dst: NkiTensor, src: NkiTensor, engine: engine = ..., name: str | None = ...) -> NkiInstruction:
    """dst = src: the same bits for the same dtype, through float32 otherwise."""

def tensor_copy_predicated(dst: NkiTensor, src: NkiTensor | float, predicate: NkiTensor, reverse_pred: bool = ..., name: str | None = ...) -> NkiInstruction:
    """dst = src where the predicate is nonzero (reverse_pred: zero); elsewhere dst stays as it is."""

def tensor_partition_reduce(dst: NkiTensor, op: Op, data: NkiTensor, name: str | None = ...) -> NkiInstruction:
    """Reduce over the partitions, into one partition."""

def tensor_reduce(dst: NkiTensor, op: Op, data: NkiTensor, axis: Any, negate: bool = ..., keepdims: bool = ..., name: str | None = ...) -> NkiInstruction:
    """Reduce the trailing free axes."""

def tensor_scalar(dst: NkiTensor, data: NkiTensor, op0: Op, operand0: NkiTensor | float | None = ..., reverse0: bool = ..., op1: Op | None = ..., operand1: NkiTensor | float | None = ..., reverse1: bool = ..., engine: engine = ..., name: str | None = ...) -> NkiInstruction:
    """dst = (data <op0> operand0) <op1> operand1, operands constants or one value a partition."""

def tensor_scalar_reduce(dst: NkiTensor, data: NkiTensor, op0: Op, operand0: NkiTensor | float, reduce_op: Op, reduce_res: NkiTensor | None = ..., reverse0: bool = ..., reduce_cmd: reduce_cmd = ..., reduce_init: NkiTensor | float | None = ..., reduce_res_negate: bool = ..., name: str | None = ...) -> NkiInstruction:
    """dst = data <op0> operand0, folded over the free axes into the reduce registers."""

def tensor_tensor(dst: NkiTensor, data1: NkiTensor, data2: NkiTensor, op: Op, engine: engine = ..., name: str | None = ...) -> NkiInstruction:
    """dst = data1 <op> data2. All-int32/uint32 operands go to GpSimd, which is exact; else through float32."""

def tensor_tensor_scan(dst: NkiTensor, data0: NkiTensor, data1: NkiTensor, initial: NkiTensor | float, op0: Op, op1: Op, reverse0: bool = ..., reverse1: bool = ..., name: str | None = ...) -> NkiInstruction:
    """r[i] = (data0[i] <op0> r[i-1]) <op1> data1[i], r[-1] = initial, along the free elements."""
