"""Count tensor bytes at dispatch level: every storage that an operation makes, while it lives, by the part of the step it is of.

Works on any device and needs no allocator statistics, which CPU lacks. A storage is counted once however many tensors view it.
Storages that first appear as the result of a view were made below the dispatcher (gloo's own staging copies): they are not counted.
"""

import sys
import weakref
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any
from unittest.mock import patch

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


@dataclass
class _Storage:
    ref: "weakref.ref[torch.UntypedStorage]"
    bytes: int
    part: str
    made_by: str


@dataclass
class Bytes:
    """Bytes by part, and where the total was largest."""

    peak: int = 0
    at: str = ""
    by_part: Counter = field(default_factory=Counter)  # type: ignore[type-arg]
    """At the largest total."""
    largest: Counter = field(default_factory=Counter)  # type: ignore[type-arg]
    """Each part's own largest."""


class TensorBytes(TorchDispatchMode):
    """Within `with TensorBytes() as count:`; `with count.part(name):` names what is made inside."""

    def __init__(self, logits: int = 0) -> None:
        """`logits`: tensors of that many elements are counted as part "logits", whoever makes them."""
        super().__init__()
        self.logits = logits
        self.live: dict[int, _Storage] = {}
        self.now: Counter[str] = Counter()
        self.result = Bytes()
        self.parts = ["other"]
        self.moment = ""

    def __enter__(self) -> "TensorBytes":
        resize = torch.UntypedStorage.resize_

        def resized(storage: torch.UntypedStorage, size: int) -> Any:
            out = resize(storage, size)
            self._see(storage, "resize_", self.parts[-1])
            return out

        self._patch = patch.object(torch.UntypedStorage, "resize_", resized)
        self._patch.start()
        return super().__enter__()  # type: ignore[no-any-return]

    def __exit__(self, *error: Any) -> None:
        self._patch.stop()
        super().__exit__(*error)

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        self.parts.append(name)
        try:
            yield
        finally:
            self.parts.pop()

    def name(self, tensors: Iterable[torch.Tensor], part: str) -> None:
        """Count the storages of `tensors` under `part` from now on."""
        for tensor in tensors:
            local = tensor.to_local() if hasattr(tensor, "to_local") else tensor
            storage = local.untyped_storage()
            self._see(storage, "named")
            entry = self.live[storage._cdata]
            self.now[entry.part] -= entry.bytes
            self.now[part] += entry.bytes
            entry.part = part

    def living(self, part: str) -> int:
        return self.now[part]

    def reset_peak(self) -> None:
        self.result = Bytes()
        self._look("reset")

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(out):
            if type(leaf) is torch.Tensor or type(leaf) is torch.nn.Parameter:
                size = leaf.untyped_storage().nbytes()
                logits = self.logits and size == self.logits * leaf.element_size() and "_copy_in" not in str(func)
                self._see(leaf.untyped_storage(), str(func), "logits" if logits else self.parts[-1], func.is_view)
        return out

    def _see(self, storage: torch.UntypedStorage, made_by: str, part: str = "other", viewed: bool = False) -> None:
        key, size = storage._cdata, storage.nbytes()
        known = self.live.get(key)
        if known is not None and known.ref() is storage:
            self.now[known.part] += size - known.bytes
            known.bytes = size
        elif storage.device.type != "meta" and not viewed:
            entry = _Storage(weakref.ref(storage, lambda _, key=key: self._gone(key)), size, part, made_by)
            self.live[key] = entry
            self.now[entry.part] += size
        self._look(made_by)

    def _gone(self, key: int) -> None:
        entry = self.live.pop(key, None)
        if entry is not None:
            self.now[entry.part] -= entry.bytes

    def _look(self, where: str) -> None:
        total = self.now.total()
        for part, size in self.now.items():
            if size > self.result.largest[part]:
                self.result.largest[part] = size
                if part == DETAIL:
                    self.result.part_detail = (
                        sorted(((e.bytes, e.made_by) for e in self.live.values() if e.part == part), reverse=True),
                        where,
                    )  # type: ignore[attr-defined]
        if total > self.result.peak:
            self.result.peak, self.result.at = total, f"{self.moment} {where}"
            self.result.by_part = Counter(self.now)
            if DETAIL:
                self.result.detail = sorted(((e.bytes, e.part, e.made_by) for e in self.live.values()), reverse=True)  # type: ignore[attr-defined]


DETAIL = "--detail" in sys.argv
