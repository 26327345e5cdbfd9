"""A low-rank adapter next to an N:M weight: y += x L R / r, a dense correction of what the pattern leaves out."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from ..pattern import ShapeError

ADAPTER = ("nm_left", "nm_right")
"""Names under which a layer keeps L ``(in, r)`` and R ``(r, out)``, also in state dicts and files."""


def adapter_of(layer: nn.Module) -> tuple[nn.Parameter, nn.Parameter] | None:
    """(L, R) of ``layer``, or None where it has no adapter."""
    parameters: Mapping[str, nn.Parameter | None] = layer._parameters
    left, right = parameters.get(ADAPTER[0]), parameters.get(ADAPTER[1])
    return None if left is None or right is None else (left, right)


def set_adapter(layer: nn.Module, left: Tensor, right: Tensor, out_features: int, in_features: int) -> None:
    """Give ``layer`` the adapter (L, R); a Parameter stays the same Parameter.

    Raises:
        ShapeError: L and R do not fit each other or a weight ``(out, in)``.
    """
    if left.dim() != 2 or right.dim() != 2 or not left.shape[1] == right.shape[0] >= 1:
        raise ShapeError(f"adapter: L and R must be (in, r) and (r, out) with r >= 1; got {tuple(left.shape)} and {tuple(right.shape)}.")
    if (left.shape[0], right.shape[1]) != (in_features, out_features):
        raise ShapeError(
            f"adapter: L {tuple(left.shape)} and R {tuple(right.shape)} do not fit a weight (out, in) of shape "
            f"({out_features}, {in_features})."
        )
    for name, tensor in zip(ADAPTER, (left, right), strict=True):
        layer.register_parameter(name, tensor if isinstance(tensor, nn.Parameter) else nn.Parameter(tensor))


def add_adapter(y: Tensor, x: Tensor, left: Tensor, right: Tensor) -> Tensor:
    """y + x L R / r (SLoPe, Mozaffari et al., ICLR 2025), x ``(..., in)``, y ``(..., out)``."""
    return y + (x @ left) @ (right / left.shape[1])


def folded(weight: Tensor, left: Tensor, right: Tensor) -> Tensor:
    """W + (L R)ᵀ / r ``(out, in)``, the dense weight that multiplies as W and the adapter together do, in W's dtype."""
    with torch.no_grad():
        wide = torch.promote_types(weight.dtype, torch.float32)  # a GEMM of 16-bit numbers would be rounded twice
        return (weight.to(wide) + (left.to(wide) @ right.to(wide)).t() / left.shape[1]).to(weight.dtype)
