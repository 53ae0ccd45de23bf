"""What a Qwen3 tensor is called, and how it is folded, in each place it lives.

The table `SPELLINGS` is the whole mapping. Its common language is the set of *parts*: the tensors as the Hub
stores them, one expert at a time. Each line says that a stored tensor of some name holds these parts, folded
by an operation. Every operation is a rearrangement of rows, so one function (`rows_of`) that lists the rows
of a stored tensor serves both directions: reading looks up where each row of a part lies, writing lists which
rows come next. A conversion between two layouts is the composition of the two lists, and needs no
intermediate tensor.

Dialects: `hub` (Hugging Face names; the Transformers backend of TorchTitan adds `model.` in front and keeps
experts in TorchTitan's stacked form) and `native` (TorchTitan's own Qwen3). Names seen in torchtitan 0.3.0
`models/qwen3/state_dict_adapter.py`, `models/common/attention.py` (the fused QKV is saved split, by a hook)
and `models/common/moe.py`; fused experts in transformers 5 `models/qwen3_moe/modeling_qwen3_moe.py`.

Shape legend: V vocabulary, D model, N heads x head_dim, K kv heads x head_dim, H head_dim, F feed-forward,
E experts. "Rows" are a tensor's leading dimensions flattened: [E, F, D] has E*F rows of D.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from enum import Enum, StrEnum

__all__ = [
    "HUB_LAYOUTS",
    "SPELLINGS",
    "Layout",
    "Op",
    "Piece",
    "Reading",
    "Run",
    "Shape",
    "Spelling",
    "Target",
    "missing_parts",
    "read_names",
    "rows_of",
    "side_name",
    "tidy",
    "write_names",
]

Shape = tuple[int, ...]
# Bounds on what shapes in a hostile header can make us list; Qwen3-235B-A22B has 128 experts and 37,000 tensors.
MAX_EXPERTS = 9999
MAX_PARTS = 1_000_000


class Op(Enum):
    """How parts are folded into one stored tensor."""

    RENAME = "rename"  # the part itself
    STACK = "stack"  # [E, F, D]: expert after expert
    GATE_UP = "gate_up"  # [E, 2F, D]: for each expert its gate rows, then its up rows
    QKV = "qkv"  # [K/H * (N/K + 2) * H, D]: for each kv head its q heads, its k head, its v head
    SIDE = "side"  # state that only TorchTitan has: kept in a side file
    DROP = "drop"  # a buffer that is computed, not learned


class Layout(StrEnum):
    """Where a checkpoint is going, which decides the spelling of each tensor."""

    PER_EXPERT = "per-expert"  # Hub names, one tensor an expert: what the Hub and servers read
    FUSED = "fused"  # Hub names, experts as two 3-D tensors a layer: transformers 5 in memory
    NATIVE = "native"  # TorchTitan's own Qwen3
    NATIVE_WQKV = "native-wqkv"  # the same, q, k and v in one parameter: for models without the split hook
    BACKEND = "backend"  # TorchTitan's Transformers backend


_HUB = frozenset({Layout.PER_EXPERT, Layout.FUSED, Layout.BACKEND})
_NATIVE = frozenset({Layout.NATIVE, Layout.NATIVE_WQKV})
HUB_LAYOUTS = (Layout.PER_EXPERT, Layout.FUSED)  # those that Hugging Face folders have


@dataclass(frozen=True)
class Spelling:
    """One line of the table: `name` in `layouts` holds `parts`, folded by `op`. `{}` stands for a number."""

    name: str
    layouts: frozenset[Layout]
    op: Op
    parts: tuple[str, ...] = ()


def _same(part: str, native: str) -> tuple[Spelling, Spelling]:
    return Spelling(part, _HUB, Op.RENAME, (part,)), Spelling(native, _NATIVE, Op.RENAME, (part,))


_EXPERT = "model.layers.{}.mlp.experts.{}."
_GATE, _UP, _DOWN = (_EXPERT + p for p in ("gate_proj.weight", "up_proj.weight", "down_proj.weight"))
_ROUTER = "model.layers.{}.mlp.gate.weight"
_ATTN, _QKV = "model.layers.{}.self_attn.", "layers.{}.attention.qkv_linear."
_QKV_PARTS = tuple(_ATTN + p for p in ("q_proj.weight", "k_proj.weight", "v_proj.weight"))
_TITAN_EXPERTS = "routed_experts.inner_experts."


def _titan_experts(block: str, layouts: frozenset[Layout]) -> tuple[Spelling, ...]:
    stacks = (("w1_EFD", _GATE), ("w3_EFD", _UP), ("w2_EDF", _DOWN))
    return (
        *(Spelling(block + _TITAN_EXPERTS + w, layouts, Op.STACK, (part,)) for w, part in stacks),
        Spelling(block + "expert_bias_E", layouts, Op.SIDE),
        Spelling(block + "tokens_per_expert_E", layouts, Op.SIDE),
    )


SPELLINGS: tuple[Spelling, ...] = (
    *_same("model.embed_tokens.weight", "tok_embeddings.weight"),  # [V, D]
    *_same("model.layers.{}.input_layernorm.weight", "layers.{}.attention_norm.weight"),  # [D]
    *_same(_QKV_PARTS[0], _QKV + "wq.weight"),  # [N, D]
    *_same(_QKV_PARTS[1], _QKV + "wk.weight"),  # [K, D]
    *_same(_QKV_PARTS[2], _QKV + "wv.weight"),  # [K, D]
    Spelling(_QKV + "wqkv.weight", frozenset({Layout.NATIVE_WQKV}), Op.QKV, _QKV_PARTS),  # [N + 2K, D]
    *_same(_ATTN + "o_proj.weight", "layers.{}.attention.wo.weight"),  # [D, N]
    *_same(_ATTN + "q_norm.weight", "layers.{}.attention.q_norm.weight"),  # [H]
    *_same(_ATTN + "k_norm.weight", "layers.{}.attention.k_norm.weight"),  # [H]
    *_same("model.layers.{}.post_attention_layernorm.weight", "layers.{}.ffn_norm.weight"),  # [D]
    *_same("model.layers.{}.mlp.gate_proj.weight", "layers.{}.feed_forward.w1.weight"),  # [F, D]
    *_same("model.layers.{}.mlp.up_proj.weight", "layers.{}.feed_forward.w3.weight"),  # [F, D]
    *_same("model.layers.{}.mlp.down_proj.weight", "layers.{}.feed_forward.w2.weight"),  # [D, F]
    # Mixture of experts
    Spelling(
        _ROUTER,  # [E, D]
        frozenset({Layout.PER_EXPERT, Layout.FUSED}),
        Op.RENAME,
        (_ROUTER,),
    ),
    Spelling(
        "model.layers.{}.mlp.router.gate.weight",
        frozenset({Layout.BACKEND}),
        Op.RENAME,
        (_ROUTER,),
    ),
    Spelling("layers.{}.moe.router.gate.weight", _NATIVE, Op.RENAME, (_ROUTER,)),
    *(Spelling(part, frozenset({Layout.PER_EXPERT}), Op.RENAME, (part,)) for part in (_GATE, _UP, _DOWN)),
    Spelling("model.layers.{}.mlp.experts.gate_up_proj", frozenset({Layout.FUSED}), Op.GATE_UP, (_GATE, _UP)),
    Spelling("model.layers.{}.mlp.experts.down_proj", frozenset({Layout.FUSED}), Op.STACK, (_DOWN,)),
    *_titan_experts("layers.{}.moe.", _NATIVE),
    *_titan_experts("model.layers.{}.mlp.", frozenset({Layout.BACKEND})),
    *_same("model.norm.weight", "norm.weight"),  # [D]
    *_same("lm_head.weight", "lm_head.weight"),  # [V, D]
    # Buffers of older files
    Spelling("model.layers.{}.self_attn.rotary_emb.inv_freq", _HUB, Op.DROP),
    Spelling("model.rotary_emb.inv_freq", _HUB, Op.DROP),
    Spelling("freqs_cis", _NATIVE, Op.DROP),
    Spelling("rope_cache", _NATIVE, Op.DROP),
)

# Module wrappers that leave a segment in a name, at any depth and in any order.
_WRAPPERS = frozenset({"_orig_mod", "_checkpoint_wrapped_module", "_fsdp_wrapped_module", "module"})
_ADAPTER = re.compile(r"(^|\.)(lora_\w+|base_layer|modules_to_save|adapter_\w+)(\.|$)")
_NUMBER = re.compile(r"(?<=\.)(0|[1-9][0-9]{0,3})(?=\.)")  # up to 9999; anything else is no layer or expert
# What follows a layer's number tells the dialects apart, and what stands before `layers.` is the root of all
# names.
_LAYER = re.compile(
    r"^(?P<root>.*?)layers\.\d+\."
    r"((?P<native>attention_norm|ffn_norm|attention|feed_forward|moe)"
    r"|(?P<hub>input_layernorm|post_attention_layernorm|self_attn|mlp))\."
)


@dataclass(frozen=True)
class Run:
    """`rows` rows of a part from `part_row` on are the rows of stored tensor `tensor` from `row` on."""

    part_row: int
    rows: int
    tensor: str
    row: int


@dataclass(frozen=True)
class Piece:
    """The next `rows` rows of a target come from `part`, its row `row` on; `part` None means zeros."""

    part: str | None
    row: int
    rows: int


@dataclass(frozen=True)
class Target:
    """A tensor to write: its name, shape, and the pieces that make it up in order."""

    name: str
    shape: Shape
    pieces: tuple[Piece, ...]


@dataclass
class Reading:
    """What a set of stored names turned out to hold.

    `parts` gives each part's shape, `runs` where its rows lie, `stored` its one stored name where it has one.
    `side` maps native-only state by its native name to the stored name; `dropped` are computed buffers;
    `experts` is the expert layout found in each layer; `unexpected` are names that the table does not know.
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


