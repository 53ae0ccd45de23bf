"""uv run apps/train [RECIPE] [--section.option value ...]: see --help."""

import sys
from pathlib import Path

from titan_recipes.cli import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:], recipes=Path(__file__).resolve().parents[2] / "recipes"))
