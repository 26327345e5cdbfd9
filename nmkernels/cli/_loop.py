"""The training loop around a Trainer: logging, checkpoints, and a clean stop on Ctrl-C."""

from __future__ import annotations

import signal
import threading
import time
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any

from ._checkpoint import Store
from ._log import Log
from ._trainer import VAL_WINDOWS, Trainer, learning_rate

EVALS = 10
"""Validations on the way, for the curves."""


class Interrupted(Exception):
    """The user asked to stop; the checkpoint at ``path`` holds everything up to ``step``."""

    def __init__(self, step: int, path: Path) -> None:
        super().__init__(f"stopped after step {step}")
        self.step, self.path = step, path


class StopRequest:
    """While entered, the first SIGINT or SIGTERM sets ``asked``, and a second one interrupts at once.

    Signals can only be taken over in the main thread; elsewhere this does nothing. The handler prints nothing: it may have
    interrupted a print.
    """

    def __init__(self) -> None:
        self.asked = False
        self._before: dict[int, Any] = {}

    def __enter__(self) -> StopRequest:
        if threading.current_thread() is threading.main_thread():
            self._before = {number: signal.signal(number, self._handle) for number in (signal.SIGINT, signal.SIGTERM)}
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self.asked:
            raise KeyboardInterrupt
        self.asked = True


def train(trainer: Trainer, store: Store, log: Log, start: int, *, checkpoint_every: int, log_every: int) -> None:
    """Run steps ``start`` + 1 to the end, with a checkpoint every ``checkpoint_every`` steps and after the last.

    Raises:
        Interrupted: a signal came; the checkpoint is written. DivergedError: the loss is not finite.
    """
    config = trainer.config
    eval_every = max(1, config.steps // EVALS)
    with StopRequest() as stop:
        for step in range(start + 1, config.steps + 1):
            begin = time.perf_counter()
            trainer.losses.append(trainer.step(step))
            trainer.seconds += time.perf_counter() - begin
            evaluated = step % eval_every == 0
            if evaluated or step % log_every == 0 or step == config.steps:
                losses = trainer.losses
                speed = len(losses) * config.batch * config.context / max(trainer.seconds - trainer.mark, 1e-9)
                row: dict[str, Any] = {"step": step, "loss": sum(losses) / len(losses), "lr": learning_rate(config, step)}
                if evaluated:
                    row["val_loss"] = trainer.validate(VAL_WINDOWS // 4)
                log.row({**row, "tokens_per_s": speed, **trainer.metrics()})
                trainer.losses, trainer.mark = [], trainer.seconds
            log.tick()
            if step % checkpoint_every == 0 or step == config.steps or stop.asked:
                path = store.save(trainer.state(step))
            if stop.asked:
                raise Interrupted(step, path)
