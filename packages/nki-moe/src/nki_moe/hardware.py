"""Sizes of Trainium2 that the kernels are planned and written by, and the pieces that work is cut into because of them.

This is their one home: limits.py, tiling.py and the kernels import them from here.
"""

__all__ = ["BANK", "BYTES", "D_SLICE", "F_SLICE", "SBUF_BYTES", "TILE", "P"]

P = 128  # partitions of SBUF and PSUM
# Bytes of SBUF per partition, less what compiler and runtime keep (nki-library d2ad3a5 plans with as many).
SBUF_BYTES = 224 * 1024 - 16384 - 8 - 520
BANK = 512  # float32 of one PSUM bank per partition: the widest matmul
TILE = BANK  # rows of a tile
# Columns of a slice of weights, of F and of D: MiBs, so that latencies do not count.
F_SLICE = 256
D_SLICE = 1024
BYTES = {"bfloat16": 2, "float32": 4}  # the dtypes that the kernels take
