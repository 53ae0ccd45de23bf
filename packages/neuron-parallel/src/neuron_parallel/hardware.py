"""Trainium machines as data: chips, cores, memory and links, each number with its source.

    trn2 = instance("trn2.48xlarge")
    Cluster(trn2, nodes=2).cores                  # 128 logical cores
    Cluster(trn2).peak_flops("bf16")              # of one logical core: the denominator of MFU

Sources: [D] AWS Neuron SDK 2.33 documentation, architecture pages of Trainium2, Trainium3 and their instances; [F]
reports from the field, nothing that AWS states. A logical core is `lnc` physical NeuronCores that a program sees as
one.

MFU here divides by the chip's data-sheet peak shared out to its logical cores: 667e12 / 4 = 166.75e12 for BF16 at
LNC=2. TorchTitan's own table has 158e12 (2 x 79e12, the sum of what a physical core is quoted with), which reads 5.5 %
higher.
"""

import difflib
from dataclasses import dataclass, field
from functools import lru_cache

__all__ = ["GIB", "INSTANCES", "Chip", "Cluster", "Instance", "instance", "parse_cores"]

GIB = 1 << 30


@dataclass(frozen=True)
class Chip:
    """One accelerator device. Bandwidths in bytes per second."""

    name: str
    physical_cores: int
    hbm_bytes: int
    hbm_bandwidth: float
    peak: dict[str, float] = field(hash=False)
    """FLOP/s by dtype."""
    sbuf_bytes: int
    """On-chip working memory of a physical core."""
    psum_bytes: int
    source: str


@dataclass(frozen=True)
class Instance:
    """A machine, or several hosts sold and linked as one (UltraServer)."""

    name: str
    chip: Chip
    chips: int
    hosts: int
    link_bandwidth: float
    """Bytes per second of one chip to the others of its host."""
    host_link_bandwidth: float
    """Bytes per second of one chip to the other hosts of an UltraServer; 0 where there are none."""
    efa_bandwidth: float
    """Bytes per second of the whole instance to others; 0: cannot be clustered."""
    vcpus: int | None
    host_bytes: int | None
    source: str
    chip_numa: tuple[tuple[tuple[int, ...], str], ...] = ()
    """(chips, CPUs of their NUMA node), for binding."""

    def cores(self, lnc: int) -> int:
        """Logical cores of the instance."""
        return self.chips * self.chip.physical_cores // lnc

    def core_counts(self, lnc: int) -> tuple[int, ...]:
        """How many logical cores one job may take: powers of two, and all.

        Collectives were only accepted for groups that tile the torus of chips, which sizes of 4, 8, 16, 32 do [F].
        """
        every = self.cores(lnc)
        return tuple(sorted({1 << i for i in range(every.bit_length()) if 1 << i <= every} | {every}))


_TRN2_SOURCE = (
    "[D] Trainium2 architecture: 8 NeuronCore-v3, 667 BF16 / 1,299 FP8 / 181 FP32 TFLOPS, 96 GiB at 2.9 "
    "TB/s; SBUF 28 MiB (128 x 224 KiB), PSUM 2 MiB a core"
)
TRAINIUM2 = Chip(
    "Trainium2", 8, 96 * GIB, 2.9e12, {"bf16": 667e12, "fp8": 1299e12, "fp32": 181e12}, 28 << 20, 2 << 20, _TRN2_SOURCE
)
TRAINIUM3 = Chip(
    "Trainium3",
    8,
    144 * GIB,
    4.9e12,
    {"bf16": 671e12, "mxfp8": 2517e12},
    28 << 20,
    2 << 20,
    "[D] Trainium3 architecture: 671 BF16 / 2,517 MXFP8 TFLOPS, 144 GiB at 4.9 TB/s; SBUF and PSUM as Trainium2 "
    "(unconfirmed)",
)

_NUMA_48XL = (((0, 1, 2, 3, 12, 13, 14, 15), "48-95,144-191"), ((4, 5, 6, 7, 8, 9, 10, 11), "0-47,96-143"))
_GBIT = 1e9 / 8

