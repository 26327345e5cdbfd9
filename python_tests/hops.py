"""How many Python calls, in how many files of the package, a call takes: the way one has to keep in the head."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType

import nmkernels

PACKAGE = Path(nmkernels.__file__).parent


def hops(call: Callable[[], object], warm: int = 3) -> tuple[int, list[str]]:
    """(Python calls inside the package, the files they are in) of ``call`` once it has run ``warm`` times; forward only, in this thread."""
    for _ in range(warm):
        call()
    files: list[str] = []

    def seen(frame: FrameType, event: str, _: object) -> None:
        path = Path(frame.f_code.co_filename)
        # every attached model is told of a step; those of other tests are not this call's
        if event == "call" and PACKAGE in path.parents and frame.f_code.co_name != "doubt":
            files.append(str(path.relative_to(PACKAGE)))

    sys.setprofile(seen)
    try:
        call()
    finally:
        sys.setprofile(None)
    return len(files), sorted(set(files))
