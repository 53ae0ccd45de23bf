"""Contract of the commands: what they print is right, `--json` is JSON, and exit codes can be used by a
script."""

import json
import os
import shutil
import struct
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from hf_ckpt_adapter import convert_checkpoint as convert
from hf_ckpt_adapter.cli import export_main, main
from hf_ckpt_adapter.compare import diff
from hf_ckpt_adapter.verify import verify
from hf_tiny import config, equal, fused, state, write_hub
from safetensors.torch import load_file


@pytest.fixture
def hub(tmp_path: Path) -> Path:
    cfg = config(moe=True, dtype="bfloat16")
    return write_hub(tmp_path / "hub", cfg, state(cfg, dtype=torch.bfloat16))


def run(capsys: pytest.CaptureFixture[str], *arguments: object) -> tuple[int, Any]:
    code = main([*map(str, arguments), "--json"])
    return code, json.loads(capsys.readouterr().out)


def test_convert_both_ways_and_verify_and_diff(tmp_path: Path, hub: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(capsys, "convert", hub, tmp_path / "step")[1]["layout"] == "native"
    code, report = run(capsys, "convert", tmp_path / "step", tmp_path / "hf", "--max-shard-size", "100kB")
    assert code == 0 and report["layout"] == "per-expert" and len(report["files"]) > 3
    assert report["bytes_written"] == sum(t.nbytes for t in state(config(moe=True), dtype=torch.bfloat16).values())
    for folder in ("step", "hf"):
        assert run(capsys, "verify", tmp_path / folder)[0] == 0
        assert run(capsys, "diff", hub, tmp_path / folder)[0] == 0
    code, facts = run(capsys, "inspect", tmp_path / "step")
    assert code == 0 and facts["sizes"]["num_experts"] == 8 and facts["experts"] == {"stacked": 2}
    assert facts["dtypes"] == {"bfloat16": 27, "float32": 2}  # the two are zero expert biases
    assert facts["marked"] and facts["problems"] == []


def test_export_is_convert_to_the_hub(tmp_path: Path, hub: Path, capsys: pytest.CaptureFixture[str]) -> None:
    convert(hub, tmp_path / "step", "backend")
    assert export_main([str(tmp_path / "step"), str(tmp_path / "hf"), "--expert-layout", "fused"]) == 0
    assert "written as fused in bfloat16" in capsys.readouterr().out
    equal(load_file(tmp_path / "hf" / "model.safetensors"), fused(state(config(moe=True), dtype=torch.bfloat16)))


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["convert", "nowhere", "out"], "neither a folder nor a Hub id"),
        (["convert", "HUB", "HUB"], "--overwrite"),
        (["convert", "HUB", "out", "--dtype", "float7"], "unknown dtype 'float7'"),
        (["convert", "HUB", "out", "--assets", "empty"], "no config.json"),
    ],
)
def test_refusals_exit_with_2_and_one_error(
    tmp_path: Path, hub: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch,
    arguments: list[str], words: str,
) -> None:  # fmt: skip
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty").mkdir()
    assert main([str(hub) if a == "HUB" else a for a in arguments]) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.count("error:") == 1 and words in err
    assert not (tmp_path / "out").exists()


def flip(folder: Path, tensor: str, byte: int, bit: int) -> str:
    """Flip a bit of a tensor; returns the name of its file."""
    for path in folder.glob("*.safetensors"):
        data = bytearray(path.read_bytes())
        (length,) = struct.unpack("<Q", data[:8])
        entry = json.loads(data[8 : 8 + length]).get(tensor)
        if entry:
            data[8 + length + entry["data_offsets"][0] + byte] ^= 1 << bit
            path.write_bytes(data)
            return path.name
    raise AssertionError(tensor)


