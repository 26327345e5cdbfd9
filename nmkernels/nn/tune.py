"""tune: time the ways to do a model's products on the device at hand, and keep the fastest ones on disk.

What ``nm.tune`` found, as data and as a table.

The products of a model's layers, and the fastest way to do each: dense, or one backend's kernel.

The launches of Triton's kernels for a model's products: which there are, and which is the fastest.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ..autograd import choice
from ..autograd.choice import LEAST_GAIN, Product, Timer
from ..autograd.choice.judge import Judge
from ..dispatch import ENV, Impl, choose, forced_backend, implementations
from ..pattern import BackendError, NMError, Pattern
from .compressed import CompressedLinear
from .linear import NMWeight, autocast_dtype, castable

__all__ = ["Progress", "TuneReport", "Tuned", "tune"]


HEADER = ("layer", "product", "shape", "tokens", "default ms", "best ms", "gain", "choice")


@dataclass
class Tuned:
    """What was found for one product of some layers.

    Args:
        layers: their names. kind: their class. product: ``fprop``, ``dgrad``, ``wgrad``, or empty where the layer has none to tune.
        shape: (out, in). tokens: of the input. pattern, dtype: of the compressed operand.
        default, best: seconds of what is done where nothing was measured (of a launch: by the heuristic; of a choice: dense, or by the
            backend of highest priority) and of the fastest right one; None where nothing was timed.
        choice: that fastest one, or why nothing was tuned.
        refused: those whose result was wrong or that failed, each with the reason; they are never chosen.
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

    def cells(self) -> tuple[str, ...]:
        """Its row of the table."""
        kind = f"{self.kind} x{len(self.layers)}" if len(self.layers) > 1 else self.kind
        product = " ".join(part for part in (self.product, self.pattern, self.dtype) if part)
        times = [f"{1e3 * t:.4f}" if t is not None else "" for t in (self.default, self.best)]
        gain = f"{self.gain:.2f}x" if self.gain is not None else ""
        return kind, product, f"({self.shape[0]},{self.shape[1]})", str(self.tokens or ""), *times, gain, self.choice


@dataclass
class TuneReport:
    """What ``tune`` found; ``str`` of it is a table.

    ``choices`` has the way that each product of layers of one shape is done, such as ``dense`` or ``cpu rows``; ``entries`` how Triton's
    kernels are launched, and layers that have nothing to tune. ``paths`` are the files that was written to; where there are none, ``note``
    says why.

    Example:
        >>> print(TuneReport([Tuned(["fc"], "SparseLinear", shape=(8, 16), choice="its products are dense")]))
        layer         product  shape   tokens  default ms  best ms  gain  choice
        SparseLinear           (8,16)                                     its products are dense
        nothing to store
    """

    entries: list[Tuned] = field(default_factory=list)
    choices: list[Tuned] = field(default_factory=list)
    paths: list[str] = field(default_factory=list)
    note: str = "nothing to store"

    @property
    def path(self) -> str | None:
        """The files, or None."""
        return ", ".join(self.paths) or None

    @property
    def changed(self) -> list[Tuned]:
        """Launches that are no longer the heuristic's, and products that are no longer done as they are where nothing was measured."""
        launches = [e for e in self.entries if e.best is not None and not e.choice.startswith("default")]
        return launches + [c for c in self.choices if c.best is not None and c.best != c.default]

    def __str__(self) -> str:
        every = [*self.choices, *self.entries]
        rows = [HEADER, *(e.cells() for e in every)]
        widths = [max(len(row[i]) for row in rows) for i in range(7)]
        lines = ["  ".join([*(cell.ljust(w) for cell, w in zip(row[:7], widths, strict=True)), row[7]]).rstrip() for row in rows]
        lines += [f"refused, {e.product} {e.shape[0]}x{e.shape[1]}: {why}" for e in every for why in e.refused]
        return "\n".join([*lines, f"stored in {self.path}" if self.paths else self.note])


log = logging.getLogger("nmkernels.tune")

DEVICES = ("cpu", "cuda")


def gemms(model: nn.Module, counts: Sequence[int]) -> list[tuple[Product, Tuned]]:
    """Every product for which layers ask, once, with the entry that names these layers."""
    found: dict[tuple[str, Product], Tuned] = {}
    for name, module in model.named_modules():
        for tokens in counts:
            for product in of_layer(module, tokens):
                kind = type(module).__name__
                entry = found.setdefault((kind, product), _entry(kind, product))
                entry.layers.append(name or "(root)")
    return [(product, entry) for (_, product), entry in found.items()]


def of_layer(module: nn.Module, tokens: int) -> tuple[Product, ...]:
    """The products that a layer asks ``choice`` about, under the autocast that is on; none for other modules."""
    if not isinstance(module, (CompressedLinear, NMWeight)):
        return ()
    weight = module.values if isinstance(module, CompressedLinear) else module.weight
    cast = autocast_dtype(weight)
    dtype: torch.dtype = cast if cast is not None and castable(weight.dtype) else weight.dtype
    asked: tuple[Product, ...] = module.products(tokens, dtype)
    return tuple(product for product in asked if product.device.type in DEVICES)


def _entry(kind: str, product: Product) -> Tuned:
    pattern, dtype = f"{product.n}:{product.m}", str(product.dtype).removeprefix("torch.")
    return Tuned([], kind, product.role, (product.rows, product.cols), product.tokens, pattern, dtype)


