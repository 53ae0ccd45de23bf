"""The commands: `hf-ckpt convert|inspect|diff|verify`, and `uv run apps/export CHECKPOINT OUT` (convert to a
Hub folder).

Exit codes: 0 done, equal or verified; 1 a difference was found or a check failed; 2 the input was refused or
is not there; 130 interrupted (what was written is kept, and the same command goes on).
"""

from __future__ import annotations

import argparse
import json
import math
import os
import re
import sys
import time
import warnings
from collections.abc import Callable, Sequence
from typing import Any, TextIO

from .report import size_text

__all__ = ["export_main", "main"]

OK, DIFFERENT, REFUSED, INTERRUPTED = 0, 1, 2, 130


class _Bar:
    """A progress line with bytes per second and time left; on a terminal it is rewritten, else it is
    silent.
    """

    def __init__(self, stream: TextIO, shown: bool) -> None:
        self._stream, self._shown = stream, shown
        self._begun, self._last = time.monotonic(), 0.0
        self._first: int | None = None
        self._open = False

    def __call__(self, done: int, total: int) -> None:
        now = time.monotonic()
        if not self._shown or (now - self._last < 0.1 and done < total):
            return
        if self._first is None:  # a resumed run begins in the middle
            self._first, self._begun = done, now
        self._last = now
        speed = (done - self._first) / max(now - self._begun, 1e-6)
        left = (total - done) / speed if speed > 0 else 0.0
        width = 24
        bar = "#" * (width * done // max(total, 1))
        amount = f"{size_text(done)} of {size_text(total)}"
        rate = f", {size_text(speed)}/s, {left:.0f} s left" if speed > 0 else ""
        text = f"[{bar:<{width}}] {amount}{rate}"
        self._open = done < total
        self._stream.write(f"\r{text:<90}" + ("" if self._open else "\n"))
        self._stream.flush()

    def end(self) -> None:
        """Leave a line that stopped in the middle."""
        if self._open:
            self._stream.write("\n")
            self._open = False


def _bytes(text: str) -> int:
    """`5GB`, `500MB` or a number of bytes; decimal units, as the Hub counts."""
    match = re.fullmatch(r"([0-9]{1,18}(?:\.[0-9]+)?)\s*([kKmMgGtT]?)[bB]?", text)
    units = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12}
    size = int(float(match[1]) * units[match[2].lower()]) if match else 0
    if size < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a size; expected e.g. 5GB")
    return size


def _positive(text: str) -> int:
    if not re.fullmatch(r"[0-9]{1,18}", text) or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a positive number")
    return int(text)


