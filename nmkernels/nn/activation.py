"""SquaredReLU, dense or with N:M sparse activations, and the two-layer MLP around it."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from ..arguments import whole_number
from ..autograd.activation import GRADS, SplitRule, sparse_relu2, split_linear
from ..pattern import NMError, Pattern, PatternLike, RecipeError, ShapeError
from .linear import under_autocast
from .traces import PROXY, is_tracing, leaf, refuse_script
from .weight import NMWeight


@dataclass(frozen=True)
class ActivationRule:
    """How ``SquaredReLU`` makes its activations sparse, and which gradient rule the layers around it follow.

    ``pattern`` is N:M along features; ``grad`` is ``"chain"`` or ``"ste"``, see ``nmkernels.autograd.sparse_relu2``. With a ``split``
    weight gradients too have an operand that is sparse along tokens, which only ``SquaredReLUMLP`` supports.
    """

    pattern: Pattern
    grad: str = "chain"
    split: SplitRule | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "pattern", Pattern(self.pattern))
        if self.grad not in GRADS:
            raise NMError(f"ActivationRule: grad={self.grad!r} is unknown; choose one of {', '.join(GRADS)}.")


class SquaredReLU(nn.Module):
    """a = relu(x)² (So et al., "Primer", 2021), or with a pattern a = relu(sp(x))², sp the N largest values of every M features.

    The pattern is in no state dict, so build the deployed model with the same one (Haziza et al., arXiv 2503.16672).

    Args:
        pattern: ``"N:M"`` or a ``Pattern``; None for the dense form.
        grad: ``"chain"``, the derivative, or ``"ste"``, see ``nmkernels.autograd.sparse_relu2``.

    Attributes: ``rule``, the ``ActivationRule`` in use or None; it may be set at any time.

    Raises:
        PatternError, NMError: an argument is not usable. ShapeError (in forward): M does not divide the features.

    Example:
        >>> x = torch.tensor([3.0, -1.0, 2.0, 1.0])
        >>> SquaredReLU()(x), SquaredReLU("2:4")(x)
        (tensor([9., 0., 4., 1.]), tensor([9., 0., 4., 0.]))
    """

    def __init__(self, pattern: PatternLike | None = None, grad: str = "chain") -> None:
        super().__init__()
        self.rule: ActivationRule | None = None if pattern is None else ActivationRule(Pattern(pattern), grad)

    def forward(self, x: Tensor) -> Tensor:
        """Activations of x ``(..., features)``."""
        rule = self.rule
        if rule is None:
            return x.relu().square()
        if isinstance(x, PROXY):
            return leaf(self, x)
        if is_tracing():  # a trace has no autograd Function
            return torch.ops.nmkernels.nm_prune(x.relu(), rule.pattern.n, rule.pattern.m).square()
        return sparse_relu2(x, rule.pattern, rule.grad)

    def __prepare_scriptable__(self) -> nn.Module:
        return self if self.rule is None else refuse_script(self)

    def extra_repr(self) -> str:
        return "" if self.rule is None else f"pattern={self.rule.pattern}, grad={self.rule.grad}"


class SquaredReLUMLP(nn.Module):
    """proj(relu(fc(x))²), the feed-forward block whose activations can be N:M sparse in forward and backward.

    With ``act.rule.split`` set, and y₁ = x W₁ᵀ + b₁, a = relu(sp(y₁))², y₂ = a W₂ᵀ + b₂ (arXiv 2503.16672)::

        ∂L/∂W₂ = (∂L/∂y₂)ᵀ S(a)      ∂L/∂a = ∂L/∂y₂ W₂
        ∂L/∂W₁ = S(∂L/∂y₁)ᵀ x        ∂L/∂x = sp(∂L/∂y₁) W₁

    where S leaves the few features with the most non-zeros as they are and keeps N of every M tokens of each other feature
    (``nmkernels.autograd.split``). The GEMMs run in dense layout.

    Args:
        features, hidden: sizes of the input and of the activations.
        out_features: of the output; None for ``features``.
        bias, device, dtype: as for ``nn.Linear``.
        pattern, grad: as for ``SquaredReLU``.

    Example:
        >>> SquaredReLUMLP(16, 64, pattern="2:4")(torch.randn(2, 3, 16)).shape
        torch.Size([2, 3, 16])
    """

    def __init__(
        self,
        features: int,
        hidden: int,
        out_features: int | None = None,
        bias: bool = True,
        pattern: PatternLike | None = None,
        grad: str = "chain",
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        out_features = features if out_features is None else out_features
        sizes = {"features": features, "hidden": hidden, "out_features": out_features}
        features, hidden, out_features = (whole_number(ShapeError, f"SquaredReLUMLP: {name}", size, 0) for name, size in sizes.items())
        self.fc = nn.Linear(features, hidden, bias, device, dtype)
        self.act = SquaredReLU(pattern, grad)
        self.proj = nn.Linear(hidden, out_features, bias, device, dtype)

    def forward(self, x: Tensor) -> Tensor:
        """The block's output for x ``(..., features)``.

        Raises:
            RecipeError: the rule has a split, and a layer's weight is N:M sparse itself.
        """
        rule = self.act.rule
        if rule is None or rule.split is None or not torch.is_grad_enabled():
            return self.proj(self.act(self.fc(x)))
        if isinstance(x, PROXY):
            return leaf(self, x)
        y = _split(self.fc, x, rule.split, "output")
        return _split(self.proj, self.act(y), rule.split, "input")


def _split(layer: nn.Module, x: Tensor, rule: SplitRule, side: str) -> Tensor:
    if isinstance(layer, NMWeight):
        if layer.transform is not None:
            raise RecipeError("SquaredReLUMLP: split weight gradients need dense weights; sparse ones have a gradient rule of their own.")
        layer.ran = True
    elif type(layer) is not nn.Linear:
        raise RecipeError(f"SquaredReLUMLP: split weight gradients need an nn.Linear, and its layer is a {type(layer).__name__}.")
    x, weight = (t.to(under_autocast(x, t.dtype)) for t in (x, layer.weight))
    bias = None if layer.bias is None else layer.bias.to(under_autocast(x, layer.bias.dtype))
    return split_linear(x, weight, bias, rule, side)
