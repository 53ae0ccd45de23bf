"""The process group: what torch-neuronx's asks of its ranks, and gloo's sums."""

from emu_ranks import run, start

INIT = "import torch.distributed as dist\ndist.init_process_group('neuron')\nr = dist.get_rank()\n"


def test_sums_means_gathers_and_exchanges_are_right() -> None:
    out = run(
        INIT
        + """
x = torch.full((4,), float(r + 1), device=f"neuron:{r}")
assert x.device.index == r and torch.neuron.current_device() == r and torch.neuron.device_count() == 2
for op, expected in ((dist.ReduceOp.SUM, 3.0), (dist.ReduceOp.AVG, 1.5), (dist.ReduceOp.MAX, 2.0)):
    y = x.clone()
    dist.all_reduce(y, op=op)
    assert y.tolist() == [expected] * 4, (op, y)
y = x.clone()
dist.all_reduce(y, op=dist._make_nccl_premul_sum(0.5))
assert y.tolist() == [1.5] * 4
whole = torch.empty(8, device=x.device)
dist.all_gather_into_tensor(whole, x)
assert whole.tolist() == [1.0] * 4 + [2.0] * 4
part = torch.empty(2, device=x.device)
dist.reduce_scatter_tensor(part, x, op=dist.ReduceOp.AVG)
assert part.tolist() == [1.5] * 2
swapped = torch.empty_like(x)
dist.all_to_all_single(swapped, x)
assert swapped.tolist() == [1.0] * 2 + [2.0] * 2
b = x.clone()
dist.broadcast(b, 1)
assert b.tolist() == [2.0] * 4
work = dist.all_reduce(x, async_op=True)
assert work.get_future().wait()[0].device == x.device
dist.barrier()
print("fine", torch.neuron.current_device())
""",
        2,
    )
    assert [line.split() for line in out] == [["fine", "0"], ["fine", "1"]]


def test_uneven_exchanges_and_point_to_point_are_refused() -> None:
    out = run(
        INIT
        + """
x = torch.ones(3, device=f"neuron:{r}")
for what in (lambda: dist.all_to_all_single(torch.empty_like(x), x, [1, 2] if r else [1, 2], [1, 2]), lambda:
dist.send(x, 1 - r)):
    try:
        what()
    except RuntimeError as error:
        print(str(error).splitlines()[0][:40])
""",
        2,
    )
    for text in out:
        assert text.splitlines() == [
            "all_to_all_single on neuron takes no spl",
            "send is not there on neuron (seen so in ",
        ]


def test_every_core_for_every_rank_is_refused_as_the_first_generated_launch_would_be() -> None:
    results = start(INIT, 2, {"NEURON_RT_VISIBLE_CORES": "0-3"})
    assert any(code and "reserves 4 cores for each rank" in error for code, _, error in results)


def test_two_ranks_cannot_have_one_core() -> None:
    results = start(INIT, 2, {"NEURON_RT_VISIBLE_CORES": "1"})
    assert any(code and "core 1 is taken by another process" in error for code, _, error in results)


def test_a_device_that_was_touched_before_its_group_is_refused() -> None:
    results = start("x = torch.ones(1, device='neuron')\n" + INIT, 2)
    # The other rank may find the first one gone instead.
    assert any(code and "started by an allocation before init_process_group" in error for code, _, error in results)


def test_barrier_is_for_the_default_group_and_sizes_divide_the_world() -> None:
    out = run(
        INIT
        + """
group = dist.new_group([0, 1])
try:
    dist.barrier(group)
except RuntimeError as error:
    print(str(error).splitlines()[0][:39])
try:
    dist.new_group([0, 1])
except RuntimeError as error:
    print(str(error).splitlines()[0])
if r < 2:
    pass
""",
        2,
    )
    assert all(text.splitlines() == ["barrier is there for the default group "] for text in out)
    results = start(INIT + "dist.new_group([0, 1])", 3)
    assert "has 2 ranks, which do not divide the world's 3" in results[0][2]


def test_a_compilation_on_one_rank_is_longer_than_the_group_waits() -> None:
    code = """
import datetime
import torch.distributed as dist
dist.init_process_group("neuron", timeout=datetime.timedelta(seconds=2))
r = dist.get_rank()
x = torch.ones(3, device=f"neuron:{r}")
if r:
    neuron_emu.set_compile_delay(5)
    x * 2
dist.all_reduce(x)
torch.neuron.synchronize()
"""
    (first, _, error), _ = start(code, 2)
    assert first and "imed out" in error


def test_shards_that_draw_for_themselves_are_copies_and_are_counted() -> None:
    out = run(
        INIT
        + """
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor, empty
mesh = init_device_mesh("neuron", (2,))
t = empty(8, device_mesh=mesh, placements=[Shard(0)])
torch.manual_seed(0)
torch.nn.init.normal_(t)
mine = t.to_local().clone()
both = torch.empty(8, device=mine.device)
dist.all_gather_into_tensor(both, mine)
rows = neuron_emu.counts("generator-ignored")
print(torch.equal(both[:4], both[4:]), len(rows), rows[0].detail)
""",
        2,
    )
    assert [text.strip() for text in out] == ["True 1 aten::normal_"] * 2
