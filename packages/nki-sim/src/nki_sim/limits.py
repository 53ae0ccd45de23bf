"""Facts of Trainium2 (NeuronCore-v3), each with its source, and the assumptions where no source exists.

[A] Trainium2 architecture guide and NKI 0.6 API pages (aws-neuron-sdk 81ce03a). [C] cost formulas of the October 2025 API pages
(aws-neuron-sdk 1db4d74, nki/api/nki/isa/__init__.py; later releases dropped them). [D] NKI DMA bandwidth guide (81ce03a).
"""

PARTITIONS = 128  # [A] of SBUF and PSUM
SBUF_BYTES = 224 * 1024  # [A] per partition: 28 MiB
SBUF_RESERVED = 16384 + 8 + 520  # per partition, kept by compiler and runtime: what nki-library d2ad3a5 plans with
PSUM_BANK_BYTES = 2048  # [A] per partition: 512 float32
PSUM_BANKS = 8  # [A]
STATIONARY_FREE = 128  # [A] nc_matmul
MOVING_FREE = 512  # [A] nc_matmul, on NeuronCore-v2 and v3
BN_STATS_FREE = 512  # [A]
FREE_DIMENSIONS = 4  # [A] an access pattern is the partition and at most four more
PATTERN_DIMENSIONS = 1 + FREE_DIMENSIONS  # of an .ap() pattern
REGISTERS = 64  # [A] of 32 bits, per engine
LOOP_TRIPS = 2048  # of a device loop: field notes, where 4,096 stalled and 2,048 ran; no page says a number
PSUM_ALIGN = (
    4  # bytes of a PSUM address: one float32, assumed (nl.tile_size.psum_min_align is named [A] without its value)
)
DMA_COMPUTE_SOURCES = 16  # [A]
GHZ = {"tensor": 2.4, "vector": 0.96, "scalar": 1.2, "gpsimd": 1.2, "sync": 1.2}  # [A]; sync: as Scalar, assumed
DMA_ENGINES = 16  # [D] per physical core
DMA_BYTES_PER_NS = 23.0  # [D] per engine


def start_partitions(partitions: int) -> tuple[int, ...]:
    """Where a tile of so many partitions may begin for a compute engine [A]."""
    return (0,) if partitions > 64 else (0, 64) if partitions > 32 else (0, 32, 64, 96)
