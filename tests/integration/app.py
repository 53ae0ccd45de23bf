"""Run apps/train in tests: as a user does (a process of its own), or forked from this one, which has TorchTitan loaded.

The fork runs the same `main` with the same arguments and saves the 10-20 s that importing TorchTitan costs.
"""

import json
import multiprocessing
import os
import re
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
APP = ROOT / "apps" / "train"


@dataclass
class Ended:
    code: int
    out: str

    @property
    def losses(self) -> dict[int, float]:
        """Loss by step, from the printed lines."""
        return {int(s): float(x) for s, x in re.findall(r"step +(\d+)/\d+  loss +([\d.]+)", self.out)}


def run_app(*arguments: str, cwd: Path, launcher: tuple[str, ...] = (), timeout: float = 600) -> Ended:
    """apps/train in a fresh interpreter."""
    command = [*launcher, str(APP), *arguments] if launcher else [sys.executable, str(APP), *arguments]
    environment = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE", "LOCAL_RANK")}
    child = subprocess.run(
        command,
        cwd=cwd,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=timeout,
        check=False,
    )
    return Ended(child.returncode, child.stdout)


class ForkedApp:
    """apps/train forked into a process group of its own, its output in a file."""

    def __init__(self, *arguments: str, cwd: Path) -> None:
        import titan_recipes.cli  # loaded here, inherited by the fork
        from titan_recipes.device.select import set_device

        set_device("cpu")
        import titan_recipes.publish.publish
        import titan_recipes.train.trainer  # noqa: F401

        cwd.mkdir(parents=True, exist_ok=True)
        self.file = cwd / f"output-{time.monotonic_ns()}.txt"
        self.process = multiprocessing.get_context("fork").Process(target=self._run, args=(arguments, cwd))
        self.process.start()

    def _run(self, arguments: tuple[str, ...], cwd: Path) -> None:
        import titan_recipes.cli

        os.setsid()
        os.chdir(cwd)
        with open(self.file, "wb", buffering=0) as file:
            os.dup2(file.fileno(), 1)
            os.dup2(file.fileno(), 2)
        # pytest's capture replaced these; give the app plain ones.
        sys.stdout, sys.stderr = os.fdopen(1, "w", buffering=1), os.fdopen(2, "w", buffering=1)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        multiprocessing.current_process()._config["daemon"] = False  # type: ignore[attr-defined]
        code = titan_recipes.cli.main(list(arguments), recipes=ROOT / "recipes")
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)

    @property
    def out(self) -> str:
        return self.file.read_text() if self.file.exists() else ""

    def wait_for(self, pattern: str, timeout: float = 120) -> None:
        """Wait until the output has `pattern`."""
        end = time.monotonic() + timeout
        while not re.search(pattern, self.out):
            assert time.monotonic() < end and self.process.is_alive(), f"no {pattern!r} in:\n{self.out}"
            time.sleep(0.02)

    def signal_launcher(self, number: int) -> None:
        assert self.process.pid is not None
        os.kill(self.process.pid, number)

    def signal_group(self, number: int) -> None:
        """What a terminal's Ctrl-C does: every process of the group gets it."""
        assert self.process.pid is not None
        os.killpg(self.process.pid, number)

    def end(self, timeout: float = 300) -> Ended:
        self.process.join(timeout)
        if self.process.is_alive():
            self.signal_group(signal.SIGKILL)
            raise AssertionError(f"still running after {timeout} s:\n{self.out}")
        assert self.process.exitcode is not None
        return Ended(self.process.exitcode, self.out)


def fork_app(*arguments: str, cwd: Path, timeout: float = 300) -> Ended:
    """Run the forked app to its end."""
    return ForkedApp(*arguments, cwd=cwd).end(timeout)


def metrics(run: Path) -> list[dict]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
