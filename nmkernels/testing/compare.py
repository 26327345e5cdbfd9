"""Compare results: bit for bit, or no less accurate than torch."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

_INTS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def equal_bits(a: Any, b: Any) -> bool:
    """Whether two tensors, or two trees of them, have the same bits; NaN equals NaN, -0.0 differs from 0.0.

    Shapes and dtypes must match, devices and strides need not.

    Example:
        >>> nan = float("nan")
        >>> equal_bits(torch.tensor([nan, 1.0]), torch.tensor([nan, 1.0])), equal_bits(torch.tensor(0.0), torch.tensor(-0.0))
        (True, False)
    """
    return difference(a, b) is None


def assert_equal_bits(actual: Any, expected: Any, message: str = "") -> None:
    """Raise an ``AssertionError`` that names the first differing element unless ``equal_bits``.

    Example:
        >>> assert_equal_bits(torch.ones(2), torch.ones(2))
    """
    mismatch = difference(actual, expected)
    if mismatch is not None:
        raise AssertionError(f"{message}: {mismatch}" if message else mismatch)


def difference(actual: Any, expected: Any) -> str | None:
    """Describe the first difference of two trees; None if there is none."""
    one, tree = pytree.tree_flatten(actual)
    two, other = pytree.tree_flatten(expected)
    if tree != other:
        return f"structures differ: {tree} and {other}"
    for i, (a, b) in enumerate(zip(one, two, strict=True)):
        mismatch = _difference(a, b)
        if mismatch is not None:
            return mismatch if len(one) == 1 else f"leaf {i}: {mismatch}"
    return None


def _difference(a: Any, b: Any) -> str | None:
    if not isinstance(a, Tensor) or not isinstance(b, Tensor):
        return None if type(a) is type(b) and a == b else f"{a!r} is not {b!r}"
    if a.shape != b.shape or a.dtype != b.dtype:
        return f"{a.dtype} {tuple(a.shape)} is not {b.dtype} {tuple(b.shape)}"
    a, b = a.detach().cpu(), b.detach().cpu()
    # contiguous copies first: views of another dtype need matching strides
    wrong = torch.ne(*(x.contiguous().clone().view(_INTS[x.element_size()]) for x in (a, b)))
    if a.is_floating_point():
        wrong &= ~(a.isnan() & b.isnan())
    if not wrong.any():
        return None
    where = tuple(wrong.nonzero()[0].tolist())
    return f"{int(wrong.sum())} of {a.numel()} elements differ, first at {where}: {a[where].item()!r} is not {b[where].item()!r}"


def assert_no_worse(ours: Tensor, theirs: Tensor, exact: Tensor, message: str = "") -> None:
    """Raise an ``AssertionError`` unless a rounded result is about as accurate as torch's in the same dtype, compared with float64.

    ``max|ours - exact| <= 2·max|theirs - exact| + 4·eps·max|exact|``, eps of the dtype of ``theirs``

    Example:
        >>> x = torch.tensor([1.0, 2.0])
        >>> assert_no_worse(x, x, x.double())
    """
    message = f"{message}: " if message else ""
    if ours.shape != exact.shape or ours.dtype != theirs.dtype or exact.dtype != torch.float64:
        raise AssertionError(
            f"{message}{ours.dtype} {tuple(ours.shape)} cannot be compared with {theirs.dtype} and {exact.dtype} {tuple(exact.shape)}"
        )
    if not exact.numel():
        return
    exact = exact.cpu()
    error, other = ((y.detach().double().cpu() - exact).abs().max().item() for y in (ours, theirs))
    bound = 2 * other + 4 * torch.finfo(theirs.dtype).eps * exact.abs().max().item()
    # written so that a NaN on either side fails
    if not error <= bound:
        raise AssertionError(f"{message}max error {error:.3e} against float64 is above {bound:.3e} (2x torch's own + 4 eps max|y|)")
