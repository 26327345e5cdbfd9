"""tune: time the methods of a model's GEMMs on its device, and store the fastest ones on disk.

Every method is checked against float64 before it is timed. For a layer in training, making W̃, fprop and dgrad are timed together, as in a
training step. The methods alternate, and one replaces the baseline (dense, if the weight is available in dense layout) only if repeated
measurements agree that it is faster.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from ..arguments import whole_number
from ..dispatch import ENV, forced_backend
from ..pattern import OptionError
from ..timing import Measurement, Seconds
from . import estimate
from .candidates import measure, search
from .choose import ESTIMATED, rule
from .methods import DENSE, Method
from .problem import Problem, plain, stored_as

HEADER = ("layer", "GEMM", "shape", "tokens", "by rule ms", "estimate ms", "best ms", "gain", "choice")

Progress = Callable[[int, int, str], None]

log = logging.getLogger("nmkernels.tune")
log.addHandler(logging.NullHandler())


@dataclass
class Tuned:
    """The result of tuning one GEMM, or fprop and dgrad together, of some equal layers.

    Args:
        layers: their names.
        kind: their class.
        gemm: ``fprop``, ``wgrad`` or ``fprop + dgrad``; empty if there is nothing to tune.
        shape: (out, in).
        tokens: rows of the input.
        pattern, dtype: of the compressed operand; the pattern with its integers, if values are that: ``"2:4 int4/128"``.
        default, best: seconds of the rule's choice and of the fastest correct method; None if nothing was timed.
        estimate: seconds of the rule's choice as estimated; None without an estimate.
        choice: the fastest correct method, or why nothing was tuned.
        refused: methods that were wrong or failed, with the reason; they are never chosen.
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
    estimate: float | None = None
    choice: str = ""
    refused: list[str] = field(default_factory=list)

    @property
    def gain(self) -> float | None:
        """The speed-up of the best method over the rule's choice; None if nothing was timed."""
        return None if self.default is None or self.best is None else self.default / self.best

    def cells(self) -> tuple[str, ...]:
        """The entry as a row of the report's table."""
        kind = f"{self.kind} x{len(self.layers)}" if len(self.layers) > 1 else self.kind
        gemm = " ".join(part for part in (self.gemm, self.pattern, self.dtype) if part)
        times = [f"{1e3 * t:.4f}" if t is not None else "" for t in (self.default, self.estimate, self.best)]
        gain = f"{self.gain:.2f}x" if self.gain is not None else ""
        return kind, gemm, f"({self.shape[0]},{self.shape[1]})", str(self.tokens or ""), *times, gain, self.choice


@dataclass
class TuneReport:
    """The result of ``tune``; ``str`` formats it as a table.

    Args:
        choices: one entry for each distinct GEMM, and for layers without anything to tune.
        paths: the files that were written.
        note: why no file was written.

    Example:
        >>> print(TuneReport([Tuned(["fc"], "SparseLinear", shape=(8, 16), choice="its GEMMs are dense")]))
        layer         GEMM  shape   tokens  by rule ms  estimate ms  best ms  gain  choice
        SparseLinear        (8,16)                                                  its GEMMs are dense
        nothing to store
    """

    choices: list[Tuned] = field(default_factory=list)
    paths: list[str] = field(default_factory=list)
    note: str = "nothing to store"

    @property
    def path(self) -> str | None:
        """The written files as text, or None."""
        return ", ".join(self.paths) or None

    @property
    def changed(self) -> list[Tuned]:
        """The entries whose best method is not the rule's choice."""
        return [c for c in self.choices if c.best is not None and c.best != c.default]

    def __str__(self) -> str:
        rows = [HEADER, *(e.cells() for e in self.choices)]
        widths = [max(len(row[i]) for row in rows) for i in range(len(HEADER) - 1)]
        lines = ["  ".join([*(cell.ljust(w) for cell, w in zip(row[:-1], widths, strict=True)), row[-1]]).rstrip() for row in rows]
        lines += [f"refused, {e.gemm} {e.shape[0]}x{e.shape[1]}: {why}" for e in self.choices for why in e.refused]
        return "\n".join([*lines, f"stored in {self.path}" if self.paths else self.note])


