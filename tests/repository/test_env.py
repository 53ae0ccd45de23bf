"""Contract: docs/env.md names every environment variable that our programs read or set, and where, and no other."""

import ast
import re
from collections import defaultdict

import pytest
from neuron_parallel import Cluster, ParallelPlan, instance
from neuron_parallel.launch_files import launch_files
from repository import ROOT

PAGE = ROOT / "docs" / "env.md"
PROGRAMS = ["apps", "benchmarks", "packages", "recipes"]
NAME = re.compile(r"[A-Z][A-Z0-9_]+$")
MAPPING = re.compile(r"(os\.)?environ$")
PYTHONS_OWN = {"PATH", "PYTHONPATH"}


def constants(tree: ast.Module) -> dict[str, str]:
    """Return the module-level strings of a file by their names: `VARIABLE = "NKI_MOE_BACKEND"`."""
    pairs = ((node.targets[0], node.value) for node in tree.body if isinstance(node, ast.Assign))
    return {
        target.id: value.value
        for target, value in pairs
        if isinstance(target, ast.Name) and isinstance(value, ast.Constant) and isinstance(value.value, str)
    }


def tables(tree: ast.Module) -> set[str]:
    """Return the names in a file's module-level tables: `_BLOCKING = {"cuda": "CUDA_LAUNCH_BLOCKING"}`."""
    values = [node.value for node in tree.body if isinstance(node, ast.Assign)]
    literals = [node for value in values for node in ast.walk(value) if isinstance(node, ast.Constant)]
    return {node.value for node in literals if isinstance(node.value, str) and NAME.match(node.value)}


class Uses(ast.NodeVisitor):
    """Collect ("reads" or "sets", variable) for each use of the environment in a file."""

    def __init__(self, source: str):
        tree = ast.parse(source)
        self.constants, self.tables = constants(tree), tables(tree)
        self.found: set[tuple[str, str]] = set()
        self.visit(tree)

    def note(self, how: str, node: ast.AST | None) -> None:
        """Note the variable that an expression names: a literal, a constant, or else whatever the file's
        tables hold.
        """
        if isinstance(node, ast.Constant):
            names = {node.value}
        elif isinstance(node, ast.Name):
            names = {self.constants[node.id]} if node.id in self.constants else self.tables
        else:
            names = set()
        self.found |= {(how, name) for name in names if isinstance(name, str) and NAME.match(name)}

    def visit_Subscript(self, node: ast.Subscript) -> None:
        if MAPPING.search(ast.unparse(node.value)) and not isinstance(node.ctx, ast.Del):
            self.note("reads" if isinstance(node.ctx, ast.Load) else "sets", node.slice)
        self.generic_visit(node)

    def visit_Compare(self, node: ast.Compare) -> None:
        if MAPPING.search(ast.unparse(node.comparators[0])):
            self.note("reads", node.left)
        self.generic_visit(node)

    def visit_Call(self, node: ast.Call) -> None:
        mapping, _, method = ast.unparse(node.func).rpartition(".")
        if (mapping, method) == ("os", "getenv") or (MAPPING.search(mapping) and method == "get"):
            self.note("reads", node.args[0])
        elif MAPPING.search(mapping) and method == "setdefault":
            self.note("sets", node.args[0])
        elif MAPPING.search(mapping) and method == "update":
            self.found |= {("sets", keyword.arg) for keyword in node.keywords if keyword.arg}
        given = [keyword.value for keyword in node.keywords if keyword.arg == "env"]
        for part in (part for value in given for part in ast.walk(value) if isinstance(part, ast.Dict)):
            for key in part.keys:
                self.note("sets", key)
        self.generic_visit(node)


@pytest.mark.parametrize(
    ("source", "found"),
    [
        ('os.environ["RANK"]', ("reads", "RANK")),
        ('os.environ.get("RANK", "0")', ("reads", "RANK")),
        ('"RANK" in os.environ', ("reads", "RANK")),
        ('os.getenv("HF_HOME")', ("reads", "HF_HOME")),
        ('KEY = "HF_HOME"\nos.environ.get(KEY)', ("reads", "HF_HOME")),
        ('os.environ["RANK"] = "0"', ("sets", "RANK")),
        ('os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")', ("sets", "TOKENIZERS_PARALLELISM")),
        ('run(command, env={**os.environ, "HF_HUB_OFFLINE": "1"})', ("sets", "HF_HUB_OFFLINE")),
        ('os.environ.update(RANK="0")', ("sets", "RANK")),
    ],
)
def test_the_rule_finds_what_it_should(source, found):
    assert found in Uses(source).found


def uses(how: str, folders: list[str]) -> dict[str, set[str]]:
    """Return the files that read (or set) each variable, as the page writes them: `nki_moe/backend.py`."""
    found: dict[str, set[str]] = defaultdict(set)
    for file in (file for folder in folders for file in sorted((ROOT / folder).rglob("*.py"))):
        for kind, name in Uses(file.read_text(encoding="utf-8")).found:
            if kind == how and name not in PYTHONS_OWN:
                found[name].add(re.sub(r"^packages/[^/]+/src/", "", str(file.relative_to(ROOT))))
    return dict(found)


def on_the_page(how: str) -> dict[str, set[str]]:
    """Return the files that the page's table with this column names for each variable."""
    found: dict[str, set[str]] = {}
    for table in re.findall(r"(?:^\|.*\n)+", PAGE.read_text(encoding="utf-8"), re.MULTILINE):
        head, _, *rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in table.splitlines()]
        if how in head:
            column = head.index(how)
            for row in rows:
                files = set(re.findall(r"`([^`]+\.py)`", row[column]))
                found |= dict.fromkeys(re.findall(r"`([A-Z][A-Z0-9_]+)`", row[0]), files)
    return found


def test_the_page_names_each_variable_that_a_program_reads_and_its_files():
    programs = uses("reads", PROGRAMS)
    for_tests_alone = {name: files for name, files in uses("reads", ["tests"]).items() if name not in programs}
    assert on_the_page("read by") == programs | for_tests_alone


def test_the_page_names_each_variable_that_a_package_sets_and_its_files():
    assert on_the_page("set by") == uses("sets", ["packages"])


def test_the_page_names_each_variable_that_launch_files_export():
    files = launch_files(ParallelPlan().resolve(128), Cluster(instance("trn2.48xlarge"), 2), command=("x",))
    written = {
        name for text in files.values() for name in re.findall(r"^export ([A-Z][A-Z0-9_]+)=", text, re.MULTILINE)
    }
    assert len(written) > 3
    assert set(on_the_page("exported for")) == written
