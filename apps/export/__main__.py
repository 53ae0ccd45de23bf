"""`uv run apps/export CHECKPOINT OUT`: a TorchTitan checkpoint step becomes a Hugging Face folder."""

import sys

from hf_ckpt_adapter.cli import export_main

if __name__ == "__main__":
    sys.exit(export_main())
