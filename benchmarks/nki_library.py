"""AWS's nki-library as the outside judge of nki-sim: its kernels and its own pytest cases, unmodified, on the
simulator.

    git clone https://github.com/aws-neuron/nki-library
    uv run --with allpairspy --with scipy python benchmarks/nki_library.py nki-library            # everything, hours
    uv run --with allpairspy --with scipy python benchmarks/nki_library.py nki-library -k router -k rope

Each test file runs in a process of its own under ``nki_sim.install(compat="0.3")``. One hook replaces
``Orchestrator.execute``, the single call through which every case reaches a device: it simulates the kernel and
compares with the case's golden, twice. *aws*: by AWS's own comparison at the case's own tolerances. *loose*: no NaN
where the golden has none, and not both relative L2 above 2e-2 and more than 1 % of the elements off; a golden that is
only a validator is then checked for output count and NaN. What a strict rule of the simulator refuses is a finding: the
case runs again with that rule recorded instead of raised, so that its numbers are still compared.
"""

from __future__ import annotations

import argparse
import collections
import importlib.abc
import importlib.machinery
import json
import math
import os
import random
import re
import resource
import signal
import subprocess
import sys
import time
import traceback
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

OUTPUT = Path(__file__).resolve().parent.parent / "outputs" / "benchmarks" / "nki_library.json"
FIRST = ("moe_cte/", "experimental/moe/", "router_topk", "embeddings/")  # what matters most runs first
ABSENT = (
    "boto3",
    "botocore",
    "fabric2",
    "paramiko",
    "aws_embedded_metrics",
    "plotext",
    "pytest_html",
    "debugpy",
    "nki.compiler",
    "neuronxcc.starfish",
    "test.utils.perf_analysis_private",
    "test.utils.scripts",
)
LOOSE_L2, LOOSE_SHARE = 2e-2, 1e-2
SMALL = "small MoE shapes"
LIMITS = ("seconds", "file_seconds", "memory_gb", "input_gb")


# ---------------------------------------------------------------- what the test suite imports and this machine need not
# have


class _Anything(type):
    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _Anything(name, (Exception,), {})


