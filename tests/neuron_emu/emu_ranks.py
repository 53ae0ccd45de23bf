"""Programs on emulated ranks: a process each, as a launcher would start them."""

import os
import socket
import subprocess
import sys
import textwrap

# Quick builds of this repository's tests all share one build of the C++ half.
PREAMBLE = "import neuron_emu, torch\nneuron_emu.enable(cores=4)\n"


def run(code: str, ranks: int = 1, environment: dict[str, str] | None = None, timeout: float = 240) -> list[str]:
    """Run `code` after PREAMBLE on each rank; what each printed to stdout, by rank. AssertionError when one fails."""
    done = start(code, ranks, environment, timeout)
    failures = [f"rank {rank} ended with {code}:\n{error}" for rank, (code, _, error) in enumerate(done) if code]
    assert not failures, "\n".join(failures)
    return [out for _, out, _ in done]


def start(
    code: str, ranks: int = 1, environment: dict[str, str] | None = None, timeout: float = 240, preamble: str = PREAMBLE
) -> list[tuple[int, str, str]]:
    """(exit code, stdout, stderr) by rank."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    processes = []
    for rank in range(ranks):
        env = {**os.environ, "OMP_NUM_THREADS": "1", **(environment or {})}
        if ranks > 1:
            env |= {
                "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(ranks), "LOCAL_WORLD_SIZE": str(ranks),
                "MASTER_ADDR": "localhost", "MASTER_PORT": str(port),
            }  # fmt: skip
        command = [sys.executable, "-c", preamble + textwrap.dedent(code)]
        pipe = subprocess.PIPE
        processes.append(subprocess.Popen(command, env=env, stdout=pipe, stderr=pipe, text=True))
    results = []
    for process in processes:
        try:
            out, error = process.communicate(timeout=timeout)
        except subprocess.TimeoutExpired:
            process.kill()
            out, error = process.communicate()
            error += f"\nno end within {timeout} s"
        results.append((process.returncode, out, error))
    return results
