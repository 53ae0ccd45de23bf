"""Contract of stream.py: memory does not grow with the model, and a number that the dtype cannot hold is an error.
(Case 127.)"""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from hf_ckpt_adapter import Options, convert_checkpoint, export_step, stream
from hf_tiny import config, native, save_step, state, write_hub

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


def test_a_number_that_the_dtype_cannot_hold_is_an_error(tmp_path: Path) -> None:
    cfg = config()
    step = save_step(tmp_path / "step-3", cfg, native(cfg))
    with pytest.raises(ValueError, match=r"torch.float16 cannot hold that"):
        export_step(step, tmp_path / "hf", dtype="float16")
    assert not (tmp_path / "hf").exists()


LIMITED = """
import resource, sys
import torch
from hf_ckpt_adapter import Options, convert_checkpoint, diff
base, limit = sys.argv[1], int(sys.argv[2])
# A first conversion starts threads and loads what is loaded late.
convert_checkpoint(base + "/warm-up", base + "/warm", "native")
diff(base + "/warm-up", base + "/warm")
limit += int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
convert_checkpoint(base + "/hub", base + "/native", "native", options=Options(max_shard_bytes=8 << 20))
convert_checkpoint(base + "/native", base + "/back", "fused")
convert_checkpoint(base + "/native", base + "/wide", "per-expert", options=Options(dtype=torch.float32))
assert diff(base + "/hub", base + "/back").equal
"""


def formula() -> int:
    """The stated bound on top of the interpreter and torch: blocks, and 3 kB for each of at most 1,000
    names."""
    return (stream.POOL + 2) * stream.BLOCK + 3_000 * 1_000


def test_a_40_shard_model_converts_within_the_formula(tmp_path: Path) -> None:
    cfg = config(
        moe=True, num_hidden_layers=4, num_experts=16, hidden_size=512, moe_intermediate_size=384,
        vocab_size=20_000, head_dim=64, num_attention_heads=8, dtype="bfloat16",
    )  # fmt: skip
    write_hub(tmp_path / "warm-up", config(), state(config()))
    tensors = state(cfg, dtype=torch.bfloat16)
    names = list(tensors)
    size = -(-len(names) // 40)
    write_hub(tmp_path / "hub", cfg, tensors, [names[i : i + size] for i in range(0, len(names), size)])
    total = sum(t.nbytes for t in tensors.values())
    largest = 20_000 * 512 * 2
    allowed = formula() + (16 << 20)  # what the allocator rounds up, and Python's own growth
    assert allowed < total / 3 and allowed < 2 * largest
    result = subprocess.run(
        [sys.executable, "-c", LIMITED, str(tmp_path), str(allowed)], capture_output=True, text=True
    )
    assert result.returncode == 0, result.stderr[-2000:]


@pytest.mark.soak
def test_a_64_shard_moe_of_a_gigabyte_grows_by_less_than_two_layers(tmp_path: Path) -> None:
    cfg = config(
        moe=True, num_hidden_layers=16, num_experts=32, hidden_size=1024, moe_intermediate_size=256,
        vocab_size=20_000, head_dim=64, num_attention_heads=16, dtype="bfloat16",
    )  # fmt: skip
    tensors = state(cfg, dtype=torch.bfloat16)
    names = list(tensors)
    size = -(-len(names) // 64)
    write_hub(tmp_path / "hub", cfg, tensors, [names[i : i + size] for i in range(0, len(names), size)])
    layer = sum(t.nbytes for n, t in tensors.items() if n.startswith("model.layers.0."))
    code = f"""
import json, re
import hf_ckpt_adapter.convert

def peak():  # of this program alone; ru_maxrss would count the process that started it
    return 1024 * int(re.search(r"VmHWM:\\s+(\\d+)", open("/proc/self/status").read())[1])

before = peak()
hf_ckpt_adapter.convert_checkpoint({str(tmp_path / "hub")!r}, {str(tmp_path / "out")!r}, "native")
print(json.dumps(peak() - before))
"""
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr[-2000:]
    assert 0 < json.loads(result.stdout) < 2 * layer


def test_nan_and_numbers_that_a_cast_makes_zero_are_reported(tmp_path: Path) -> None:
    """Case 214: both were exported without a word."""
    cfg = config()
    tensors = state(cfg)
    scale = {name: t / t.max() for name, t in tensors.items()}
    scale["model.norm.weight"][3], scale["model.norm.weight"][5] = float("nan"), float("inf")
    scale["model.layers.0.self_attn.q_norm.weight"][:4] = 1e-9
    hub = write_hub(tmp_path / "hub", cfg, scale)
    report = convert_checkpoint(hub, tmp_path / "half", "per-expert", options=Options(dtype=torch.float16))
    assert report.not_finite == {"model.norm.weight": 2}
    assert report.vanished["model.layers.0.self_attn.q_norm.weight"] == 4
    assert "warning: 2 numbers in 1 tensors, such as model.norm.weight, are NaN or infinite" in report.summary()
    report = convert_checkpoint(hub, tmp_path / "same", "native")
    assert report.not_finite == {"norm.weight": 2} and not report.vanished
