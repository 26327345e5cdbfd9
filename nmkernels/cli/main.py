"""Finds the verb, parses its options, runs it, and turns errors into one line and an exit status."""

from __future__ import annotations

import argparse
import difflib
import importlib
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass

from .._version import __version__
from ..pattern import NMError

PROG = "python -m nmkernels"


@dataclass(frozen=True)
class Verb:
    """One verb: its name, the module of this folder that runs it, and its line of help."""

    name: str
    module: str
    help: str


VERBS = (
    Verb("train", "train", "train a small byte-level GPT with a sparse recipe, compress it and check the result"),
    Verb("recipes", "recipes", "list the training methods: paper, patterns, state, cost; or one with its keywords"),
    Verb("audit", "audit", "predict, and measure here, what N:M would gain a model on a device, layer by layer"),
    Verb("bench", "bench", "time the operations on this machine beside what one would write in torch"),
    Verb("doctor", "doctor", "tell what works on this machine, and why the rest does not"),
)


def main(argv: Sequence[str] | None = None) -> int:
    """Run ``python -m nmkernels VERB ...`` and return its exit status.

    0 success, 1 a failure that the message explains, 2 wrong usage, 130 interrupted.
    """
    words = list(sys.argv[1:] if argv is None else argv)
    if not words or words[0].startswith("-"):
        return _top(words)
    verb = next((v for v in VERBS if v.name == words[0]), None)
    if verb is None:
        return _unknown(words[0])
    module = importlib.import_module(f".{verb.module}", __package__)
    parser = argparse.ArgumentParser(prog=f"{PROG} {verb.name}", description=verb.help)
    module.add_arguments(parser)
    args = parser.parse_args(words[1:])
    try:
        status = int(module.run(args) or 0)
        sys.stdout.flush()
        return status
    except NMError as error:
        print(f"{PROG} {verb.name}: error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:
        # the reader (head, less) went away; point stdout at nothing, or the flush at exit complains
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1


def _top(words: list[str]) -> int:
    verbs = "\n".join(f"  {v.name:<8} {v.help}" for v in VERBS)
    parser = argparse.ArgumentParser(
        prog=PROG,
        usage=f"{PROG} VERB [options]",
        description="N:M sparse training and inference.",
        epilog=f"verbs:\n{verbs}\n\n{PROG} VERB --help tells the options of one.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"nmkernels {__version__}")
    parser.parse_args(words)
    parser.print_help()
    return 0


def _unknown(word: str) -> int:
    near = difflib.get_close_matches(word, [v.name for v in VERBS], n=1)
    hint = f"; did you mean {near[0]!r}?" if near else "."
    print(f"{PROG}: error: no verb is called {word!r}{hint} Verbs are: {', '.join(v.name for v in VERBS)}.", file=sys.stderr)
    return 2
