"""Time per tensor: a model with the 18,000+ tensors of Qwen3-30B-A3B, each tiny, so that only overhead is
left.

    python benchmarks/adapter_overhead.py

Claim: under 1 ms a tensor in either direction, growing no faster than the number of tensors. The peer is
safetensors' own writer and reader moving the same tensors (`save_file`, `load_file`), in the same run.
"""

from __future__ import annotations

import json
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from adapter_models import moe, shapes, write_model
from hf_ckpt_adapter import convert_checkpoint
from safetensors.torch import load_file, save_file

PAIRS = 5


def timed(run: Callable[[], Any]) -> float:
    begun = time.perf_counter()
    run()
    return time.perf_counter() - begun


def measure(layers: int, work: Path) -> dict[str, Any]:
    """Both directions and the peer, interleaved; milliseconds a tensor."""
    cfg = moe(layers=layers, experts=128, hidden=16, width=8, vocab=64)
    count = len(list(shapes(cfg)))
    write_model(work / "hub", cfg, 16)

    def peer() -> None:
        for path in sorted((work / "hub").glob("*.safetensors")):
            save_file(load_file(path), work / "peer.safetensors")

    def to_dcp() -> None:
        convert_checkpoint(work / "hub", work / "dcp", "native", overwrite=True)

    def to_hub() -> None:
        convert_checkpoint(work / "dcp", work / "back", "per-expert", overwrite=True)

    times: dict[str, list[float]] = {"peer": [], "to-dcp": [], "to-hub": []}
    for _ in range(PAIRS + 1):
        for name, run in (("peer", peer), ("to-dcp", to_dcp), ("to-hub", to_hub)):
            times[name].append(timed(run))
    result: dict[str, Any] = {"tensors": count}
    for name, seconds in times.items():
        result[name] = 1000 * statistics.median(seconds[1:]) / count
    for name in ("to-dcp", "to-hub"):
        ratios = [a / b for a, b in zip(times[name][1:], times["peer"][1:], strict=True)]
        result[f"{name} ratio"] = [statistics.median(ratios), min(ratios), max(ratios)]
    return result


def main() -> None:
    torch.set_num_threads(1)
    results = []
    for layers in (12, 48):
        with tempfile.TemporaryDirectory() as folder:
            found = measure(layers, Path(folder))
        results.append(found)
        print(
            f"{found['tensors']} tensors: HF -> DCP {found['to-dcp']:.3f} ms, DCP -> HF "
            f"{found['to-hub']:.3f} ms, "
            f"safetensors alone {found['peer']:.3f} ms a tensor; ratios {found['to-dcp ratio'][0]:.1f} "
            f"({found['to-dcp ratio'][1]:.1f} to {found['to-dcp ratio'][2]:.1f}) and "
            f"{found['to-hub ratio'][0]:.1f} "
            f"({found['to-hub ratio'][1]:.1f} to {found['to-hub ratio'][2]:.1f})",
            flush=True,
        )
    out = Path("outputs/benchmarks")
    out.mkdir(parents=True, exist_ok=True)
    (out / "adapter_overhead.json").write_text(json.dumps(results, indent=2))


if __name__ == "__main__":
    main()
