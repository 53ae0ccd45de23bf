"""Enumerations of nki.isa, with the values of NKI 0.6."""

from enum import Enum, IntEnum

engine = Enum("engine", {"unknown": 0, "tensor": 1, "scalar": 2, "gpsimd": 3, "dma": 4, "vector": 5, "sync": 6})
reduce_cmd = Enum("reduce_cmd", {"idle": 0, "reset": 1, "reduce": 2, "reset_reduce": 3, "load_reduce": 4})
dge_mode = Enum("dge_mode", {"unknown": 0, "swdge": 1, "hwdge": 2, "none": 3})
oob_mode = Enum("oob_mode", {"error": 0, "skip": 1})
matmul_perf_mode = Enum("matmul_perf_mode", {"none": "none", "double_row": "double_row"})
dma_engine = Enum("dma_engine", {"dma": 1, "gpsimd_dma": 2})
nc_version = IntEnum("nc_version", {"gen2": 2, "gen3": 3, "gen4": 4})  # ordered: kernels ask for >= gen3
Engine = engine  # for functions that have an `engine` parameter
