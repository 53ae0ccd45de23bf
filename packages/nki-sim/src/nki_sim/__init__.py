"""NKI kernels on any CPU: strict where Trainium2 is strict, with a modelled cost for every engine.

`import nki_sim as nki, nki_sim.language as nl, nki_sim.isa as nisa` writes a kernel; nki_sim.install() lets kernels that
import `nki` run unchanged.
"""

from nki_sim import isa, language
from nki_sim.alias import install, uninstall
from nki_sim.cost import Model
from nki_sim.errors import NkiError, checks
from nki_sim.kernel import Kernel, Program, Run, Spec, jit, run, simulate, trace
from nki_sim.reporting import Report, report

__all__ = [
    "Kernel",
    "Model",
    "NkiError",
    "Program",
    "Report",
    "Run",
    "Spec",
    "__version__",
    "checks",
    "install",
    "isa",
    "jit",
    "language",
    "report",
    "run",
    "simulate",
    "trace",
    "uninstall",
]


def __getattr__(name: str) -> str:
    if name == "__version__":
        from importlib.metadata import version

        return version("nki-sim")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
