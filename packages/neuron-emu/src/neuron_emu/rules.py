"""What the emulated device is strict about: a row for each rule, with its source and what it does by default.

Sources: [D] AWS Neuron documentation 2.32 / 2.33, [P] the public pre-release sources of torch-neuronx (April 2026),
which
may have changed since, [T] public field notes of others, [R] reproduced on this emulation. Nothing was run on a device.
`point` is the number of a subject; several rules may share one.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from enum import IntEnum

__all__ = ["RULES", "Mode", "Rule", "mode", "rule_named"]


class Mode(IntEnum):
    """What happens when a rule is met."""

    OFF = 0
    COUNT = 1
    REFUSE = 2


@dataclass(frozen=True)
class Rule:
    """One rule: its name is its switch (`neuron_emu.set_rule`) and its counter (`neuron_emu.report`)."""

    point: int
    name: str
    default: Mode
    source: str
    fact: str


OFF, COUNT, REFUSE = Mode

RULES: tuple[Rule, ...] = (
    Rule(
        1, "one-core-per-process", REFUSE, "[D, P]", "a process of a group has one core, and reserves all that it lists"
    ),
    Rule(1, "core-taken", REFUSE, "[D]", "two processes cannot have the same core"),
    Rule(
        2, "runtime-before-process-group", REFUSE, "[P]", "init_process_group comes before anything touches the device"
    ),
    Rule(2, "forked-after-start", REFUSE, "[P]", "the runtime does not survive a fork"),
    Rule(3, "all-to-all-splits", REFUSE, "[P]", "all-to-all takes equal parts: no split sizes, or ones"),
    Rule(3, "point-to-point", REFUSE, "[P; listed for 2.33 by D]", "no send and recv"),
    Rule(3, "barrier-on-subgroup", REFUSE, "[P]", "barrier is there for the default group alone"),
    Rule(3, "group-size", REFUSE, "[P]", "a group's size divides the world's"),
    Rule(3, "two-rank-all-to-all", COUNT, "[T]", "an all-to-all of two ranks was refused at LNC=2"),
    Rule(
        4, "group-time-limit", REFUSE, "[D, P]", "a watchdog enforces a group's time limit, also while a rank compiles"
    ),
    Rule(5, "random-draw", COUNT, "[P]", "no random operator is registered: draws come from the CPU generator"),
    Rule(5, "generator-ignored", COUNT, "[P, R]", "the device's 16-byte generator state is read by no operator"),
    Rule(5, "device-generator", REFUSE, "[P]", "CPU kernels take no generator of the device"),
    Rule(6, "int64-wraps", COUNT, "[P, T]", "arithmetic on int64 has 32 bits"),
    Rule(6, "float64", REFUSE, "[P, T]", "no float64"),
    Rule(7, "host-round-trip", COUNT, "[P]", "sort and argsort go device -> host -> device"),
    Rule(7, "sort-compiled", REFUSE, "[T: NCC_EVRF029]", "sort does not compile"),
    Rule(
        8,
        "bounds-check",
        COUNT,
        "[P]",
        "index_select, scatter and index_put wait twice each, unless TORCH_NEURONX_SKIP_OP_PRECONDITIONS=1",
    ),
    Rule(8, "out-of-range-index", COUNT, "[P]", "with that variable nothing is checked: here the result is poison"),
    Rule(9, "grouped-mm-blocks", REFUSE, "[P]", "_grouped_mm takes rows and offsets that are multiples of 128"),
    Rule(9, "grouped-mm-copy", COUNT, "[P]", "_grouped_mm copies an expert's matrix for each block of 128 rows"),
    Rule(10, "cpu-fallback", COUNT, "[P]", "an operator that is not registered runs on the CPU, without a word"),
    Rule(10, "host-wait", COUNT, "[D, P]", "reading a value or copying to the host waits for the device"),
    Rule(11, "select-backward", COUNT, "[P]", "the backward of select goes over the host"),
    Rule(11, "event-elapsed-time", REFUSE, "[P]", "events take no times"),
    Rule(12, "symbolic-size", REFUSE, "[D]", "torch.compile takes static shapes alone; dynamic=True is rejected"),
    Rule(12, "compile-mode", REFUSE, "[D]", "torch.compile has the default mode alone"),
    Rule(12, "graph", COUNT, "[D]", "each graph is compiled, which takes minutes"),
    Rule(12, "new-signature", COUNT, "[D, P]", "eager compiles each operator for each new set of shapes and dtypes"),
    Rule(
        13,
        "nki-contract",
        REFUSE,
        "[D, P]",
        "nki_op and wrap_nki take annotated functions, grids that are tuples, constants",
    ),
    Rule(13, "wrap-again", COUNT, "[P]", "wrap_nki registers a kernel again each time it is called"),
    Rule(14, "out-of-memory", REFUSE, "[D]", "a logical core has 24 GiB at LNC=2"),
    Rule(
        15, "deferred-error", COUNT, "[D]", "errors show at the next synchronisation, unless NEURON_LAUNCH_BLOCKING=1"
    ),
    Rule(16, "destroy-ends-process", OFF, "[T]", "destroy_process_group may end the process"),
    Rule(17, "device-index", REFUSE, "[P]", "a rank's device is neuron:<LOCAL_RANK> and no other"),
    Rule(17, "mixed-devices", REFUSE, "[P]", "operands lie on one device"),
    Rule(
        18,
        "slow-attention",
        COUNT,
        "[P, T]",
        "fused attention: no mask, no dropout, queries % 128, keys % 512, head dimension <= 128",
    ),
)

_current: dict[str, Mode] = {rule.name: rule.default for rule in RULES}


def rule_named(name: str) -> Rule:
    """The rule of that name. Raises ValueError, with the names there are."""
    for rule in RULES:
        if rule.name == name:
            return rule
    raise ValueError(f"no rule is named {name!r}; choose among {', '.join(sorted(_current))}")


def mode(name: str) -> Mode:
    """What happens now when this rule is met."""
    return _current[rule_named(name).name]


def set_mode(name: str, value: Mode) -> None:
    """Change what happens, here; the device is told by `neuron_emu.set_rule`."""
    _current[rule_named(name).name] = Mode(value)


def modes() -> Iterator[tuple[str, Mode]]:
    """Each rule's name and what happens now."""
    yield from _current.items()
