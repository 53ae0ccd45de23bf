"""Training `debug-moe` on CPU: the static dispatchers and nki-moe's experts against TorchTitan's own.

    python benchmarks/moe_train.py            # one rank, then expert parallelism over two; minutes

All sides start from the same weights, see the same random tokens and take turns in one process: ROUNDS rounds of STEPS
whole steps each (forward, loss, backward, clipping, AdamW) after one round that is not counted.
  stock       TorchTitan's dispatcher and experts, which compute in bfloat16
  float32     TorchTitan's dispatcher with the experts of our specs, in the parameters' dtype
  gather      the default dispatcher: T*K rows on one rank, the fullest routing's on two
  blocks      the same with each expert's rows in whole blocks of 128
  nki-moe     the default dispatcher with nki-moe's operator (its torch path) in the experts' place
Claims, by the median of the rounds' ratios: gather and blocks at no less than 0.9 of stock's tokens/s, nki-moe no less
than 1.0, on one rank; losses within LOSSES of float32's. Beside them the ratio to `float32`, the faster peer where a
CPU has no bfloat16 products. Two ranks are shown without a bound. Time is CPU time on one thread a rank, all ranks
together: it measures the work, also on a shared machine.
"""

import json
import multiprocessing
import os
import socket
import statistics
import sys
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
ROUNDS, STEPS, LOSSES = 5, 2, 1e-3
BATCH, LENGTH = 4, 128
PEERS = ("stock", "float32")
BOUNDS = {"gather": 0.9, "blocks": 0.9, "nki-moe": 1.0}


