"""Where a run's words go: the console gets what a person reads, a file per rank gets everything.

TorchTitan logs to the root logger, hundreds of lines a run. One rank, the one that has the loss, prints our lines
(`say`) and others' warnings; each rank writes all of it to <run>/logs/rank-N.log.
"""

import logging
import sys
import warnings
from pathlib import Path

__all__ = ["say", "set_up_logging"]

_console = logging.getLogger("titan_recipes.console")

# Messages of TorchTitan's that do not hold here, with the reason. They are dropped from console and file.
_MOOT = {
    "Setting validation steps to -1 might cause hangs": "our loader gives each rank the same number of batches",
    "initial_load_model_only=True has no effect": "TorchTitan's own default triggers it",
    "Peak FLOPS used for computing MFU": "on an unknown device it is an A100's; ours prints MFU only where it is known",
    "Peak flops undefined for": "as above",
    "Error running lspci": "asked only for a GPU's name",
    "ENV[TORCH_NCCL_ASYNC_ERROR_HANDLING]": "set for each run, NCCL or not",
    "Pipeline Parallel loss is not visible": "the rank that has the loss prints, and no other",
    "model.safetensors.index.json not found": "weights are exported by hf-ckpt-adapter, which makes its own index",
}


def say(text: str) -> None:
    """A line for the person who runs this."""
    _console.info(text)


def set_up_logging(log_file: Path | None, *, console: bool) -> None:
    """Route logging for this process. Called by entry points, never at import."""
    root = logging.getLogger()
    root.setLevel(logging.INFO)
    for handler in [*root.handlers, *_console.handlers]:
        handler.close()
    root.handlers.clear()
    _console.handlers.clear()
    _console.setLevel(logging.INFO)
    _console.propagate = log_file is not None
    if console:
        lines = logging.StreamHandler(sys.stdout)
        lines.setFormatter(logging.Formatter("%(message)s"))
        _console.addHandler(lines)
        others = logging.StreamHandler(sys.stderr)
        others.setLevel(logging.WARNING)
        others.setFormatter(logging.Formatter("%(levelname)s: %(message)s"))
        others.addFilter(_is_news)
        root.addHandler(others)
    if log_file is not None:
        log_file.parent.mkdir(parents=True, exist_ok=True)
        file = logging.FileHandler(log_file)
        file.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
        file.addFilter(_holds)
        root.addHandler(file)
        logging.captureWarnings(True)
    else:
        warnings.simplefilter("ignore")


def _holds(record: logging.LogRecord) -> bool:
    return not record.getMessage().startswith(tuple(_MOOT))


def _is_news(record: logging.LogRecord) -> bool:
    # Python warnings (deprecations inside libraries) go to the file alone.
    return _holds(record) and record.name not in ("py.warnings", _console.name)
