"""Read the table: what does each tensor of a checkpoint hold, under whatever names and roots it is stored?"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from .order import abstract, natural
from .rows import Run, Shape, part_shapes, rows_of
from .table import HEAD, HUB, NATIVE, ROUTER, SPELLINGS, Layout, Op, Spelling

__all__ = ["Reading", "missing_parts", "read_names", "side_name", "tidy"]

# Bounds on what shapes in a hostile header can make us list; Qwen3-235B-A22B has 128 experts and 37,000 tensors.
MAX_EXPERTS = 9999
MAX_PARTS = 1_000_000
# Module wrappers that leave a segment in a name, at any depth and in any order.
_WRAPPERS = frozenset({"_orig_mod", "_checkpoint_wrapped_module", "_fsdp_wrapped_module", "module"})
_ADAPTER = re.compile(r"(^|\.)(lora_\w+|base_layer|modules_to_save|adapter_\w+)(\.|$)")
# What follows a layer's number tells the dialects apart; what stands before `layers.` is the root of all names.
_LAYER = re.compile(
    r"^(?P<root>.*?)layers\.\d+\."
    r"((?P<native>attention_norm|ffn_norm|attention|feed_forward|moe)"
    r"|(?P<hub>input_layernorm|post_attention_layernorm|self_attn|mlp))\."
)


@dataclass
class Reading:
    """What a set of stored names turned out to hold.

    `parts` gives each part's shape, `runs` where its rows lie. `side` maps the native name of native-only state to its
    stored name. `dropped` are computed buffers. `experts` is the expert layout found in each layer. `unexpected` are
    names that the table does not know.
    """

    dialect: str = "hub"
    root: str = ""
    parts: dict[str, Shape] = field(default_factory=dict)
    runs: dict[str, list[Run]] = field(default_factory=dict)
    side: dict[str, str] = field(default_factory=dict)
    dropped: list[str] = field(default_factory=list)
    experts: dict[int, str] = field(default_factory=dict)
    unexpected: list[str] = field(default_factory=list)

    @property
    def layers(self) -> int:
        """One more than the highest layer number seen."""
        return 1 + max((int(p.split(".")[2]) for p in self.parts if p.startswith("model.layers.")), default=-1)


def read_names(shapes: Mapping[str, Shape], *, dialect: str | None = None) -> Reading:
    """Work out what each stored tensor holds.

    Args:
        shapes: stored name -> shape, any dialect, any expert layout, wrapper segments and roots allowed.
        dialect: `hub` or `native` when the caller knows it (a fragment without any layer); found from the names
            otherwise.

    Returns:
        The parts and where their rows lie. Unknown names are in `unexpected`, for the caller to refuse.

    Raises:
        ValueError: adapters left in the file, two names that become one, a shape that cannot be unfolded, or no layer
            at all.
    """
    _refuse_adapters(shapes)
    tidied = _tidied(shapes)
    if dialect is None or any(_LAYER.match(clean) for clean in tidied):
        dialect, root = _find_root(tidied)
    else:
        root = "model." if dialect == "hub" else ""
    stored = _as_the_table_spells(tidied, dialect, root)
    reading = Reading(dialect=dialect, root=root)
    spelled = {name: tuple(shapes[tensor]) for name, tensor in stored.items()}
    table = {s.name: s for s in SPELLINGS if s.layouts & (NATIVE if dialect == "native" else HUB)}
    for name, tensor in stored.items():
        pattern, numbers = abstract(name)
        spelling = table.get(pattern)
        if spelling is None:
            reading.unexpected.append(tensor)
        elif spelling.op is Op.DROP:
            reading.dropped.append(tensor)
        else:
            _check_shape(tensor, spelling, spelled[name])
            if spelling.op is Op.SIDE:
                reading.side[side_name(name)] = tensor
            else:
                _add(reading, spelling, numbers, tensor, spelled[name], spelled)
    return reading


def tidy(name: str) -> str:
    """A name without wrapper segments (`_orig_mod`, `_checkpoint_wrapped_module`, `module`, ...)."""
    return ".".join(s for s in name.split(".") if s not in _WRAPPERS)


def side_name(stored: str) -> str:
    """The native name of native-only state, whichever spelling it was stored under."""
    return re.sub(r"^model\.layers\.(\d+)\.mlp\.", r"layers.\1.moe.", stored)


def _refuse_adapters(names: Iterable[str]) -> None:
    adapters = [name for name in names if _ADAPTER.search(name)]
    if adapters:
        raise ValueError(
            f"{len(adapters)} adapter tensors such as {adapters[0]!r}: this is not a full-weight "
            "checkpoint. Merge the adapter into the base model first (PEFT: merge_and_unload)."
        )


def _tidied(names: Iterable[str]) -> dict[str, str]:
    """Name without wrapper segments -> stored name."""
    tidied: dict[str, str] = {}
    for name in names:
        clean = tidy(name)
        if clean in tidied:
            raise ValueError(
                f"{tidied[clean]!r} and {name!r} are the same tensor once wrapper names are removed "
                f"({clean!r}); keep one of them."
            )
        tidied[clean] = name
    return tidied


def _find_root(names: Iterable[str]) -> tuple[str, str]:
    """The dialect of these (tidied) names and what stands before their `layers.`; an error for two answers."""
    found: dict[tuple[str, str], str] = {}
    for name in names:
        match = _LAYER.match(name)
        if match:
            found.setdefault(("native" if match["native"] else "hub", match["root"]), name)
    if len(found) > 1:
        raise ValueError(
            "the checkpoint holds more than one model: "
            + "; ".join(f"{dialect} names such as {name!r}" for (dialect, _), name in sorted(found.items()))
            + ". Expected one set of layers: split the file or remove the other model."
        )
    if not found:
        raise ValueError(
            "no transformer layer found: expected names such as 'model.layers.0.input_layernorm.weight' "
            "(Hugging Face) or 'layers.0.attention_norm.weight' (TorchTitan)."
        )
    return next(iter(found))


def _as_the_table_spells(tidied: Mapping[str, str], dialect: str, root: str) -> dict[str, str]:
    """The table's name -> stored name: Hub names under `model.`, native ones under nothing, the head at the top."""
    inner = "model." if dialect == "hub" else ""
    common: dict[str, str] = {}
    for clean, stored in tidied.items():
        if clean == HEAD or (clean.endswith("." + HEAD) and root.startswith(clean[: -len(HEAD)])):
            name = HEAD
        else:
            name = inner + clean[len(root) :] if clean.startswith(root) else clean
        if name in common:
            raise ValueError(f"{common[name]!r} and {stored!r} both stand for {name!r}; keep one of them.")
        common[name] = stored
    return common


