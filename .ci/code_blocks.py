"""Run the code blocks of Markdown pages: `python .ci/code_blocks.py README.md docs/recipes.md`.

A page's `python` blocks run in order and share their names, as a reader would type them. Its `bash` blocks run where
they stand between them, and stop at the first command that fails. Blocks of any other language are not run. Setup that
a reader need not see is Python in a comment: `<!-- setup` on a line of its own, the code, `-->`. With `--no-shell`
before the pages, `bash` blocks are left out. Standard library only, because `nox -s build` calls this with an
interpreter that has one package and nothing else.
"""

import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple


class Block(NamedTuple):
    """A fenced block of a page, or its hidden setup."""

    line: int
    """The number of the block's first line of code, counted from 1."""
    language: str
    """What follows the opening fence: `python`, `bash`, nothing; `setup` for hidden setup."""
    code: str


FENCE = re.compile(
    r"^```(?P<language>\w*)[^\n]*\n(?P<code>.*?)^```$|^<!-- setup\n(?P<setup>.*?)^-->$", re.DOTALL | re.MULTILINE
)


def blocks(text: str) -> Iterator[Block]:
    """Yield the blocks of a page in order."""
    for found in FENCE.finditer(text):
        hidden = found["setup"] is not None
        code = found["setup"] if hidden else found["code"]
        start = found.start("setup" if hidden else "code")
        yield Block(text.count("\n", 0, start) + 1, "setup" if hidden else found["language"], code)


def run(page: Path, shell: bool) -> None:
    """Run a page's blocks in the current folder. A traceback names the page and its line."""
    names: dict[str, object] = {"__name__": "__main__"}
    for block in blocks(page.read_text(encoding="utf-8")):
        if block.language in ("python", "setup"):
            exec(compile("\n" * (block.line - 1) + block.code, str(page), "exec"), names)
        elif block.language == "bash" and shell:
            print(f"{page}:{block.line}: bash", flush=True)
            subprocess.run(["bash", "-e", "-o", "pipefail", "-c", block.code], check=True)


if __name__ == "__main__":
    arguments = sys.argv[1:]
    for name in arguments:
        if name != "--no-shell":
            run(Path(name), shell="--no-shell" not in arguments)
