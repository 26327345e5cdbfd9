"""The N:M pattern, the alignment rules that follow from it, and the package's error classes.

It needs only the standard library and ``arguments``, so that every other module can import it.
"""

from __future__ import annotations

from dataclasses import dataclass

from .arguments import whole_number

MAX_M = 256
"""Largest supported group: an index inside a group is stored in one byte."""


class NMError(Exception):
    """Base class of all errors that nmkernels raises."""


class PatternError(NMError, ValueError):
    """The N:M pattern is invalid."""


class ShapeError(NMError, ValueError):
    """A tensor's shape does not fit the operation or the pattern."""


class DtypeError(NMError, TypeError):
    """A tensor's dtype is not supported by the operation."""


class OptionError(NMError, ValueError):
    """An option has a value that is unknown or out of range."""


class BackendError(NMError, RuntimeError):
    """A backend requested by name cannot run this call."""


class RecipeError(NMError, RuntimeError):
    """A recipe, its handle or its optimizer is used incorrectly."""


class CheckpointError(NMError, RuntimeError):
    """A file or state dict cannot be loaded: it is truncated, has another format, or belongs to another recipe."""


@dataclass(frozen=True)
class Pattern:
    """N non-zeros kept in every group of M consecutive elements.

    Args:
        spec: ``"N:M"``, for instance ``"2:4"``, with ``1 <= N <= M <= 256``; or another ``Pattern``.

    Raises:
        PatternError: the text does not have this form, or N and M are out of range.

    Example:
        >>> Pattern("2:4").n, Pattern("2:4").m, Pattern("1:16").density
        (2, 4, 0.0625)
    """

    n: int
    m: int

    def __init__(self, spec: PatternLike, m: int | None = None) -> None:
        if isinstance(spec, Pattern):
            n, m = spec.n, spec.m
        elif m is None:
            n, m = _parse(spec)
        else:
            n = spec if type(spec) is int else whole_number(PatternError, "Pattern: N", spec, least=None)
            m = m if type(m) is int else whole_number(PatternError, "Pattern: M", m, least=None)
        if not 1 <= n <= m <= MAX_M:
            raise PatternError(
                f"pattern {n}:{m} is not usable: N:M keeps N of every M elements, so 1 <= N <= M <= {MAX_M} must hold. "
                'Common choices are "2:4", "1:4", "2:8", "1:16".'
            )
        object.__setattr__(self, "n", n)
        object.__setattr__(self, "m", m)

    @property
    def density(self) -> float:
        """Share of elements kept, N/M."""
        return self.n / self.m

    @property
    def index_bits(self) -> int:
        """Bits per stored position: 2 for M <= 4, 4 for M <= 16, else 8."""
        return 2 if self.m <= 4 else 4 if self.m <= 16 else 8

    def index_bytes(self, cols: int, integers: bool = False) -> int:
        """Bytes of packed indices per row of ``cols`` elements (the last group may be partial); none for ``integers`` at 1:1."""
        return 0 if integers and self.m == 1 else -(-self.kept(cols) * self.index_bits // 8)

    def groups(self, cols: int) -> int:
        """Groups per row of ``cols`` elements, including a partial last group."""
        return -(-cols // self.m)

    def kept(self, cols: int) -> int:
        """Stored values per row of ``cols`` elements."""
        return self.groups(cols) * self.n

    def check_divides(self, op: str, size: int, what: str = "the last dimension") -> None:
        """Raise ``ShapeError`` unless ``size`` is a whole number of groups."""
        if size % self.m:
            raise ShapeError(
                f"{op}: {what} is {size}, which is not a multiple of M={self.m} (pattern {self}). "
                f"Pad it to {self.groups(size) * self.m}, choose a pattern whose M divides {size}, or leave this layer dense."
            )

    def __str__(self) -> str:
        return f"{self.n}:{self.m}"

    def __repr__(self) -> str:
        return f'Pattern("{self}")'


PatternLike = str | Pattern | int


def _parse(spec: object) -> tuple[int, int]:
    # no regular expression, so that torch.compile can trace it
    if isinstance(spec, str):
        n, colon, m = (part.strip() for part in spec.partition(":"))
        if colon and n.isdecimal() and m.isdecimal():
            return int(n), int(m)
    raise PatternError(f'{spec!r} is not an N:M pattern; write it as text such as "2:4" (keep 2 of every 4).')
