"""Contract: the table says what a machine has, and what is not in it is refused by name, with what would be allowed."""

import pytest
from neuron_parallel import INSTANCES, Cluster, instance
from neuron_parallel.hardware import GIB, parse_cores
from plan_shapes import TRN2


@pytest.mark.parametrize(
    ("name", "chips", "physical", "logical", "petaflops", "hbm_gib", "hbm_tb"),
    [
        ("trn2.3xlarge", 1, 8, 4, 0.667, 96, 2.9),
        ("trn2.48xlarge", 16, 128, 64, 10.7, 1536, 46.4),
        ("trn2-ultraserver", 64, 512, 256, 42.8, 6144, 185.6),
        ("trn3-gen1-ultraserver", 64, 512, 256, 42.9, 9216, 313.6),
        ("trn3-gen2-ultraserver", 144, 1152, 576, 96.6, 20736, 705.6),
    ],
)
def test_chips_add_up_to_what_the_instance_is_quoted_with(name, chips, physical, logical, petaflops, hbm_gib, hbm_tb):
    row = instance(name)
    assert (row.chips, row.cores(1), row.cores(2)) == (chips, physical, logical)
    assert chips * row.chip.peak["bf16"] == pytest.approx(petaflops * 1e15, rel=0.005)
    assert chips * row.chip.hbm_bytes == hbm_gib * GIB
    assert chips * row.chip.hbm_bandwidth == pytest.approx(hbm_tb * 1e12, rel=0.001)


def test_every_row_names_its_source():
    assert all(row.source and row.chip.source for row in INSTANCES.values())


def test_a_logical_core_has_24_gib_and_a_quarter_of_the_chips_peak():
    assert TRN2.hbm_bytes == 24 * GIB
    assert TRN2.peak_flops() == 667e12 / 4


@pytest.mark.parametrize("cores", [3, 24, 0, 65, 128])
def test_a_core_count_that_does_not_tile_the_chips_is_refused_with_those_that_do(cores):
    with pytest.raises(ValueError, match=r"allowed at LNC=2: 1, 2, 4, 8, 16, 32, 64"):
        Cluster(instance("trn2.48xlarge"), cores_per_node=cores)


def test_an_instance_outside_the_table_is_refused_by_name():
    with pytest.raises(ValueError, match=r"'trn1.32xlarge' is not in the table.*trn2.48xlarge"):
        instance("trn1.32xlarge")


@pytest.mark.parametrize("bad", [{"lnc": 4}, {"nodes": 0}, {"nodes": 2, "cores_per_node": 8}])
def test_a_cluster_that_cannot_be_is_refused(bad):
    with pytest.raises(ValueError):
        Cluster(instance("trn2.48xlarge"), **bad)


def test_an_instance_without_efa_does_not_form_a_cluster():
    with pytest.raises(ValueError, match="EFA"):
        Cluster(instance("trn2.3xlarge"), nodes=2)


@pytest.mark.parametrize(
    ("text", "cores"), [("0-3", (0, 1, 2, 3)), ("0,2,5-6", (0, 2, 5, 6)), ("7", (7,)), (" 1, 2 ", (1, 2))]
)
def test_visible_cores_are_lists_and_ranges(text, cores):
    assert parse_cores(text) == cores


@pytest.mark.parametrize("text", ["3-1", "0,0", "", "a", "0-", "-1", "1,,2", "0-99999999", "0-2,1"])
def test_other_visible_cores_are_refused_with_the_value(text):
    with pytest.raises(ValueError, match="NEURON_RT_VISIBLE_CORES="):
        parse_cores(text)


def test_a_ring_is_as_fast_as_its_slowest_link():
    chip = TRN2.group_bandwidth(4, 1)
    host = TRN2.group_bandwidth(16, 4)
    nodes = Cluster(instance("trn2.48xlarge"), 4)
    assert chip == (2.9e12 / 4, "HBM of one chip")
    assert host == (1.024e12 / 4, "NeuronLink")  # four groups leave each chip at once
    assert nodes.group_bandwidth(256, 1) == (400e9, "EFA")  # one ring has the node's whole 3,200 Gbps
    assert nodes.group_bandwidth(4, 64) == (400e9 / 64, "EFA")  # 64 rings share it