def test_one_flipped_bit_is_found_by_diff_with_tensor_shard_and_index(
    tmp_path: Path, hub: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tensor = "model.layers.1.mlp.experts.5.up_proj.weight"
    assert main(["convert", str(hub), str(tmp_path / "hf"), "--to", "hub", "--max-shard-size", "200kB"]) == 0
    capsys.readouterr()
    file = flip(tmp_path / "hf", tensor, byte=2 * (7 * 64 + 9), bit=0)
    code, found = run(capsys, "diff", hub, tmp_path / "hf")
    assert code == 1 and len(found["different"]) == 1 and found["same"] == len(state(config(moe=True))) - 1
    (only,) = found["different"]
    assert only["part"] == tensor and only["index"] == [7, 9] and only["count"] == 1 and file in only["b"]
    value = state(config(moe=True), dtype=torch.bfloat16)[tensor][7, 9]
    other = (value.view(torch.int16) ^ 1).view(torch.bfloat16)
    assert only["max"] == abs(float(value) - float(other)) and only["mean"] == only["max"] / (48 * 64)


def test_a_sign_of_zero_and_a_nan_are_differences(tmp_path: Path) -> None:
    cfg = config()
    write_hub(tmp_path / "a", cfg, state(cfg))
    changed = state(cfg)
    changed["model.embed_tokens.weight"][0, 0] = -0.0  # the very first number is 0.0
    changed["model.norm.weight"][3] = float("nan")
    write_hub(tmp_path / "b", cfg, changed)
    found = diff(tmp_path / "a", tmp_path / "b")
    assert [(d.part, d.index, d.max) for d in found.different] == [
        ("model.embed_tokens.weight", (0, 0), 0.0),
        ("model.norm.weight", (3,), float("inf")),
    ]


def test_diff_reads_any_layout_and_names_what_only_one_side_has(tmp_path: Path, hub: Path) -> None:
    cfg = config(moe=True, dtype="bfloat16")
    write_hub(tmp_path / "fused", cfg, fused(state(cfg, dtype=torch.bfloat16)))
    assert diff(hub, tmp_path / "fused").equal
    less = state(cfg, dtype=torch.bfloat16)
    del less["model.layers.0.self_attn.q_norm.weight"]
    less["model.layers.0.self_attn.q_norm_x.weight"] = torch.zeros(3)
    write_hub(tmp_path / "less", cfg, less)
    found = diff(hub, tmp_path / "less")
    assert found.missing == ["model.layers.0.self_attn.q_norm.weight"]
    assert found.extra == ["model.layers.0.self_attn.q_norm_x.weight"]


def test_diff_between_dtypes_compares_values(tmp_path: Path, hub: Path) -> None:
    cfg = config(moe=True)
    wide = {n: t.float() for n, t in state(cfg, dtype=torch.bfloat16).items()}
    assert diff(hub, write_hub(tmp_path / "wide", cfg, wide)).equal
    wide["model.norm.weight"][5] += 1
    assert [d.index for d in diff(hub, write_hub(tmp_path / "off", cfg, wide)).different] == [(5,)]


def test_verify_finds_damage_of_every_kind(tmp_path: Path, hub: Path, capsys: pytest.CaptureFixture[str]) -> None:
    bias = {f"model.layers.{n}.mlp.expert_bias_E": torch.arange(8.0) for n in range(2)}
    hub = write_hub(tmp_path / "biased", config(moe=True), {**state(config(moe=True)), **bias})
    whole = tmp_path / "whole"
    convert(hub, whole, "per-expert")
    assert verify(whole).ok

    def fresh(name: str) -> Path:
        return Path(shutil.copytree(whole, tmp_path / name))

    flip(fresh("bit"), "model.norm.weight", 4, 3)
    flip(fresh("bias") / "titan_state", "layers.1.moe.expert_bias_E", 4, 3)
    (fresh("marker") / "complete.json").unlink()
    (fresh("stray") / "model-00002-of-00002.safetensors").write_bytes(b"")
    (fresh("gone") / "generation_config.json").unlink()
    (fresh("tokenizer") / "tokenizer.json").write_text("[]")
    cfg = fresh("config") / "config.json"
    text = cfg.read_text().replace('"moe_intermediate_size": 48', '"moe_intermediate_size": 84')
    cfg.write_text(text)
    for name, words in {
        "bit": ["model.norm.weight in model.safetensors"],
        "bias": ["titan_state/model.safetensors not what was written"],
        "marker": ["never completed"],
        "stray": ["model-00002-of-00002.safetensors is not of this export"],
        "gone": ["generation_config.json is missing"],
        "tokenizer": ["tokenizer.json not what was written"],
        "config": ["config.json not what was written", "moe_intermediate_size"],
    }.items():
        code, found = run(capsys, "verify", tmp_path / name)
        failed = [c["detail"] for c in found["checks"] if not c["ok"]]
        assert code == 1 and len(failed) == len(words), (name, found)
        assert all(word in detail for word, detail in zip(words, failed, strict=True)), (name, found)


def test_a_marker_with_a_path_in_it_is_refused(tmp_path: Path, hub: Path) -> None:
    convert(hub, tmp_path / "out", "per-expert")
    path = tmp_path / "out" / "complete.json"
    marker = json.loads(path.read_text())
    marker["files"]["../../etc/passwd"] = 1
    path.write_text(json.dumps(marker))
    result = verify(tmp_path / "out")
    assert not result.ok and "refused" in result.checks[-1].detail


def test_inspect_reports_problems_and_values_that_are_not_finite(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    cfg = config()
    bad = state(cfg)
    bad["model.norm.weight"][:2] = float("nan")
    del bad["model.layers.1.self_attn.k_norm.weight"]
    write_hub(tmp_path / "bad", cfg, bad)
    code, facts = run(capsys, "inspect", tmp_path / "bad", "--values")
    assert code == 1 and len(facts["problems"]) == 2
    assert "k_norm" in facts["problems"][0] and "2 values that are not finite" in facts["problems"][1]


def test_leftover_launcher_variables_and_hidden_devices_change_nothing(
    tmp_path: Path, hub: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    convert(hub, tmp_path / "plain", "native")
    for name, value in {
        "RANK": "3",
        "WORLD_SIZE": "8",
        "MASTER_ADDR": "nowhere",
        "CUDA_VISIBLE_DEVICES": "0,1",
    }.items():
        monkeypatch.setenv(name, value)
    convert(hub, tmp_path / "launched", "native")
    assert (tmp_path / "plain" / "__0_0.distcp").read_bytes() == (tmp_path / "launched" / "__0_0.distcp").read_bytes()


def test_help_is_quick_because_torch_is_not_needed_for_it() -> None:
    code = """
import sys
from hf_ckpt_adapter.cli import main
try:
    main(["--help"])
except SystemExit:
    pass
sys.exit("torch" in sys.modules)
"""
    assert subprocess.run([sys.executable, "-c", code], capture_output=True).returncode == 0


def test_an_interrupt_exits_with_130_and_the_same_command_goes_on(
    tmp_path: Path, hub: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from hf_ckpt_adapter.formats import staging as publish

    arguments = ["convert", str(hub), str(tmp_path / "step"), "--max-shard-size", "100kB"]
    real = publish.Staging.note

    def third_time(self: publish.Staging, name: str, note: Any) -> None:
        real(self, name, note)
        if len(self.done) == 3:
            raise KeyboardInterrupt

    monkeypatch.setattr(publish.Staging, "note", third_time)
    assert main(arguments) == 130
    assert "goes on where it stopped" in capsys.readouterr().err and not (tmp_path / "step").exists()
    monkeypatch.setattr(publish.Staging, "note", real)
    code, report = run(capsys, *arguments)
    assert code == 0 and report["bytes_resumed"] > 0


def test_the_progress_line_says_bytes_speed_and_time_left() -> None:
    import io

    from hf_ckpt_adapter.cli import _Bar

    screen = io.StringIO()
    bar = _Bar(screen, shown=True)
    bar(0, 2_000_000)
    bar._last = 0.0
    bar(1_000_000, 2_000_000)
    bar(2_000_000, 2_000_000)
    lines = screen.getvalue().split("\r")
    assert "1 MB of 2 MB" in lines[2] and "/s" in lines[2] and "s left" in lines[2]
    assert lines[-1].startswith("[" + "#" * 24 + "]") and lines[-1].endswith("\n")


def test_json_is_json_for_readers_that_know_no_infinity(
    tmp_path: Path, hub: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    cfg = config(moe=True, dtype="bfloat16")
    changed = state(cfg, dtype=torch.bfloat16)
    changed["model.norm.weight"][3] = float("nan")
    write_hub(tmp_path / "nan", cfg, changed)
    assert main(["diff", str(hub), str(tmp_path / "nan"), "--json"]) == 1
    found = json.loads(capsys.readouterr().out, parse_constant=lambda word: pytest.fail(f"{word} is not JSON"))
    assert found["different"][0]["max"] == "inf"


def test_names_out_of_a_file_cannot_talk_to_the_terminal(
    tmp_path: Path, hub: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    cfg = config(moe=True, dtype="bfloat16")
    strange = {"\x1b]0;owned!\x07": torch.zeros(1), **state(cfg, dtype=torch.bfloat16)}
    write_hub(tmp_path / "strange", cfg, strange)
    path = tmp_path / "strange" / "model.safetensors"
    path.write_bytes(path.read_bytes().replace(b"owned!", b"\\ud800"))  # half a character, which no encoding has
    for arguments in (["diff", str(hub), str(tmp_path / "strange")], ["inspect", str(tmp_path / "strange")]):
        assert main(arguments) == 1
        out = capsys.readouterr().out
        assert "\\ud800" in out and out.isascii() and all(c.isprintable() or c == "\n" for c in out)
    assert main(["convert", str(tmp_path / "strange"), str(tmp_path / "out")]) == 2
    assert "\\ud800" in capsys.readouterr().err


def test_a_reader_that_leaves_early_is_no_error() -> None:
    from hf_ckpt_adapter.cli import _say

    reading, writing = os.pipe()
    os.close(reading)
    with os.fdopen(writing, "w") as stream:
        _say("a report that nobody reads", stream)


@pytest.mark.parametrize("size", ["0", "0.5", "-1", "inf", "1e9", "9" * 400 + "TB", "5PB", "GB", "\u0665GB", ""])
def test_a_size_that_is_none_is_refused_in_words(hub: Path, capsys: pytest.CaptureFixture[str], size: str) -> None:
    with pytest.raises(SystemExit) as stop:
        main(["convert", str(hub), "out", f"--max-shard-size={size}"])
    assert stop.value.code == 2 and "is not a size; expected e.g. 5GB" in capsys.readouterr().err


def test_an_error_comes_on_a_line_of_its_own_after_the_bar() -> None:
    import io

    from hf_ckpt_adapter.cli import _Bar

    for shown, ending in ((True, "left\n"), (False, "")):
        screen = io.StringIO()
        bar = _Bar(screen, shown=shown)
        bar(1_000_000, 2_000_000)
        bar.end()
        assert screen.getvalue().replace(" ", "").endswith(ending.replace(" ", ""))


def test_padding_of_the_vocabulary_is_no_difference_between_a_step_and_its_export(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    cfg = config(vocab_size=322)
    hub = write_hub(tmp_path / "hub", cfg, state(cfg))
    assert run(capsys, "convert", hub, tmp_path / "step", "--pad-vocab-to", "8")[0] == 0
    code, found = run(capsys, "diff", tmp_path / "step", hub)
    assert code == 0 and found["same"] == len(state(cfg))
    assert [text.split(" in ")[0] for text in found["padding"]] == [
        "6 padding rows of lm_head.weight",
        "6 padding rows of model.embed_tokens.weight",
    ]


def test_a_few_norms_alone_are_described_with_what_they_lack(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    norms = {n: t for n, t in state(config()).items() if "q_norm" in n}
    code, facts = run(capsys, "inspect", write_hub(tmp_path / "norms", config(), norms))
    assert code == 1 and "0 query rows" in facts["problems"][0]


def test_a_source_for_logits_that_is_not_there_is_refused(
    tmp_path: Path, hub: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    convert(hub, tmp_path / "out", "per-expert")
    code, found = run(capsys, "verify", tmp_path / "out", "--logits", tmp_path / "nowhere")
    assert code == 2 and found["kind"] == "FileNotFoundError"


def test_an_interrupt_with_json_prints_an_object_too(
    hub: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def stop(*arguments: object, **options: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("hf_ckpt_adapter.describe.describe", stop)
    code, found = run(capsys, "inspect", hub)
    assert code == 130 and found == {"error": "interrupted", "kind": "KeyboardInterrupt"}
