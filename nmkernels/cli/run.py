"""``python -m nmkernels run``: another program, in this process, in which transformers opens compressed models."""

from __future__ import annotations

import argparse
import runpy
import shutil
import sys
from importlib.util import find_spec
from pathlib import Path

from ..pattern import OptionError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.usage = "python -m nmkernels run PROGRAM|-m MODULE [its arguments]"
    rest = argparse.REMAINDER
    parser.add_argument("-m", dest="module", nargs=rest, default=[], metavar=("MODULE", "..."), help="run a module, as python -m does")
    parser.add_argument("program", nargs=rest, help="a Python script, or the name of an installed one (transformers), and its arguments")


def run(args: argparse.Namespace) -> int:
    """Run the program as if it had been started by itself; ``import nmkernels`` has told transformers of the format."""
    words = args.module or args.program
    if not words:
        raise OptionError("no program is named; run PROGRAM, or -m MODULE, with its arguments.")
    if args.module:
        if find_spec(words[0].partition(".")[0]) is None:
            raise OptionError(f"there is no module {words[0]!r} in this environment; install it.")
        sys.argv = words
        runpy.run_module(words[0], run_name="__main__", alter_sys=True)
        return 0
    path = words[0] if Path(words[0]).exists() else shutil.which(words[0])
    if path is None:
        raise OptionError(f"{words[0]!r} is neither a file nor a program on PATH; name a Python script, or a module by -m.")
    sys.argv = [path, *words[1:]]
    sys.path.insert(0, str(Path(path).resolve().parent))
    try:
        runpy.run_path(path, run_name="__main__")
    except (SyntaxError, UnicodeDecodeError) as error:
        raise OptionError(f"{path} is no Python program ({error}); only those can be run in this process.") from error
    return 0
