"""Registers, the meeting of two cores, and printing: what the sequencers do."""

from typing import Any

import numpy as np

from nki_sim import errors
from nki_sim.constants import Engine, dma_engine
from nki_sim.dtypes import INTS
from nki_sim.errors import need
from nki_sim.instruction import HBM, PSUM, REQUIRED, SBUF, Args, Compute, Tile, instruction
from nki_sim.machine import Machine
from nki_sim.program import tracer
from nki_sim.tensor import MemoryRegion, VirtualRegister

GPSIMD_DMA_BYTES = {4: 1024, 2: 512, 1: 256}  # per partition, by element size (NKI 0.6, sendrecv)


def register_alloc(x: int | None = None) -> VirtualRegister:
    """A register, optionally holding a constant."""
    register = tracer().register()
    if x is not None:
        register_move(register, x)
    return register


def _check(register: Any, view: Any = None) -> None:
    need(isinstance(register, VirtualRegister), "operand", "{!r} is no register (nisa.register_alloc)", register)
    need(view is None or view.size == 1, "shape", "a register holds one element; got {}", view)


def _move(a: Args) -> Compute:
    def execute(machine: Machine) -> None:
        machine.registers[machine.core][a.dst.number] = machine.value(a.src)

    return execute


@instruction("Y", special=True, dst=REQUIRED, src=REQUIRED)
def register_move(a: Args) -> Compute:
    """Put a constant or another register's value in a register."""
    _check(a.dst)
    tracer().assign(a.dst)
    need(isinstance(a.src, (int, VirtualRegister)), "operand", "src is an integer or a register; got {!r}", a.src)
    return _move(a)


@instruction("Y", special=True, dst=REQUIRED, src=Tile(HBM | SBUF, INTS))
def register_load(a: Args) -> Compute:
    """Put a tensor's single integer in a register."""
    _check(a.dst, a.src)
    tracer().assign(a.dst)
    return _move(a)


@instruction("Y", special=True, dst=Tile(HBM | SBUF, write=True), src=REQUIRED)
def register_store(a: Args) -> Compute:
    """Write a register's value to a tensor of one element."""
    _check(a.src, a.dst)
    return lambda machine: machine.write(a.dst, np.asarray(machine.value(a.src)))


@instruction("GVSTY", special=True, data=Tile(HBM | SBUF), cores=REQUIRED, engine=Engine.gpsimd)
def core_barrier(a: Args) -> Compute:
    """Both cores wait for each other; accesses to shared memory before it happen before those after it."""
    need(tracer().cores == 2, "cores", "needs two cores; launch with k[2](...)")
    need(tuple(a.cores) == (0, 1), "cores", "cores must be (0, 1); got {}", a.cores)
    need(a.data.buffer is MemoryRegion.shared_hbm or errors.compat, "buffer", "data {} must be in shared HBM", a.data)
    return None


@instruction("D", special=True, same="src dst", same_dtype="src dst", src=Tile(SBUF), dst=Tile(SBUF, write=True), send_to_rank=REQUIRED, recv_from_rank=REQUIRED, pipe_id=REQUIRED, dma_engine=dma_engine.dma)  # fmt: skip
def sendrecv(a: Args) -> Compute:
    """Send src to the other core's dst and receive its src into our dst."""
    need(tracer().cores == 2, "cores", "needs two cores; launch with k[2](...)")
    need({a.send_to_rank, a.recv_from_rank} <= {0, 1}, "cores", "ranks are 0 or 1")
    used, limit = a.src.free_size * a.src.dtype.itemsize, GPSIMD_DMA_BYTES[a.src.dtype.itemsize]
    fits = a.dma_engine is dma_engine.dma or used <= limit
    need(fits, "value", "gpsimd_dma moves at most {} bytes per partition of {}; got {}", limit, a.src.dtype, used)
    return None


@instruction("Y", special=True, prefix=REQUIRED, tensor=Tile(HBM | SBUF | PSUM))
def device_print(a: Args) -> Compute:
    """Print values as the program reaches this point (nl.device_print)."""
    return lambda machine: print(a.prefix, machine.read(a.tensor))