def tune_gemm(product: Product, entry: Tuned, timer: Timer | None) -> Path:
    """Measure a product, fill in its entry, and follow what was found from now on.

    Raises:
        OSError: the table cannot be written; this process follows it all the same.
    """
    try:
        found = choice.measure(product, timer=timer)
    except RuntimeError as error:  # out of memory, mostly
        entry.choice = f"not measured: {str(error).splitlines()[0]}"
        return choice.table.path()
    entry.default, entry.best, entry.choice = found.seconds.get(found.baseline), found.seconds.get(found.best), found.best
    entry.refused = [f"{name}: {why}" for name, why in found.refused.items()]
    for why in entry.refused:
        log.warning("%s: refused %s", product.words(), why)
    return choice.record(found)


OPS = {"fprop": "nm_linear", "dgrad": "nm_linear_dgrad", "wgrad": "nm_linear_wgrad"}
BACKEND = "triton"

Call = Callable[[], object]


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
def tune_launch(job: Job, entry: Tuned, timer: Any) -> dict[str, dict[str, Any] | None]:
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


log.addHandler(logging.NullHandler())

Progress = Callable[[int, int, str], None]


def tune(
    model: nn.Module, tokens: int | Sequence[int] = 8192, *, timer: Timer | None = None, progress: Progress | None = None
) -> TuneReport:
    """Time the ways in which the products of ``model`` can be done on its device, dense among them; later calls use the fastest.

    First the launches of Triton's kernels, where those run; then, for every product whose layer leaves the choice open, the backends
    against each other and against dense: y = x Wᵀ of ``CompressedLinear``, and in training the products of layers whose recipe has
    ``packed="auto"``. So a sparse product is never slower than the dense one where there is a dense weight, which a
    ``CompressedLinear`` has with ``keep_dense=True``. Works on CPUs too.

    Each shape is timed once, on random numbers, in turns. What is not as good as torch's own result, judged against float64, is told in
    the report and never chosen. The choices are stored in ``NMKERNELS_CACHE`` or ``~/.cache/nmkernels``; they hold for this device, these
    versions, these shapes, and token counts up to the next power of two. A product takes about a second, or some ten calls where those
    are slower: on a CPU give the tokens that you really use. Triton's launches take ten seconds, with up to four tokens a minute, nearly
    all of it compiling for the first time. Under ``torch.autocast`` the products are those of its dtype. ``NMKERNELS_CHOICE=dense`` or
    ``packed`` takes the choice away, and ``measured`` lets layers measure what is unknown when they meet it.

    Args:
        model: any module, on the device it will run on and in its dtype.
        tokens: rows of the layers' input, batch times sequence; several for a model that is called with several.
        timer: seconds of a call; the median of many on the device if None.
        progress: called with (done, total, what) before each product. The same is logged to ``nmkernels.tune``.

    Returns:
        a ``TuneReport``. With ``NMKERNELS_BACKEND`` set there is nothing to choose, and only that backend's launches are timed.

    Raises:
        NMError: a token count below 1.

    Example:
        >>> import torch
        >>> from nmkernels import CompressedLinear, ops
        >>> layer = CompressedLinear(ops.compress(torch.randn(4, 8), "2:4"))
        >>> [entry.product for entry in tune(layer, tokens=4).choices]
        ['fprop']
    """
    counts = (tokens,) if isinstance(tokens, int) else tuple(tokens)
    if not counts or any(t < 1 for t in counts):
        raise NMError(f"tune: tokens={tokens!r}; give the rows of the layers' input, at least 1, or several such numbers.")
    forced = forced_backend()
    launches, products = jobs(model, counts), [] if forced else gemms(model, counts)
    report, covered = TuneReport(), {name for _, entry in products for name in entry.layers}
    report.entries = [entry for job, entry in launches if job is not None or not covered.issuperset(entry.layers)]
    report.choices = [entry for _, entry in products]
    if forced and not report.entries:
        report.note = f"nothing to choose: {ENV}={forced}"
    tell = _Progress(progress, sum(job is not None for job, _ in launches) + len(products))
    for job, entry in launches:
        if job is not None:
            tell(entry)
            lines = tune_launch(job, entry, timer)
            _stored(report, lambda lines=lines: import_module("..backends.triton.tuned", __package__).store(lines))  # type: ignore[misc]
    for product, entry in products:
        tell(entry)
        _stored(report, lambda product=product, entry=entry: tune_gemm(product, entry, timer))  # type: ignore[misc]
    return report


class _Progress:
    """Counts products and tells of each."""

    def __init__(self, tell: Progress | None, total: int) -> None:
        self.tell, self.total, self.done = tell, total, 0

    def __call__(self, entry: Tuned) -> None:
        what = f"{entry.product} {entry.shape[0]}x{entry.shape[1]} {entry.pattern}, {entry.tokens} tokens"
        log.info("%d of %d: %s", self.done + 1, self.total, what)
        if self.tell is not None:
            self.tell(self.done, self.total, what)
        self.done += 1


def _stored(report: TuneReport, store: Callable[[], Path]) -> None:
    """One by one, so that a compiler that crashes takes nothing along that was found before."""
    try:
        path = str(store())
    except OSError as error:
        report.note = f"could not be stored, holds for this process only: {error}"
        return
    if path not in report.paths:
        report.paths.append(path)
