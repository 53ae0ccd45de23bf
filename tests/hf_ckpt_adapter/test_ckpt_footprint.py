"""Contract: memory does not grow with the model, the package needs nothing but torch and safetensors, and it
can be vendored under another name. (Cases 068, 121, 127.)"""

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import hf_ckpt_adapter
import pytest
import torch
from hf_ckpt_adapter import stream
from hf_tiny import config, state, write_hub

PACKAGE = Path(hf_ckpt_adapter.__file__).parent
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


def test_numpy_is_not_needed(tmp_path: Path) -> None:
    cfg = config(moe=True)
    write_hub(tmp_path / "hub", cfg, state(cfg))
    code = (
        "import sys; sys.modules['numpy'] = None\n"
        "from hf_ckpt_adapter import convert_checkpoint, diff\n"
        f"base = {str(tmp_path)!r}\n"
        "convert_checkpoint(base + '/hub', base + '/dcp', 'native')\n"
        "convert_checkpoint(base + '/dcp', base + '/out', 'fused')\n"
        "assert diff(base + '/hub', base + '/out').equal\n"
    )
    result = subprocess.run([sys.executable, "-W", "ignore", "-c", code], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr[-2000:]


def test_the_first_example_of_the_readme_runs() -> None:
    readme = Path(__file__).parents[2] / "packages" / "hf-ckpt-adapter" / "README.md"
    match = re.search(r"```python\n(.*?)```", readme.read_text(), re.S)
    assert match
    result = subprocess.run([sys.executable, "-c", match[1]], capture_output=True, text=True)
    assert result.returncode == 0 and "w1_EFD" in result.stdout, result.stderr


def test_every_import_is_torch_safetensors_the_standard_library_or_relative() -> None:
    for path in sorted(PACKAGE.rglob("*.py")):
        for number, line in enumerate(path.read_text().splitlines(), 1):
            match = re.match(r"\s*(?:from|import)\s+([\w.]+)", line)
            if match and not match[1].startswith("."):
                root = match[1].split(".")[0]
                allowed = root in ("torch", "safetensors", "__future__") or root in sys.stdlib_module_names
                assert allowed, f"{path}:{number}: {line.strip()}: use a relative import or drop the dependency"


def test_the_folder_can_be_vendored_under_any_name_and_passes_its_tests_there(tmp_path: Path) -> None:
    """Copy the package as `our.weights`, rename it in copies of its tests, and run those with the original
    hidden."""
    shutil.copytree(PACKAGE, tmp_path / "our" / "weights", ignore=shutil.ignore_patterns("__pycache__"))
    (tmp_path / "our" / "__init__.py").write_text("")
    (tmp_path / "hf_ckpt_adapter.py").write_text("raise ImportError('the original must not be used')")
    (tmp_path / "tests").mkdir()
    for path in Path(__file__).parent.glob("*.py"):
        if path.name in (
            "hf_tiny.py",
            "test_ckpt_mapping.py",
            "test_ckpt_import.py",
            "test_ckpt_commands.py",
        ):
            text = path.read_text().replace("hf_ckpt_adapter", "our.weights")
            (tmp_path / "tests" / path.name).write_text(text)
    result = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", str(tmp_path / "tests")],
        cwd=tmp_path,
        env={"PYTHONPATH": str(tmp_path), "PATH": "/usr/bin:/bin", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
    )
    assert result.returncode == 0, result.stdout[-3000:] + result.stderr[-1000:]


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
