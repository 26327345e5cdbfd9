"""Records the result of each test or case: a line of JSON when it begins and one when it ends, so that nothing is lost if a process dies.

``NMKERNELS_OUTCOMES`` names the file. ``bench.run`` writes it, and pytest with ``-p bench.outcomes``. Items that the file records as ended
are not run again: the same command continues where the last one stopped. With ``--collect-only`` the lines name the test files instead.
"""

from __future__ import annotations

import json
import os
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

ENV = "NMKERNELS_OUTCOMES"


@dataclass(frozen=True)
class Outcome:
    """The result of an item: ``what`` is passed, failed or skipped; ``why`` is the first line of the reason if it did not pass."""

    item: str
    what: str
    why: str = ""


def here() -> Path | None:
    """The file that this process writes, or None."""
    return Path(os.environ[ENV]) if os.environ.get(ENV) else None


def lines(path: Path) -> list[dict[str, Any]]:
    """Every line of the file, except truncated ones."""
    found = []
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines() if path.exists() else []:
        try:
            found.append(json.loads(line))
        except ValueError:
            continue
    return found


def read(path: Path) -> tuple[dict[str, Outcome], str | None]:
    """The outcomes of items that have ended, and the item that the last process began but did not end."""
    ended: dict[str, Outcome] = {}
    current = None
    for line in lines(path):
        if "starts" in line:
            current = None
        elif "begins" in line:
            current = line["begins"]
        elif "what" in line:
            ended[line["item"]] = Outcome(**line)
            current = None if current == line["item"] else current
    return ended, current


def lost(path: Path) -> bool:
    """Whether the last process exited early because it could no longer use the device."""
    last = [line for line in lines(path) if "starts" in line or "lost" in line]
    return bool(last) and "lost" in last[-1]


def tell(path: Path | None, **line: Any) -> None:
    """Add a line."""
    if path is not None:
        with path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")


def begin(path: Path | None, item: str) -> None:
    """Record that an item begins."""
    tell(path, begins=item)


def end(path: Path | None, outcome: Outcome) -> None:
    """Record that an item has ended."""
    tell(path, **asdict(outcome))


# ---- pytest's hooks


_now: dict[str, Outcome] = {}


def pytest_collectreport(report: Any) -> None:
    """Record a file that cannot be imported as a failed item."""
    if report.failed:
        end(here(), Outcome(report.nodeid, "failed", reason(report)))


def pytest_collection_finish(session: Any) -> None:
    """Leave out the tests that have ended; with ``--collect-only`` record the files that have tests."""
    path = here()
    if session.config.option.collectonly:
        files: dict[str, bool] = {}
        for item in session.items:
            file = os.path.relpath(item.path, session.config.rootpath)
            files[file] = files.get(file, False) or item.get_closest_marker("alone") is not None
        for file, alone in files.items():
            tell(path, file=file, alone=alone)
        return
    ended = read(path)[0] if path is not None else {}
    session.items[:] = [item for item in session.items if item.nodeid not in ended]


def pytest_runtest_logstart(nodeid: str) -> None:
    """Record that a test begins."""
    begin(here(), nodeid)
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