def build(side: str, ranks: int) -> Any:
    """A function that takes one training step of `side` on the tokens of a seed and returns this rank's part of the
    loss.
    """
    import torch
    import torch.distributed as dist
    from titan_recipes.models.spec import native
    from titan_recipes.moe.dispatchers import use_dispatcher
    from titan_recipes.moe.kernels import NkiExperts
    from titan_recipes.moe.layer import SameDtypeExperts
    from titan_recipes.train.trainer import Trainer
    from torch.distributed.tensor.debug import _clear_sharding_prop_cache
    from torchtitan.components.loss import cross_entropy_loss
    from torchtitan.config import CompileConfig, ParallelismConfig, TrainingConfig
    from torchtitan.distributed import ParallelDims
    from torchtitan.distributed import utils as distributed
    from torchtitan.models.common.moe import GroupedExperts, RoutedExperts

    _clear_sharding_prop_cache()  # it holds the meshes of the side before
    spec = native("debug-moe")
    use_dispatcher(spec, "all-to-all" if side in PEERS else "gather", **({"block": 128} if side == "blocks" else {}))
    for _, config, _, _ in spec.model.traverse(RoutedExperts.Config):
        old = config.inner_experts
        kind = {"stock": GroupedExperts, "nki-moe": NkiExperts}.get(side, SameDtypeExperts)
        config.inner_experts = kind.Config(
            dim=old.dim, hidden_dim=old.hidden_dim, num_experts=old.num_experts, param_init=old.param_init
        )
    parallelism = ParallelismConfig(data_parallel_shard_degree=ranks, expert_parallel_degree=ranks)
    training = TrainingConfig(
        seq_len=LENGTH, local_batch_size=BATCH // ranks, mixed_precision_param="float32", disable_cuda_graphs=True
    )
    dims = ParallelDims.from_config(parallelism, ranks)
    distributed.set_spmd_backend("spmd_types")
    dims.build_mesh()
    spec.model.update_from_config(config=Trainer.Config(model_spec=spec, parallelism=parallelism, training=training))
    with torch.device("meta"):
        model = spec.model.build()
    model = spec.parallelize_fn(
        model,
        parallel_dims=dims,
        training=training,
        parallelism=parallelism,
        compile_config=CompileConfig(),
        ac_config=None,
        dump_folder="",
    )
    model.to_empty(device="cpu")
    torch.manual_seed(0)
    with torch.no_grad():
        model.init_weights(buffer_device=None)
    parameters = list(model.parameters())
    optimizer = torch.optim.AdamW(parameters, lr=1e-3, foreach=True)
    first = dist.get_rank() * BATCH // ranks
    rows = slice(first, first + BATCH // ranks)
    positions_BL = torch.arange(LENGTH).expand(BATCH // ranks, -1)

    def step(seed: int) -> float:
        generator = torch.Generator().manual_seed(seed)
        # ids of a skewed distribution: there is something to learn, and experts are not used alike
        ids = (torch.rand(BATCH, LENGTH + 1, generator=generator) ** 3 * 2048).long()[rows]
        optimizer.zero_grad()
        with distributed.get_spmd_context(parallel_dims=dims, spmd_typechecking=False)():
            logits = model(ids[:, :-1], positions_BL)
            loss = cross_entropy_loss(logits, ids[:, 1:], global_vocab_size=2048) / (BATCH * LENGTH)
            loss.backward()
        distributed.clip_grad_norm_(parameters, 1.0, foreach=True, ep_enabled=ranks > 1)
        optimizer.step()
        return loss.item()

    return step


def rank_main(rank: int, ranks: int, port: int, pipe: Any) -> None:
    """Measure all sides on this rank: seconds of CPU and losses of every round and side."""
    os.environ.update(
        RANK=str(rank),
        LOCAL_RANK=str(rank),
        WORLD_SIZE=str(ranks),
        LOCAL_WORLD_SIZE=str(ranks),
        MASTER_ADDR="localhost",
        MASTER_PORT=str(port),
        TORCH_CPP_LOG_LEVEL="ERROR",
    )
    import logging
    import warnings

    import torch
    import torch.distributed as dist
    from titan_recipes.device.select import set_device

    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    set_device("cpu")
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    sides = [*PEERS, *BOUNDS]
    steps = {side: build(side, ranks) for side in sides}
    results = []
    for turn in range(ROUNDS + 1):
        shift = turn % len(sides)
        found = {}
        for side in sides[shift:] + sides[:shift]:
            dist.barrier()
            start = time.process_time()
            losses = [steps[side](turn * STEPS + n) for n in range(STEPS)]
            found[side] = (time.process_time() - start, losses)
        results.append(found)
    pipe.send(results[1:])
    pipe.close()
    dist.barrier()
    os._exit(0)


def measure(ranks: int) -> list[dict[str, Any]]:
    """A row for each side: tokens per second of CPU, ratios to the peer by round, largest difference of a loss."""
    context = multiprocessing.get_context("spawn")
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    pipes, processes = [], []
    for rank in range(ranks):
        ours, theirs = context.Pipe(duplex=False)
        processes.append(context.Process(target=rank_main, args=(rank, ranks, port, theirs)))
        processes[-1].start()
        theirs.close()
        pipes.append(ours)
    try:
        results = [pipe.recv() for pipe in pipes]
    except EOFError:
        raise SystemExit("a rank failed; its traceback is above") from None
    for process in processes:
        process.join()
    rounds = [{side: sum(r[n][side][0] for r in results) for side in results[0][n]} for n in range(ROUNDS)]
    losses = {
        side: [sum(parts) for n in range(ROUNDS) for parts in zip(*(r[n][side][1] for r in results), strict=True)]
        for side in results[0][0]
    }
    rows = []
    for side in losses:
        ratios, narrow = ([r[peer] / r[side] for r in rounds] for peer in PEERS)
        rows.append(
            {
                "ranks": ranks,
                "side": side,
                "tokens_per_cpu_second": statistics.median(BATCH * LENGTH * STEPS / r[side] for r in rounds),
                "ratio": statistics.median(ratios),
                "ratio_min": min(ratios),
                "ratio_max": max(ratios),
                "ratio_to_float32": statistics.median(narrow),
                "last_loss": losses[side][-1],
                "loss_difference": max(abs(a - b) for a, b in zip(losses[side], losses["float32"], strict=True)),
                "bound": BOUNDS.get(side) if ranks == 1 else None,
            }
        )
    return rows


def main() -> None:
    print(
        f"{'ranks':>5} {'side':10} {'tokens/s':>9} {'ratio to stock':>24} {'bound':>6} {'to float32':>10} "
        f"{'last loss':>10} {'largest loss difference':>24}"
    )
    rows, missed = [], []
    for ranks in (1, 2):
        for r in measure(ranks):
            ratio = f"{r['ratio']:.3f} ({r['ratio_min']:.3f}-{r['ratio_max']:.3f})"
            print(
                f"{ranks:>5} {r['side']:10} {r['tokens_per_cpu_second']:>9,.0f} {ratio:>24} {r['bound'] or '':>6} "
                f"{r['ratio_to_float32']:>10.3f} {r['last_loss']:>10.4f} "
                f"{r['loss_difference']:>24.1e}",
                flush=True,
            )
            rows.append(r)
            if r["side"] != "stock" and r["loss_difference"] > LOSSES:
                missed.append(f"{r['side']} on {ranks}: a loss differs by {r['loss_difference']:.1e}")
            if r["bound"] and r["ratio"] < r["bound"]:
                missed.append(f"{r['side']}: {r['ratio']:.3f} of stock's tokens/s, bound {r['bound']}")
    out = ROOT / "outputs" / "benchmarks" / "moe_train.json"
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(json.dumps(rows, indent=1) + "\n")
    for line in missed:
        print(f"MISSED: {line}")
    sys.exit(1 if missed else 0)


if __name__ == "__main__":
    main()
