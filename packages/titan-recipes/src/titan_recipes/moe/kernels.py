"""Route 3: nki-moe's operators in the native model, by TorchTitan's `@override`.

    config.override.imports = [kernel("experts")]                                  in every layer
    config.override.imports = [kernel("experts", "layers.[0-3].*"), kernel("rope", "layers.0.*")]
    config.override.imports = [(kernel("experts"), {"provider": "nkilib"})]        AWS's kernels instead of ours

On the command line: `--route kernels`, or `--override.imports titan_recipes.moe.kernels.experts`. An override's globs
are fixed when it is registered, and one that matches nothing only warns in TorchTitan: `kernel` registers one per
(operator, globs), `check_overrides` makes it an error, and compares sizes with nki-moe's limits, before a rank starts.

Shapes: R = rows (routed tokens), E = experts here, D = model dim, F = expert hidden dim; B, L, N, M, H as nki_moe.rope.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import nki_moe
import torch
from nki_moe import Provider, nkilib
from nki_moe.backend import choose
from torch.distributed.tensor import DTensor
from torchtitan.config.override import Override, derive, override
from torchtitan.models.common import CosSinRoPE
from torchtitan.models.common.moe import GroupedExperts

from ..errors import UserError
from ..upstream import OVERRIDES, check_node_conflicts, collect_claims, resolve_active, resolve_target

if TYPE_CHECKING:
    from ..upstream import Claim

__all__ = ["NkiExperts", "NkiRoPE", "check_overrides", "experts", "is_kernel", "kernel", "rope"]

_ROOT = "model_spec.model."
"""Where a trainer's config keeps its model: TorchTitan's globs see this in front of a module's name."""


class NkiExperts(GroupedExperts):
    """GroupedExperts by nki_moe.grouped_mlp, in the dtype of rows and weights."""

    @dataclass(kw_only=True, slots=True)
    class Config(GroupedExperts.Config):
        provider: Provider = "own"
        """Whose kernels: nki-moe's, or those of AWS's nki-library where it is installed."""

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.provider = config.provider

    def forward(self, x_RD: torch.Tensor, num_tokens_per_expert_E: torch.Tensor) -> torch.Tensor:
        """Return the experts' outputs for rows sorted by expert, [R, D], by nki-moe."""
        w1_EFD, w2_EDF, w3_EFD = (
            w.to_local() if isinstance(w, DTensor) else w for w in (self.w1_EFD, self.w2_EDF, self.w3_EFD)
        )
        return nki_moe.grouped_mlp(x_RD, num_tokens_per_expert_E, w1_EFD, w2_EDF, w3_EFD, provider=self.provider)


