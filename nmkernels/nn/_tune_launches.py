"""The launches of Triton's kernels for a model's products: which there are, and which is the fastest."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import Any

import torch
from torch import Tensor, nn

from .._dispatch import Impl, choose, implementations
from ..autograd.choice import LEAST_GAIN
from ..autograd.choice.judge import Judge
from ..pattern import BackendError, Pattern
from ._tune_report import Tuned
from .compressed import CompressedLinear
from .linear import NMWeight

log = logging.getLogger("nmkernels.tune")

OPS = {"fprop": "nm_linear", "dgrad": "nm_linear_dgrad", "wgrad": "nm_linear_wgrad"}
BACKEND = "triton"

Call = Callable[[], object]
Timer = Callable[[Call], float]


@dataclass(frozen=True)
class Job:
    """One product to tune: E ``(rows, cols)`` compressed, with ``width`` columns of the other operand."""

    kind: str
    dtype: torch.dtype
    rows: int
    cols: int
    width: int
    pattern: Pattern
    device: torch.device

    @property
    def tokens(self) -> int:
        """Tokens of the layer's input."""
        return self.cols if self.kind == "wgrad" else self.width

    @property
    def shape(self) -> tuple[int, int]:
        """(out, in) of the layer."""
        return (self.rows, self.width if self.kind == "wgrad" else self.cols)


def jobs(model: nn.Module, counts: Sequence[int]) -> list[tuple[Job | None, Tuned]]:
    """Every product once with the entry of its layers, and an entry without a product per kind of layer that has none."""
    found: dict[Any, tuple[Job | None, Tuned]] = {}
    for name, module in model.named_modules():
        if not isinstance(module, (CompressedLinear, NMWeight)):
            continue
        for job, reason in _of_layer(module, counts):
            kind = type(module).__name__
            shape = shape_of(module) if job is None else job.shape
            key = (kind, job or (shape, reason))
            if key not in found:
                entry = Tuned([], kind, shape=shape, choice=reason)
                if job is not None:
                    entry.product, entry.tokens, entry.pattern = job.kind, job.tokens, str(job.pattern)
                    entry.dtype = str(job.dtype).removeprefix("torch.")
                found[key] = (job, entry)
            found[key][1].layers.append(name or "(root)")
    return list(found.values())


def shape_of(module: CompressedLinear | NMWeight) -> tuple[int, int]:
    """(out, in) of a layer."""
    rows, cols = (module.weight if isinstance(module, CompressedLinear) else module.master).shape
    return int(rows), int(cols)


def _of_layer(module: CompressedLinear | NMWeight, counts: Sequence[int]) -> Iterator[tuple[Job | None, str]]:
    """The products of a layer that Triton's kernels run, or the reason why there are none."""
    rows, cols = shape_of(module)
    if isinstance(module, CompressedLinear):
        roles: Iterable[str] = ("fprop",)
        pattern, weight = module.pattern, module.values
    else:
        plan, weight = module.plan, module.weight
        roles = (("fprop", "dgrad") if plan.packs else ()) + (("wgrad",) if plan.wgrad in ("mvue", "magnitude") else ())
        if not roles:
            yield None, "its products are dense until nm.compress_"
            return
        pattern = module.mask_pattern
    for role in roles:
        for t in counts:
            if role == "wgrad":
                job = Job(role, weight.dtype, rows, t, cols, Pattern(plan.n, plan.m), weight.device)
            else:
                job = Job(role, weight.dtype, rows, cols, t, pattern, weight.device)
            reason = _declined(job)
            yield (None, reason) if reason else (job, "")


def _declined(job: Job) -> str:
    """Why Triton's kernels do not run this product here; empty if they do."""
    op, args = OPS[job.kind], _arguments(job)
    can, reason = _backend(op).supports(*args)
    if not can:
        return f"{BACKEND} declined: {reason}"
    try:
        chosen = choose(op, *args).backend
    except BackendError as error:
        return str(error)
    return "" if chosen == BACKEND else f"runs on {chosen}"


