"""Contract: what a page says to open or to type is there. Links lead somewhere, and commands name what exists.

Python blocks run elsewhere: those of a package's README in `nox -s build`, with that package alone; those of the other
pages in tests/integration/test_pages.py.
"""

import ast
import re
import shlex
import tomllib
from collections.abc import Iterator
from itertools import dropwhile, groupby, pairwise
from pathlib import Path

import pytest
from repository import PACKAGES, ROOT, code_blocks, pages

BLOCKS = code_blocks().blocks
LINK = re.compile(r"!?\[[^\]]*\]\((?P<target>[^)\s#]*)(?:#(?P<anchor>[^)\s]*))?\)")
PAGES = {str(file.relative_to(ROOT)): file for file in pages()}
PLACEHOLDER = re.compile(r"[A-Z][A-Z0-9_]*$|.*\.\.\.")
"""What a page leaves to the reader: RECIPE, DIR, `outputs/debug-.../hf`."""
FOREIGN = {"cd", "export", "git", "hf", "kubectl", "pip", "pytest", "python", "sbatch", "torchrun", "uv"}
"""Commands that others bring."""


def prose(text: str) -> str:
    """Return a page without its code blocks and code spans, whose brackets are no links."""
    return re.sub(r"`[^`\n]*`", "", re.sub(r"^```.*?^```$", "", text, flags=re.DOTALL | re.MULTILINE))


def anchors(text: str) -> set[str]:
    """Return the anchors that a browser of the repository gives a page's headings."""
    headings = re.findall(r"^#+ (.+)$", re.sub(r"^```.*?^```$", "", text, flags=re.DOTALL | re.MULTILINE), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).strip().replace(" ", "-") for heading in headings}


def dead_links(page: Path) -> list[str]:
    """Return the links of a page that lead nowhere in the repository."""
    dead = []
    for found in LINK.finditer(prose(page.read_text(encoding="utf-8"))):
        target, anchor = found["target"], found["anchor"]
        if re.match(r"https?://|mailto:", target):
            continue
        place = (page.parent / target).resolve() if target else page
        inside = place.is_relative_to(ROOT)
        if place.is_dir():
            place = place / "README.md"
        if not (inside and place.exists()) or (anchor and anchor not in anchors(place.read_text(encoding="utf-8"))):
            dead.append(found[0])
    return dead


@pytest.mark.parametrize("page", PAGES)
def test_links_lead_to_files_and_headings(page):
    assert dead_links(PAGES[page]) == []


def test_a_dead_link_and_a_dead_anchor_are_found(tmp_path, monkeypatch):
    monkeypatch.setitem(globals(), "ROOT", tmp_path)
    (tmp_path / "there.md").write_text("# One heading, *twice*\n")
    page = tmp_path / "page.md"
    page.write_text("[a](nowhere.md) [b](there.md#one-heading-twice) [c](there.md#two) [d](there.md) `[e](code)`")
    assert dead_links(page) == ["[a](nowhere.md)", "[c](there.md#two)"]


def test_the_list_of_pages_lists_every_page():
    text = (ROOT / "docs" / "README.md").read_text(encoding="utf-8")
    linked = {(ROOT / "docs" / found["target"]).resolve() for found in LINK.finditer(text) if found["target"]}
    wanted = {file.resolve() for file in PAGES.values() if file.parent == ROOT / "docs"} - {ROOT / "docs" / "README.md"}
    assert wanted <= linked, f"docs/README.md does not list {sorted(file.name for file in wanted - linked)}"


# Commands.


def top_level(file: Path) -> ast.Module:
    """Parse a file."""
    return ast.parse(file.read_text(encoding="utf-8"))


def nox_sessions() -> set[str]:
    """Return the sessions of noxfile.py, by the functions that a nox decorator makes one."""
    functions = [node for node in top_level(ROOT / "noxfile.py").body if isinstance(node, ast.FunctionDef)]
    return {f.name for f in functions if any("nox.session" in ast.unparse(d) for d in f.decorator_list)}