INSTANCES: dict[str, Instance] = {
    row.name: row
    for row in (
        Instance(
            "trn2.3xlarge", TRAINIUM2, 1, 1, 1.024e12, 0, 0, None, None, "[D] one chip; no EFA in the table we have"
        ),
        Instance(
            "trn2.48xlarge",
            TRAINIUM2,
            16,
            1,
            1.024e12,
            0,
            3200 * _GBIT,
            192,
            2048 * GIB,
            "[D] 16 chips as a 4 x 4 torus, 1,024 GB/s a chip, EFA 3,200 Gbps; NUMA map [F]",
            _NUMA_48XL,
        ),
        Instance(
            "trn2u.48xlarge",
            TRAINIUM2,
            16,
            1,
            1.024e12,
            0,
            3200 * _GBIT,
            192,
            2048 * GIB,
            "[D] as trn2.48xlarge; NUMA map [F]",
            _NUMA_48XL,
        ),
        Instance(
            "trn2-ultraserver",
            TRAINIUM2,
            64,
            4,
            1.024e12,
            0.256e12,
            3200 * _GBIT,
            768,
            8192 * GIB,
            "[D] 4 trn2u.48xlarge, +256 GB/s a chip between them, EFA 3,200 Gbps",
        ),
        Instance(
            "trn3-gen1-ultraserver",
            TRAINIUM3,
            64,
            1,
            2.048e12,
            0,
            12800 * _GBIT,
            768,
            8192 * GIB,
            "[D] 64 chips, 2,048 GB/s a chip, EFA 12,800 Gbps; taken as one link domain",
        ),
        Instance(
            "trn3-gen2-ultraserver",
            TRAINIUM3,
            144,
            1,
            2.048e12,
            0,
            28800 * _GBIT,
            2304,
            27648 * GIB,
            "[D] 144 chips, 2,048 GB/s a chip, EFA 28,800 Gbps; taken as one link domain",
        ),
    )
}


def instance(name: str) -> Instance:
    """The row of that name. Raises ValueError with the known names."""
    if name not in INSTANCES:
        near = difflib.get_close_matches(name, INSTANCES, n=1)
        hint = f" Did you mean {near[0]!r}?" if near else ""
        raise ValueError(f"instance {name!r} is not in the table.{hint} Known: {', '.join(INSTANCES)}.")
    return INSTANCES[name]


