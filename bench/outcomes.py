"""Records the result of each test or case: a line of JSON when it begins and one when it ends, so that nothing is lost if a process dies.

``NMKERNELS_OUTCOMES`` names the file. ``bench.run`` writes it, and pytest with ``-p bench.outcomes``. Items that the file records as ended
are not run again: the same command continues where the last one stopped.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any, NamedTuple

ENV = "NMKERNELS_OUTCOMES"


class Outcome(NamedTuple):
    """The result of an item: ``what`` is passed, failed or skipped; ``why`` is the first line of the reason if it did not pass."""

    item: str
    what: str
    why: str = ""


class Record(NamedTuple):
    """What the file says: the outcomes of items that have ended, the item that the last process began but did not end, whether it exited
    because it could no longer use the device, whether nothing is left, and of collected test files whether they run alone."""

    ended: dict[str, Outcome]
    current: str
    lost: bool
    finished: bool
    alone: dict[str, bool]


def here() -> Path | None:
    """The file that this process writes, or None."""
    return Path(os.environ[ENV]) if os.environ.get(ENV) else None


def read(path: Path | None) -> Record:
    """The record of a file, without truncated lines."""
    ended, alone = dict[str, Outcome](), dict[str, bool]()
    current, lost, finished = "", False, False
    for text in path.read_text(encoding="utf-8", errors="replace").splitlines() if path and path.exists() else ():
        try:
            line = json.loads(text)
        except ValueError:
            continue
        if "what" in line:
            ended[line["item"]] = Outcome(**line)
            current = "" if current == line["item"] else current
        elif "begins" in line or "starts" in line:
            current, lost = line.get("begins", ""), lost and "starts" not in line
        elif "file" in line:
            alone[line["file"]] = line["alone"] or alone.get(line["file"], False)
        lost, finished = lost or "lost" in line, finished or "finished" in line
    return Record(ended, current, lost, finished, alone)


def tell(path: Path | None, **line: Any) -> None:
    """Add a line: that a process ``starts``, an item ``begins``, the device is ``lost``, or the job ``finished``."""
    if path is not None:
        with path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")


def end(path: Path | None, outcome: Outcome) -> None:
    """Record that an item has ended."""
    tell(path, **outcome._asdict())


# ---- pytest's hooks


_now: dict[str, Outcome] = {}


def pytest_collectreport(report: Any) -> None:
    """Record a file that cannot be imported as a failed item."""
    if report.failed:
        end(here(), Outcome(report.nodeid, "failed", reason(report)))


def pytest_collection_finish(session: Any) -> None:
    """Leave out the tests that have ended; with ``--collect-only`` record the file of each."""
    for item in session.items if session.config.option.collectonly else ():
        tell(here(), file=os.path.relpath(item.path, session.config.rootpath), alone=item.get_closest_marker("alone") is not None)
    ended = read(here()).ended
    session.items[:] = [item for item in session.items if item.nodeid not in ended]


def pytest_runtest_logstart(nodeid: str) -> None:
    """Record that a test begins."""
    tell(here(), begins=nodeid)
    _now[nodeid] = Outcome(nodeid, "passed")


def pytest_runtest_logreport(report: Any) -> None:
    """The result of a test is that of the first of set-up, call and tear-down that does not pass."""
    if not report.passed and _now[report.nodeid].what == "passed":
        _now[report.nodeid] = Outcome(report.nodeid, report.outcome, reason(report))


def pytest_runtest_logfinish(nodeid: str) -> None:
    """Record that a test has ended, and exit if this process can no longer use the GPU."""
    found = _now.pop(nodeid)
    end(here(), found)
    torch = sys.modules.get("torch")
    if found.what == "failed" and torch is not None and torch.cuda.is_initialized():
        import pytest

        from . import device

        if why := device.lost("cuda"):
            tell(here(), lost=why)
            pytest.exit(f"after {nodeid} this process can no longer use the GPU: {why}", 1)


def reason(report: Any) -> str:
    """The first line of the reason why a test or file failed or was skipped, with file and line."""
    crash, text = getattr(report.longrepr, "reprcrash", None), report.longrepr
    if crash is not None:
        text = f"{Path(crash.path).name}:{crash.lineno}: {crash.message}"
    elif isinstance(text, tuple):
        text = text[2]
    elif report.failed and hasattr(text, "longrepr"):  # of a file that cannot be imported, the last line names the error
        text = str(text.longrepr).strip().splitlines()[-1].removeprefix("E").strip()
    return next((line.strip() for line in str(text).splitlines() if line.strip()), "")
