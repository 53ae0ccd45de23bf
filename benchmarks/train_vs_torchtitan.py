"""Tokens/s of the `debug` recipe through apps/train's trainer against TorchTitan's own, same config, same machine, same
run.

    uv run python benchmarks/train_vs_torchtitan.py [PAIRS]

The peer is `torchtitan.train`'s own body (config.build(), trainer.train()) with TorchTitan's stock Trainer, metrics and
checkpoint manager, and the least that makes it start on a CPU: the device, our model spec (its attention has no CPU
backward) and our loader (the dataset). Both train STEPS steps in a process of their own; tokens/s is taken over the
steps after WARM, from inside the loop. Pairs are interleaved; the claim is on the median of the pairwise ratios.
"""

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
STEPS, WARM, BOUND = 40, 10, 0.98


def child(side: str, folder: str) -> None:
    """Train one side and print its tokens/s."""
    os.environ.update(RANK="0", LOCAL_RANK="0", WORLD_SIZE="1", LOCAL_WORLD_SIZE="1", MASTER_ADDR="localhost")
    from titan_recipes.device.select import set_device

    set_device("cpu")
    from titan_recipes.config.build import build_config
    from titan_recipes.config.options import Options
    from titan_recipes.logs import set_up_logging
    from titan_recipes.recipes import find_recipe

    set_up_logging(Path(folder) / "log.txt", console=False)
    options = Options(
        find_recipe("debug", ROOT / "recipes"), ("--training.steps", str(STEPS)), "cpu", folder, False, ""
    )
    config = build_config(options)
    config.validator.enable = False
    if side == "torchtitan":
        config = stock(config)
    trainer = config.build()
    times: list[float] = []
    step = trainer.train_step

    def timed(iterator: object) -> None:
        step(iterator)
        times.append(time.perf_counter())

    trainer.train_step = timed
    trainer.train()
    trainer.close()
    tokens = (STEPS - WARM) * config.training.local_batch_size * config.training.seq_len
    print(json.dumps(tokens / (times[-1] - times[WARM - 1])))


def stock(config: Any) -> Any:
    """The same run on TorchTitan's own classes."""
    from titan_recipes.config.adopt import recast
    from torchtitan.components.checkpointer import CheckpointManager
    from torchtitan.components.metrics import MetricsProcessor
    from torchtitan.trainer import Trainer

    config = recast(Trainer.Config, config)
    config.metrics = recast(MetricsProcessor.Config, config.metrics)
    config.checkpoint = recast(CheckpointManager.Config, config.checkpoint)
    return config


def measure(side: str) -> float:
    with tempfile.TemporaryDirectory() as folder:
        environment = {**os.environ, "MASTER_PORT": str(29500 + os.getpid() % 1000)}
        out = subprocess.run(
            [sys.executable, __file__, "--child", side, folder],
            env=environment,
            capture_output=True,
            text=True,
            check=False,
        )
        if out.returncode != 0:
            raise SystemExit(f"{side} failed:\n{out.stderr[-3000:]}")
        return float(json.loads(out.stdout.splitlines()[-1]))


def main() -> None:
    pairs = int(sys.argv[1]) if len(sys.argv) > 1 else 5
    rows = []
    print(f"{'pair':>4}  {'apps/train':>10}  {'torchtitan':>10}  ratio   (tokens/s)")
    for pair in range(pairs):
        order = ("ours", "torchtitan") if pair % 2 == 0 else ("torchtitan", "ours")
        speed = {side: measure(side) for side in order}
        rows.append(speed | {"ratio": speed["ours"] / speed["torchtitan"]})
        print(
            f"{pair + 1:>4}  {speed['ours']:>10,.0f}  {speed['torchtitan']:>10,.0f}  {rows[-1]['ratio']:.3f}",
            flush=True,
        )
    ratios = sorted(row["ratio"] for row in rows)
    median, spread = statistics.median(ratios), ratios[-1] - ratios[0]
    holds = median >= BOUND - spread / 2
    print(
        f"median ratio {median:.3f}, spread {spread:.3f} ({ratios[0]:.3f} to {ratios[-1]:.3f}); bound {BOUND}: "
        f"{'holds' if holds else 'MISSED'}"
    )
    out = ROOT / "outputs" / "benchmarks" / "train_vs_torchtitan.json"
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(json.dumps({"rows": rows, "median": median, "spread": spread, "bound": BOUND}, indent=1) + "\n")
    if not holds:
        raise SystemExit(1)


if __name__ == "__main__":
    child(*sys.argv[2:4]) if sys.argv[1:2] == ["--child"] else main()
