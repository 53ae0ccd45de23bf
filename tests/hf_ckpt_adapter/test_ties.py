"""Contract for tied heads: the tensors are looked at, not only the config, and nothing is thrown away in
silence. (Cases 001-012.)"""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from hf_ckpt_adapter import Layout, Options, convert_state, export_step
from hf_ckpt_adapter import convert_checkpoint as convert
from hf_tiny import config, equal, state, write_hub
from safetensors.torch import load_file

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
EMBED, HEAD = "model.embed_tokens.weight", "lm_head.weight"


def tied_state(**changes: torch.Tensor) -> dict[str, torch.Tensor]:
    return {**state(config(), head=False), **changes}


def hub(folder: Path, tensors: dict[str, torch.Tensor], **kwargs: Any) -> Path:
    return write_hub(folder, config(tie_word_embeddings=True), tensors, **kwargs)


def out(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "model.safetensors")


def test_head_absent_equal_or_in_another_shard_all_give_the_same_keys(tmp_path: Path) -> None:
    plain = tied_state()
    equal_head = {**plain, HEAD: plain[EMBED].clone()}
    rest = [n for n in equal_head if n not in (EMBED, HEAD)]
    folders = [
        hub(tmp_path / "a", plain),
        hub(tmp_path / "b", equal_head),
        hub(tmp_path / "c", equal_head, shards=[[EMBED], [*rest, HEAD]]),
    ]
    for folder in folders:
        convert(folder, tmp_path / f"{folder.name}-out", "per-expert")
        equal(out(tmp_path / f"{folder.name}-out"), plain)
        convert(folder, tmp_path / f"{folder.name}-head", "per-expert", options=Options(head="write"))
        equal(out(tmp_path / f"{folder.name}-head"), equal_head)


@pytest.mark.parametrize("layout", ["per-expert", "native"])
def test_a_head_that_differs_stops_the_conversion_naming_both_and_the_gap(tmp_path: Path, layout: str) -> None:
    folder = hub(tmp_path / "hub", tied_state(**{HEAD: tied_state()[EMBED] + 0.5}))
    with pytest.raises(ValueError, match=r"'lm_head.weight'.*'model.embed_tokens.weight' differ by up to 0.5"):
        convert(folder, tmp_path / "out", layout)
    assert not (tmp_path / "out").exists()


def test_one_ulp_is_a_difference_and_untie_keeps_both_and_says_so(tmp_path: Path) -> None:
    embed = tied_state()[EMBED]
    head = embed.clone()
    head[-1, -1] = torch.nextafter(head[-1, -1], torch.tensor(float("inf")))
    folder = hub(tmp_path / "hub", tied_state(**{HEAD: head}))
    with pytest.raises(ValueError, match="differ by up to"):
        convert(folder, tmp_path / "out", "per-expert")
    convert(folder, tmp_path / "untied", "per-expert", options=Options(on_untied="untie"))
    equal(out(tmp_path / "untied"), tied_state(**{HEAD: head}))
    assert json.loads((tmp_path / "untied" / "config.json").read_text())["tie_word_embeddings"] is False
    convert(folder, tmp_path / "dropped", "per-expert", options=Options(on_untied="drop"))
    equal(out(tmp_path / "dropped"), tied_state())


def test_a_dcp_with_both_copies_of_a_tied_pair_exports_one(tmp_path: Path) -> None:
    native = convert_state(tied_state(), Layout.NATIVE, tied=True).tensors
    native["lm_head.weight"] = native["lm_head.weight"].clone()
    dcp.save(native, checkpoint_id=tmp_path / "step", no_dist=True)
    export_step(tmp_path / "step", tmp_path / "out", assets=hub(tmp_path / "hub", tied_state()))
    equal(out(tmp_path / "out"), tied_state())
    native["lm_head.weight"][3, 4] += 1
    dcp.save(native, checkpoint_id=tmp_path / "moved", no_dist=True)
    with pytest.raises(ValueError, match=r"differ by up to 1\b"):
        export_step(tmp_path / "moved", tmp_path / "out2", assets=tmp_path / "hub")