class NkiRoPE(CosSinRoPE):
    """CosSinRoPE by nki_moe.rope. Seldom faster (docs/kernels.md): no recipe uses it."""

    @dataclass(kw_only=True, slots=True)
    class Config(CosSinRoPE.Config):
        pass

    @staticmethod
    def apply_rotary_emb(
        query: torch.Tensor, key: torch.Tensor, rope_cache: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """query (B, L, N, H), key (B, L, M, H), rope_cache (1 or B, L, 1, 2H): cosines, then sines."""
        cos_BLH, sin_BLH = rope_cache.squeeze(2).expand(query.shape[0], -1, -1).chunk(2, dim=-1)
        return nki_moe.rope(query, key, cos_BLH, sin_BLH)


def experts(config: GroupedExperts.Config, provider: Provider = "own") -> GroupedExperts.Config:
    """Replacement of one layer's experts."""
    return derive(config, NkiExperts.Config, provider=provider)


def rope(config: CosSinRoPE.Config) -> CosSinRoPE.Config:
    """Replacement of one layer's rotary embedding."""
    return derive(config, NkiRoPE.Config)


_TARGETS: dict[str, tuple[Callable[..., Any], type[Any]]] = {
    "experts": (experts, GroupedExperts.Config),
    "rope": (rope, CosSinRoPE.Config),
}
for _factory, _target in _TARGETS.values():
    override(target=_target, description="nki-moe, in every layer")(_factory)


def kernel(name: Literal["experts", "rope"], *globs: str) -> str:
    """The entry of `config.override.imports` that puts nki-moe's operator where a module's name matches one of `globs`.

    Names are the model's ("layers.3.moe.routed_experts.inner_experts"), globs those of fnmatch, whose `*` crosses dots;
    without globs it is every layer. UserError for an unknown operator.
    """
    if name not in _TARGETS:
        raise UserError(f"nki-moe has no operator {name!r} for a model; choose one of {', '.join(_TARGETS)}.")
    if not globs:
        return f"{__name__}.{name}"
    factory, target = _TARGETS[name]
    # TorchTitan takes what stands before the last dot for the module, and JSON after "=" for arguments.
    unique = f"{name}@{'+'.join(globs)}".replace(".", ":")
    if f"{__name__}.{unique}" not in OVERRIDES:

        def replacement(config: Any, **arguments: Any) -> Any:
            return factory(config, **arguments)

        replacement.__name__, replacement.__module__ = unique, __name__
        override(target=target, fqns=[*globs, *(_ROOT + glob for glob in globs)], description="nki-moe")(replacement)
    return f"{__name__}.{unique}"


def is_kernel(entry: str | tuple[str, dict[str, Any]]) -> bool:
    """Whether an entry of `config.override.imports` is one of this module."""
    return (entry if isinstance(entry, str) else entry[0]).startswith(f"{__name__}.")


def check_overrides(config: Any, device: str, *, planned: bool = False) -> list[str]:
    """A line for each override of a built config: what it replaces. Changes nothing.

    UserError for an override that is unknown or replaces nothing, for two that meet, and for sizes or a backend that
    the kernels on `device` do not have. `planned`: the device is elsewhere, so that its software is not looked for.
    """
    entries = [(entry, {}) if isinstance(entry, str) else entry for entry in config.override.imports]
    if not entries:
        return []
    try:
        resolved = resolve_active([(*resolve_target(target), arguments) for target, arguments in entries])
        claims = collect_claims(resolved, config)
        check_node_conflicts(claims)
    except (ValueError, ImportError) as error:
        ours = f" Of nki-moe there are {', '.join(f'{__name__}.{name}' for name in _TARGETS)}."
        raise UserError(f"{error}{ours if 'no registered' in str(error) else ''}") from None
    lines = []
    for found, _ in resolved:
        nodes = [claim for claim in claims if claim.ov is found]
        if not nodes:
            raise UserError(_claims_nothing(found, config))
        line = f"{found.name} replaces {len(nodes)} {_kind(found)}"
        if found.origin_module == __name__:
            try:
                line += f" ({_check_kernel(nodes, config, device, planned)})"
            except (ValueError, ModuleNotFoundError) as error:
                raise UserError(f"{found.name}: {error}.\nTo train without kernels: --route native.") from None
        lines.append(line)
    return lines


def _check_kernel(claims: list["Claim"], config: Any, device: str, planned: bool) -> str:
    """What runs in the place of these nodes; ValueError or ModuleNotFoundError when it cannot."""
    provider = claims[0].kwargs.get("provider", "own")
    backend = "nki" if planned else choose(device, provider)
    p = config.parallelism
    if claims[0].ov.target_cls is CosSinRoPE.Config and p.tensor_parallel_degree > 1 and p.spmd_backend != "spmd_types":
        raise ValueError(
            f"spmd_backend {p.spmd_backend!r} gives it DTensors under tensor parallelism, which nki_moe.rope does not "
            "take; use spmd_types"
        )
    refusal = next(filter(None, (_refusal(claim, config, provider) for claim in claims)), None)
    if refusal is not None and backend != "torch":
        raise ValueError(refusal)
    where = {"torch": f"torch on {device}", "sim": "nki-sim", "nki": "Trainium's kernels"}[backend]
    maker = "AWS's nki-library" if provider == "nkilib" else "nki-moe"
    return f"{maker}, by {where}" + (f"; Trainium would refuse {refusal}" if refusal else "")


def _refusal(claim: "Claim", config: Any, provider: Provider) -> str | None:
    """Why the kernels would not take this node's sizes on a core, or None."""
    p, t = config.parallelism, config.training
    tokens = t.local_batch_size * t.seq_len // p.context_parallel_degree
    dtype = t.mixed_precision_param
    try:
        if isinstance(claim.cfg, CosSinRoPE.Config):
            nki_moe.check_rope(tokens, claim.cfg.dim, dtype=dtype)
        elif isinstance(claim.cfg, GroupedExperts.Config):
            ep = p.expert_parallel_degree
            local = claim.cfg.num_experts // ep
            hidden = claim.cfg.hidden_dim // (p.tensor_parallel_degree if ep == 1 else 1)  # with EP experts are whole
            check = nki_moe.check if provider == "own" else nkilib.check
            check(tokens, local, hidden, claim.cfg.dim, dtype=dtype)  # any number of rows will do
    except ValueError as error:
        return (
            f"{claim.fqn.removeprefix(_ROOT)} (tp {p.tensor_parallel_degree}, ep {p.expert_parallel_degree}): {error}"
        )
    return None


def _claims_nothing(found: Override, config: Any) -> str:
    names = [fqn.removeprefix(_ROOT) for fqn, *_ in config.traverse(found.target_cls)]
    there = f"the config has {len(names)}, {names[0]} to {names[-1]}" if names else "the config has none"
    wanted = " or ".join(repr(glob) for glob in found.fqns or () if not glob.startswith(_ROOT))
    return (
        f"Override {found.name} replaces nothing: it is for {_kind(found)}{f' named {wanted}' if wanted else ''}, and "
        f"{there}.\n"
        + ("Correct the glob" if names else "Choose a model that has some (experts: a mixture of experts)")
        + ", or take the override out of override.imports."
    )


def _kind(found: Override) -> str:
    return found.target_cls.__qualname__.removesuffix(".Config")
