"""MkDocs' hooks: which pages the site has, and in which order.

The site mirrors the repository's tree, so that a link between two Markdown files works there as it works here. The
order of the pages is the order of the links in docs/README.md. One page per package is made of its docstrings; a new
package needs no change here.
"""

import re
from pathlib import Path
from posixpath import normpath

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).parents[1]
CODE = ["apps", "benchmarks", "packages", "recipes", ".ci"]
"""Folders whose Python files a page may link to."""
LINK = re.compile(r"\]\((?P<target>[^)\s#:]+)(?P<anchor>#[^)\s]*)?\)")


def reference(package: str) -> str:
    """Return the path of a package's reference page in the site."""
    return f"reference/{package}.md"


def packages() -> list[str]:
    """Return the names of the packages, sorted."""
    return sorted(file.parent.name for file in ROOT.glob("packages/*/pyproject.toml"))


def reading_order() -> list[str]:
    """Return the pages that docs/README.md links to, as paths from the root, in its order, each once."""
    targets = [found["target"] for found in LINK.finditer((ROOT / "docs" / "README.md").read_text(encoding="utf-8"))]
    paths = [normpath(f"docs/{target}") for target in targets]
    return list(dict.fromkeys(path for path in paths if path.endswith(".md")))


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Set the order of the pages."""
    config.nav = [
        {"Front page": "README.md"},
        {"Documentation": ["docs/README.md", *reading_order()]},
        {"Packages": [f"packages/{package}/README.md" for package in packages()]},
        {"Reference": [reference(package) for package in packages()]},
    ]
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Replace the files of docs/ by the repository's own tree, and add the reference pages."""
    pages = [*ROOT.glob("*.md"), *ROOT.glob("docs/*"), *ROOT.glob("packages/*/README.md"), ROOT / "LICENSE"]
    code = [file for folder in CODE for file in ROOT.glob(f"{folder}/**/*.py")]
    theme = [file for file in files if not file.src_uri.endswith((".md", ".py", ".png"))]
    tree = [
        File.generated(config, str(file.relative_to(ROOT)), abs_src_path=str(file))
        for file in [*pages, *code]
        if file.is_file()
    ]
    made = [
        File.generated(config, reference(package), content=f"# {package}\n\n::: {package.replace('-', '_')}\n")
        for package in packages()
    ]
    return Files([*theme, *tree, *made])


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Point links to a folder at its README.md, as a repository's browser does."""
    here = Path(page.file.src_uri).parent

    def readme(found: re.Match[str]) -> str:
        target = Path(normpath(here / found["target"]))
        if (ROOT / target / "README.md").is_file():
            return f"]({found['target'].rstrip('/')}/README.md{found['anchor'] or ''})"
        return found[0]

    return LINK.sub(readme, markdown)
