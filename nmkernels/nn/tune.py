"""tune: time the ways to do a model's GEMMs on the device at hand, and keep the fastest ones on disk."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import product
from typing import Any

import torch
from torch import nn

from ..autograd import gemms
from ..autograd.gemms import Gemm
from ..dispatch import ENV, choose, forced_backend, implementations
from ..pattern import BackendError, NMError, Pattern
from ..tuning import Found, Seconds
from .compressed import CompressedLinear
from .experts import CompressedExperts, experts_per_token, layer_name
from .linear import NMWeight, autocast_dtype, castable

HEADER = ("layer", "GEMM", "shape", "tokens", "default ms", "best ms", "gain", "choice")
DEVICES = ("cpu", "cuda")

Progress = Callable[[int, int, str], None]

log = logging.getLogger("nmkernels.tune")
log.addHandler(logging.NullHandler())


@dataclass
class Tuned:
    """What was found for one GEMM of some layers.

    Args:
        kind: the layers' class. GEMM: ``fprop``, ``dgrad``, ``wgrad``, or empty where the layer has none to tune.
        shape: (out, in).
        pattern, dtype: of the compressed operand.
        default, best: seconds of what is done where nothing was measured, and of the fastest right one; None where nothing was timed.
        choice: that fastest one, or why nothing was tuned.
        refused: what was wrong or failed, with the reason; it is never chosen.
    """

    layers: list[str]
    kind: str
    gemm: str = ""
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
        gemm = " ".join(part for part in (self.gemm, self.pattern, self.dtype) if part)
        times = [f"{1e3 * t:.4f}" if t is not None else "" for t in (self.default, self.best)]
        gain = f"{self.gain:.2f}x" if self.gain is not None else ""
        return kind, gemm, f"({self.shape[0]},{self.shape[1]})", str(self.tokens or ""), *times, gain, self.choice


@dataclass
class TuneReport:
    """What ``tune`` found; ``str`` of it is a table.

    ``choices`` has the way that each GEMM of layers of one shape is done, such as ``dense`` or ``cpu rows``; ``entries`` how Triton's
    kernels are launched, and layers that have nothing to tune. ``paths`` are the files written to; where there are none, ``note`` says why.

    Example:
        >>> print(TuneReport([Tuned(["fc"], "SparseLinear", shape=(8, 16), choice="its GEMMs are dense")]))
        layer         GEMM  shape   tokens  default ms  best ms  gain  choice
        SparseLinear           (8,16)                                     its GEMMs are dense
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
        """Launches that are no longer the heuristic's, and GEMMs that are no longer done as they are where nothing was measured."""
        launches = [e for e in self.entries if e.best is not None and not e.choice.startswith("default")]
        return launches + [c for c in self.choices if c.best is not None and c.best != c.default]

    def __str__(self) -> str:
        every = [*self.choices, *self.entries]
        rows = [HEADER, *(e.cells() for e in every)]
        widths = [max(len(row[i]) for row in rows) for i in range(7)]
        lines = ["  ".join([*(cell.ljust(w) for cell, w in zip(row[:7], widths, strict=True)), row[7]]).rstrip() for row in rows]
        lines += [f"refused, {e.gemm} {e.shape[0]}x{e.shape[1]}: {why}" for e in every for why in e.refused]
        return "\n".join([*lines, f"stored in {self.path}" if self.paths else self.note])


