"""Contract between hf-ckpt-adapter and the real Transformers: every export loads in a fresh interpreter with
nothing missing and nothing unexpected, and computes exactly what the source computes."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from hf_ckpt_adapter import Options, convert_checkpoint, diff, export_step
from hf_ckpt_adapter.cli import main

transformers = pytest.importorskip("transformers")

TINY: dict[str, Any] = {
    "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "head_dim": 32, "intermediate_size": 96, "vocab_size": 320, "dtype": "float32",
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e6},
}  # fmt: skip
MOE = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 48, "norm_topk_prob": True}

FRESH = """
import json, sys, torch, transformers
results = []
for folder in sys.argv[1:]:
    load = transformers.AutoModelForCausalLM.from_pretrained
    model, info = load(folder, dtype="float32", output_loading_info=True)
    tokens = torch.tensor([[i * 37 % 320 for i in range(64)]])
    with torch.no_grad():
        logits = model.eval()(tokens).logits
    results.append([sorted(info["missing_keys"]), sorted(info["unexpected_keys"]), logits.flatten().tolist()])
print(json.dumps(results))
"""


def fresh(*folders: Path) -> list[tuple[list[str], list[str], torch.Tensor]]:
    """Missing keys, unexpected keys and logits of each folder, from one fresh interpreter."""
    result = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", FRESH, *map(str, folders)], capture_output=True, text=True
    )
    assert result.returncode == 0, result.stderr[-3000:]
    return [(m, u, torch.tensor(x)) for m, u, x in json.loads(result.stdout.splitlines()[-1])]


@pytest.mark.parametrize("moe", [False, True], ids=["dense", "moe"])
def test_every_route_loads_clean_and_computes_the_same(tmp_path: Path, moe: bool) -> None:
    torch.manual_seed(0)
    folders = []
    for tie in (False, True):
        base = tmp_path / f"tied-{tie}"
        if moe:
            cfg = transformers.Qwen3MoeConfig(**TINY, **MOE, tie_word_embeddings=tie)
            model = transformers.Qwen3MoeForCausalLM(cfg)
        else:
            cfg = transformers.Qwen3Config(**TINY, tie_word_embeddings=tie)
            model = transformers.Qwen3ForCausalLM(cfg)
        model.save_pretrained(base / "source")
        (base / "source" / "generation_config.json").write_text("{}")
        convert_checkpoint(base / "source", base / "native", "native")
        convert_checkpoint(base / "source", base / "backend", "backend")
        export_step(base / "native", base / "from-native")
        export_step(base / "backend", base / "from-backend")
        folders += [base / "source", base / "from-native", base / "from-backend"]
        if moe:
            convert_checkpoint(base / "native", base / "fused", "fused")
            assert diff(base / "fused", base / "source").equal
            folders.append(base / "fused")
    results = dict(zip(folders, fresh(*folders), strict=True))
    for folder, (missing, unexpected, logits) in results.items():
        assert not missing and not unexpected, (folder, missing, unexpected)
        assert torch.equal(logits, results[folder.parent / "source"][2]), folder


def test_an_export_has_a_config_and_tokenizer_that_load_offline(tmp_path: Path) -> None:
    tokenizers = pytest.importorskip("tokenizers")
    torch.manual_seed(0)
    model = transformers.Qwen3ForCausalLM(transformers.Qwen3Config(**TINY))
    model.save_pretrained(tmp_path / "source")
    words = {"[UNK]": 0, "hello": 1, "world": 2}
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="[UNK]")),
        unk_token="[UNK]",
    )
    tokenizer.save_pretrained(tmp_path / "source")
    convert_checkpoint(tmp_path / "source", tmp_path / "step", "native")
    export_step(tmp_path / "step", tmp_path / "hf")
    loaded = transformers.AutoConfig.from_pretrained(tmp_path / "hf")
    assert loaded.rope_parameters["rope_theta"] == 1e6 and loaded.head_dim == 32 and loaded.vocab_size == 320
    again = transformers.AutoTokenizer.from_pretrained(tmp_path / "hf")
    assert again.get_vocab() == words
    assert transformers.GenerationConfig.from_pretrained(tmp_path / "hf") is not None


def test_verify_logits_passes_for_an_export_and_fails_for_another_model(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for seed, name in enumerate(("source", "stranger")):
        torch.manual_seed(seed)
        cfg = transformers.Qwen3MoeConfig(**TINY, **MOE)
        transformers.Qwen3MoeForCausalLM(cfg).save_pretrained(tmp_path / name)
    convert_checkpoint(tmp_path / "source", tmp_path / "step", "native")
    export_step(tmp_path / "step", tmp_path / "hf", dtype="bfloat16")
    for source in ("source", "step"):
        assert main(["verify", str(tmp_path / "hf"), "--logits", str(tmp_path / source)]) == 0
        assert "transformers: 0 missing, 0 unexpected, largest float32 difference 0 " in capsys.readouterr().out
    assert main(["verify", str(tmp_path / "hf"), "--logits", str(tmp_path / "stranger")]) == 1
    capsys.readouterr()
    # A source with padding is the same model; one of another shape is said to be none.
    convert_checkpoint(tmp_path / "source", tmp_path / "padded", "native", options=Options(pad_vocab_to=48))
    assert main(["verify", str(tmp_path / "hf"), "--logits", str(tmp_path / "padded")]) == 0
    transformers.Qwen3MoeForCausalLM(transformers.Qwen3MoeConfig(**{**TINY, "vocab_size": 640}, **MOE)).save_pretrained(
        tmp_path / "larger"
    )
    assert main(["verify", str(tmp_path / "hf"), "--logits", str(tmp_path / "larger")]) == 1
    assert "these are two models: lm_head.weight is [320, 64]" in capsys.readouterr().out


def test_verify_logits_works_with_qwen3_core_where_that_is_what_is_installed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("qwen3_core")
    import importlib.util

    from hf_ckpt_adapter import logits

    torch.manual_seed(0)
    transformers.Qwen3MoeForCausalLM(transformers.Qwen3MoeConfig(**TINY, **MOE)).save_pretrained(tmp_path / "hub")
    convert_checkpoint(tmp_path / "hub", tmp_path / "step", "native")
    real = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda n: None if n == "transformers" else real(n))
    found = logits.compare_logits(str(tmp_path / "hub"), str(tmp_path / "step"))
    assert found["with"] == "qwen3_core" and found["difference"] == 0.0
    assert not found["missing"] and not found["unexpected"]