def tidy(name: str) -> str:
    """A name without wrapper segments (`_orig_mod`, `_checkpoint_wrapped_module`, `module`, ...)."""
    return ".".join(s for s in name.split(".") if s not in _WRAPPERS)


def side_name(stored: str) -> str:
    """The native name of native-only state, whichever spelling it was stored under."""
    return re.sub(r"^model\.layers\.(\d+)\.mlp\.", r"layers.\1.moe.", stored)


def _abstract(name: str) -> tuple[str, tuple[str, ...]]:
    return _NUMBER.sub("{}", name), tuple(_NUMBER.findall(name))


def _lookup(dialect: str) -> dict[str, Spelling]:
    layouts = _NATIVE if dialect == "native" else _HUB
    return {s.name: s for s in SPELLINGS if s.layouts & layouts}


def _find_roots(names: Iterable[str]) -> tuple[str, str]:
    """Dialect, and what stands before `layers.` in these (tidied) names; an error when there are two
    answers."""
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


def _common_name(name: str, dialect: str, root: str) -> str:
    """`name` as the table spells it: hub names under `model.`, native ones under nothing, the head at the
    top."""
    inner = "model." if dialect == "hub" else ""
    head = "lm_head.weight"
    if name == head or (name.endswith("." + head) and root.startswith(name[: -len(head)])):
        return head
    if name.startswith(root):
        return inner + name[len(root) :]
    return name