def tune(
    model: nn.Module, tokens: int | Sequence[int] = 8192, *, timer: Seconds | None = None, progress: Progress | None = None
) -> TuneReport:
    """Time the methods of each GEMM in ``model`` on its device, including dense, and store the fastest for later calls.

    This covers y = x Wᵀ of ``CompressedLinear`` (including dense with ``keep_dense=True``), and in training the GEMMs of layers with
    ``packed="auto"`` in their recipe: fprop and dgrad together with making the effective weight, and wgrad if it uses an N:M estimate.
    Backends with several launches or algorithms first search for their fastest. Under ``torch.autocast`` GEMMs use the autocast dtype.

    Each shape is timed once, on random numbers; a layer takes about a second, or ten calls if those take longer. A method that is less
    accurate than torch's GEMM, compared with float64, is reported and never chosen. The choices are stored in ``NMKERNELS_CACHE`` or
    ``~/.cache/nmkernels``; they apply to this device, these versions and shapes, and token counts up to the next power of two.
    ``NMKERNELS_CHOICE=dense`` or ``packed`` overrides them; with ``measured``, layers measure unknown GEMMs at first use.

    Args:
        model: any module, on the device and in the dtype that it will be used in.
        tokens: rows of the layers' input, batch times sequence; a sequence of numbers for a model that is called with several.
        timer: returns the seconds of a call; by default the median of many calls on the device.
        progress: called with (done, total, what) before each GEMM. The same is logged to ``nmkernels.tune``.

    Returns:
        a ``TuneReport``. With ``NMKERNELS_BACKEND`` set, only that backend's launches or algorithms are timed.

    Raises:
        OptionError: a token count is not a whole number of at least 1.

    Example:
        >>> import torch
        >>> from nmkernels import CompressedLinear, ops
        >>> layer = CompressedLinear(ops.compress(torch.randn(4, 8), "2:4"))
        >>> [entry.gemm for entry in tune(layer, tokens=4).choices]
        ['fprop']
    """
    several: Any = tokens
    try:
        several = [tokens] if isinstance(several, str) else [*several]
    except TypeError:  # a 0-d tensor has an iterator all the same
        several = [tokens]
    counts = [whole_number(OptionError, "tune: tokens", count, also="a sequence of such numbers") for count in several or [tokens]]
    forced = forced_backend()
    collected = _collected(model, counts)
    report = TuneReport([entry for _, entry in collected])
    if forced:
        report.note = f"nothing to choose: {ENV}={forced}"
    work = [(problems, entry) for problems, entry in collected if problems]
    for done, (problems, entry) in enumerate(work):
        what = f"{entry.gemm} {entry.shape[0]}x{entry.shape[1]} {entry.pattern}, {entry.tokens} tokens"
        log.info("%d of %d: %s", done + 1, len(work), what)
        if progress is not None:
            progress(done, len(work), what)
        # stored one by one, so that earlier results survive a crash
        (_search if forced else _tune)(report, problems, entry, timer)
    return report


def _tune(report: TuneReport, problems: tuple[Problem, ...], entry: Tuned, timer: Seconds | None) -> None:
    """Measure, store the fastest methods, and fill in ``entry`` and ``report``."""
    by_rule = rule(*problems)
    default = ", ".join(m.name for m in by_rule)
    try:
        measured = measure(*problems, timer=timer)
        measured.store(measured.best)
    except RuntimeError as error:  # mostly out of memory
        entry.choice = f"not measured: {str(error).splitlines()[0]}"
        return
    entry.default, entry.best = measured.seconds.get(default, measured.seconds.get(measured.baseline)), measured.seconds.get(measured.best)
    entry.estimate = _estimate(problems, by_rule)
    entry.choice = measured.best if measured.seconds else "no method gave a correct result"
    _stored(report, entry, measured)
    for why in entry.refused:
        log.warning("%s: refused %s", problems[0].words(), why)


def _search(report: TuneReport, problems: tuple[Problem, ...], entry: Tuned, timer: Seconds | None) -> None:
    """With a forced backend: let it find its fastest launch or algorithm for each GEMM, if it has several."""
    searches = [one for p in problems if (one := search(p, timer)) is not None]
    entry.choice = "; ".join(f.best if f.seconds else "no launch gave a correct result" for f in searches) or report.note
    if all(f.seconds for f in searches) and searches:
        entry.default, entry.best = sum(f.seconds[f.baseline] for f in searches), sum(f.seconds[f.best] for f in searches)
    for one in searches:
        _stored(report, entry, one)


def _stored(report: TuneReport, entry: Tuned, measured: Measurement) -> None:
    entry.refused += [f"{name}: {why}" for name, why in measured.refused.items()]
    if measured.path is None:
        report.note = measured.note or report.note
    elif measured.path not in report.paths:
        report.paths.append(measured.path)


def _estimate(problems: tuple[Problem, ...], chosen: tuple[Method, ...]) -> float | None:
    """The estimate of these methods, including the time to make W̃; None without one."""
    if not all(estimate.measured(p) for p in problems) or any(m.name not in ESTIMATED for m in chosen):
        return None
    made = {"dense" if m == DENSE else "packed" for m in chosen} if problems[0].changing else set()
    making = sum(estimate.making(form, problems[0]) for form in sorted(made))
    return making + sum(estimate.seconds(ESTIMATED[m.name], p) for p, m in zip(problems, chosen, strict=True))


def _collected(model: nn.Module, tokens: Sequence[int]) -> list[tuple[tuple[Problem, ...], Tuned]]:
    """Each distinct GEMM of a model that ``choose`` decides, with its layers; layers without one have an entry with the reason."""
    entries: dict[Any, tuple[tuple[Problem, ...], Tuned]] = {}
    # of stacked experts only the first, with the tokens of one expert
    tunable = ((n, *layer) for n, m in model.named_modules() if hasattr(m, "tunable") for layer in m.tunable(tokens))
    for home, last, layer, counts in tunable:
        name = f"{home}.{last}".strip(".") or "(root)"
        kind, shape = type(layer).__name__, layer.shape
        problems = [some for count in counts for some in layer.problems(count) if some[0].device.type in ("cpu", "cuda")]
        for some in problems or [()]:
            entry = Tuned([], kind, shape=shape, choice="" if some else "its GEMMs are dense until nm.compress_")
            if some:
                p = some[0]
                roles = " + ".join(q.role for q in some)
                pattern = f"{p.n}:{p.m} {stored_as(p)}" if p.integers else f"{p.n}:{p.m}"
                entry = Tuned([], kind, roles, (p.rows, p.cols), p.tokens, pattern, plain(p.dtype))
            entries.setdefault((kind, some or shape), (some, entry))[1].layers.append(name)
    return list(entries.values())