@dataclass(frozen=True)
class Cluster:
    """`nodes` instances of one kind, of each of which a job takes `cores_per_node` logical cores (None: all).

    Raises ValueError for what no job can run on.
    """

    instance: Instance
    nodes: int = 1
    lnc: int = 2
    cores_per_node: int | None = None

    def __post_init__(self) -> None:
        name = self.instance.name
        if self.lnc not in (1, 2):
            raise ValueError(f"LNC {self.lnc} is not possible on {name}; use 1 or 2 (NEURON_LOGICAL_NC_CONFIG)")
        if not isinstance(self.nodes, int) or self.nodes < 1:
            raise ValueError(f"{self.nodes} nodes of {name}; give 1 or more")
        if self.nodes > 1 and not self.instance.efa_bandwidth:
            raise ValueError(f"{self.nodes} nodes of {name}: it has no EFA to form a cluster with; use 1")
        allowed = self.instance.core_counts(self.lnc)
        if self.cores_per_node is None:
            object.__setattr__(self, "cores_per_node", allowed[-1])
        elif self.cores_per_node not in allowed:
            raise ValueError(
                f"{self.cores_per_node} cores on one {name} are not possible; allowed at LNC={self.lnc}: "
                f"{', '.join(map(str, allowed))}"
            )
        elif self.nodes > 1 and self.cores_per_node != allowed[-1]:
            raise ValueError(
                f"{self.cores_per_node} cores on each of {self.nodes} {name}; over several nodes a job takes all "
                f"{allowed[-1]} of each"
            )

    @property
    def per_node(self) -> int:
        """Logical cores of the job on one instance."""
        assert self.cores_per_node is not None
        return self.cores_per_node

    @property
    def cores(self) -> int:
        """Logical cores of the job: its world size."""
        return self.nodes * self.per_node

    @property
    def cores_per_chip(self) -> int:
        """Logical cores of one chip."""
        return self.instance.chip.physical_cores // self.lnc

    @property
    def hbm_bytes(self) -> int:
        """Memory of one logical core: its share of the chip's (24 GiB at LNC=2 on Trainium2, one bank)."""
        return self.instance.chip.hbm_bytes // self.cores_per_chip

    @property
    def hbm_bandwidth(self) -> float:
        """Bytes per second of one logical core: its share of the chip's."""
        return self.instance.chip.hbm_bandwidth / self.cores_per_chip

    def peak_flops(self, dtype: str = "bf16") -> float:
        """FLOP/s of one logical core by the data sheet. Raises ValueError for a dtype the chip has no figure for."""
        peaks = self.instance.chip.peak
        if dtype not in peaks:
            raise ValueError(f"{self.instance.chip.name} has no peak for {dtype!r}; known: {', '.join(peaks)}")
        return peaks[dtype] / self.cores_per_chip

    def group_bandwidth(self, size: int, stride: int) -> tuple[float, str]:
        """Bytes per second of one hop of a ring over a group, and the name of its slowest link. Modelled, not measured.

        The group is ranks first, first+stride, ... (`size` of them). A hop inside a chip gets a core's share of the
        HBM. A hop out of a unit (the chip over NeuronLink or to another host of an UltraServer, the node over EFA) gets
        the unit's bandwidth, shared with the other groups that leave the unit at once: bandwidth * members in the unit
        / cores of the unit.
        """
        return _group_bandwidth(self, size, stride)


@lru_cache(maxsize=4096)
def _group_bandwidth(cluster: Cluster, size: int, stride: int) -> tuple[float, str]:
    span = size * stride
    host = cluster.instance.cores(cluster.lnc) // cluster.instance.hosts
    levels = []
    if span > cluster.cores_per_chip:
        levels.append(("NeuronLink", cluster.cores_per_chip, cluster.instance.link_bandwidth))
    if span > host and cluster.instance.hosts > 1:
        levels.append(("UltraServer link", cluster.cores_per_chip, cluster.instance.host_link_bandwidth))
    if span > cluster.per_node:
        levels.append(("EFA", cluster.per_node, cluster.instance.efa_bandwidth))
    rates = [(cluster.hbm_bandwidth, "HBM of one chip")]
    for name, cores, bandwidth in levels:
        members = max(1, min(size, cores // stride))
        rates.append((bandwidth * members / cores, name))
    return min(rates)


def parse_cores(text: str) -> tuple[int, ...]:
    """The cores that a NEURON_RT_VISIBLE_CORES value names: "0-3", "0,2,5-6". Raises ValueError for anything else."""
    cores: list[int] = []
    for part in text.split(","):
        first, dash, last = part.strip().partition("-")
        if not first.isdecimal() or (dash and not last.isdecimal()):
            raise ValueError(
                f"NEURON_RT_VISIBLE_CORES={text!r}: {part!r} is neither a core nor a range; write 0-3 or 0,2,5-6"
            )
        low, high = int(first), int(last) if dash else int(first)
        if high < low:
            raise ValueError(f"NEURON_RT_VISIBLE_CORES={text!r}: the range {part!r} runs backwards; write {high}-{low}")
        if high - low >= 1 << 16:
            raise ValueError(f"NEURON_RT_VISIBLE_CORES={text!r}: {part!r} is more cores than any host has")
        cores.extend(range(low, high + 1))
    twice = sorted({core for core in cores if cores.count(core) > 1}) if len(cores) < 1 << 12 else []
    if twice:
        raise ValueError(f"NEURON_RT_VISIBLE_CORES={text!r} names core {twice[0]} twice")
    return tuple(cores)
