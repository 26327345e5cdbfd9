"""tune: time the ways to launch a model's products on the GPU at hand, and keep the fastest ones on disk."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from .._dispatch import Impl, choose, implementations
from ..pattern import BackendError, NMError, Pattern
from .compressed import CompressedLinear
from .linear import NMWeight

log = logging.getLogger("nmkernels.tune")
log.addHandler(logging.NullHandler())

OPS = {"fprop": "nm_linear", "dgrad": "nm_linear_dgrad", "wgrad": "nm_linear_wgrad"}
BACKEND = "triton"
LEAST_GAIN = 1.02
"""A launch replaces the heuristic's only if it is so many times as fast: less is noise."""

CHUNK = 1 << 24
"""Elements that are compared in float64 at once."""

Call = Callable[[], object]
Timer = Callable[[Call], float]
Progress = Callable[[int, int, str], None]


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


@dataclass
class Tuned:
    """What was found for one product of some layers.

    Args:
        layers: their names. kind: their class. product: ``fprop``, ``dgrad``, ``wgrad``, or empty where the layer has none to tune.
        shape: (out, in). tokens: of the input. pattern, dtype: of the compressed operand.
        default, best: seconds of the heuristic's launch and of the fastest right one; None where nothing was timed.
        choice: that launch, or why nothing was tuned.
        refused: launches whose result was wrong or that failed, each with the reason; they are never chosen.
    """

    layers: list[str]
    kind: str
    product: str = ""
    shape: tuple[int, int] = (0, 0)
    tokens: int = 0
    pattern: str = ""
    dtype: str = ""
    default: float | None = None
    best: float | None = None
    choice: str = ""
    refused: list[str] = field(default_factory=list)

    @property
    def gain(self) -> float | None:
        """How many times as fast the best is; None where nothing was timed."""
        return None if self.default is None or self.best is None else self.default / self.best


@dataclass
class TuneReport:
    """What ``tune`` found, one entry per product of layers of one shape; ``str`` of it is a table.

    ``path`` is the file that the choices were written to; where it is None, ``note`` says why.

    Example:
        >>> print(TuneReport([Tuned(["fc"], "CompressedLinear", shape=(8, 16), choice="triton declined: no GPU")]))
        layer              product  shape   tokens  default ms  best ms  gain  choice
        CompressedLinear           (8,16)                                      triton declined: no GPU
        nothing to store
    """

    entries: list[Tuned] = field(default_factory=list)
    path: str | None = None
    note: str = "nothing to store"

    @property
    def changed(self) -> list[Tuned]:
        """Those whose launch is no longer the heuristic's."""
        return [e for e in self.entries if e.best is not None and not e.choice.startswith("default")]

    def __str__(self) -> str:
        rows: list[tuple[str, ...]] = [("layer", "product", "shape", "tokens", "default ms", "best ms", "gain", "choice")]
        for e in self.entries:
            kind = f"{e.kind} x{len(e.layers)}" if len(e.layers) > 1 else e.kind
            product = " ".join(part for part in (e.product, e.pattern, e.dtype) if part)
            times = [f"{1e3 * t:.4f}" if t is not None else "" for t in (e.default, e.best)]
            gain = f"{e.gain:.2f}x" if e.gain is not None else ""
            shape = f"({e.shape[0]},{e.shape[1]})"
            rows.append((kind, product, shape, str(e.tokens or ""), *times, gain, e.choice))
        widths = [max(len(row[i]) for row in rows) for i in range(7)]
        lines = ["  ".join([*(cell.ljust(w) for cell, w in zip(row[:7], widths, strict=True)), row[7]]).rstrip() for row in rows]
        lines += [f"refused, {e.product} {e.shape[0]}x{e.shape[1]}: {why}" for e in self.entries for why in e.refused]
        return "\n".join([*lines, f"stored in {self.path}" if self.path else self.note])


def tune(
    model: nn.Module, tokens: int | Sequence[int] = 8192, *, timer: Timer | None = None, progress: Progress | None = None
) -> TuneReport:
    """Time the ways in which Triton's kernels can do the products of ``model`` on its device; later calls use the fastest.

    Every layer with a compressed operand counts: ``CompressedLinear`` (y = x Wᵀ) and, in training, layers whose recipe packs the weight
    or the gradient. Each shape is timed once, on random numbers. A launch whose result is not as good as torch's own, judged against
    float64, is told in the report and never chosen. The choices are stored in ``NMKERNELS_CACHE`` or ``~/.cache/nmkernels``; they hold for
    this GPU, this version of Triton, these shapes, and token counts up to the next power of two. A shape takes ten seconds, with up to four
    tokens a minute, nearly all of it compiling for the first time.

    Args:
        model: any module, on the device it will run on and in its dtype.
        tokens: rows of the layers' input, batch times sequence; several for a model that is called with several.
        timer: seconds of a call; the median of many on the device if None.
        progress: called with (done, total, what) before each product. The same is logged to ``nmkernels.tune``.

    Returns:
        a ``TuneReport``. Where nothing can be tuned, such as on a CPU, it says why for each layer, and nothing else happens.

    Raises:
        NMError: a token count below 1.

    Example:
        >>> from nmkernels import ops
        >>> layer = CompressedLinear(ops.compress(torch.randn(4, 8), "2:4"))
        >>> tune(layer, tokens=4).changed
        []
    """
    counts = (tokens,) if isinstance(tokens, int) else tuple(tokens)
    if not counts or any(t < 1 for t in counts):
        raise NMError(f"tune: tokens={tokens!r}; give the rows of the layers' input, at least 1, or several such numbers.")
    report, jobs = TuneReport(), _jobs(model, counts)
    for done, (job, entry) in enumerate(jobs):
        report.entries.append(entry)
        if job is None:
            continue
        what = f"{entry.product} {entry.shape[0]}x{entry.shape[1]} {entry.pattern}, {entry.tokens} tokens"
        log.info("%d of %d: %s", done + 1, len(jobs), what)
        if progress is not None:
            progress(done, len(jobs), what)
        with torch.no_grad():
            lines = _tune(job, entry, timer or _seconds)
        try:  # one by one, so that a compiler that crashes takes nothing along that was found before
            report.path = str(_tuned().store(lines))
        except OSError as error:
            report.note = f"could not be stored, holds for this process only: {error}"
    return report


