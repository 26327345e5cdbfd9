"""The trial: whether whole steps are faster with what each GEMM measured, or in dense layout.

GEMMs are measured one by one. What they do to each other in a step, through the caches and by packing for one and keeping a dense layout
for another, only the step tells. So the first steps of a run alternate: each is a real step of training, and the weights multiplied are
the same, so that nothing is computed in vain and results differ by rounding.
"""

from __future__ import annotations

import hashlib
import logging
import time
from contextlib import suppress
from statistics import median
from typing import Any

import torch

from .. import tuning
from ..autograd.gemms import DENSE, Gemm, choose, key
from ..dispatch import forced_backend
from ..nn import NMWeight
from ..tuning import TABLE
from ..tuning.measure import LEAST_GAIN
from ..tuning.setting import reproducible, setting, undisturbed

PACKED = "packed"
WARM, PAIRS = 2, 7
"""Steps that do not count, one of each kind, and pairs of steps that do."""

log = logging.getLogger("nmkernels.choice")


class Trial:
    """Trains ``layers``, whose plan says "auto", in turns as measured and in dense layout, and keeps what makes steps faster.

    It begins at the end of the first step, unless nothing would be packed, the table has the verdict, or nothing may be measured. ``done``:
    it is over, or there is nothing to try.
    """

    def __init__(self, layers: dict[str, NMWeight]) -> None:
        self.layers = layers
        self.done = False
        self.problem = ""
        self._moments: list[Any] = []

    def stepped(self) -> None:
        """An optimizer step has ended."""
        if self.done or reproducible():
            return
        device = next(iter(self.layers.values())).weight.device
        if not undisturbed(device):
            return  # a step that is captured or watched is none to time
        if not self.problem:
            self._begin(device)
            return
        self._turn(device)
        if len(self._moments) == 1 + WARM + 2 * PAIRS:
            self._decide()

    def _begin(self, device: torch.device) -> None:
        gemms = self._gemms()
        if not gemms:
            return  # nothing has run yet, or all of it was compiled
        if setting() in ("dense", "packed") or forced_backend() or all(choose(gemm) == DENSE for gemm in gemms):
            self.done = True
            return
        parts = "\n".join(sorted(map(key, gemms)))
        what = f"{len(self.layers)} layers|{hashlib.sha256(parts.encode()).hexdigest()[:16]}"
        self.problem = tuning.key("step", device, what, max(gemm.tokens for gemm in gemms))
        line = TABLE.get(self.problem)
        if line is not None and line.get("choice") in (DENSE, PACKED):
            self._end(line["choice"])
        elif setting() == "table":
            self.done = True
        else:
            self._turn(device)

    def _turn(self, device: torch.device) -> None:
        """A step begins: the first in dense layout, and every other."""
        self._moments.append(now(device))
        self._use(dense=len(self._moments) % 2 == 1)

    def _gemms(self) -> list[Gemm]:
        """Those for which the layers asked in grad mode."""
        found: list[Gemm] = []
        for layer in self.layers.values():
            cols = layer.master.shape[1]
            for size, dtype, recording, _ in layer.effective.asked:
                found += layer.gemms(size // max(cols, 1), dtype) if recording else ()
        return found

    def _use(self, dense: bool) -> None:
        for layer in self.layers.values():
            layer.effective.dense_layout = dense

    def _decide(self) -> None:
        took = [between(a, b) for a, b in zip(self._moments, self._moments[1:], strict=False)][WARM:]
        dense, packed = took[::2], took[1::2]
        ratios = sorted(p / max(d, 1e-9) for p, d in zip(packed, dense, strict=True))
        # by more than noise: in the middle of the pairs, and in three of four
        faster = LEAST_GAIN * median(ratios) < 1 and ratios[3 * len(ratios) // 4] < 1
        choice = PACKED if faster else DENSE
        micro = {PACKED: round(1e6 * median(packed), 3), DENSE: round(1e6 * median(dense), 3)}
        with suppress(OSError):  # it holds for this process then
            TABLE.store({self.problem: {"choice": choice, "us": micro, "refused": {}, "by": "training"}})
        log.info("%s: whole steps are faster %s: %s", self.problem, choice, micro)
        self._end(choice)

    def _end(self, choice: str) -> None:
        self.done, self._moments = True, []
        self._use(dense=choice == DENSE)
        for layer in self.layers.values():
            layer.effective.release()  # of the two forms one is not needed any more


def now(device: torch.device) -> Any:
    """The present moment on the device, noted without waiting for it."""
    if device.type != "cuda":
        return time.perf_counter()
    moment = torch.cuda.Event(enable_timing=True)
    moment.record(torch.cuda.current_stream(device))
    return moment


def between(a: Any, b: Any) -> float:
    """Seconds from one moment to the next."""
    if isinstance(a, float):
        return float(b - a)
    b.synchronize()
    return float(a.elapsed_time(b)) / 1e3
