"""tune: time the ways to do a model's products on the device at hand, and keep the fastest ones on disk."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from importlib import import_module
from pathlib import Path

from torch import nn

from .._dispatch import ENV, forced_backend
from ..pattern import NMError
from . import _tune_choices, _tune_launches
from ._tune_launches import Timer
from ._tune_report import Tuned, TuneReport

log = logging.getLogger("nmkernels.tune")
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
    launches, products = _tune_launches.jobs(model, counts), [] if forced else _tune_choices.products(model, counts)
    report, covered = TuneReport(), {name for _, entry in products for name in entry.layers}
    report.entries = [entry for job, entry in launches if job is not None or not covered.issuperset(entry.layers)]
    report.choices = [entry for _, entry in products]
    if forced and not report.entries:
        report.note = f"nothing to choose: {ENV}={forced}"
    tell = _Progress(progress, sum(job is not None for job, _ in launches) + len(products))
    for job, entry in launches:
        if job is not None:
            tell(entry)
            lines = _tune_launches.tune_one(job, entry, timer)
            _stored(report, lambda lines=lines: import_module("..backends.triton.tuned", __package__).store(lines))  # type: ignore[misc]
    for product, entry in products:
        tell(entry)
        _stored(report, lambda product=product, entry=entry: _tune_choices.tune_one(product, entry, timer))  # type: ignore[misc]
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


__all__ = ["Progress", "TuneReport", "Tuned", "tune"]