def tune(
    model: nn.Module, tokens: int | Sequence[int] = 8192, *, timer: Seconds | None = None, progress: Progress | None = None
) -> TuneReport:
    """Time the ways in which the GEMMs of ``model`` can be done on its device, dense among them; later calls use the fastest.

    First the launches of Triton's kernels, where those run; then, for every GEMM whose layer leaves the choice open, the backends
    against each other and against dense: y = x Wᵀ of ``CompressedLinear`` (dense with ``keep_dense=True``), and in training the GEMMs of
    layers whose recipe has ``packed="auto"``. Under ``torch.autocast`` the GEMMs are those of its dtype.

    Each shape is timed once, on random numbers, in turns. What is not as good as torch's own result, judged against float64, is told in
    the report and never chosen. The choices are stored in ``NMKERNELS_CACHE`` or ``~/.cache/nmkernels``; they hold for this device, these
    versions, these shapes, and token counts up to the next power of two. A GEMM takes about a second, or some ten calls where those
    are slower: on a CPU give the tokens that you really use. ``NMKERNELS_CHOICE=dense`` or ``packed`` takes the choice away, and
    ``measured`` lets layers measure what is unknown when they meet it.

    Args:
        model: any module, on the device it will run on and in its dtype.
        tokens: rows of the layers' input, batch times sequence; several for a model that is called with several.
        timer: seconds of a call; the median of many on the device if None.
        progress: called with (done, total, what) before each GEMM. The same is logged to ``nmkernels.tune``.

    Returns:
        a ``TuneReport``. With ``NMKERNELS_BACKEND`` set there is nothing to choose, and only that backend's launches are timed.

    Raises:
        NMError: a token count below 1.

    Example:
        >>> import torch
        >>> from nmkernels import CompressedLinear, ops
        >>> layer = CompressedLinear(ops.compress(torch.randn(4, 8), "2:4"))
        >>> [entry.gemm for entry in tune(layer, tokens=4).choices]
        ['fprop']
    """
    counts = (tokens,) if isinstance(tokens, int) else tuple(tokens)
    if not counts or any(t < 1 for t in counts):
        raise NMError(f"tune: tokens={tokens!r}; give the rows of the layers' input, at least 1, or several such numbers.")
    forced = forced_backend()
    launches, wanted = _collected(model, counts, _launches), [] if forced else _collected(model, counts, _choices)
    covered = {name for _, entry in wanted for name in entry.layers}
    report = TuneReport([e for gemm, e in launches if gemm or not covered.issuperset(e.layers)], [e for _, e in wanted])
    if forced and not report.entries:
        report.note = f"nothing to choose: {ENV}={forced}"
    work = [(gemm, entry, True) for gemm, entry in launches if gemm is not None]
    work += [(gemm, entry, False) for gemm, entry in wanted if gemm is not None]
    for done, (gemm, entry, launch) in enumerate(work):
        what = f"{entry.gemm} {entry.shape[0]}x{entry.shape[1]} {entry.pattern}, {entry.tokens} tokens"
        log.info("%d of %d: %s", done + 1, len(work), what)
        if progress is not None:
            progress(done, len(work), what)
        # stored one by one, so that a compiler that crashes takes nothing along that was found before
        _measure(report, gemm, entry, launch, timer)
    return report


def _measure(report: TuneReport, gemm: Gemm, entry: Tuned, launch: bool, timer: Seconds | None) -> None:
    """Find the fastest launch, or the fastest backend; fill in the entry, and where it was stored."""
    try:
        if launch:
            op, args = _call(gemm)
            prepare: Any = choose(op, *args).tuning.prepare
            found: Found = prepare(op, *args, timer=timer)
        else:
            found = gemms.measure(gemm, timer=timer)
            gemms.record(found)
    except RuntimeError as error:  # out of memory, mostly
        entry.choice = f"not measured: {str(error).splitlines()[0]}"
        return
    entry.default, entry.best, entry.choice = found.seconds.get(found.baseline), found.seconds.get(found.best), found.best
    if launch:
        default = f"default, {found.best}" if found.best == found.baseline else found.best
        entry.choice = default if found.seconds else "no launch gave a right result"
    entry.refused = [f"{name}: {why}" for name, why in found.refused.items()]
    for why in entry.refused:
        log.warning("%s: refused %s", gemm.words(), why)
    if found.path is None:
        report.note = found.note
    elif found.path not in report.paths:
        report.paths.append(found.path)


Layer = CompressedLinear | NMWeight
OfLayer = Callable[[Layer, Sequence[int]], Iterator[tuple[Gemm | None, str]]]


