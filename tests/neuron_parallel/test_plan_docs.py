"""Contract: the figures of docs/planning.md are those that the formulas give."""

import re
from pathlib import Path

import pytest
from neuron_parallel import Cluster, Training, core_memory, instance
from neuron_parallel.hardware import GIB
from neuron_parallel.memory import PARTS, device_allowance
from plan_shapes import QWEN3_4B, QWEN3_8B, QWEN3_30B, QWEN3_235B, TRN2, plan

TEXT = (Path(__file__).parents[2] / "docs" / "planning.md").read_text()
COLUMNS = {
    2: ("8B, TP4 x FSDP16, selective", QWEN3_8B, plan(64, tp=4), {"checkpointing": "selective"}),
    3: ("4B, FSDP64, selective", QWEN3_4B, plan(64), {"checkpointing": "selective"}),
    4: (
        "30B-A3B, EP8 x FSDP64, full, 8 loss chunks",
        QWEN3_30B,
        plan(64, ep=8),
        {"checkpointing": "full", "loss_chunks": 8},
    ),
}
ROWS = [
    [cell.strip(" *") for cell in line.strip().strip("|").split("|")]
    for line in TEXT.splitlines()
    if line.startswith("|")
]


@pytest.mark.parametrize("column", COLUMNS)
def test_the_table_of_three_plans_is_what_the_formulas_give(column):
    name, shape, layout, how = COLUMNS[column]
    assert ROWS[0][column] == name
    written = {row[0]: row[column] for row in ROWS}
    peak = core_memory(layout, shape, Training(**how)).peak
    assert {part: written[part] for part in PARTS} == {
        part: f"{size / GIB:.2f}" for part, size in peak.by_part().items()
    }
    assert written["all tensors"] == f"{peak.bytes / GIB:.1f}"
    assert written["with the allowance"] == f"{(peak.bytes + device_allowance(TRN2)) / GIB:.1f}"
    assert ("loss" in written["largest moment"]) == ("loss" in peak.where)


def test_the_sentences_below_the_table_are_right_too():
    def needs(shape, layout, **how):
        return f"{core_memory(layout, shape, Training(**how)).peak.bytes / GIB:.1f}"

    four = Cluster(instance("trn2.48xlarge"), 4).cores
    moe = {
        name: needs(QWEN3_30B, plan(64, ep=8), checkpointing="full", loss_chunks=8, dispatcher=name)
        for name in ("gather", "capacity", "all-to-all")
    }
    large = {
        name: needs(QWEN3_235B, plan(four, ep=8), checkpointing="full", dispatcher=name)
        for name in ("gather", "capacity")
    }
    said = re.sub(r"\s+", " ", TEXT)
    whole = {needs(QWEN3_30B, plan(64, ep=8), checkpointing="full", dispatcher=name) for name in moe}
    assert (
        f"8 loss chunks: gather {moe['gather']} GiB, capacity {moe['capacity']}, all-to-all {moe['all-to-all']} "
        f"(without chunks the loss is the largest moment of all three: {' '.join(whole)})"
    ) in said
    assert (
        f"235B-A22B on 4 nodes, EP8, full: capacity {large['capacity']}, gather {large['gather']}, which does not fit."
        in said
    )
    chunked = needs(QWEN3_4B, plan(64), checkpointing="selective", loss_chunks=8)
    assert f"8 chunks: 4B {chunked} instead of {needs(QWEN3_4B, plan(64), checkpointing='selective')} GiB" in said
