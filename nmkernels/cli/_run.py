"""A whole run in its folder: checked first, then trained, its twin too, deployed, and written down."""

from __future__ import annotations

import argparse
import json
import platform
import shlex
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from .._version import __version__
from ..export import atomic_write
from ..pattern import NMError
from ..zoo import load_corpus
from ._checkpoint import Store
from ._config import fresh, resumed, settings
from ._deploy import deploy
from ._folder import CHECKPOINTS, CURVES, RESULT, TWIN, Folder
from ._log import LOG, Log, board_writer, default_stream, quiet_threads, read_log
from ._loop import train
from ._plot import plot
from ._summary import ABOUT, summary
from ._trainer import Trainer


class Run:
    """One run of ``train``; building it checks everything that can be checked before training, and locks the folder.

    Raises:
        NMError: the folder holds something else, the checkpoint does not fit, the text cannot be used, or an option is wrong.
    """

    def __init__(self, args: argparse.Namespace, folder: Folder) -> None:
        self.args, self.folder, self.out = args, folder, folder.path
        self.stream = default_stream(args.json)
        self.result: dict[str, Any] = {}
        self.state: dict[str, Any] | None = None
        if args.threads:
            torch.set_num_threads(args.threads)
        self.device = _device(args.device)
        if args.tensorboard:
            board_writer()
        how = {"resume": args.resume is not None, "overwrite": args.overwrite}
        folder.check(**how)
        self.store = Store(self.out / CHECKPOINTS)
        if args.resume is not None:
            self.state = self.store.load(args.resume or None)
            self.config = resumed(settings(args, self.state["config"]), self.state["config"], args.resume or self.store.paths()[-1])
        else:
            self.config = fresh(settings(args))
        self.recipe = self.config.build_recipe()
        self.corpus = load_corpus(args.data)
        self.corpus.check(self.config.context)
        self.trainer = Trainer(self.config, self.corpus, self.recipe, self.device)
        self.parameters = self.trainer.parameters
        self.start = self.trainer.load(self.state, self.store.folder) if self.state is not None else 0
        folder.take()
        folder.check(**how)  # again, where it was only locked now: another run may have been here meanwhile

    def resume_command(self) -> str:
        """The command line that continues this run."""
        words = [python_command(), "-m", "nmkernels", "train", "--out", str(self.out), "--resume"]
        words += ["--data", str(self.args.data)] if self.args.data else []
        words += ["--twin"] if self.args.twin else []
        return shlex.join(words)

    def execute(self) -> None:
        """Train what is left to train, deploy, and write ``result.json``."""
        if self.state is None:
            self.folder.clear()
        elif self.args.resume:
            self.store.set_aside(self.start)
        self._train(self.trainer, self.store, self.out, self.config.recipe, self.start)
        twin = self._twin() if self.args.twin else None
        print("checking, compressing and measuring the result", file=self.stream, flush=True)
        handle = self.trainer.handle
        assert handle is not None
        switch_step = handle.state.get("switch_step", 0)
        about = {
            **self._speed(self.trainer, self.out),
            "switch_step": switch_step,
            "layers": len(handle.layers),
            "flops": self.trainer.flops(),
        }
        sparse = {**about, **deploy(self.trainer, self.out)}
        self.result = self._result(sparse, twin)
        title = f"{self.config.recipe} on {self.corpus.source}"
        if plot(self.out / CURVES, read_log(self.out / LOG), read_log(self.out / TWIN / LOG), title, switch_step):
            self.result["files"].append(CURVES)
        text = json.dumps(self.result, indent=2).encode() + b"\n"
        atomic_write(self.out / RESULT, lambda temporary: temporary.write_bytes(text))

    def _train(self, trainer: Trainer, store: Store, folder: Path, label: str, start: int) -> None:
        args = self.args
        store.drop()  # where a kill came between saving and this
        with quiet_threads(), Log(folder, label, start, self.config.steps, self.stream, args.tensorboard) as log:
            if start:
                log.say(f"{label}: resumed after step {start} of {self.config.steps}")
            train(trainer, store, log, start, checkpoint_every=args.checkpoint_every, log_every=args.log_every)

    def _twin(self) -> dict[str, Any]:
        """Train the dense twin, from its own checkpoint where a resumed run has one."""
        trainer = Trainer(self.config, self.corpus, None, self.device)
        folder = self.out / TWIN
        store = Store(folder / CHECKPOINTS)
        start = 0
        if self.args.resume is not None and store.paths():
            start = trainer.load(store.load(), store.folder)
        self._train(trainer, store, folder, "dense twin", start)
        return {**self._speed(trainer, folder), "val_loss": trainer.validate()}

    def _speed(self, trainer: Trainer, folder: Path) -> dict[str, float | None]:
        rows = read_log(folder / LOG)
        return {
            "train_loss": rows[-1].get("loss") if rows else None,  # a run that was resumed at its end may have lost its log
            "train_tokens_per_s": self.config.tokens / max(trainer.seconds, 1e-9),
            "seconds": trainer.seconds,
        }

    def _result(self, sparse: dict[str, Any], twin: dict[str, Any] | None) -> dict[str, Any]:
        corpus = self.corpus
        return {
            "config": asdict(self.config),
            "corpus": {"source": corpus.source, "files": corpus.files, "train_bytes": len(corpus.train), "val_bytes": len(corpus.val)},
            "parameters": self.parameters,
            "sparse": sparse,
            "twin": twin,
            "val_loss_ratio": sparse["val_loss"] / twin["val_loss"] if twin else None,
            "versions": {"nmkernels": __version__, "torch": torch.__version__, "python": platform.python_version()},
            "threads": torch.get_num_threads(),
            "out": str(self.out),
            "files": [name for name in ABOUT if (self.out / name).exists() and name != CURVES] + [RESULT],
        }

    def show(self) -> None:
        """Print the summary, or with ``--json`` the result."""
        if self.args.json:
            json.dump(self.result, sys.stdout, indent=2)
            print()
        else:
            print(f"\n{summary(self.result)}", file=self.stream)


def python_command() -> str:
    """The running interpreter as a user would type it: a relative path where it lies below the present folder, as a venv does."""
    path, here = Path(sys.executable), Path.cwd()
    return str(path.relative_to(here)) if path.is_relative_to(here) else "python"


def _device(name: str) -> str:
    try:
        torch.zeros(1, device=name).item()  # the meta device makes tensors and cannot read them
    except (RuntimeError, AssertionError) as error:
        raise NMError(f"--device {name} cannot be used here: {str(error).splitlines()[0]}") from error
    return name
