"""``python -m nmkernels train``: real text to a sparse model to a compressed file that is proved to be the model.

A whole run in its folder: checked first, then trained, its twin too, deployed, and written down.
"""

from __future__ import annotations

import argparse
import json
import platform
import shlex
import sys
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from .._version import __version__
from ..export import atomic_write
from ..models import load_corpus
from ..pattern import NMError
from .checkpoint import Store
from .config import fresh, resumed, settings
from .deploy import deploy
from .folder import CHECKPOINTS, CURVES, RESULT, TWIN, Folder
from .log import ABOUT, LOG, Log, board_writer, default_stream, plot, quiet_threads, read_log, summary
from .loop import Trainer, train

if TYPE_CHECKING:
    pass


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


PROG = "python -m nmkernels train"


def positive(text: str) -> int:
    """A whole number of at least 1, for argparse."""
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{value} is below 1")
    return value


def rate(text: str) -> float:
    """A finite number above 0, for argparse."""
    value = float(text)
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"{value} is not a finite number above 0")
    return value


def seed(text: str) -> int:
    """A whole number from 0 to 2⁶³ − 1, for argparse."""
    value = int(text)
    if not 0 <= value < 2**63:
        raise argparse.ArgumentTypeError(f"{value} is not between 0 and 2**63 - 1")
    return value


def path(text: str) -> Path:
    """A path, for argparse; an empty one would be the present folder."""
    if not text:
        raise argparse.ArgumentTypeError("it is empty; give a path, . for the present folder")
    return Path(text)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of the verb."""
    what = parser.add_argument_group("what to train")
    what.add_argument("--recipe", metavar="NAME:N:M", help="training recipe, default step:2:4; `python -m nmkernels recipes` lists them")
    what.add_argument(
        "--set",
        metavar="KEY=VALUE",
        action="append",
        help="keyword of the recipe, e.g. --set decay=2e-4; may be repeated; `python -m nmkernels recipes NAME` lists them",
    )
    what.add_argument("--data", metavar="FILE_OR_FOLDER", help="text to train on; default: the Python standard library's source")
    what.add_argument("--demo", action="store_true", help="the sizes of `make demo`: under four minutes on two cores")
    what.add_argument("--twin", action="store_true", help="also train the dense twin on the same batches, and compare")
    size = parser.add_argument_group("size")
    size.add_argument("--steps", type=positive, help="optimizer steps, default 2000")
    size.add_argument("--batch", type=positive, help="sequences per step, default 16")
    size.add_argument("--context", type=positive, help="bytes per sequence, default 128")
    size.add_argument("--width", type=positive, help="features of the model, default 128")
    size.add_argument("--layers", type=positive, help="transformer blocks, default 4")
    size.add_argument("--heads", type=positive, help="attention heads, default 4; divides the width")
    size.add_argument("--activation", metavar="NAME", help="gelu or relu2; default gelu, for the recipe act24 relu2")
    size.add_argument("--lr", type=rate, help="peak learning rate, default 2e-3")
    size.add_argument("--seed", type=seed, help="of the weights and the order of the text, default 0")
    run = parser.add_argument_group("the run")
    run.add_argument(
        "--out",
        metavar="DIR",
        type=path,
        help="where everything is written, a new or empty folder; default runs/train, demo_out with --demo",
    )
    run.add_argument(
        "--resume",
        metavar="CHECKPOINT",
        nargs="?",
        type=path,
        const=False,
        help="continue the run in --out, from its newest checkpoint or from the one named",
    )
    run.add_argument("--overwrite", action="store_true", help="replace the run that --out holds; other files there stay")
    run.add_argument("--checkpoint-every", metavar="STEPS", type=positive, default=100, help="default 100")
    run.add_argument("--log-every", metavar="STEPS", type=positive, default=20, help="default 20")
    run.add_argument("--tensorboard", action="store_true", help="also write event files into --out")
    run.add_argument("--threads", type=positive, help="threads of PyTorch; default: its own choice")
    run.add_argument("--device", default="cpu", help="default cpu")
    run.add_argument("--json", action="store_true", help="print the result as JSON on standard output, everything else on standard error")


def run(args: argparse.Namespace) -> int:
    """Train, deploy, report; 0 done, 1 failed on the way, 2 refused at the start, 130 interrupted with the way to resume."""
    from .folder import Folder
    from .loop import Interrupted

    pass

    with Folder(args.out or Path("demo_out" if args.demo else "runs/train")) as folder:
        try:
            job = Run(args, folder)
        except (NMError, OSError) as error:
            print(f"{PROG}: error: {error}", file=sys.stderr)
            return 2
        try:
            job.execute()
            job.show()
        except Interrupted as stop:
            return _stopped(job, f"Stopped after step {stop.step}; saved in {stop.path}.")
        except KeyboardInterrupt:
            return _stopped(job, "Stopped.")
        except OSError as error:
            if isinstance(error, BrokenPipeError):
                raise
            print(f"{PROG}: error: {error.filename or 'output'} could not be written: {error.strerror or error}.", file=sys.stderr)
            return 1
    return 0


def _stopped(job: Run, text: str) -> int:
    print(f"\n{text}\nTo go on: {job.resume_command()}", file=sys.stderr)
    return 130
