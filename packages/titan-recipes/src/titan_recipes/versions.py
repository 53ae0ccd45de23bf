"""Which releases this toolkit was tested with; anything else stops unless the user says so."""

import re
from importlib.metadata import PackageNotFoundError, version

from .errors import UserError

TESTED_MINORS = {"torch": "2.14", "torchtitan": "0.3", "transformers": "5.24"}
"""Package -> tested minor release. TorchTitan and Transformers move their internals between minors."""


def check_versions(allow_untested: bool = False) -> list[str]:
    """Compare what is installed with what was tested.

    Returns the mismatches as text (empty when all match). Raises UserError when there are any and `allow_untested` is
    false; a package that is absent is always an error.
    """
    mismatches = []
    for package, minor in TESTED_MINORS.items():
        try:
            found = version(package)
        except PackageNotFoundError:
            raise UserError(
                f"{package} is not installed; apps/train needs {package} {minor}.\n"
                "Run it through the workspace (`uv run apps/train`), or install titan-recipes with its dependencies."
            ) from None
        if not re.match(rf"{re.escape(minor)}(\.|$|[a-z+])", found):
            mismatches.append(f"{package} {found} (tested: {minor}.x)")
    if mismatches and not allow_untested:
        raise UserError(
            "These releases were not tested with this toolkit: " + ", ".join(mismatches) + ".\n"
            "Install the tested ones (`uv sync`), or pass --allow-untested to run anyway."
        )
    return mismatches
