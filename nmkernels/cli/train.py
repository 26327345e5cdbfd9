"""``python -m nmkernels train``: real text to a sparse model to a compressed file that is proved to be the model."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from ..pattern import NMError

if TYPE_CHECKING:
    from ._run import Run

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
    from ._folder import Folder
    from ._loop import Interrupted
    from ._run import Run

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