def _layers(model: nn.Module, counts: Sequence[int]) -> Iterator[tuple[str, Layer, Sequence[int]]]:
    """Each layer with the numbers of rows of its input; of compressed experts the first, with the tokens that one meets on average."""
    for name, module in model.named_modules():
        if isinstance(module, Layer):
            yield layer_name(name, module), module, counts
        elif isinstance(module, CompressedExperts):
            chosen = experts_per_token(module) or 1
            for key, stack in module.stacks.items():
                yield f"{name}.{key}" if name else key, stack.layers[0], [-(-tokens * chosen // stack.experts) for tokens in counts]


def _collected(model: nn.Module, tokens: Sequence[int], of_layer: OfLayer) -> list[tuple[Gemm | None, Tuned]]:
    """What ``of_layer`` finds for so many tokens, GEMMs or the reason why there are none, each once with the layers that have it."""
    found: dict[Any, tuple[Gemm | None, Tuned]] = {}
    for name, module, counts in _layers(model, tokens):
        kind, (rows, cols) = type(module).__name__, (module.weight if isinstance(module, CompressedLinear) else module.multiplied).shape
        for gemm, reason in of_layer(module, counts):
            entry = Tuned([], kind, shape=(int(rows), int(cols)), choice=reason)
            if gemm is not None:
                pattern, dtype = f"{gemm.n}:{gemm.m}", str(gemm.dtype).removeprefix("torch.")
                entry = Tuned([], kind, gemm.role, (gemm.rows, gemm.cols), gemm.tokens, pattern, dtype)
            found.setdefault((kind, gemm or (entry.shape, reason)), (gemm, entry))[1].layers.append(name or "(root)")
    return list(found.values())


def _choices(module: Layer, counts: Sequence[int]) -> Iterator[tuple[Gemm | None, str]]:
    """The GEMMs for which a layer asks, under the autocast that is on."""
    weight = module.values if isinstance(module, CompressedLinear) else module.weight
    cast = autocast_dtype(weight)
    dtype: torch.dtype = cast if cast is not None and castable(weight.dtype) else weight.dtype
    return ((gemm, "") for tokens in counts for gemm in module.gemms(tokens, dtype) if gemm.device.type in DEVICES)


# ---- how kernels that compile are launched


def _launches(module: Layer, counts: Sequence[int]) -> Iterator[tuple[Gemm | None, str]]:
    """The GEMMs of a layer whose kernel has launches to choose among, or the reason why there are none."""
    if isinstance(module, CompressedLinear):
        roles, weight, (rows, cols) = [("fprop", module.pattern)], module.values, module.weight.shape
    else:
        plan, pattern, weight, (rows, cols) = module.plan, module.mask_pattern, module.master, module.multiplied.shape
        roles = [("fprop", pattern), ("dgrad", pattern)] if plan.packs else []
        roles += [("wgrad", Pattern(plan.n, plan.m))] if plan.wgrad in ("mvue", "magnitude") else []
    if not roles:
        yield None, "its GEMMs are dense until nm.compress_"
    for (role, p), tokens in product(roles, counts):
        rule = "magnitude" if role == "wgrad" else ""
        gemm = Gemm(role, tokens, int(rows), int(cols), p.n, p.m, weight.dtype, weight.device, ("rows",), rule)
        op, args = _call(gemm)
        entry = next(i for i in implementations(op) if i.tuning.compiles)
        can, reason = entry.supports(*args)
        try:
            chosen = choose(op, *args) if can else entry
            reason = f"{entry.backend} declined: {reason}" if not can else "" if chosen is entry else f"runs on {chosen.backend}"
        except BackendError as error:
            reason = str(error)
        yield (None, reason) if reason else (gemm, "")


def _call(gemm: Gemm) -> tuple[str, tuple[Any, ...]]:
    """The raw op of a GEMM and arguments of its shapes, in memory as it comes."""
    p, pattern = gemm, Pattern(gemm.n, gemm.m)
    new = partial(torch.empty, dtype=p.dtype, device=p.device)
    cols = p.tokens if p.role == "wgrad" else p.cols
    packed = new((p.rows, pattern.kept(cols))), torch.empty((p.rows, pattern.index_bytes(cols)), dtype=torch.uint8, device=p.device)
    return gemms.op_of(p, "rows"), gemms.arguments(p, "rows", packed, new((p.tokens, p.rows if p.role == "dgrad" else p.cols)))