def rows_of(op: Op, parts: tuple[str, ...], shapes: Mapping[str, Shape], head_rows: int = 0) -> list[Piece]:
    """The rows of a stored tensor in order.

    For STACK and GATE_UP `parts` are concrete names, gates first then ups, each expert in order. `head_rows`
    is head_dim, needed by QKV alone.
    """

    def whole(part: str) -> Piece:
        return Piece(part, 0, math.prod(shapes[part][:-1]) if len(shapes[part]) > 1 else shapes[part][0])

    if op in (Op.RENAME, Op.STACK):
        return [whole(p) for p in parts]
    if op is Op.GATE_UP:
        half = len(parts) // 2
        return [whole(p) for pair in zip(parts[:half], parts[half:], strict=True) for p in pair]
    assert op is Op.QKV, op
    q, k, v = parts
    n_kv, groups = shapes[k][0] // head_rows, shapes[q][0] // shapes[k][0]
    return [
        piece
        for head in range(n_kv)
        for piece in (
            Piece(q, head * groups * head_rows, groups * head_rows),
            Piece(k, head * head_rows, head_rows),
            Piece(v, head * head_rows, head_rows),
        )
    ]


def _part_shapes(
    name: str, op: Op, parts: tuple[str, ...], shape: Shape, o_shape: Shape | None, head: Shape | None
) -> dict[str, Shape]:
    """Shapes of the parts folded in stored tensor `name`, or a ValueError that says what does not fit."""
    if op is Op.RENAME:
        return {parts[0]: shape}
    if op is Op.STACK:
        return dict.fromkeys(parts, shape[1:])
    if op is Op.GATE_UP:
        if shape[1] % 2:
            raise ValueError(f"{name} has shape {list(shape)}; expected [experts, 2 x width, model]")
        return dict.fromkeys(parts, (shape[1] // 2, shape[2]))
    assert op is Op.QKV, op
    if o_shape is None or head is None:
        raise ValueError(f"{name} is fused and needs attention.wo and attention.q_norm beside it to be split")
    q_rows, kv = o_shape[1], shape[0] - o_shape[1]
    if kv <= 0 or kv % (2 * head[0]) or q_rows % (kv // 2):
        raise ValueError(
            f"{name} has {shape[0]} rows; with {q_rows} query rows and head_dim {head[0]} the rest cannot "
            "be split into equal k and v heads"
        )
    return {parts[0]: (q_rows, shape[1]), parts[1]: (kv // 2, shape[1]), parts[2]: (kv // 2, shape[1])}


def read_names(shapes: Mapping[str, Shape], *, dialect: str | None = None) -> Reading:
    """Work out what each stored tensor holds.

    Args:
        shapes: stored name -> shape, any dialect, any expert layout, wrapper segments and roots allowed.
        dialect: `hub` or `native` when the caller knows it (a fragment without any layer); found from the
            names otherwise.

    Raises:
        ValueError: adapters left in the file, two names that become one, a shape that cannot be unfolded, or
            no layer at all. Unknown names are returned in `unexpected`, for the caller to refuse.
    """
    tidied: dict[str, str] = {}
    adapters = [name for name in shapes if _ADAPTER.search(name)]
    if adapters:
        raise ValueError(
            f"{len(adapters)} adapter tensors such as {adapters[0]!r}: this is not a full-weight "
            "checkpoint. Merge the adapter into the base model first (PEFT: merge_and_unload)."
        )
    for name in shapes:
        clean = tidy(name)
        if clean in tidied:
            raise ValueError(
                f"{tidied[clean]!r} and {name!r} are the same tensor once wrapper names are removed "
                f"({clean!r}); keep one of them."
            )
        tidied[clean] = name
    if dialect is None or any(_LAYER.match(clean) for clean in tidied):
        dialect, root = _find_roots(tidied)
    else:
        root = "model." if dialect == "hub" else ""
    reading = Reading(dialect=dialect, root=root)
    table = _lookup(dialect)

    common: dict[str, str] = {}
    for clean, stored in tidied.items():
        name = _common_name(clean, dialect, root)
        if name in common:
            raise ValueError(f"{common[name]!r} and {stored!r} both stand for {name!r}; keep one of them.")
        common[name] = stored

    def shape_of(name: str) -> Shape | None:
        return tuple(shapes[common[name]]) if name in common else None

    for name, stored in common.items():
        pattern, numbers = _abstract(name)
        spelling = table.get(pattern)
        if spelling is None:
            reading.unexpected.append(stored)
            continue
        if spelling.op is Op.DROP:
            reading.dropped.append(stored)
            continue
        shape = tuple(shapes[stored])
        if 0 in shape:
            raise ValueError(f"{stored!r} has shape {list(shape)}: there is nothing in it")
        ndim = 3 if spelling.op in (Op.STACK, Op.GATE_UP) else 1 if spelling.op is Op.SIDE or "norm" in pattern else 2
        if len(shape) != ndim:
            raise ValueError(f"{stored!r} has shape {list(shape)}; expected {ndim} dimensions")
        if spelling.op is Op.SIDE:
            reading.side[side_name(name)] = stored
            continue
        if (ndim == 3 or spelling.parts == (_ROUTER,)) and shape[0] > MAX_EXPERTS:
            raise ValueError(f"{stored!r} has {shape[0]} experts; up to {MAX_EXPERTS} are read")
        parts = spelling.parts
        if ndim == 3 and len(reading.parts) + len(parts) * shape[0] > MAX_PARTS:
            raise ValueError(f"{stored!r} and those before it hold more than {MAX_PARTS} experts; no model has so many")
        if spelling.op in (Op.STACK, Op.GATE_UP):
            parts = tuple(p.format(numbers[0], e) for p in parts for e in range(shape[0]))
        else:
            parts = tuple(p.format(*numbers) for p in parts)
        if "experts" in pattern:
            reading.experts[int(numbers[0])] = _expert_layout(spelling, reading.experts.get(int(numbers[0])))
        attention = f"layers.{numbers[0]}.attention." if numbers else ""
        part_shapes = _part_shapes(
            stored,
            spelling.op,
            parts,
            shape,
            shape_of(attention + "wo.weight"),
            shape_of(attention + "q_norm.weight"),
        )
        head = shape_of(attention + "q_norm.weight") if spelling.op is Op.QKV else None
        row = 0
        for piece in rows_of(spelling.op, parts, part_shapes, head[0] if head else 0):
            assert piece.part is not None
            runs = reading.runs.setdefault(piece.part, [])
            if any(run.tensor != stored for run in runs):
                raise ValueError(f"{runs[0].tensor!r} and {stored!r} both hold {piece.part!r}; keep one of them.")
            runs.append(Run(piece.row, piece.rows, stored, row))
            row += piece.rows
        reading.parts.update(part_shapes)
    return reading


def _expert_layout(spelling: Spelling, before: str | None) -> str:
    """`fused`, `per-expert`, or `stacked` (TorchTitan), `mixed` when a layer has two; for reports,
    `as-source`."""
    here = next((o.value for o in (Layout.FUSED, Layout.PER_EXPERT) if o in spelling.layouts), "stacked")
    return here if before in (None, here) else "mixed"


def missing_parts(reading: Reading, *, layers: int, experts: int = 0, tied: bool = False) -> list[str]:
    """Parts that a model of these sizes has and the reading lacks, sorted.

    A layer counts as MoE when it has a router or any expert; it must then have all `experts` of them.
    """
    wanted: list[str] = []
    moe = {n for n in range(layers) if n in reading.experts or _ROUTER.format(n) in reading.parts}
    if len(moe) * experts > MAX_PARTS:
        raise ValueError(
            f"{len(moe)} layers with routers of {experts} rows: more than {MAX_PARTS} experts; no model has so many"
        )
    for spelling in SPELLINGS:
        if spelling.op is not Op.RENAME or spelling.name != spelling.parts[0]:
            continue
        part = spelling.name
        if part == _ROUTER or ".experts." in part:
            kind = "moe"
        elif ".mlp." in part:
            kind = "dense"
        else:
            kind = "any"
        if "{}" not in part:
            if not (tied and part == "lm_head.weight"):
                wanted.append(part)
            continue
        for layer in range(layers):
            if kind == "any" or kind == ("moe" if layer in moe else "dense"):
                if part.count("{}") == 2:
                    wanted.extend(part.format(layer, e) for e in range(experts))
                else:
                    wanted.append(part.format(layer))
    return sorted(set(wanted) - reading.parts.keys(), key=natural)


def natural(name: str) -> list[tuple[int, int, str]]:
    """Sort key: numbers by value, and embedding, layers, norm, head in the order of the forward pass."""
    first = {"model.embed_tokens.weight": 0, "tok_embeddings.weight": 0}.get(name)
    order = first if first is not None else 1 if "layers." in name else 3 if "lm_head" in name else 2
    return [(order, 0, "")] + [(0, int(s), "") if s.isdecimal() else (1, 0, s) for s in name.split(".")]


def write_names(
    parts: Mapping[str, Shape], layout: Layout, *, expert_layouts: Mapping[int, str] | None = None
) -> list[Target]:
    """The tensors of a layout that together hold exactly `parts`, in the order of the forward pass.

    Args:
        parts: part name -> shape, as `Reading.parts` has them.
        layout: the target's layout.
        expert_layouts: layer -> `per-expert` or `fused`, to override the layout of experts layer by layer.

    Raises:
        ValueError: experts of a layer missing in the middle, or of unequal shape; parts that no line of the
            table can hold in this layout.
    """
    targets: list[Target] = []
    left = dict(parts)
    experts: dict[tuple[str, str], dict[int, str]] = {}
    for part in parts:
        pattern, numbers = _abstract(part)
        if len(numbers) == 2:
            experts.setdefault((pattern, numbers[0]), {})[int(numbers[1])] = part

    def emit(name: str, shape: Shape, op: Op, names: tuple[str, ...], head_rows: int = 0) -> None:
        targets.append(Target(name, shape, tuple(rows_of(op, names, parts, head_rows))))
        for part in names:
            left.pop(part, None)

    def stack(spelling: Spelling, layer: str) -> None:
        columns = [experts.get((p, layer), {}) for p in spelling.parts]
        count = max(len(c) for c in columns)
        absent = [
            p.format(layer, e)
            for p, c in zip(spelling.parts, columns, strict=True)
            for e in range(max([*c, count - 1]) + 1)
            if e not in c
        ]
        if absent:
            raise ValueError(f"layer {layer} lacks experts: {absent[0]!r} and {len(absent) - 1} more are missing")
        names = tuple(c[e] for c in columns for e in range(count))
        shapes = {parts[n] for n in names}
        if len(shapes) != 1:
            raise ValueError(f"the experts of layer {layer} differ in shape: {sorted(map(list, shapes))}")
        rows, cols = next(iter(shapes))
        emit(
            _prefix(layout) + spelling.name.format(layer),
            (count, rows * len(columns), cols),
            spelling.op,
            names,
        )

    by_layout = {
        chosen: [s for s in SPELLINGS if chosen in s.layouts and s.op not in (Op.SIDE, Op.DROP)] for chosen in Layout
    }
    layers = sorted({int(_abstract(p)[1][0]) for p in parts if _abstract(p)[1]})
    for layer in layers:
        wanted = (expert_layouts or {}).get(layer)
        chosen = Layout(wanted) if wanted and layout in HUB_LAYOUTS else layout
        for spelling in by_layout[chosen]:
            if spelling.op in (Op.STACK, Op.GATE_UP):
                if any((p, str(layer)) in experts for p in spelling.parts):
                    stack(spelling, str(layer))
            elif spelling.op is Op.QKV:
                names = tuple(p.format(layer) for p in spelling.parts)
                norm = f"model.layers.{layer}.self_attn.q_norm.weight"
                if all(n in left for n in names) and norm in parts:
                    rows = sum(parts[n][0] for n in names)
                    emit(
                        _prefix(layout) + spelling.name.format(layer),
                        (rows, parts[names[0]][1]),
                        Op.QKV,
                        names,
                        parts[norm][0],
                    )
            elif spelling.name.count("{}") == 2:
                for expert, part in sorted(experts.get((spelling.parts[0], str(layer)), {}).items()):
                    emit(spelling.name.format(layer, expert), parts[part], Op.RENAME, (part,))
            elif "{}" in spelling.name and spelling.op is Op.RENAME:
                part = spelling.parts[0].format(layer)
                fused = layout is Layout.NATIVE_WQKV and spelling.parts[0] in _QKV_PARTS
                if part in left and not fused:
                    emit(_prefix(layout) + spelling.name.format(layer), parts[part], Op.RENAME, (part,))
    for spelling in by_layout[layout]:
        if "{}" not in spelling.name and spelling.parts[0] in left:
            part = spelling.parts[0]
            emit(_prefix(layout) + spelling.name, parts[part], Op.RENAME, (part,))
    if left:
        raise ValueError(f"no name in layout {layout.value!r} for {sorted(left)[:5]} ({len(left)} in all)")
    return sorted(targets, key=lambda t: natural(t.name.removeprefix(_prefix(layout))))


def _prefix(layout: Layout) -> str:
    """TorchTitan's Transformers backend holds the Hugging Face model as `self.model`."""
    return "model." if layout is Layout.BACKEND else ""
