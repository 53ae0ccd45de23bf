"""`uv run apps/plan MODEL [--instance trn2.48xlarge] [--nodes N] [--fix tp=4 ...]`: see --help."""

import sys

from neuron_parallel.cli import main
from qwen3_core import MODELS

if __name__ == "__main__":
    sys.exit(main(models={name: config.to_hf() for name, config in MODELS.items()}))
