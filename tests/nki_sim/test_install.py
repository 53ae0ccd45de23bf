"""The contract: `nki` is this simulator only when asked, never hides a real one, and arguments may be numpy or torch-like."""

import inspect
import sys
import types

import ml_dtypes
import nki_sim
import nki_sim.isa as nisa
import nki_sim.language as nl
import numpy as np
import pytest
from sim_harness import hbm, randn


@pytest.fixture(autouse=True)
def clean():
    yield
    nki_sim.uninstall()
    for name in [n for n in sys.modules if n == "nki" or n.startswith("nki.")]:
        del sys.modules[name]


def test_install_makes_the_alias_and_uninstall_takes_it_back():
    nki_sim.install()
    import nki
    import nki.isa
    import nki.language

    assert nki.isa is nisa and nki.language is nl and nki.jit is nki_sim.jit and not hasattr(nki, "cpu_simulate")
    nki_sim.uninstall()
    assert "nki" not in sys.modules


def test_pypis_placeholder_is_told_from_a_real_package(monkeypatch, tmp_path):
    (tmp_path / "nki").mkdir()
    (tmp_path / "nki" / "__init__.py").write_text("")
    monkeypatch.syspath_prepend(str(tmp_path))
    nki_sim.install()
    import nki.isa

    assert nki.isa is nisa
    nki_sim.uninstall()
    sys.modules.pop("nki", None)
    (tmp_path / "nki" / "isa.py").write_text("real = True")
    with pytest.raises(RuntimeError, match=r"real nki.isa"):
        nki_sim.install()


def test_old_names_exist_only_under_their_compat_mode():
    nki_sim.install(compat="0.3")
    import nki
    from nki.isa.constants import oob_mode

    assert oob_mode is nisa.oob_mode and nki.cpu_simulate
    from nki.collectives import ReplicaGroup

    with pytest.raises(NotImplementedError, match="ReplicaGroup"):
        ReplicaGroup([[0]])
    nki_sim.install()
    assert "nki.isa.constants" not in sys.modules
    with pytest.raises(ValueError, match=r"0\.3"):
        nki_sim.install(compat="0.1")


def test_awss_simulator_is_used_only_on_request_and_only_if_there():
    kernel = nki_sim.jit(lambda x: x)
    with pytest.raises(ModuleNotFoundError, match="AWS"):
        nki_sim.simulate(kernel, backend="nki")
    nki_sim.install()
    with pytest.raises(ModuleNotFoundError, match="this simulator here"):
        nki_sim.simulate(kernel, backend="nki")
    nki_sim.uninstall()
    real = types.ModuleType("nki")
    real.isa = sys.modules["nki.isa"] = types.ModuleType("nki.isa")
    real.simulate = lambda function: lambda *args: ("theirs", function, args)
    sys.modules["nki"] = real
    assert nki_sim.simulate(kernel, backend="nki")(1) == ("theirs", kernel.function, (1,))
    with pytest.raises(ValueError, match="backend"):
        nki_sim.simulate(kernel, backend="gpu")


def plus_one(x, y):
    tile = nl.load(x)
    nisa.tensor_scalar(tile, tile, nl.add, 1.0)
    nisa.dma_copy(y, tile)
    out = hbm(*x.shape, dtype=x.dtype)
    nisa.dma_copy(out, tile)
    return {"out": out, "same": (y, 3)}


@pytest.mark.parametrize("dtype", [np.float32, ml_dtypes.bfloat16, np.float16, np.int32])
def test_arrays_in_arrays_out_and_written_arguments_updated(dtype):
    x, y = np.arange(8).reshape(2, 4).astype(dtype), np.zeros((4, 2), dtype).T
    got = nki_sim.jit(plus_one)(x, y)
    want = (x.astype(np.float32) + 1).astype(dtype)
    assert got["out"].tobytes() == want.tobytes() and got["same"][1] == 3
    assert (y == want).all() and got["same"][0].dtype == dtype


def test_a_read_only_argument_that_is_written_and_a_foreign_one_are_refused():
    x, y = randn(2, 4), randn(2, 4)
    y.flags.writeable = False
    with pytest.raises(ValueError, match="read-only"):
        nki_sim.jit(plus_one)(x, y)
    with pytest.raises(TypeError, match="numpy arrays or torch"):
        nki_sim.trace(plus_one, (x, y)).run(nki_sim.Spec((2, 4), "float32"), x)
    for empty in (np.zeros((0, 4), np.float32), np.zeros((), np.float32)):
        with pytest.raises(nki_sim.NkiError, match=r"^shape: an argument of shape \("):
            nki_sim.jit(plus_one)(empty, x)


