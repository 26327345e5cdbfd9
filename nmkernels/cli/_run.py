"""A whole run in its folder: checked first, then trained, its twin too, deployed, and written down."""

from __future__ import annotations

import argparse
import json
import platform
import shlex
import shutil
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
from ._deploy import DENSE_FILE, FILE, SAMPLE_FILE, deploy
from ._log import Log, default_stream, read_log
from ._loop import train
from ._plot import plot
from ._summary import ABOUT, summary
from ._trainer import Trainer

RESULT = "result.json"
OURS = (FILE, DENSE_FILE, SAMPLE_FILE, RESULT, "curves.png", "log.csv", "checkpoints", "twin", "tensorboard")
"""What a run writes into its folder, and all that --overwrite removes from it."""


class Run:
    """One run of ``train``; building it checks everything that can be checked before training.

    Raises:
        NMError: the folder holds another run, the checkpoint does not fit, the text cannot be used, or an option is wrong.
    """

    def __init__(self, args: argparse.Namespace) -> None:
        self.args = args
        self.stream = default_stream(args.json)
        self.out: Path = args.out or Path("demo_out" if args.demo else "runs/train")
        self.result: dict[str, Any] = {}
        self.state: dict[str, Any] | None = None
        if args.threads:
            torch.set_num_threads(args.threads)
        self.device = _device(args.device)
        self._look_at_folder()
        self.store = Store(self.out / "checkpoints")
        if args.resume is not None:
            path = Path(args.resume) if args.resume else None
            self.state = self.store.load(path)
            self.config = resumed(settings(args, self.state["config"]), self.state["config"], path or self.store.paths()[-1])
            if path is not None:
                self.store.set_aside(self.state["step"])
        else:
            self.config = fresh(settings(args))
        self.recipe = self.config.build_recipe()
        self.corpus = load_corpus(args.data)
        self.corpus.check(self.config.context)
        self.trainer = Trainer(self.config, self.corpus, self.recipe, self.device)
        self.parameters = self.trainer.parameters
        self.start = self.trainer.load(self.state, self.store.folder) if self.state is not None else 0

    def _look_at_folder(self) -> None:
        if self.out.exists() and not self.out.is_dir():
            raise NMError(f"--out {self.out} is a file; give a folder.")
        if self.args.resume is not None:
            return
        if self.args.overwrite:
            return
        if (self.out / RESULT).exists():
            raise NMError(f"{self.out} holds a finished run: see {self.out / RESULT}. Use another --out, or --overwrite to replace it.")
        if Store(self.out / "checkpoints").paths():
            raise NMError(f"{self.out} holds a run that was stopped. Continue it with --resume, or replace it with --overwrite.")

    def resume_command(self) -> str:
        """The command line that continues this run."""
        words = [python_command(), "-m", "nmkernels", "train", "--out", str(self.out), "--resume"]
        words += ["--data", str(self.args.data)] if self.args.data else []
        words += ["--twin"] if self.args.twin else []
        return shlex.join(words)

    def _prepare_folder(self) -> None:
        try:
            self.out.mkdir(parents=True, exist_ok=True)
            for path in (self.out / name for name in OURS if self.args.resume is None):
                if path.is_dir():
                    shutil.rmtree(path)
                else:
                    path.unlink(missing_ok=True)
        except OSError as error:
            raise NMError(f"--out {self.out} cannot be written: {error.strerror or error}.") from error

    def execute(self) -> None:
        """Train what is left to train, deploy, and write ``result.json``."""
        self._prepare_folder()
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
        if plot(self.out / "curves.png", read_log(self.out / "log.csv"), read_log(self.out / "twin" / "log.csv"), title, switch_step):
            self.result["files"].append("curves.png")
        text = json.dumps(self.result, indent=2).encode() + b"\n"
        atomic_write(self.out / RESULT, lambda temporary: temporary.write_bytes(text))

    def _train(self, trainer: Trainer, store: Store, folder: Path, label: str, start: int) -> None:
        args = self.args
        with Log(folder, label, start, self.config.steps, self.stream, args.tensorboard) as log:
            if start:
                log.say(f"{label}: resumed after step {start} of {self.config.steps}")
            train(trainer, store, log, start, checkpoint_every=args.checkpoint_every, log_every=args.log_every)

    def _twin(self) -> dict[str, Any]:
        """Train the dense twin, from its own checkpoint where a resumed run has one."""
        trainer = Trainer(self.config, self.corpus, None, self.device)
        folder = self.out / "twin"
        store = Store(folder / "checkpoints")
        start = 0
        if self.args.resume is not None and store.paths():
            start = trainer.load(store.load(), store.folder)
        self._train(trainer, store, folder, "dense twin", start)
        return {**self._speed(trainer, folder), "val_loss": trainer.validate()}

    def _speed(self, trainer: Trainer, folder: Path) -> dict[str, float]:
        rows = read_log(folder / "log.csv")
        return {
            "train_loss": rows[-1]["loss"],
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
            "files": [name for name in ABOUT if (self.out / name).exists() and name != "curves.png"] + [RESULT],
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
