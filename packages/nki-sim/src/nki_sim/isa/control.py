"""Registers, the meeting of two cores, and printing: what the sequencers do."""

from typing import TYPE_CHECKING, Any

import numpy as np

from nki_sim import errors
from nki_sim.constants import dma_engine
from nki_sim.constants import engine as Engine
from nki_sim.dtypes import INTS
from nki_sim.errors import refuse
from nki_sim.program import Instr, tracer
from nki_sim.rules import HBM, PSUM, SBUF, instruction, out, rule, tile
from nki_sim.tensor import MemoryRegion, VirtualRegister

if TYPE_CHECKING:
    from nki_sim.machine import Machine

GPSIMD_DMA_BYTES = {4: 1024, 2: 512, 1: 256}  # per partition, by element size (NKI 0.6, sendrecv)


def register_alloc(x: int | None = None) -> VirtualRegister:
    """A register, optionally holding a constant."""
    register = tracer().register()
    if x is not None:
        register_move(register, x)
    return register


def _register(title: str, value: Any) -> None:
    if not isinstance(value, VirtualRegister):
        raise TypeError(f"{title}: {value!r} is no register; allocate one with nisa.register_alloc()")


@instruction("Y", special=True)
def register_move(dst: Any, src: Any) -> Any:
    """Put a constant or another register's value in a register."""
    _register("register_move", dst)
    if not isinstance(src, (int, VirtualRegister)):
        raise TypeError(f"register_move: src is an integer or a register; got {src!r}")

    def execute(machine: "Machine", instr: Instr) -> None:
        machine.registers[machine.core][dst.number] = machine.value(src, instr)

    return execute


@instruction("Y", special=True, src=tile(HBM | SBUF))
def register_load(dst: Any, src: Any) -> Any:
    """Put a tensor's single element in a register."""
    _register("register_load", dst)
    rule(src.size == 1, "shape", lambda: f"register_load: src {src.shape} must have one element")
    rule(src.dtype in INTS, "dtype", lambda: f"register_load: src must be an integer; got {src.dtype}")

    def execute(machine: "Machine", instr: Instr) -> None:
        machine.registers[machine.core][dst.number] = machine.value(src, instr)

    return execute


@instruction("Y", special=True, dst=out(HBM | SBUF))
def register_store(dst: Any, src: Any) -> Any:
    """Write a register's value to a tensor of one element."""
    _register("register_store", src)
    rule(dst.size == 1, "shape", lambda: f"register_store: dst {dst.shape} must have one element")

    def execute(machine: "Machine", instr: Instr) -> None:
        machine.write(dst, np.asarray(machine.value(src, instr)), instr)

    return execute


@instruction("GVSTY", special=True, data=tile(HBM | SBUF))
def core_barrier(data: Any, cores: Any, engine: Engine = Engine.gpsimd) -> Any:
    """Both cores wait for each other; accesses to shared memory before it happen before those after it."""
    _two_cores("core_barrier")
    rule(tuple(cores) == (0, 1), "cores", lambda: f"core_barrier: cores must be (0, 1); got {cores}")
    rule(
        data.buffer is MemoryRegion.shared_hbm or errors.compat is not None,
        "buffer",
        lambda: f"core_barrier: data must be in shared HBM; got {data!r}",
    )
    return None


@instruction("D", special=True, src=tile(SBUF), dst=out(SBUF), same=("src", "dst"), same_dtype=("src", "dst"))
def sendrecv(
    src: Any, dst: Any, send_to_rank: int, recv_from_rank: int, pipe_id: int, dma_engine: dma_engine = dma_engine.dma
) -> Any:
    """Send src to the other core's dst and receive its src into our dst."""
    _two_cores("sendrecv")
    rule(
        {send_to_rank, recv_from_rank} <= {0, 1},
        "cores",
        lambda: f"sendrecv: ranks are 0 or 1; got {send_to_rank} and {recv_from_rank}",
    )
    if dma_engine.name == "gpsimd_dma":
        limit = GPSIMD_DMA_BYTES[src.dtype.itemsize]
        used = src.free_size * src.dtype.itemsize
        rule(
            used <= limit,
            "value",
            lambda: (
                f"sendrecv: gpsimd_dma moves at most {limit} bytes per partition of {src.dtype}; got {used}. Use dma_engine.dma"
            ),
        )
    return None


@instruction("Y", special=True, tensor=tile(HBM | SBUF | PSUM))
def device_print(tensor: Any, prefix: str) -> Any:
    """Print values as the program reaches this point."""

    def execute(machine: "Machine", instr: Instr) -> None:
        print(prefix, machine.read(tensor, instr))

    return execute


def _two_cores(title: str) -> None:
    if tracer().cores != 2:
        refuse("cores", f"{title} needs two cores; launch the kernel with k[2](...)")
