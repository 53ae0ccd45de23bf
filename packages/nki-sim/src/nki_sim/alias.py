"""Letting kernels that `import nki` run here: the alias, made only when asked and only where AWS's package is missing."""

import importlib
import sys
from importlib.abc import MetaPathFinder
from types import ModuleType
from typing import Any

from nki_sim import errors, isa, kernel, language
from nki_sim.constants import dge_mode, dma_engine, engine, matmul_perf_mode, nc_version, oob_mode, reduce_cmd
from nki_sim.dtypes import NUMPY, UNSUPPORTED, DType
from nki_sim.errors import unsupported

_TYPING = {"mutable_tensor": Any, "tensor": list}  # annotations only; list can be subscripted
_replaced: dict[str, ModuleType | None] = {}
_attributes: list[tuple[ModuleType, str]] = []  # names given to modules that live on


def install(compat: str | None = None) -> None:
    """Alias this package as `nki`, `nki.language` and `nki.isa` for imports that follow.

    Refused when a real nki.isa can be imported (PyPI's placeholder answers `import nki` and has none). compat="0.3" adds
    what NKI 0.3 had and later releases dropped, for kernels of that time such as nki-library's of April 2026.
    """
    if compat not in (None, "0.3"):
        raise ValueError(f"compat={compat!r}: None or '0.3'")
    if sys.modules.get("nki.isa") is not isa and _real_nki():
        raise RuntimeError("a real nki.isa can be imported here, which an alias would hide; use nki_sim itself")
    uninstall()
    top = _module("nki", jit=kernel.jit, simulate=kernel.simulate, language=language, isa=isa, __path__=[])
    modules: dict[str, ModuleType] = {"nki": top, "nki.language": language, "nki.isa": isa}
    modules["nki.typing"] = _module("nki.typing", **_TYPING)
    if compat == "0.3":
        errors.compat = compat
        modules |= _of_03(top)
    sys.meta_path.append(_old_names)
    for name, module in modules.items():
        _replaced[name] = sys.modules.get(name)
        sys.modules[name] = module
        parent, _, child = name.rpartition(".")
        if parent and child not in vars(modules[parent]):
            setattr(modules[parent], child, module)
            _attributes.append((modules[parent], child))


def uninstall() -> None:
    """Undo install()."""
    errors.compat = None
    while _old_names in sys.meta_path:
        sys.meta_path.remove(_old_names)
    while _attributes:
        delattr(*_attributes.pop())
    for name, module in _replaced.items():
        sys.modules.pop(name, None)
        if module is not None:
            sys.modules[name] = module
    _replaced.clear()


class _OldNames(MetaPathFinder):
    """Says of the namespace of NKI 0.1 which one it is, where nothing else can import it."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> None:
        if name.split(".")[0] == "neuronxcc":
            found = f"{name} is the namespace of NKI 0.1 (Beta 1), whose kernels NKI 0.4 and later do not run"
            move = "write `import nki, nki.isa as nisa, nki.language as nl`; instructions take their result as `dst`, the first argument"
            raise ModuleNotFoundError(
                f"{found}. To move: {move} (AWS's NKI migration guide, 0.1.0 to 0.2.0)", name=name
            )


_old_names = _OldNames()


def _real_nki() -> bool:
    if "nki.isa" in _replaced:
        return False
    try:
        importlib.import_module("nki.isa")
    except Exception:  # a placeholder may refuse to be imported with any error
        return False
    return True


def _of_03(top: ModuleType) -> dict[str, ModuleType]:
    enums = (dge_mode, dma_engine, engine, matmul_perf_mode, nc_version, oob_mode, reduce_cmd)
    top.cpu_simulate = kernel.jit  # type: ignore[attr-defined]  # cpu_simulate(kernel)[cores](...)
    content: dict[str, dict[str, Any]] = {
        "nki.isa.constants": {e.__name__: e for e in enums},
        "nki.dtype": {n: DType(n) for n in (*NUMPY, *UNSUPPORTED)} | {"bool_": DType("bool")},
        "nki.collectives": {"__getattr__": _collective},
        "neuronxcc": {"__path__": []},
        "neuronxcc.nki": {"__path__": []},
        "neuronxcc.nki.typing": _TYPING,
    }
    return {name: _module(name, **names) for name, names in content.items()}


def _collective(name: str) -> Any:
    if name.startswith("__"):
        raise AttributeError(name)
    return lambda *_, **__: unsupported(f"nki.collectives.{name}", "collectives between devices are not modelled")


def _module(name: str, **content: Any) -> ModuleType:
    module = ModuleType(name, "Alias made by nki_sim.install().")
    module.__dict__.update(content)
    return module
