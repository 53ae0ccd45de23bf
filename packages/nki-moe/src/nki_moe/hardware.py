"""Sizes of Trainium2 that the kernels are planned and written by.

This is their one home: limits.py, tables.py and the kernels import them from here.
"""

__all__ = ["BANK", "BANK_BYTES", "BYTES", "CHUNK", "LOOP_PASSES", "SBUF_BYTES", "P"]

P = 128  # partitions of SBUF and PSUM
# Bytes of SBUF per partition, less what compiler and runtime keep (nki-library d2ad3a5 plans with as many).
SBUF_BYTES = 224 * 1024 - 16384 - 8 - 520
BANK_BYTES = 2048  # of one PSUM bank per partition
BANK = 512  # float32 of one PSUM bank per partition: the widest matmul
CHUNK = 1024  # columns of weights that are in SBUF at once, at most: rows of 2 KiB, from which on DMA is near its peak
# Passes of a device loop that field notes have seen to run; 4,096 stalled, and no page of AWS's says a number.
LOOP_PASSES = 2048
BYTES = {"bfloat16": 2, "float32": 4}  # the dtypes that the kernels take