def _common(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of text")
    parser.add_argument("--quiet", action="store_true", help="no progress line")
    parser.add_argument("--follow-symlinks", action="store_true", help="trust links that lead out of the folder")


def _conversion(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("source", help="TorchTitan step folder, Hugging Face folder, cache snapshot, or Hub id")
    parser.add_argument("out", help="folder to make")
    parser.add_argument("--dtype", help="cast floating tensors (default: what config.json says, or as stored)")
    parser.add_argument(
        "--expert-layout",
        default="per-expert",
        choices=["per-expert", "fused", "as-source"],
        help="experts in a Hugging Face folder (default per-expert, what the Hub and servers read)",
    )
    parser.add_argument("--max-shard-size", type=_bytes, default=5 * 10**9, help="default 5GB")
    parser.add_argument("--assets", help="folder with config.json and tokenizer (default: the checkpoint's own)")
    parser.add_argument("--tied-head", default="omit", choices=["omit", "write"], help="lm_head of a tied model")
    parser.add_argument(
        "--on-untied",
        default="fail",
        choices=["fail", "untie", "drop"],
        help="the config ties the head but it differs from the embedding",
    )
    parser.add_argument("--allow-missing-head", action="store_true", help="accept a backbone without lm_head")
    parser.add_argument("--fit-config", action="store_true", help="take sizes from the tensors, not the config")
    parser.add_argument("--trim-vocab", action="store_true", help="cut rows past vocab_size whatever they hold")
    parser.add_argument("--overwrite", action="store_true", help="replace OUT as a whole")
    parser.add_argument("--write-once", action="store_true", help="OUT cannot be renamed: write in place, marker last")
    _common(parser)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="hf-ckpt", description="Qwen3 checkpoints, Hugging Face and TorchTitan")
    commands = parser.add_subparsers(dest="command", required=True)
    convert = commands.add_parser("convert", help="between Hugging Face and TorchTitan, either way")
    _conversion(convert)
    convert.add_argument(
        "--to",
        choices=["hub", "native", "native-wqkv", "backend"],
        help="default: hub from TorchTitan, native from Hugging Face",
    )
    convert.add_argument("--pad-vocab-to", type=_positive, default=1, help="round the vocabulary up (import)")
    show = commands.add_parser("inspect", help="what is in a checkpoint")
    show.add_argument("checkpoint")
    show.add_argument("--values", action="store_true", help="read everything and count NaN and infinity")
    _common(show)
    compare = commands.add_parser("diff", help="compare two checkpoints, any format and layout")
    compare.add_argument("a")
    compare.add_argument("b")
    _common(compare)
    check = commands.add_parser("verify", help="marker, checksums, config against shapes")
    check.add_argument("checkpoint")
    check.add_argument("--logits", metavar="SOURCE", help="also compare what the two models compute")
    _common(check)
    return parser


def _convert(arguments: argparse.Namespace, bar: _Bar) -> tuple[int, Any]:
    from .convert import convert_checkpoint
    from .formats.dcp_read import is_dcp
    from .formats.tensors import dtype_named
    from .options import Options
    from .sources import find

    options = Options(
        dtype=dtype_named(arguments.dtype) if arguments.dtype else None,
        experts=arguments.expert_layout,
        head=arguments.tied_head,
        on_untied=arguments.on_untied,
        allow_missing_head=arguments.allow_missing_head,
        fit_config=arguments.fit_config,
        trim_vocab=arguments.trim_vocab,
        max_shard_bytes=arguments.max_shard_size,
        pad_vocab_to=arguments.pad_vocab_to,
    )
    layout = arguments.to or ("hub" if is_dcp(find(arguments.source)) else "native")
    if layout == "hub":
        layout = "fused" if arguments.expert_layout == "fused" else "per-expert"
    report = convert_checkpoint(
        arguments.source,
        arguments.out,
        layout,
        options=options,
        assets=arguments.assets,
        overwrite=arguments.overwrite,
        write_once=arguments.write_once,
        follow_symlinks=arguments.follow_symlinks,
        progress=bar,
    )
    return OK, report


def _inspect(arguments: argparse.Namespace, bar: _Bar) -> tuple[int, Any]:
    from .describe import describe

    found = describe(
        arguments.checkpoint, values=arguments.values, follow_symlinks=arguments.follow_symlinks, progress=bar
    )
    return (DIFFERENT if found.problems else OK), found


def _diff(arguments: argparse.Namespace, bar: _Bar) -> tuple[int, Any]:
    from .compare import diff

    found = diff(arguments.a, arguments.b, follow_symlinks=arguments.follow_symlinks, progress=bar)
    return (OK if found.equal else DIFFERENT), found


def _verify(arguments: argparse.Namespace, bar: _Bar) -> tuple[int, Any]:
    from .verify import verify

    found = verify(
        arguments.checkpoint,
        logits=arguments.logits,
        follow_symlinks=arguments.follow_symlinks,
        progress=bar,
    )
    return (OK if found.ok else DIFFERENT), found


def _run(command: Callable[[argparse.Namespace, _Bar], tuple[int, Any]], arguments: argparse.Namespace) -> int:
    bar = _Bar(sys.stderr, sys.stderr.isatty() and not arguments.quiet and not arguments.json)
    warnings.simplefilter("ignore")  # what matters is in the report
    try:
        code, result = command(arguments, bar)
    except KeyboardInterrupt:
        again = "; the same command goes on where it stopped" if command is _convert else ""
        return _failed(arguments, bar, f"interrupted{again}", "KeyboardInterrupt", INTERRUPTED)
    except (ValueError, OSError) as error:
        return _failed(arguments, bar, f"error: {error}", type(error).__name__, REFUSED)
    bar.end()
    _say(_json(result.to_dict(), indent=2) if arguments.json else result.summary(), sys.stdout)
    return code


def _failed(arguments: argparse.Namespace, bar: _Bar, text: str, kind: str, code: int) -> int:
    bar.end()
    if arguments.json:
        _say(_json({"error": text.removeprefix("error: "), "kind": kind}), sys.stdout)
    _say(text, sys.stderr)
    return code


def _json(value: Any, indent: int | None = None) -> str:
    """JSON that any reader takes: a number that it does not have is a word (`inf`, `nan`)."""

    def plain(item: Any) -> Any:
        if isinstance(item, dict):
            return {key: plain(v) for key, v in item.items()}
        if isinstance(item, (list, tuple)):
            return [plain(v) for v in item]
        return str(item) if isinstance(item, float) and not math.isfinite(item) else item

    return json.dumps(plain(value), indent=indent, allow_nan=False)


def _say(text: str, stream: TextIO) -> None:
    """Print what may hold names out of a hostile file: no control characters, nothing that the terminal's encoding
    lacks. A reader that has left (`| head`) is no error.
    """
    text = "".join(c if c == "\n" or c.isprintable() else c.encode("unicode_escape").decode() for c in text)
    encoding = stream.encoding or "utf-8"
    try:
        print(text.encode(encoding, "backslashreplace").decode(encoding), file=stream, flush=True)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


def main(arguments: Sequence[str] | None = None) -> int:
    """`hf-ckpt`; returns the exit code."""
    parsed = _parser().parse_args(arguments)
    commands = {"convert": _convert, "inspect": _inspect, "diff": _diff, "verify": _verify}
    return _run(commands[parsed.command], parsed)


def export_main(arguments: Sequence[str] | None = None) -> int:
    """`apps/export CHECKPOINT OUT`: `hf-ckpt convert --to hub`; returns the exit code."""
    parser = argparse.ArgumentParser(
        prog="apps/export", description="Export a TorchTitan checkpoint step to a Hugging Face folder"
    )
    _conversion(parser)
    parsed = parser.parse_args(arguments)
    parsed.to, parsed.pad_vocab_to = "hub", 1
    return _run(_convert, parsed)


if __name__ == "__main__":
    sys.exit(main())
