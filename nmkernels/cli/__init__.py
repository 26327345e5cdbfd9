"""The command line, ``python -m nmkernels VERB``: parses the options of a verb, runs it, and turns errors into one line and a status.

A verb is a module of this folder with ``add_arguments(parser)`` and ``run(args) -> exit status``, imported only when it is called.
"""

from __future__ import annotations

import argparse
import difflib
import importlib
import os
import sys
from collections.abc import Callable, Sequence
from typing import TypeVar

from .._version import __version__
from ..pattern import NMError

T = TypeVar("T")
PROG = "python -m nmkernels"

VERBS = {
    "prune": "prune a Hugging Face model to N:M in one shot, block by block, and write the compressed one",
    "finetune": "train on what prune wrote, with its masks held, and write the same kind of folder",
    "export": "write a compressed model as dense integers for vLLM, SGLang and transformers, without loss",
    "convert": "read a Hugging Face model that another library has compressed or pruned to N:M, and write it as prune would",
    "recipes": "list the training methods: paper, patterns, state, cost; or one with its keywords",
    "audit": "predict, and measure here, what N:M would gain a model on a device, layer by layer",
    "run": "run another program, such as transformers serve or -m lm_eval, in which transformers opens compressed models",
    "doctor": "show what works on this machine, and why the rest does not",
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run ``python -m nmkernels VERB ...`` and return its exit status.

    0 success, 1 a failure that the message explains, 2 wrong usage, 130 interrupted.
    """
    words = list(sys.argv[1:] if argv is None else argv)
    if not words or words[0].startswith("-"):
        verbs = "\n".join(f"  {name:<8} {summary}" for name, summary in VERBS.items())
        parser = argparse.ArgumentParser(
            prog=PROG,
            usage=f"{PROG} VERB [options]",
            description="N:M sparse training and inference.",
            epilog=f"verbs:\n{verbs}\n\n{PROG} VERB --help lists the options of one.",
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        parser.add_argument("--version", action="version", version=f"nmkernels {__version__}")
        parser.parse_args(words)
        parser.print_help()
        return 0
    verb = words[0]
    if verb == "train":  # which it was in 0.1
        print(f"{PROG}: error: train has become a program, examples/train_gpt/train.py in the repository.", file=sys.stderr)
        return 2
    if verb not in VERBS:
        near = difflib.get_close_matches(verb, VERBS, n=1)
        hint = f"; did you mean {near[0]!r}?" if near else "."
        print(f"{PROG}: error: no verb is called {verb!r}{hint} Verbs are: {', '.join(VERBS)}.", file=sys.stderr)
        return 2
    module = importlib.import_module(f".{verb}", __package__)
    parser = argparse.ArgumentParser(prog=f"{PROG} {verb}", description=VERBS[verb])
    try:
        module.add_arguments(parser)
        args = parser.parse_args(words[1:])
        status = int(module.run(args) or 0)
        sys.stdout.flush()
        return status
    except NMError as error:
        print(f"{PROG} {verb}: error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:
        # the reader (head, less) has closed the pipe; without this the flush at exit would fail too
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1


def by_text(make: Callable[[str], T], text: str) -> T:
    """``make(text)``, for what has a name and keywords; a wrong keyword is an NMError."""
    try:
        return make(text)
    except TypeError as error:
        raise NMError(str(error)) from error


def positive(text: str) -> int:
    """A ``type=`` for argparse: a whole number of at least 1."""
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{value} is below 1")
    return value


def seed(text: str) -> int:
    """A ``type=`` for argparse: a whole number from which torch's generators, and those of later steps, can start."""
    value = int(text)
    if abs(value) >= 1 << 32:
        raise argparse.ArgumentTypeError(f"{value} is not between -2^32 and 2^32")
    return value