def recipes() -> set[str]:
    """Return the names of the recipes that the repository ships."""
    nodes = [node for file in (ROOT / "recipes").glob("*.py") for node in top_level(file).body]
    return {node.name for node in nodes if isinstance(node, ast.FunctionDef) and not node.name.startswith("_")}


def scripts() -> set[str]:
    """Return the commands that the packages install."""
    projects = [
        tomllib.loads((ROOT / "packages" / name / "pyproject.toml").read_text())["project"] for name in PACKAGES
    ]
    return {name for project in projects for name in project.get("scripts", {})}


def commands(code: str) -> Iterator[list[str]]:
    """Yield the commands of a shell block as words, without comments and the variables set before them."""
    for line in code.replace("\\\n", " ").splitlines():
        words = shlex.split(line, comments=True)
        for joins, group in groupby(words, key=lambda word: word in ("&&", "||", "|", ";", "&")):
            command = [] if joins else list(dropwhile(re.compile(r"[A-Z][A-Z0-9_]*=").match, group))
            if command:
                yield command


def unknown(words: list[str]) -> str | None:
    """Say what in a command does not exist, or return None. A launcher before an app is passed over."""
    words = words[2:] if words[:2] == ["uv", "run"] else words
    app = next((i for i, word in enumerate(words) if word.startswith("apps/")), None)
    if app is not None:
        name, first = words[app], (words[app + 1 :] or ["-"])[0]
        if not (ROOT / name / "__main__.py").is_file():
            return f"no {name}"
        a_recipe = name == "apps/train" and re.fullmatch(r"[a-z]\w*", first)
        return f"no recipe {first}" if a_recipe and first not in recipes() else None
    if words[0] == "nox":
        named = [word.partition("(")[0] for flag, word in pairwise(words) if flag == "-s"]
        return next((f"no session {name}" for name in named if name not in nox_sessions()), None)
    scripted = next((word for word in words if word.endswith(".py")), None)
    if words[0] == "python" and scripted and not PLACEHOLDER.match(scripted):
        return None if (ROOT / scripted).is_file() else f"no file {scripted}"
    known = words[0] in scripts() | FOREIGN or PLACEHOLDER.match(words[0])
    return None if known else f"no command {words[0]}"


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        ("uv run apps/train debug --resume  # go on", None),
        ("uv run apps/train debugg", "no recipe debugg"),
        ("NKI_MOE_BACKEND=sim apps/train debug_moe", None),
        ("uv run apps/trian", "no apps/trian"),
        ("pip install uv && uv run nox -s nothing", "no session nothing"),
        ('uv run nox -s "tests(nki-moe)"', None),
        ("hf-ckptt diff A B", "no command hf-ckptt"),
    ],
)
def test_the_rule_for_commands_finds_what_it_should(line, problem):
    found = [trouble for words in commands(line) if (trouble := unknown(words))]
    assert found == ([problem] if problem else [])


@pytest.mark.parametrize("page", PAGES)
def test_commands_of_a_page_exist(page):
    text = PAGES[page].read_text(encoding="utf-8")
    wrong = [
        f"{page}:{block.line}: {trouble}: {' '.join(words)}"
        for block in BLOCKS(text)
        if block.language in ("bash", "sh", "console")
        for words in commands(block.code)
        if (trouble := unknown(words))
    ]
    assert not wrong, "\n".join(wrong)


LANGUAGES = {"bash", "python", "console", "text", "setup"}


@pytest.mark.parametrize("page", PAGES)
def test_every_block_says_its_language_and_parses(page):
    for block in BLOCKS(PAGES[page].read_text(encoding="utf-8")):
        where = f"{page}:{block.line}"
        assert block.language in LANGUAGES, f"{where}: a block without a known language: {block.language!r}"
        if block.language in ("python", "setup"):
            ast.parse(block.code, filename=where)
