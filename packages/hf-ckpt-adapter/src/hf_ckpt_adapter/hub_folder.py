"""A Hugging Face folder: safetensors files, their index, config and tokenizer."""

from __future__ import annotations

from collections.abc import Callable

from .folder import Folder
from .formats.files import INDEX, SIDE_FILE, shard_file
from .formats.safetensors import header_bytes, index_bytes
from .formats.tensors import TensorSource
from .plan import Output
from .side_state import side_file_bytes

__all__ = ["HubFolder"]


class HubFolder(Folder):
    """safetensors files, their index, config and tokenizer; native-only state in a side file."""

    kind = "hub"

    def file_names(self, count: int) -> list[str]:
        """Names of `count` files of tensors."""
        return [shard_file(i, count) for i in range(1, count + 1)]

    def write_file(self, name: str, outputs: list[Output], source: TensorSource, count: Callable[[int], None]) -> None:
        """Write one file of tensors and note it; `count` is told the bytes of each block."""
        sums = {}
        with self.staging.file(name) as file:
            file.write(header_bytes({o.name: o.info for o in outputs}))
            for block in self.stream(source, outputs):
                file.write(block.data)
                count(len(block.data))
                if block.checksum is not None:
                    sums[block.output.name] = block.checksum
        self.staging.note(name, {"sums": sums})

    def write_rest(self) -> None:
        """Write native-only state, index, config and tokenizer."""
        if self.side:
            with self.staging.file(SIDE_FILE) as file:
                file.write(side_file_bytes(self.side))
            self._report_side_state()
        with self.staging.file(INDEX) as file:
            file.write(index_bytes(self.files, self.sizes))
        self.write_assets("")

    def _report_side_state(self) -> None:
        self.report.side_state = {
            name: float(t.double().abs().max()) if t.numel() else 0.0 for name, t in self.side.items()
        }
        biased = {n: v for n, v in self.report.side_state.items() if n.endswith("expert_bias_E") and v != 0}
        if biased:
            worst = max(biased, key=lambda n: biased[n])
            self.report.warnings.append(
                f"{len(biased)} layers route with a non-zero expert bias (up to {biased[worst]:.6g}, "
                f"{worst}). Hugging Face has no place for it: the exported model routes without. It is "
                f"kept in {SIDE_FILE}."
            )
