"""Count tensor bytes at dispatch level: every storage that an operation makes, while it lives, by the part of the step
it is of.

Works on any device and needs no allocator statistics, which CPU lacks. A storage is counted once however many tensors
view it. Storages that first appear as the result of a view were made below the dispatcher (gloo's own staging copies):
they are not counted.

A collective's tensors stay referred to by gloo's worker thread for a moment after the step has gone on without them,
longer on a loaded machine. Only this thread makes tensors, so while it waits the count can but fall: what looks like a
new largest is looked at again before it is believed.
"""

import time
import weakref
from collections import Counter, deque
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any
from unittest.mock import patch

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

LOOKS, PAUSE = 3, 0.001
"""So many looks before a largest is believed, seconds between them."""


@dataclass
class _Storage:
    ref: "weakref.ref[torch.UntypedStorage]"
    bytes: int
    part: str


@dataclass
class Bytes:
    """Bytes by part, and where the total was largest."""

    peak: int = 0
    at: str = ""
    by_part: Counter = field(default_factory=Counter)  # type: ignore[type-arg]
    """The bytes by part, at the largest total."""
    largest: Counter = field(default_factory=Counter)  # type: ignore[type-arg]
    """Each part's own largest."""


class TensorBytes(TorchDispatchMode):
    """Count within `with TensorBytes() as count:`; `with count.part(name):` names what is made inside."""

    def __init__(self, logits: int = 0) -> None:
        """`logits`: tensors of that many elements are counted as part "logits", whoever makes them."""
        super().__init__()
        self.logits = logits
        self.live: dict[int, _Storage] = {}
        self.gone: deque[int] = deque()
        self.now: Counter[str] = Counter()
        self.result: Bytes | None = None
        self.parts = ["other"]

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

    def watch(self) -> Bytes:
        """Note what is largest, from now on."""
        self.result = Bytes()
        self._look("the start")
        return self.result

    def settled(self) -> "Counter[str]":
        """Bytes by part, once other threads have had time to let go of theirs."""
        time.sleep(LOOKS * PAUSE)
        self._drop()
        return Counter(self.now)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(out):
            if type(leaf) is torch.Tensor or type(leaf) is torch.nn.Parameter:
                size = leaf.untyped_storage().nbytes()
                logits = self.logits and size == self.logits * leaf.element_size() and "_copy_in" not in str(func)
                self._see(leaf.untyped_storage(), str(func), "logits" if logits else self.parts[-1], func.is_view)
        return out

    def _see(self, storage: torch.UntypedStorage, made_by: str, part: str = "other", viewed: bool = False) -> None:
        self._drop()
        key, size = storage._cdata, storage.nbytes()
        known = self.live.get(key)
        if known is not None:
            self.now[known.part] += size - known.bytes
            known.bytes = size
        elif storage.device.type != "meta" and not viewed:
            self.live[key] = _Storage(weakref.ref(storage, lambda _: self.gone.append(key)), size, part)
            self.now[part] += size
        self._look(made_by)

    def _drop(self) -> None:
        """Storages die in any thread; this one alone counts.

        An address is not given out again before its storage is in `gone`.
        """
        while self.gone:
            entry = self.live.pop(self.gone.popleft())
            self.now[entry.part] -= entry.bytes

    def _look(self, where: str) -> None:
        result = self.result
        if result is None:
            return
        for _ in range(LOOKS):
            if self.now.total() <= result.peak and all(size <= result.largest[p] for p, size in self.now.items()):
                return
            time.sleep(PAUSE)
            self._drop()
        for part, size in self.now.items():
            result.largest[part] = max(result.largest[part], size)
        if self.now.total() > result.peak:
            result.peak, result.at, result.by_part = self.now.total(), where, Counter(self.now)
