"""``python -m nmkernels bench``: time the operations on this machine, with the options and the measurements of ``bench.run``.

``bench/`` is a folder of the source tree and not of the installed package; an installed package says so and how to get it.
"""

from __future__ import annotations

import argparse
import importlib
import sys
from pathlib import Path
from typing import Any

from ..pattern import NMError

HOME = Path(__file__).resolve().parents[2]
"""The source tree, where this package runs from one (a checkout, or an editable install)."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    measurements(HOME).add_arguments(parser)


def run(args: argparse.Namespace) -> int:
    """Find the measurements and run them; 0 all timed, 1 a result was wrong or a case failed, 130 interrupted."""
    return int(measurements(HOME).execute(args))


def measurements(home: Path) -> Any:
    """The module ``bench.run`` of the source tree at ``home``; ``NMError`` where there is none."""
    if not (home / "bench" / "registry.py").is_file():
        raise NMError(
            "the measurements are not part of the installed package; they are the folder bench/ of the source tree. "
            "Get the sources, run `pip install -e '.[bench]'` there, and then this command again, or `python -m bench.run` in that folder."
        )
    # first, because another module of that name may be installed or in the present folder
    sys.path.insert(0, str(home))
    return importlib.import_module("bench.run")
