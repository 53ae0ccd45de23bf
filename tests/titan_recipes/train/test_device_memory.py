"""Contract: metrics name the highest memory peak of all ranks and its rank, of how much, and warn once before it runs
out.

A fake device module says what each rank's device would.
"""

import json
import logging
from types import SimpleNamespace

import pytest
from ranks import run_ranks

GIB = 1 << 30


def fake_device(reserved_gib, capacity_gib=24.0, **stats):
    """A device module as torch.neuron would be; `reserved_gib` None leaves the statistic out."""
    if reserved_gib is not None:
        stats["reserved_bytes.all.peak"] = int(reserved_gib * GIB)
    calls = []
    return SimpleNamespace(
        calls=calls,
        get_device_name=lambda device: "Fake NeuronCore",
        current_device=lambda: 0,
        get_device_properties=lambda device: SimpleNamespace(total_memory=int(capacity_gib * GIB)),
        memory_stats=lambda device: calls.append("memory_stats") or stats,
        reset_peak_memory_stats=lambda: calls.append("reset"),
        empty_cache=lambda: None,
        synchronize=lambda: calls.append("synchronize"),
    )


def metrics_of(rank, folder, peaks_by_rank):
    """Log a step for each entry of this rank's peaks; what rank 0 wrote, and the warnings it gave."""
    import torchtitan.components.metrics as titan
    from titan_recipes.train.metrics import RunMetrics
    from torchtitan.distributed import ParallelDims
    from torchtitan.tools import utils

    warnings = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: warnings.append(record.getMessage())
    logging.getLogger("titan_recipes.train.device_memory").addHandler(handler)
    device = fake_device(peaks_by_rank[rank][0])
    titan.device_module = utils.device_module = device
    world = len(peaks_by_rank)
    dims = ParallelDims(dp_replicate=1, dp_shard=world, cp=1, tp=1, pp=1, ep=1, world_size=world)
    processor = RunMetrics.Config(log_freq=1).build(parallel_dims=dims, dump_folder=str(folder))
    processor.start(0, len(peaks_by_rank[rank]))
    for step, peak in enumerate(peaks_by_rank[rank], 1):
        device.memory_stats = lambda device, peak=peak: {"reserved_bytes.all.peak": int(peak * GIB)}
        processor.log(step, 1.0, 1.0, 1.0)
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()] if rank == 0 else []
    return lines, warnings


def test_the_record_has_every_ranks_peak_the_highest_and_where_it_was(tmp_path):
    (lines, warnings), (_, others) = run_ranks(metrics_of, 2, tmp_path, [[3.0, 4.0], [5.0, 2.0]])
    got = [(r["memory_gib"], r["memory_rank"], r["memory_capacity_gib"], r["memory_gib_by_rank"]) for r in lines]
    assert got == [(5.0, 1, 24.0, [3.0, 5.0]), (4.0, 0, 24.0, [4.0, 2.0])]
    assert warnings == others == []


def test_over_ninety_percent_rank_0_warns_once_naming_the_rank(tmp_path):
    peaks = [[1.0] * 4, [21.5, 21.7, 23.0, 23.5]]  # 90 % of 24 is 21.6
    (lines, warnings), (_, others) = run_ranks(metrics_of, 2, tmp_path, peaks)
    assert len(lines) == 4 and len(warnings) == 1 and others == []
    assert "21.70 of 24.00 GiB (90%) on rank 1" in warnings[0] and "local_batch_size" in warnings[0]


@pytest.fixture
def one_rank(tmp_path):
    import torch.distributed as dist

    dist.init_process_group("gloo", init_method=f"file://{tmp_path / 'store'}", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.parametrize(
    ("stats", "expected"),
    [
        ({"reserved_bytes.all.peak": 3 * GIB, "active_bytes.all.peak": GIB}, 3.0),
        ({"active_bytes.all.peak": GIB}, 1.0),
        ({}, None),
    ],
    ids=["reserved", "active-only", "none"],
)
def test_a_device_that_reports_less_is_read_for_what_it_has(monkeypatch, one_rank, stats, expected):
    import torchtitan.components.metrics as titan
    from titan_recipes.train.device_memory import MemoryWatch
    from torchtitan.tools import utils

    device = fake_device(None, **stats)
    monkeypatch.setattr(titan, "device_module", device)
    monkeypatch.setattr(utils, "device_module", device)
    watch = MemoryWatch(titan.DeviceMemoryMonitor("cpu"), warns=True)
    device.calls.clear()
    peaks = watch.look()
    assert device.calls == ["synchronize", "memory_stats"]
    assert peaks.highest == expected or (expected is None and peaks.highest != peaks.highest)


def test_a_device_that_reserves_nothing_and_knows_no_capacity_has_what_is_in_use(monkeypatch, one_rank):
    """torch-neuronx reports 0 reserved bytes always, and may report 0 as its capacity."""
    import torchtitan.components.metrics as titan
    from titan_recipes.train.device_memory import MemoryWatch
    from torchtitan.tools import utils

    device = fake_device(0, capacity_gib=0.0, **{"active_bytes.all.peak": 3 * GIB})
    monkeypatch.setattr(titan, "device_module", device)
    monkeypatch.setattr(utils, "device_module", device)
    peaks = MemoryWatch(titan.DeviceMemoryMonitor("cpu"), warns=True).look()
    assert (peaks.highest, peaks.capacity) == (3.0, 0.0)
