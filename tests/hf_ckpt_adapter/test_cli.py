"""Contract of cli.py: exit codes, errors in words, progress, and help without torch. (Cases 084, 088, 118, 128.)"""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from hf_ckpt_adapter import convert_checkpoint as convert
from hf_ckpt_adapter.cli import export_main, main
from hf_tiny import config, equal, fused, run, state, write_hub
from safetensors.torch import load_file


@pytest.fixture
def hub(tmp_path: Path) -> Path:
    cfg = config(moe=True, dtype="bfloat16")
    return write_hub(tmp_path / "hub", cfg, state(cfg, dtype=torch.bfloat16))


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
    assert lines[1].rstrip() == "[" + " " * 24 + "] 0 B of 2 MB"  # nothing is known of the speed yet
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

    for shown, ending in ((True, "1 MB of 2 MB\n"), (False, "")):
        screen = io.StringIO()
        bar = _Bar(screen, shown=shown)
        bar(1_000_000, 2_000_000)
        bar.end()
        assert screen.getvalue().replace(" ", "").endswith(ending.replace(" ", ""))


def test_an_interrupt_with_json_prints_an_object_too(
    hub: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def stop(*arguments: object, **options: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("hf_ckpt_adapter.describe.describe", stop)
    code, found = run(capsys, "inspect", hub)
    assert code == 130 and found == {"error": "interrupted", "kind": "KeyboardInterrupt"}