class _Absent(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Remote hosts, AWS services, reports and the compiler: importable, never called by a case that runs here."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        if any(name == a or name.startswith(a + ".") for a in ABSENT):
            return importlib.machinery.ModuleSpec(name, self, is_package=True)
        return None

    def exec_module(self, module: types.ModuleType) -> None:
        module.__getattr__ = lambda name: getattr(_Anything("absent", (Exception,), {}), name)  # type: ignore[method-assign]


def neuron_dtypes() -> types.ModuleType:
    """The few functions of AWS's ``neuron_dtypes`` the suite calls: casts between numpy and ml_dtypes."""
    import ml_dtypes

    module = types.ModuleType("neuron_dtypes")
    packed = {
        name: type(name, (), {"itemsize": size})
        for name, size in (("float8_e4m3fn_x4", 4), ("float8_e5m2_x4", 4), ("float4_e2m1fn_x4", 2))
    }

    def static_cast(x: Any, dtype: Any) -> Any:
        return np.asarray(x).astype(np.dtype(dtype))

    module.__dict__.update(
        packed,
        static_cast=static_cast,
        sizeinbytes=lambda d: getattr(packed.get(str(d)), "itemsize", None) or np.dtype(d).itemsize,
        finfo=lambda d: ml_dtypes.finfo(np.dtype(d)),
        is_float_type=lambda d: np.dtype(d).kind in "fV",
    )
    for name in ("bfloat16", "float8_e4m3", "float8_e5m2", "float8_e4m3fn"):
        setattr(module, name, np.dtype(getattr(ml_dtypes, name)))
    return module


# ---------------------------------------------------------------- one case


def compare(actual: np.ndarray, golden: np.ndarray, rtol: float, atol: float) -> tuple[bool, bool, str]:
    """(aws, loose, what is wrong) of one output against its golden array."""
    from test.integration.nkilib.utils.comparators import maxAllClose

    a, g = actual.astype(np.float32), np.asarray(golden).astype(np.float32)
    if a.shape != g.shape:
        return False, False, f"shape {a.shape} for {g.shape}"
    if not a.size:
        return True, True, ""
    aws = bool(maxAllClose(a, g, rtol, atol))
    bad = int((np.isnan(a) & ~np.isnan(g)).sum())
    if bad:
        return aws, False, "NaN in the output"
    with np.errstate(all="ignore"):
        finite = np.isfinite(g) & np.isfinite(a)
        scale = np.abs(g[finite]).max(initial=0.0)
        l2 = float(np.linalg.norm(a[finite] - g[finite]) / max(float(np.linalg.norm(g[finite])), 1e-30))
        share = float(((np.abs(a - g) > atol + rtol * scale) & (a != g)).mean())
    return aws, not (l2 > LOOSE_L2 and share > LOOSE_SHARE), f"values: l2 {l2:.1e}, {share:.1%} off at rtol {rtol:g}"


def judge(case: dict[str, Any], args: Any, limit_bytes: float) -> None:
    """Simulate one ``KernelArgs`` and record in `case` how its outputs compare; raise what the simulator raises."""
    import nki_sim
    from test.utils.common_dataclasses import (
        CustomValidatorWithOutputTensorData,
        LazyGoldenGenerator,
        normalize_golden_output,
    )
    from test.utils.ranged_test_harness import is_in_negative_test_context

    inputs = {k.removesuffix(".must_alias_input"): v for k, v in dict(args.kernel_input or {}).items()}
    size = sum(v.nbytes for v in inputs.values() if isinstance(v, np.ndarray))
    if (
        size > limit_bytes and not is_in_negative_test_context()
    ):  # a case that must be refused is refused before it runs
        raise MemoryError(f"inputs of {size / 1e9:.1f} GB")
    lnc, saved = (
        args.compiler_input.logical_nc_config,
        {k: v.copy() for k, v in inputs.items() if isinstance(v, np.ndarray)},
    )
    started = time.perf_counter()
    outputs, findings = run(nki_sim, args.kernel_func, lnc, inputs, saved)
    case["simulated_s"] = round(case.get("simulated_s", 0.0) + time.perf_counter() - started, 2)
    case["findings"] += findings
    outputs = (
        []
        if outputs is None
        else list(outputs.values())
        if isinstance(outputs, dict)
        else list(outputs)
        if isinstance(outputs, list | tuple)
        else [outputs]
    )
    if args.validation_args is None:
        return
    wanted = args.validation_args.golden_output
    golden = wanted.golden if isinstance(wanted, LazyGoldenGenerator) else normalize_golden_output(wanted)
    if golden is None:
        return
    shapes = normalize_golden_output(wanted)
    if len(outputs) != len(shapes):
        raise AssertionError(f"{len(outputs)} outputs for {len(shapes)} goldens")
    rtol, atol = args.validation_args.relative_accuracy, args.validation_args.absolute_accuracy
    for (name, want), out in zip(shapes.items(), outputs, strict=True):
        array = np.asarray(out)
        if isinstance(want, CustomValidatorWithOutputTensorData):
            nan = array.dtype.kind in "fV" and bool(np.isnan(array.astype(np.float32)).any())
            ok = want.validator(None).validate(
                np.ascontiguousarray(array.astype(want.dtype)).reshape(-1).view(np.uint8)
            )
            aws, loose, why = bool(ok), bool(ok) or not nan, "NaN in the output" if nan else "AWS's validator"
        else:
            aws, loose, why = compare(array.astype(want.dtype), golden[name], rtol, atol)
        case["aws"] &= aws
        case["loose"] &= loose
        if not (aws and loose):
            case["why"].append(f"{name}: {why}")


_broken: set[str] = set()  # rules that earlier cases of this file broke: recorded from the start, which saves a run


def run(
    nki_sim: Any, kernel: Any, lnc: int, inputs: dict[str, Any], saved: dict[str, np.ndarray]
) -> tuple[Any, list[str]]:
    """(outputs, findings): under every strict rule, and where one refuses, again with that rule recorded instead of
    raised. Cores that race run in lock-step then: any order is possible, and that one is likely.
    """
    rules: dict[str, Exception | None] = dict.fromkeys(_broken)
    while True:
        try:
            with nki_sim.checks(record=sorted(rules)) as found:
                launch = (kernel if hasattr(kernel, "__getitem__") else nki_sim.jit(kernel))[lnc]
                outputs = nki_sim.simulate(launch, order="alternate" if "race" in rules else "core0")(**inputs)
            return outputs, [f"{f.rule}: {f.message} [{f.where}]" for f in found[:8]]
        except nki_sim.NkiError as error:
            if error.rule in rules or len(rules) > 5:
                raise
            rules[error.rule] = error
            _broken.add(error.rule)
        except (TypeError, ValueError, IndexError) as error:
            mine = [e for e in rules.values() if e]
            if mine or not rules:
                raise (mine[-1] if mine else error) from error
            rules = {}
        for name, array in saved.items():
            inputs[name][...] = array


# ---------------------------------------------------------------- one file, in a process of its own


class TooLong(BaseException):
    """A case's time is over. Not an Exception: a case that expects one must not take it for that."""


class Recorder:
    """Writes a case as a line of JSON when it begins and when it ends, so that a killed process loses only the case it
    died in.
    """

    def __init__(self, options: argparse.Namespace) -> None:
        self.options, self.out, self.case = options, Path(options.worker_out), {}
        self.done = (
            {json.loads(line)["id"] for line in self.out.read_text().splitlines()} if self.out.exists() else set()
        )

    def write(self, record: dict[str, Any]) -> None:
        with self.out.open("a") as f:
            f.write(json.dumps(record) + "\n")

    def begin(self, name: str) -> None:
        import torch

        self.write({"id": name, "started": time.time()})
        self.case = {"id": name, "aws": True, "loose": True, "executed": 0, "findings": [], "why": []}
        random.seed(0)
        np.random.seed(0)
        torch.manual_seed(0)
        signal.setitimer(signal.ITIMER_PROF, self.options.seconds)

    def execute(self, args: Any) -> None:
        """The hook: what ``test_manager.execute`` does here."""
        self.case["executed"] += 1
        judge(self.case, args, self.options.input_gb * 1e9)

    def end(self, seconds: float, error: BaseException | None, negative: bool = False) -> None:
        signal.setitimer(signal.ITIMER_PROF, 0)
        case = self.case
        case["status"] = (
            "skipped" if type(error).__name__ == "Skipped" else "failed" if error or not case["loose"] else "passed"
        )
        case["seconds"], case["negative"] = round(seconds, 2), negative
        if error is not None:
            case["why"].append(f"{type(error).__name__}: {str(error)[:600]}")
            frames = traceback.extract_tb(error.__traceback__)
            case["trace"] = [
                f"{Path(f.filename).name}:{f.lineno}" for f in frames if "site-packages" not in f.filename
            ][-7:]
        self.write(case)


class Plugin:
    """pytest's side of the recorder."""

    def __init__(self, recorder: Recorder) -> None:
        self.recorder = recorder

    def pytest_addhooks(self, pluginmanager: Any) -> None:
        pluginmanager.add_hookspecs(
            types.SimpleNamespace(pytest_configure_node=lambda node: None)
        )  # of pytest-xdist, which isn't loaded

    def pytest_collection_modifyitems(self, items: list[Any]) -> None:
        todo = [i for i in items if i.nodeid not in self.recorder.done]
        items[:] = sorted(
            todo, key=lambda i: math.prod(int(n) or 1 for n in re.findall(r"\d+", i.name))
        )  # small shapes first

    def pytest_collection_finish(self, session: Any) -> None:
        self.session = session
        from test.utils.test_orchestrator import Orchestrator

        Orchestrator.execute = lambda _, args: self.recorder.execute(args)

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        if time.process_time() > self.recorder.options.file_seconds:
            self.session.shouldstop = "this file's time is over"
        self.recorder.begin(nodeid)

    def pytest_runtest_makereport(self, item: Any, call: Any) -> None:
        if call.when == "call" or (call.when == "setup" and call.excinfo):
            negative = getattr(getattr(item, "callspec", None), "params", {}).get("is_negative_test_case", False)
            self.recorder.end(call.duration, call.excinfo.value if call.excinfo else None, bool(negative))


def worker(options: argparse.Namespace) -> int:
    """Run one test file's cases with the hook in place; what is recorded already is not run again."""
    import pytest

    root = Path(options.checkout).resolve()
    resource.setrlimit(resource.RLIMIT_DATA, (int(options.memory_gb * 1e9),) * 2)
    sys.meta_path.append(_Absent())
    sys.path[:0] = [str(root), str(root / "src")]
    os.chdir(root)
    sys.modules["neuron_dtypes"] = neuron_dtypes()
    import nki_sim

    nki_sim.install(compat="0.3")

    def expire(*_: Any) -> None:
        raise TooLong(f"no result in {options.seconds} s of processor time")

    signal.signal(signal.SIGPROF, expire)
    recorder = Recorder(options)
    if options.worker == SMALL:
        manager = types.SimpleNamespace(execute=recorder.execute)
        for name, case in small():
            if name not in recorder.done:
                recorder.begin(name)
                started, error = time.perf_counter(), None
                try:
                    case(manager)
                except (Exception, TooLong) as e:
                    error = e
                recorder.end(time.perf_counter() - started, error)
        return 0
    flags = [
        "-q",
        "-p",
        "no:cacheprovider",
        "-p",
        "no:xdist",
        "--tb=short",
        "--platform-target",
        "trn2",
        "--output-directory",
        options.scratch,
        "-o",
        f"artifacts_dir={options.scratch}",
    ]
    return int(pytest.main([options.worker, *flags], plugins=[Plugin(recorder)]))


def small() -> Iterator[tuple[str, Callable[[Any], Any]]]:
    """MoE at shapes a laptop takes: AWS's own test bodies, inputs, goldens and tolerances, with smaller numbers."""
    from test.integration.nkilib.core.moe.moe_cte import test_moe_cte as forward
    from test.integration.nkilib.experimental.moe import test_bwmm_bwd as backward
    from test.utils.common_dataclasses import Platforms

    request = types.SimpleNamespace(node=types.SimpleNamespace(callspec=types.SimpleNamespace(id="")))
    kinds, act, scale = forward.BWMMFunc, forward.ActFnType, forward.ExpertAffinityScaleMode
    names = [n.strip() for n in forward.BWMM_LNC2_PARAM_NAMES.split(",")]

    def fwd(
        kind: Any,
        H: int = 512,
        T: int = 512,
        E: int = 4,
        B: int = 256,
        k: int = 2,
        F: int = 256,
        skip: int = 0,
        bias: bool = False,
        training: bool = False,
        activation: Any = act.SiLU,
        scaling: Any = scale.POST_SCALE,
        clamps: tuple[Any, ...] = (None,) * 4,
        on_f: bool = False,
    ) -> Callable[[Any], Any]:
        values = (
            kind,
            H,
            T,
            E,
            B,
            k,
            F,
            forward.nl.bfloat16,
            skip,
            bias,
            training,
            None,
            activation,
            scaling,
            *clamps,
            on_f,
        )
        return lambda manager: forward.TestMoeBlockwiseMatMulLnc2().test_moe_blockwise_mm_kernel_lnc2(
            manager, None, **dict(zip(names, values, strict=True)), platform_target=Platforms.TRN2, request=request
        )

    def bwd(
        H: int = 512,
        T: int = 512,
        E: int = 4,
        B: int = 256,
        k: int = 1,
        F: int = 256,
        skip: int = 0,
        clamp: Any = None,
        bias: bool = False,
        activation: Any = backward.ActFnType.SiLU,
    ) -> Callable[[Any], Any]:
        cases = backward.TestMoeBlockwiseMatMulBwdShardHAffinityHDroplessLnc2()
        test = cases.test_moe_blockwise_mm_bwd_shardH_affinityH_dropless_lnc2
        return lambda manager: test(
            manager,
            hidden=H,
            tokens=T,
            expert=E,
            block_size=B,
            top_k=k,
            intermediate=F,
            dtype=backward.bfloat16,
            skip=skip,
            clamp_limits=clamp or backward.ClampLimits(None, None, None, None),
            bias_flag=bias,
            activation_type=activation,
        )

    for kind in (kinds.SHARD_ON_INTERMEDIATE, kinds.SHARD_ON_INTERMEDIATE_HW, kinds.SHARD_ON_BLOCK):
        for skip in (0, 1):
            yield f"forward[{kind.name}-skip{skip}]", fwd(kind, skip=skip)
        yield (
            f"forward[{kind.name}-bias-clamp-swish]",
            fwd(kind, skip=1, bias=True, activation=act.Swish, clamps=(7, None, 8, -9)),
        )
        yield f"forward[{kind.name}-E8-B512-H1024-F512]", fwd(kind, E=8, B=512, H=1024, F=512, T=1024, skip=1)
        yield f"forward[{kind.name}-top1]", fwd(kind, k=1, skip=1)
    for scaling in (scale.PRE_SCALE, scale.NO_SCALE):
        yield f"forward[SHARD_ON_INTERMEDIATE-{scaling.name}]", fwd(kinds.SHARD_ON_INTERMEDIATE, scaling=scaling)
    yield "forward[SHARD_ON_INTERMEDIATE-checkpoint]", fwd(kinds.SHARD_ON_INTERMEDIATE, training=True)
    yield (
        "forward[SHARD_ON_INTERMEDIATE-checkpoint-affinity-on-F]",
        fwd(kinds.SHARD_ON_INTERMEDIATE, training=True, on_f=True),
    )
    yield "forward[SHARD_ON_INTERMEDIATE-F384]", fwd(kinds.SHARD_ON_INTERMEDIATE, F=384)  # 192 a core: a tail of 64
    for on_f in (False, True):
        yield (
            f"forward[DROPPING-checkpoint-affinity-on-F-{on_f}]",
            fwd(kinds.SHARD_ON_INTERMEDIATE_DROPPING, T=2048, E=2, B=1024, training=True, on_f=on_f),
        )
    for case in (
        {},
        {"k": 2},
        {"skip": 1},
        {"k": 2, "skip": 1, "B": 512},
        {"bias": True, "clamp": backward.ClampLimits(7, -7, 7, -7), "activation": backward.ActFnType.Swish},
        {"H": 1024, "F": 128, "E": 8},
        {"B": 128},
    ):
        label = "-".join(f"{k}{v}" if isinstance(v, int) else k for k, v in case.items()) or "plain"
        yield f"backward[{label}]", bwd(**case)


# ---------------------------------------------------------------- all files


def files(root: Path, only: list[str]) -> list[Path]:
    found = sorted(p for p in (root / "test" / "integration").rglob("test_*.py") if "def test_" in p.read_text())
    chosen = [p for p in found if not only or any(k in str(p) for k in only)]
    return sorted(chosen, key=lambda p: (not any(k in str(p) for k in FIRST), str(p)))


def missing(name: str, status: str, why: str) -> dict[str, Any]:
    return {"id": name, "status": status, "why": [why], "findings": [], "executed": 0, "aws": False, "loose": False}


def run_file(path: Path | str, options: argparse.Namespace) -> list[dict[str, Any]]:
    """Every case's record; a process that hangs or dies in a case is started again without that case."""
    scratch = Path(options.scratch) / Path(path).stem
    scratch.mkdir(parents=True, exist_ok=True)
    out = scratch / "cases.jsonl"
    if options.fresh:
        out.unlink(missing_ok=True)
    log = (scratch / "log.txt").open("w")
    env = dict(os.environ, NEURON_PYTHONHASHSEED="0", PYTHONHASHSEED="0", NEURON_PLATFORM_TARGET_OVERRIDE="trn2")
    while not options.recorded:
        argv = [sys.executable, __file__, options.checkout, "--worker", str(path)]
        argv += ["--worker-out", str(out), "--scratch", str(scratch)]
        argv += [f"--{name.replace('_', '-')}={getattr(options, name)}" for name in LIMITS]
        process = subprocess.Popen(argv, env=env, stdout=log, stderr=log)
        while process.poll() is None:
            time.sleep(1)
            last = out.read_text().splitlines()[-1:] if out.exists() else []
            record = json.loads(last[0]) if last and last[0].endswith("}") else {}
            if "status" not in record and time.time() - record.get("started", time.time()) > 10 * options.seconds + 30:
                process.kill()
        records = [json.loads(line) for line in out.read_text().splitlines()] if out.exists() else []
        ended = {r["id"] for r in records if "status" in r}
        lost = [r for r in records if "status" not in r and r["id"] not in ended]
        if not lost:
            break
        with out.open("a") as f:
            for r in lost:
                how = "killed: no result in time" if process.returncode == -9 else f"died ({process.returncode})"
                f.write(json.dumps(missing(r["id"], "failed", how)) + "\n")
    cases = [r for r in map(json.loads, out.read_text().splitlines()) if "status" in r] if out.exists() else []
    if not cases:
        tail = (scratch / "log.txt").read_text().splitlines()
        why = next(
            (line for line in reversed(tail) if re.match(r"E   |\w*Error", line)), (tail or ["nothing collected"])[-1]
        )
        cases = [missing(str(path), "uncollected", why.removeprefix("E").strip())]
    return cases


def reason(text: str) -> str:
    """A failure with its numbers and names taken out, so that equal causes group."""
    text = re.sub(r"^\w+: values: .*", "values beyond the looser rule", text.splitlines()[0])
    return re.sub(r"0x[0-9a-f]+|\d[\d.,e+-]*", "#", text)[:160]


def summarise(results: dict[str, list[dict[str, Any]]]) -> dict[str, Any]:
    table, groups = {}, collections.defaultdict(list)
    for name, cases in results.items():
        ran = [c for c in cases if c["status"] in ("passed", "failed")]
        passed = [c for c in ran if c["status"] == "passed"]
        table[name] = {
            "cases": len(ran),
            "aws": sum(c["aws"] for c in passed),
            "loose": len(passed),
            "refusals_wanted": sum(bool(c.get("negative")) for c in passed),
            "skipped": sum(c["status"] == "skipped" for c in cases),
            "findings": sum(bool(c["findings"]) for c in cases),
            "seconds": round(sum(c.get("seconds", 0) for c in cases), 1),
        }
        for c in cases:
            if c["status"] in ("failed", "uncollected"):
                groups[reason(c["why"][-1] if c["why"] else "?")].append(f"{name}::{c['id'].split('::', 1)[-1]}")
            elif c["status"] == "passed" and not c["aws"]:
                groups["loose only: " + reason(c["why"][-1])].append(f"{name}::{c['id'].split('::', 1)[-1]}")
            for f in c["findings"]:
                groups["finding: " + reason(f)].append(f"{name}::{c['id'].split('::', 1)[-1]}")
    return {
        "files": table,
        "groups": {k: {"count": len(v), "first": v[:3]} for k, v in sorted(groups.items(), key=lambda kv: -len(kv[1]))},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkout", help="a checkout of github.com/aws-neuron/nki-library")
    parser.add_argument(
        "-k", dest="only", action="append", default=[], help="only files whose path contains this; repeatable"
    )
    parser.add_argument("--seconds", type=float, default=120.0, help="processor time a case may take")
    parser.add_argument(
        "--file-seconds",
        type=float,
        default=3600.0,
        help="processor time a file may take; the cases left over are not run",
    )
    parser.add_argument("--memory-gb", type=float, default=12.0, help="memory limit of a file's process")
    parser.add_argument("--input-gb", type=float, default=0.5, help="cases with larger inputs are not run")
    parser.add_argument("--recorded", action="store_true", help="run nothing: the table of what --scratch has")
    parser.add_argument("--fresh", action="store_true", help="forget the cases recorded in --scratch")
    parser.add_argument(
        "--scratch",
        default="/tmp/nki_library_judge",
        help="logs and the cases recorded so far: a run that stopped goes on",
    )
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    parser.add_argument("--worker-out", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        sys.exit(worker(options))
    root = Path(options.checkout).resolve()
    results: dict[str, list[dict[str, Any]]] = {}
    chosen: list[Path | str] = [
        *([SMALL] if not options.only or any(k in SMALL for k in options.only) else []),
        *files(root, options.only),
    ]
    for path in chosen:
        name = path.relative_to(root / "test" / "integration" / "nkilib").as_posix() if isinstance(path, Path) else path
        results[name] = run_file(path, options)
        row = summarise({name: results[name]})["files"][name]
        print(
            f"{name:70} {row['cases']:5} cases  aws {row['aws']:5}  loose {row['loose']:5}  skipped {row['skipped']:4} "
            f" findings {row['findings']:4}  {row['seconds']:7.0f} s",
            flush=True,
        )
    summary = summarise(results)
    total = {
        k: sum(row[k] for row in summary["files"].values())
        for k in ("cases", "aws", "loose", "skipped", "findings", "refusals_wanted")
    }
    print(f"total over {len(results)} files: {total}")
    for name, group in summary["groups"].items():
        print(f"{group['count']:5}  {name}   e.g. {group['first'][0]}")
    OUTPUT.parent.mkdir(parents=True, exist_ok=True)
    OUTPUT.write_text(json.dumps({"total": total, **summary, "cases": results}, indent=1))


if __name__ == "__main__":
    main()