def _check_shape(stored: str, spelling: Spelling, shape: Shape) -> None:
    if 0 in shape:
        raise ValueError(f"{stored!r} has shape {list(shape)}: there is nothing in it")
    if len(shape) != spelling.dims:
        raise ValueError(f"{stored!r} has shape {list(shape)}; expected {spelling.dims} dimensions")
    if (spelling.dims == 3 or spelling.parts == (ROUTER,)) and shape[0] > MAX_EXPERTS:
        raise ValueError(f"{stored!r} has {shape[0]} experts; up to {MAX_EXPERTS} are read")


def _add(
    reading: Reading,
    spelling: Spelling,
    numbers: tuple[str, ...],
    stored: str,
    shape: Shape,
    spelled: Mapping[str, Shape],
) -> None:
    """Note the parts that stored tensor `stored` holds, and where their rows lie in it."""
    if spelling.dims == 3 and len(reading.parts) + len(spelling.parts) * shape[0] > MAX_PARTS:
        raise ValueError(f"{stored!r} and those before it hold more than {MAX_PARTS} experts; no model has so many")
    if spelling.op in (Op.STACK, Op.GATE_UP):
        parts = tuple(p.format(numbers[0], e) for p in spelling.parts for e in range(shape[0]))
    else:
        parts = tuple(p.format(*numbers) for p in spelling.parts)
    if "experts" in spelling.name:
        layer = int(numbers[0])
        reading.experts[layer] = _expert_layout(spelling, reading.experts.get(layer))
    attention = f"layers.{numbers[0]}.attention." if numbers else ""
    norm = spelled.get(attention + "q_norm.weight") if spelling.op is Op.QKV else None
    found = part_shapes(stored, spelling.op, parts, shape, spelled.get(attention + "wo.weight"), norm)
    row = 0
    for piece in rows_of(spelling.op, parts, found, norm[0] if norm else 0):
        assert piece.part is not None
        runs = reading.runs.setdefault(piece.part, [])
        if any(run.tensor != stored for run in runs):
            raise ValueError(f"{runs[0].tensor!r} and {stored!r} both hold {piece.part!r}; keep one of them.")
        runs.append(Run(piece.row, piece.rows, stored, row))
        row += piece.rows
    reading.parts.update(found)


def _expert_layout(spelling: Spelling, before: str | None) -> str:
    """`fused`, `per-expert` or `stacked` (TorchTitan), or `mixed` when a layer has two; for reports and `as-source`."""
    here = next((o.value for o in (Layout.FUSED, Layout.PER_EXPERT) if o in spelling.layouts), "stacked")
    return here if before in (None, here) else "mixed"


def missing_parts(reading: Reading, *, layers: int, experts: int = 0, tied: bool = False) -> list[str]:
    """Parts that a model of these sizes has and the reading lacks.

    Args:
        reading: what was found.
        layers: how many layers the model has.
        experts: how many experts each MoE layer has. A layer is one when it has a router or any expert.
        tied: the model has no head of its own.

    Returns:
        Names of parts, in the order of the forward pass.

    Raises:
        ValueError: the sizes stand for more experts than any model has.
    """
    moe = {n for n in range(layers) if n in reading.experts or ROUTER.format(n) in reading.parts}
    if len(moe) * experts > MAX_PARTS:
        raise ValueError(
            f"{len(moe)} layers with routers of {experts} rows: more than {MAX_PARTS} experts; no model has so many"
        )
    wanted: set[str] = set()
    for part in {part for spelling in SPELLINGS for part in spelling.parts}:
        where = _layers_with(part, layers, moe)
        if part.count("{}") == 2:
            wanted.update(part.format(layer, expert) for layer in where for expert in range(experts))
        elif "{}" in part:
            wanted.update(part.format(layer) for layer in where)
        elif not (tied and part == HEAD):
            wanted.add(part)
    return sorted(wanted - reading.parts.keys(), key=natural)


def _layers_with(part: str, layers: int, moe: set[int]) -> Iterable[int]:
    """The layers that have such a part: experts and their router are in MoE layers, the other MLPs in dense ones."""
    if part == ROUTER or ".experts." in part:
        return moe
    return set(range(layers)) - moe if ".mlp." in part else range(layers)