def _backend(op: str) -> Impl:
    return next(entry for entry in implementations(op) if entry.backend == BACKEND)


def _arguments(job: Job, random: bool = False) -> tuple[Any, ...]:
    """Arguments of the raw op: memory as it comes, or random numbers."""
    p = job.pattern

    def matrix(rows: int, cols: int) -> Tensor:
        return (torch.randn if random else torch.empty)((rows, cols), dtype=job.dtype, device=job.device)

    if random:
        e = matrix(job.rows, p.groups(job.cols) * p.m)
        e[:, job.cols :] = 0  # along tokens the last group may be partial
        values, indices = torch.ops.nmkernels.nm_compress(e, p.n, p.m, None)
    else:
        values = matrix(job.rows, p.kept(job.cols))
        indices = torch.empty((job.rows, p.index_bytes(job.cols)), dtype=torch.uint8, device=job.device)
    if job.kind == "wgrad":
        return values, indices, p.n, p.m, job.cols, matrix(job.cols, job.width)
    x = matrix(job.width, job.cols if job.kind == "fprop" else job.rows)
    return (x, values, indices, p.n, p.m, job.cols, *([None] if job.kind == "fprop" else []))


@torch.no_grad()
def tune_one(job: Job, entry: Tuned, timer: Timer | None) -> dict[str, dict[str, Any] | None]:
    """Time the candidates of one product, fill in its entry, and return what is to be stored."""
    tuned = import_module("..backends.triton.tuned", __package__)
    linear = import_module("..backends.triton.linear", __package__)
    args = _arguments(job, random=True)
    sizes = (job.kind, job.dtype, job.rows, job.cols, job.width, job.pattern.n, job.pattern.m)
    capability = linear.capability(args[0])
    product = tuned.Product(*sizes, job.device, capability)
    judge, run, timer = _judge(job, args), _backend(OPS[job.kind]).fn, timer or _seconds
    default, times = tuned.plan(*sizes, capability), {}
    for candidate in tuned.candidates(*sizes, capability):
        with tuned.using(product, candidate):
            try:
                wrong = judge(lambda out: run(*args, out=out))
                if not wrong:
                    times[candidate] = timer(lambda: run(*args))
            except Exception as error:  # too much shared memory, mostly
                wrong = f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
        if wrong:
            entry.refused.append(f"{_words(candidate)}: {wrong}")
            log.warning("%s %s: refused %s", job.kind, job.shape, entry.refused[-1])
    key = tuned.name(product, tuned.device_name(job.device))
    if not times:
        entry.choice = "no launch gave a right result"
        return {key: None}
    best = min(times, key=times.__getitem__)
    entry.default = times.get(default)
    if entry.default is not None and entry.default < LEAST_GAIN * times[best]:
        best = default
    entry.best, entry.choice = times[best], f"default, {_words(best)}" if best == default else _words(best)
    line = {"plan": best._asdict(), "us": 1e6 * times[best], "default us": entry.default and 1e6 * entry.default}
    return {key: None if best == default else line}


def _words(plan: Any) -> str:
    """A launch in words: its method, and the numbers that matter to it."""
    numbers = {} if plan.method == "scratch" else {k: v for k, v in plan._asdict().items() if k != "method"}
    return " ".join([plan.method, *(f"{k}={v}" for k, v in numbers.items())])


def _judge(job: Job, args: tuple[Any, ...]) -> Judge:
    e, x = (args[:2], args[5]) if job.kind == "wgrad" else (args[1:3], args[0])
    dense = torch.ops.nmkernels.nm_decompress(*e, job.pattern.n, job.pattern.m, job.cols)
    return Judge(x, dense.t()) if job.kind == "fprop" else Judge(x, dense) if job.kind == "dgrad" else Judge(dense, x)


def _seconds(call: Call) -> float:
    """The median of calls by the device's clock, each after its cache was overwritten."""
    testing = import_module("triton.testing")
    return 1e-3 * float(testing.do_bench(call, warmup=10, rep=40, return_mode="median"))