def _tuned() -> ModuleType:
    return import_module("..backends.triton.tuned", __package__)


# ---- what there is to tune


def _jobs(model: nn.Module, counts: Sequence[int]) -> list[tuple[Job | None, Tuned]]:
    """Every product once with the entry of its layers, and an entry without a product per kind of layer that has none."""
    found: dict[Any, tuple[Job | None, Tuned]] = {}
    for name, module in model.named_modules():
        if not isinstance(module, (CompressedLinear, NMWeight)):
            continue
        for job, reason in _of_layer(module, counts):
            kind = type(module).__name__
            shape = _shape(module) if job is None else job.shape
            key = (kind, job or (shape, reason))
            if key not in found:
                entry = Tuned([], kind, shape=shape, choice=reason)
                if job is not None:
                    entry.product, entry.tokens, entry.pattern = job.kind, job.tokens, str(job.pattern)
                    entry.dtype = str(job.dtype).removeprefix("torch.")
                found[key] = (job, entry)
            found[key][1].layers.append(name or "(root)")
    return list(found.values())


def _shape(module: CompressedLinear | NMWeight) -> tuple[int, int]:
    rows, cols = (module.weight if isinstance(module, CompressedLinear) else module.master).shape
    return int(rows), int(cols)


def _of_layer(module: CompressedLinear | NMWeight, counts: Sequence[int]) -> Iterator[tuple[Job | None, str]]:
    """The products of a layer that Triton's kernels run, or the reason why there are none."""
    rows, cols = _shape(module)
    if isinstance(module, CompressedLinear):
        roles: Iterable[str] = ("fprop",)
        pattern, weight = module.pattern, module.values
    else:
        plan, weight = module.plan, module.weight
        roles = (("fprop", "dgrad") if plan.fprop == "packed" else ()) + (("wgrad",) if plan.wgrad in ("mvue", "magnitude") else ())
        if not roles:
            yield None, "its products are dense until nm.compress_"
            return
        pattern = Pattern(plan.n, plan.m)
    for role in roles:
        for t in counts:
            if role == "wgrad":
                job = Job(role, weight.dtype, rows, t, cols, pattern, weight.device)
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


# ---- tuning one


def _tune(job: Job, entry: Tuned, timer: Timer) -> dict[str, dict[str, Any] | None]:
    """Time the candidates of one product, fill in its entry, and return what is to be stored."""
    tuned = _tuned()
    linear = import_module("..backends.triton.linear", __package__)
    args = _arguments(job, random=True)
    sizes = (job.kind, job.dtype, job.rows, job.cols, job.width, job.pattern.n, job.pattern.m)
    capability = linear.capability(args[0])
    product = tuned.Product(*sizes, job.device, capability)
    judge, run = _Judge(job, args), _backend(OPS[job.kind]).fn
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


class _Judge:
    """Says what is wrong with a result: unwritten, or further from float64 than twice torch's own; or not the same twice."""

    def __init__(self, job: Job, args: tuple[Any, ...]) -> None:
        e, x = (args[:2], args[5]) if job.kind == "wgrad" else (args[1:3], args[0])
        dense = torch.ops.nmkernels.nm_decompress(*e, job.pattern.n, job.pattern.m, job.cols)
        self.theirs, self.exact = (_dense(job.kind, x.to(d), dense.to(d)) for d in (job.dtype, torch.float64))
        self.bound = 2 * self.error(self.theirs) + 4 * torch.finfo(job.dtype).eps * float(self.exact.abs().max())

    def error(self, y: Tensor) -> float:
        """The largest distance from float64; NaN where there is one."""
        step = max(1, CHUNK // max(1, y.shape[1]))
        parts = [(y[i : i + step].double() - self.exact[i : i + step]).abs().max() for i in range(0, len(y), step)]
        return float(torch.stack(parts).max())

    def __call__(self, run: Callable[[Tensor], object]) -> str:
        results = []
        for _ in range(2):
            out = torch.full_like(self.theirs, torch.nan)
            run(out)
            results.append(out)
        error = self.error(results[0])
        if not error <= self.bound:  # false for NaN
            return f"max error {error:.3g} against float64 is above {self.bound:.3g}"
        return "" if torch.equal(*results) else "two runs differ"


def _dense(kind: str, x: Tensor, e: Tensor) -> Tensor:
    return x @ e.t() if kind == "fprop" else x @ e if kind == "dgrad" else e @ x


def _seconds(call: Call) -> float:
    """The median of calls by the device's clock, each after its cache was overwritten."""
    testing = import_module("triton.testing")
    return 1e-3 * float(testing.do_bench(call, warmup=10, rep=40, return_mode="median"))
