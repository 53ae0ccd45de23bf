"""Every rule that a kernel can break: what it refuses, and on whose word. Data alone; errors.py acts on it.

Sources: [A] NKI 0.6 API and architecture pages (aws-neuron-sdk 81ce03a); [7] NKI 0.7 pages (Neuron 2.33); [D] DGE deep dive and DMA
guide (81ce03a); [M] the migration guide (81ce03a); [L] what nki-library d2ad3a5 keeps to; [F] field notes of Trainium2 users, not
documented by AWS; [S] this simulator's own consistency. Where [F] is all there is, hardware may do better than the rule allows.
"""

from typing import NamedTuple


class Rule(NamedTuple):
    """`refuses`: what the rule does not let pass. `recorded`: noted instead of raised unless checks(refuse=) names it."""

    refuses: str
    source: str
    recorded: bool = False


RULES: dict[str, Rule] = {
    # -- tiles and access patterns
    "partitions": Rule("more than 128 partitions", "[A]"),
    "start-partition": Rule(
        "a compute tile that starts elsewhere than at partition 0 (> 64 partitions), 0 or 64 (> 32), else 0, 32, 64, 96; of run-time "
        "indices too",
        "[A] trainium_inferentia2_arch",
    ),
    "access-pattern": Rule(
        "over four free dimensions on chip, or over five dimensions in an .ap() pattern",
        "[A] nki-aps: up to four-dimensional arrays",
    ),
    "broadcast-write": Rule("a destination that repeats addresses", "[A]"),
    "alignment": Rule("a PSUM tensor whose address is no multiple of 4 bytes", "[A] nl.tile_size.psum_min_align"),
    "view": Rule("views that would need a copy or move the partition", "[A]"),
    "ap": Rule(".ap() arguments that exclude each other", "[A] nki-aps"),
    "ap-on-view": Rule(".ap() on a slice", "[A] two pages that disagree"),
    "ap-partition-stride": Rule("an .ap() of an on-chip tensor with another partition stride", "[A] nki-aps"),
    "out-of-bounds": Rule(
        "addresses outside a tensor, a partition, or the dimension that an index is for, unless DMA may skip them",
        "[A]",
    ),
    # -- operands
    "buffer": Rule("an operand in a memory that the instruction does not reach", "[A]"),
    "engine": Rule("an engine that the instruction does not run on", "[A]"),
    "engine-buffer": Rule("GpSimd on PSUM; two PSUM inputs where one is allowed", "[A]"),
    "dtype": Rule("dtypes that the instruction does not take", "[A]"),
    "op": Rule("an operator that the instruction does not take", "[A] nki.api.shared"),
    "alu-operator": Rule(
        "divide, mod and what else is no operator of the ALU table", "[A] nki.api.shared, Supported Math Operators"
    ),
    "target": Rule("what needs NeuronCore-v4 (Trn3)", "[A]"),
    "shape": Rule("operands that do not agree", "[A]"),
    "axis": Rule("reductions over other than the last free axes", "[A]"),
    "axes": Rule("transpositions that DMA does not do", "[A]"),
    "value": Rule("constants outside what the instruction takes", "[A]"),
    "memset-value": Rule("a constant of another kind than an integer tensor's", "[M] 0.3: strict type matching"),
    "bn-stats-free": Rule("more than 512 elements in bn_stats", "[A]"),
    "search-size": Rule("searches of fewer than 8 or more than 16,384 elements", "[A]"),
    "shuffle-mask": Rule("a mask of nc_stream_shuffle that leaves the quadrant", "[A]"),
    "reduce-cmd": Rule("an initial value without load_reduce, or the reverse", "[A]"),
    "activation-range": Rule(
        "arguments outside the range of sin, arctan, log, sqrt, rsqrt and reciprocal on the Scalar Engine",
        "[A] nki.api.shared, Valid Input Range",
    ),
    # -- the Tensor Engine
    "stationary-free": Rule("a stationary tile of more than 128 columns", "[A]"),
    "moving-free": Rule("a moving tile of more than 512 columns", "[A]"),
    "psum-bank": Rule("a matmul across a 2 KiB PSUM bank", "[A]"),
    "tile-position": Rule("tilings of the systolic array that do not exist", "[A]"),
    "transpose-size": Rule("transposes beyond 128 x 128 (Tensor) or 32 x 32 (Vector)", "[A]"),
    "accumulate": Rule("adding to what no matmul wrote, or not knowing at compile time whether to", "[A] nc_matmul"),
    # -- DMA
    "dma-mode": Rule("descriptor modes that the transfer cannot use", "[D]"),
    "dma-transpose": Rule("DMA transposes beyond their sizes", "[A] dma_transpose"),
    "dynamic-dma-transpose": Rule(
        "a direct DMA transpose at a run-time address beyond what hardware descriptors do: 1 to 16 rows of two bytes, 128 wide",
        "[A] dma_transpose, hwdge; [L] NKI-415: dynamic access not supported",
    ),
    "dma-sources": Rule("too many or unfit sources of dma_compute", "[A]"),
    "vector-offset": Rule("indices that are no SBUF column of integers", "[A]"),
    "unique-indices": Rule("an index twice in one read-modify-write", "[A] dma_compute"),
    "indirect": Rule("run-time addresses where dma_compute has none", "[A]"),
    # -- memory
    "capacity": Rule("more SBUF or PSUM than a partition has, of what is live at once", "[A]; [L] what is reserved"),
    "address": Rule("explicit addresses outside the memory", "[A]"),
    "overlap": Rule("reading a tensor after one at the same address was written", "[A]"),
    "uninitialized": Rule("reading what nothing wrote", "[A]"),
    "unwritten-output": Rule("returning what nothing wrote", "[A]"),
    "output": Rule("outputs outside shared HBM", "[A]"),
    "no-output": Rule(
        "a kernel that fills a shared HBM tensor of its own and returns nothing", "[A] nki.jit: outputs are returned"
    ),
    # -- two cores
    "race": Rule(
        "two cores touching the same elements of shared HBM between meetings, one of them writing", "[A] core_barrier"
    ),
    "deadlock": Rule("cores that do not meet", "[A] core_barrier"),
    "interleaving": Rule("results that depend on which core is faster", "[A]"),
    "cores": Rule("two-core instructions on one core, or other core numbers", "[A]"),
    "divergence": Rule("shared tensors that differ between the cores", "[A] lnc"),
    "lnc-trips": Rule(
        "a device loop that the two cores of a pair run a different number of times",
        "[A] lnc: control flow that differs on the cores is undefined; [F] unequal loops hung",
    ),
    # -- loops and registers
    "loop": Rule("loops whose bounds, step, body or end the language does not allow", "[A] nki-dynamic-loops"),
    "scope": Rule("a loop's tensor used outside of it", "[M] 0.6, rules for migrated loops"),
    "depends-on": Rule("an edge into or out of a device loop", "[A]"),
    "registers": Rule("more than 64 registers live at once", "[A] register_alloc: 64 per engine sequencer"),
    "endless-loop": Rule("a while loop whose condition stays nonzero", "[S]"),
    "zero-trip": Rule(
        "a device loop that runs no pass (a while loop on one core may)",
        "[F] such loops hung; [7] a while loop may skip its body",
    ),
    "trip-count": Rule("a device loop of more than 2,048 passes", "[F] 4,096 stalled where 2,048 ran"),
    "loop-bound-rewritten": Rule(
        "writing, in a loop's body, the register that bounds it",
        "[7] a compare-and-branch reads it; what a rewrite does is not said",
    ),
    "loop-counter": Rule(
        "writing a counted loop's own register", "[A] language guide: it is frozen; [M] 0.6: read-only"
    ),
    "nested-dynamic-loop": Rule(
        "a device loop in another one", "[F] unproven; failed with carried state in NKI 0.4", recorded=True
    ),
    "operand": Rule("something else than a register, a tensor or a number where one is asked for", "[A]"),
    "platform-target": Rule("jit(platform_target=)", "[M] 0.3: an error; NEURON_PLATFORM_TARGET_OVERRIDE says it"),
    "signature": Rule("keyword-only parameters and lists as arguments", "[A]"),
}
