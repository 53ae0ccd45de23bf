"""qwen3-core against Transformers' Qwen3: time and peak memory of a training step on CPU, dense and MoE.

    python benchmarks/core_vs_transformers.py            # some minutes

Claim: at least as fast as the fastest of Transformers' implementations, with no more memory. All contenders
have the same weights and see the same batch (their losses are compared first), and run in turn in one
process. A ratio is peer / ours of one round, quoted as the median over the rounds with the smallest and
largest. Time is CPU time on one thread: on an idle machine that is the time that passes, and on a shared one
it still measures the work. Memory is the peak of what torch allocates in one step beside parameters and
optimizer state; it is exact.

Transformers' experts implementations "deepgemm" and "sonicmoe" need CUDA; "batched_mm" copies the weights of
an expert for every row (gigabytes a layer), so it takes part with 128 tokens only.
"""

import argparse
import json
import statistics
import time
import warnings
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
import transformers
from qwen3_core import MODELS, Qwen3Config, Qwen3ForCausalLM, target_loss, to_hub
from torch import Tensor, nn
from torch.profiler import profile

SIZES: dict[str, Any] = {
    "vocab_size": 8192,
    "hidden_size": 512,
    "num_hidden_layers": 3,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "intermediate_size": 1536,
    "dtype": "float32",
    "extra": {},
}
DENSE = replace(MODELS["8B"], **SIZES)
MOE = replace(MODELS["30B-A3B"], **SIZES, num_experts=32, num_experts_per_tok=4, moe_intermediate_size=256)


class Case(NamedTuple):
    name: str
    config: Qwen3Config
    batch: int
    length: int
    peers: tuple[dict[str, str], ...]


CASES = (
    Case("dense", DENSE, 2, 512, ({"attn": "sdpa"}, {"attn": "eager"})),
    Case("moe", MOE, 2, 512, ({"attn": "sdpa", "experts": "grouped_mm"}, {"attn": "sdpa", "experts": "eager"})),
    Case(
        "moe, 128 tokens",
        replace(MOE, num_hidden_layers=2),
        1,
        128,
        tuple({"attn": "sdpa", "experts": e} for e in ("grouped_mm", "eager", "batched_mm")),
    ),
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=9, help="measured rounds, at least 5 (default: 9)")
    parser.add_argument("--out", type=Path, default=Path("outputs/benchmarks/core_vs_transformers.json"))
    options = parser.parse_args()
    if options.rounds < 5:
        parser.error(f"--rounds {options.rounds}: a median of fewer than 5 rounds says little")
    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()

    print(f"{'case':16} {'peer':16} {'ms ours':>8} {'ms peer':>8} {'time peer/ours':>17} {'MB ours':>8} {'MB peer':>8}")
    rows: list[dict[str, Any]] = []
    for case in CASES:
        for r in measure(case, options.rounds):
            ratio = f"{r['ratio']:.2f} ({r['ratio_min']:.2f}-{r['ratio_max']:.2f})"
            print(
                f"{r['case']:16} {r['peer']:16} {r['ours_ms']:8.0f} {r['peer_ms']:8.0f} {ratio:>17} "
                f"{r['ours_peak'] / 1e6:8.1f} {r['peer_peak'] / 1e6:8.1f}",
                flush=True,
            )
            rows.append(r)
    result = {"threads": torch.get_num_threads(), "torch": torch.__version__, "rounds": options.rounds}
    options.out.parent.mkdir(parents=True, exist_ok=True)
    partial = options.out.with_suffix(".tmp")
    partial.write_text(json.dumps({**result, "transformers": transformers.__version__, "rows": rows}, indent=1))
    partial.replace(options.out)


def measure(case: Case, rounds: int) -> list[dict[str, Any]]:
    generator = torch.Generator().manual_seed(0)
    shape = (2, case.batch, case.length)
    tokens, targets = torch.randint(case.config.vocab_size, shape, generator=generator)
    ours = Qwen3ForCausalLM(case.config)
    ours.init_weights(generator)

    steps = {"ours": training_step(ours, ours, targets, tokens)}
    for peer in case.peers:
        model = transformers_model(ours, peer)
        steps[" ".join(peer.values())] = training_step(model, logits_of(model), targets, tokens)
    losses = {name: step() for name, step in steps.items()}
    for name, loss in losses.items():
        assert abs(loss - losses["ours"]) < 1e-4, f"{name} computes something else: {losses}"

    peaks = {name: peak_bytes(step) for name, step in steps.items()}
    seconds: dict[str, list[float]] = {name: [] for name in steps}
    for i in range(rounds):
        order = list(steps) if i % 2 == 0 else list(reversed(steps))  # none always follows the same one
        for name in order:
            start = time.process_time()
            steps[name]()
            seconds[name].append(time.process_time() - start)
    return [row(case.name, name, seconds, peaks) for name in steps if name != "ours"]


def row(case: str, peer: str, seconds: dict[str, list[float]], peaks: dict[str, int]) -> dict[str, Any]:
    ratios = [theirs / ours for theirs, ours in zip(seconds[peer], seconds["ours"], strict=True)]
    return {
        "case": case,
        "peer": peer,
        "ours_ms": 1e3 * statistics.median(seconds["ours"]),
        "peer_ms": 1e3 * statistics.median(seconds[peer]),
        "ratio": statistics.median(ratios),
        "ratio_min": min(ratios),
        "ratio_max": max(ratios),
        "ours_peak": peaks["ours"],
        "peer_peak": peaks[peer],
    }


def transformers_model(ours: Qwen3ForCausalLM, peer: dict[str, str]) -> nn.Module:
    config = ours.config
    cls: Any = transformers.Qwen3MoeForCausalLM if config.num_experts else transformers.Qwen3ForCausalLM
    options: dict[str, Any] = {"attn_implementation": peer["attn"], "dtype": torch.float32}
    if "experts" in peer:
        options["experts_implementation"] = peer["experts"]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        hf_config = cls.config_class(**config.to_hf("transformers-5"))
        hub = {name: t.detach().clone() for name, t in to_hub(ours.state_dict()).items()}
        return cls.from_pretrained(None, config=hf_config, state_dict=hub, **options).train()


def logits_of(model: nn.Module) -> Callable[[Tensor], Tensor]:
    return lambda tokens: model(input_ids=tokens, use_cache=False).logits


def training_step(
    model: nn.Module, logits: Callable[[Tensor], Tensor], targets: Tensor, tokens: Tensor
) -> Callable[[], float]:
    """Forward, loss, backward, AdamW; with a learning rate of 0, so that every step computes the same."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.0, weight_decay=0.0, fused=True)

    def step() -> float:
        loss = target_loss(logits(tokens), targets)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss.item()

    return step


def peak_bytes(step: Callable[[], float]) -> int:
    """The largest sum of bytes that are allocated and not yet freed within one step."""
    with profile(profile_memory=True) as run:
        step()
    now = peak = 0
    for event in run.profiler.kineto_results.events():
        if event.name() == "[memory]":
            now += event.nbytes()
            peak = max(peak, now)
    return peak


if __name__ == "__main__":
    main()
