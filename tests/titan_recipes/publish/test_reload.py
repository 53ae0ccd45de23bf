"""Contract: the check of an export sees a wrong one. (That a right one passes is in tests/integration.)"""

import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

pytestmark = pytest.mark.filterwarnings("ignore")
TOKENIZER = Path(__file__).parents[3] / "recipes" / "debug_tokenizer"


@pytest.fixture(scope="module")
def export(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Hugging Face folder, and beside it the probe of its own logits."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    folder = tmp_path_factory.mktemp("export")
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=8, tie_word_embeddings=False, initializer_range=0.2,
    )  # fmt: skip
    model = Qwen3ForCausalLM(config).eval()
    model.save_pretrained(folder / "hf")
    for file in TOKENIZER.iterdir():
        shutil.copy(file, folder / "hf")
    tokens = torch.arange(32).reshape(2, 16)
    with torch.no_grad():
        save_file({"tokens": tokens, "logits": model(tokens).logits.contiguous()}, folder / "probe.safetensors")
    return folder


def reload(export: Path, folder: Path, change: object) -> str:
    from titan_recipes.publish.publish import _reload_text
    from titan_recipes.publish.reload import main

    shutil.copytree(export / "hf", folder)
    state = load_file(folder / "model.safetensors")
    change(state)  # type: ignore[operator]
    save_file(state, folder / "model.safetensors", metadata={"format": "pt"})
    return _reload_text(main(str(folder), str(export / "probe.safetensors")))  # type: ignore[arg-type]


def test_the_export_as_it_is_passes(export: Path, tmp_path: Path) -> None:
    text = reload(export, tmp_path / "hf", lambda state: None)
    assert text.startswith("reloaded in Transformers") and "0 missing keys, 0 unexpected" in text


def test_two_swapped_projections_are_a_wrong_export(export: Path, tmp_path: Path) -> None:
    def swap(state: dict[str, torch.Tensor]) -> None:
        k, v = (f"model.layers.1.self_attn.{p}_proj.weight" for p in "kv")
        state[k], state[v] = state[v].clone(), state[k].clone()

    assert reload(export, tmp_path / "hf", swap).startswith("WRONG EXPORT")


def test_a_missing_and_an_extra_tensor_are_named(export: Path, tmp_path: Path) -> None:
    def rename(state: dict[str, torch.Tensor]) -> None:
        state["model.layers.0.self_attn.qq_norm.weight"] = state.pop("model.layers.0.self_attn.q_norm.weight")

    text = reload(export, tmp_path / "hf", rename)
    assert text.startswith("WRONG EXPORT")
    assert "missing: model.layers.0.self_attn.q_norm.weight" in text
    assert "unexpected: model.layers.0.self_attn.qq_norm.weight" in text