def test_only_the_outer_setting_ties(tmp_path: Path) -> None:
    cfg = config(tie_word_embeddings=False, text_config={"tie_word_embeddings": True})
    convert(write_hub(tmp_path / "hub", cfg, state(cfg)), tmp_path / "out", "per-expert")
    equal(out(tmp_path / "out"), state(cfg))


def test_a_backbone_without_head_is_recognised_and_allowed_on_request(tmp_path: Path) -> None:
    bare = {n.removeprefix("model."): t for n, t in state(config(), head=False).items()}
    folder = write_hub(tmp_path / "hub", config(), bare)
    with pytest.raises(ValueError, match=r"backbone without its head.*tie_word_embeddings is false"):
        convert(folder, tmp_path / "out", "per-expert")
    convert(folder, tmp_path / "out", "per-expert", options=Options(allow_missing_head=True))
    equal(out(tmp_path / "out"), state(config(), head=False))


def test_a_tied_file_that_holds_only_the_head_gives_its_embedding(tmp_path: Path) -> None:
    tensors = tied_state()
    tensors[HEAD] = tensors.pop(EMBED)
    report = convert(hub(tmp_path / "hub", tensors), tmp_path / "out", "per-expert")
    equal(out(tmp_path / "out"), tied_state())
    assert any("taken from the tied lm_head" in w for w in report.warnings)


def test_a_dict_that_was_converted_can_still_be_saved(tmp_path: Path) -> None:
    from safetensors.torch import save_file

    before = tied_state()
    convert_state(before, Layout.NATIVE, tied=True)
    save_file(before, tmp_path / "again.safetensors")


@pytest.mark.parametrize("head", ["omit", "write"])
def test_asking_for_the_head_does_not_hide_that_it_differs(tmp_path: Path, head: str) -> None:
    folder = hub(tmp_path / "hub", tied_state(**{HEAD: tied_state()[EMBED] + 0.5}))
    with pytest.raises(ValueError, match=r"differ by up to 0.5"):
        convert(folder, tmp_path / "out", "per-expert", options=Options(head=head))
    convert(folder, tmp_path / "out", "per-expert", options=Options(head=head, on_untied="drop"))
    expected = tied_state() if head == "omit" else tied_state(**{HEAD: tied_state()[EMBED]})
    equal(out(tmp_path / "out"), expected)


def test_a_tied_pair_of_two_dtypes_is_refused_in_words(tmp_path: Path) -> None:
    folder = hub(tmp_path / "hub", tied_state(**{HEAD: tied_state()[EMBED].double()}))
    with pytest.raises(
        ValueError, match=r"'model.embed_tokens.weight' is torch.float32 and 'lm_head.weight' is torch.f"
    ):
        convert(folder, tmp_path / "out", "per-expert")


def test_a_tied_pair_with_padding_is_compared_without_it(tmp_path: Path) -> None:
    head = torch.cat([tied_state()[EMBED], torch.full((8, 64), 7.0)])
    embed = torch.cat([tied_state()[EMBED], torch.full((8, 64), 9.0)])
    folder = hub(tmp_path / "hub", tied_state(**{HEAD: head, EMBED: embed}))
    convert(folder, tmp_path / "out", "per-expert", options=Options(trim_vocab=True))
    equal(out(tmp_path / "out"), tied_state())


@pytest.mark.parametrize("layout", [Layout.NATIVE, Layout.PER_EXPERT])
def test_a_tied_state_dict_whose_head_is_another_is_refused_and_not_thrown_away(layout: Layout) -> None:
    tensors = tied_state(**{HEAD: tied_state()[EMBED].clone()})
    tensors[HEAD][0, 0] = tensors[EMBED][0, 0] = float("nan")  # the same bits are the same number
    convert_state(tensors, layout, tied=True)
    tensors[HEAD][-1, -1] += 0.5
    with pytest.raises(ValueError, match="ties lm_head to the embedding, but in this state they differ"):
        convert_state(tensors, layout, tied=True)
    equal(convert_state(tensors, Layout.PER_EXPERT).tensors, tensors)