def float8(x):
    tile, out = nl.ndarray(x.shape, "float8_e4m3"), hbm(*x.shape, dtype="float8_e4m3")
    nisa.tensor_copy(tile, nl.load(x))
    nisa.dma_copy(out, tile)
    return out


def test_torch_tensors_come_back_as_torch_tensors():
    import torch

    for dtype in (torch.float32, torch.bfloat16):
        x, y = torch.arange(8).reshape(2, 4).to(dtype), torch.zeros(2, 4, dtype=dtype, requires_grad=False)
        got = nki_sim.jit(plus_one)(torch.nn.Parameter(x), y)
        assert got["out"].dtype == dtype and torch.equal(got["out"], x + 1) and torch.equal(y, x + 1)
        with pytest.raises(TypeError, match=r"float8_e4m3 does not exist in torch"):
            nki_sim.jit(float8)(x)
        x.untyped_storage().resize_(0)  # as FSDP frees gathered weights; .numpy() on it would forbid that


SIGNATURES = {  # NKI 0.6's API pages (aws-neuron-sdk 81ce03a), `name` apart; kernels pass many of these by position
    "dma_copy": "dst src priority oob_mode dge_mode engine",
    "dma_compute": "dst srcs reduce_op scales unique_indices oob_mode",
    "dma_transpose": "dst src axes priority dge_mode oob_mode",
    "nc_matmul": "dst stationary moving is_stationary_onezero is_moving_onezero is_transpose accumulate tile_position tile_size perf_mode",
    "nc_transpose": "dst data engine",
    "tensor_copy": "dst src engine",
    "tensor_copy_predicated": "dst src predicate reverse_pred",
    "memset": "dst value engine",
    "tensor_tensor": "dst data1 data2 op engine",
    "tensor_scalar": "dst data op0 operand0 reverse0 op1 operand1 reverse1 engine",
    "scalar_tensor_tensor": "dst data op0 operand0 op1 operand1 reverse0 reverse1",
    "tensor_reduce": "dst op data axis negate keepdims",
    "tensor_partition_reduce": "dst op data",
    "tensor_scalar_reduce": "dst data op0 operand0 reduce_op reduce_res reverse0 reduce_cmd reduce_init reduce_res_negate",
    "tensor_tensor_scan": "dst data0 data1 initial op0 op1 reverse0 reverse1",
    "activation": "dst op data bias scale reduce_op reduce_res reduce_cmd",
    "activation_reduce": "dst op data reduce_op reduce_res bias scale",
    "reciprocal": "dst data",
    "iota": "dst pattern offset channel_multiplier",
    "affine_select": "dst pattern channel_multiplier on_true_tile on_false_value cmp_op offset",
    "range_select": "dst on_true_tile comp_op0 comp_op1 bound0 bound1 reduce_cmd reduce_res reduce_op range_start on_false_value",
    "select_reduce": "dst predicate on_true on_false reduce_res reduce_cmd reduce_op reverse_pred",
    "nc_stream_shuffle": "dst src shuffle_mask",
    "bn_stats": "dst data",
    "bn_aggr": "dst data",
    "max8": "dst src",
    "nc_find_index8": "dst data vals",
    "nc_match_replace8": "dst data vals imm dst_idx",
    "local_gather": "dst src_buffer index num_elem_per_idx num_valid_indices",
    "nc_n_gather": "dst data indices",
    "nonzero_with_count": "dst src index_offset padding_val",
    "register_alloc": "x",
    "register_move": "dst src",
    "register_load": "dst src",
    "register_store": "dst src",
    "sendrecv": "src dst send_to_rank recv_from_rank pipe_id dma_engine",
    "core_barrier": "data cores engine",
}


@pytest.mark.parametrize("name", SIGNATURES)
def test_instructions_have_nkis_names_and_order_of_parameters(name):
    assert list(inspect.signature(getattr(nisa, name)).parameters) == SIGNATURES[name].split()


def test_importing_the_package_imports_no_torch():
    import subprocess

    code = "import sys, nki_sim; assert 'torch' not in sys.modules and 'matplotlib' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)
