"""Reload an exported folder in Transformers and compare its logits with a probe's.

It runs in an interpreter of its own:

    python -m titan_recipes.publish.reload HF_FOLDER PROBE.safetensors

PROBE holds `tokens` [B, L] and float32 `logits` [B, L, V] of the trained weights. Prints one JSON line.
"""

import json
import sys


def main(folder: str, probe: str) -> dict[str, object]:
    """The keys that did not match and the largest float32 logit difference."""
    import torch
    import transformers
    from safetensors.torch import load_file

    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    tensors = load_file(probe)
    model, info = transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, output_loading_info=True
    )
    transformers.AutoTokenizer.from_pretrained(folder)
    with torch.no_grad():
        logits = model.eval()(tensors["tokens"]).logits
    return {
        "transformers": transformers.__version__,
        "missing": sorted(info["missing_keys"]),
        "unexpected": sorted(info["unexpected_keys"]),
        "max_difference": (logits - tensors["logits"]).abs().max().item(),
    }


if __name__ == "__main__":
    print(json.dumps(main(*sys.argv[1:3])))
