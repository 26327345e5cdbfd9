"""Torch's dense GEMMs ``y = x Wᵀ`` on a CPU, each a provider of its own, so that ours are compared with the fastest.

With the weight as it is: ``F.linear`` (MKL in float32; in 16 bits oneDNN if the CPU has instructions for it), oneDNN and MKL by name, and
for a 16-bit weight the float32 GEMM of a float32 copy, with x and y converted. With the weight packed once: MKL and oneDNN, as in a graph
with frozen weights.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ..registry import Call, Provider
from ..timing import QUICK, on_cpu

LINEAR = "torch dense"
HOPELESS = 3.0
"""A GEMM whose first calls are this many times slower than the fastest is not timed: it cannot become the fastest."""

Way = Callable[[Tensor], Tensor]
Under = Callable[[], AbstractContextManager[object]]


@dataclass
class Dense:
    """Torch's dense GEMMs that are timed; for the others, the seconds of a call, as facts of the case."""

    plain: list[Provider] = field(default_factory=list)
    packed: list[Provider] = field(default_factory=list)
    facts: dict[tuple[str, str], float] = field(default_factory=dict)

    @property
    def providers(self) -> list[Provider]:
        """All that are timed."""
        return [*self.plain, *self.packed]


def gemms(x: Tensor, weight: Tensor, nbytes: float, flops: float) -> Dense:
    """Every GEMM that works here, with ``nbytes`` moved and ``flops`` done by each; operands may be transposed views."""
    plain: dict[str, tuple[Call, Under]] = {
        LINEAR: (lambda: F.linear(x, weight), nullcontext),
        f"{LINEAR} oneDNN": (lambda: onednn(x, weight), nullcontext),
    }
    packed = {f"torch packed {name}": call for name, call in _packed(x, weight).items()}
    if x.dtype != torch.float32:
        wide = weight.float()
        plain |= {
            **({f"{LINEAR} MKL": (lambda: F.linear(x, weight), without_onednn)} if onednn_takes(x.dtype) else {}),
            f"{LINEAR} float32": (_narrow(x, lambda v: F.linear(v, wide)), nullcontext),
            f"{LINEAR} float32 oneDNN": (_narrow(x, lambda v: onednn(v, wide)), nullcontext),
        }
        packed |= {f"torch packed float32 {name}": call for name, call in _packed(x, wide).items()}
    found = Dense()
    calls: dict[str, tuple[Call, Under]] = {**plain, **{name: (call, nullcontext) for name, call in packed.items()}}
    took = {name: seconds for name, (call, under) in calls.items() if (seconds := _first(call, under))}
    for names, group in ((plain, found.plain), (packed, found.packed)):
        fastest = min((took[name] for name in names if name in took), default=0.0)
        for name in (name for name in names if name in took):
            call, under = calls[name]
            if took[name] > HOPELESS * fastest:
                found.facts[name, "us"] = 1e6 * took[name]
            else:
                group.append(Provider(name, call, nbytes, flops, under=under))
    return found


def onednn(x: Tensor, weight: Tensor) -> Tensor:
    """``x Wᵀ`` by oneDNN, which ``F.linear`` uses for 16-bit operands only; W as it is, or reordered."""
    y: Tensor = torch.ops.mkldnn._linear_pointwise(x, weight, None, "none", [], "")
    return y


def onednn_takes(dtype: torch.dtype) -> bool:
    """Whether ``F.linear`` of this 16-bit dtype uses oneDNN here."""
    known = torch.ops.mkldnn
    return bool(known._is_mkldnn_bf16_supported() if dtype == torch.bfloat16 else known._is_mkldnn_fp16_supported())


@contextmanager
def without_onednn() -> Iterator[None]:
    """Inside, torch does not use oneDNN."""
    flags: Any = torch.backends.mkldnn
    before, flags.enabled = flags.enabled, False
    try:
        yield
    finally:
        flags.enabled = before


def _narrow(x: Tensor, gemm: Way) -> Call:
    return lambda: gemm(x.float()).to(x.dtype)


def _packed(x: Tensor, weight: Tensor) -> dict[str, Call]:
    """Calls with the weight packed in the library's own order; it may be float32 where ``x`` is in 16 bits."""
    tokens = x.shape[0]
    run: Callable[[Way], Call] = (lambda gemm: lambda: gemm(x)) if x.dtype == weight.dtype else partial(_narrow, x)
    found: dict[str, Call] = {}
    for name, order in (("MKL", _mkl), ("oneDNN", _onednn)):
        try:
            found[name] = run(order(weight.contiguous(), tokens))
        except (RuntimeError, NotImplementedError, AttributeError):
            continue  # a build without it, or an unsupported dtype
    return found


def _mkl(weight: Tensor, tokens: int) -> Way:
    order = torch.ops.mkl._mkl_reorder_linear_weight(weight, tokens)
    return lambda v: torch.ops.mkl._mkl_linear(v, order, weight, None, tokens)


def _onednn(weight: Tensor, tokens: int) -> Way:
    order = torch.ops.mkldnn._reorder_linear_weight(weight, tokens)
    return lambda v: onednn(v, order)


def _first(call: Call, under: Under) -> float:
    """Seconds of a call after warm-up; 0 if it does not work here."""
    try:
        with under():
            took = on_cpu(call)
            return min(on_cpu(call) for _ in range(3)) if took < QUICK else took
    except (RuntimeError, NotImplementedError, AttributeError, TypeError):
        return 0.0
