"""What became of each test or case: a line of JSON as it begins and one as it ends, so that a process that dies loses none of it.

``NMKERNELS_OUTCOMES`` names the file. ``bench.run`` writes it, and pytest with ``-p bench.outcomes``. What the file says the end of is
not run again: the same command goes on where the last one stopped. ``NMKERNELS_SHARE=2/3`` leaves pytest the second third of the tests.
With ``--collect-only`` the lines tell what there is in each file instead.
"""

from __future__ import annotations

import json
import os
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

ENV, SHARE = "NMKERNELS_OUTCOMES", "NMKERNELS_SHARE"


@dataclass(frozen=True)
class Outcome:
    """What became of an item: ``what`` is passed, failed or skipped; ``why`` is the first line of the reason where it did not pass."""

    item: str
    what: str
    why: str = ""
    seconds: float = 0.0


def here() -> Path | None:
    """The file of this process, if it is to write one."""
    return Path(os.environ[ENV]) if os.environ.get(ENV) else None


def lines(path: Path) -> list[dict[str, Any]]:
    """Every line of the file; one that a full disk cut short says nothing."""
    found = []
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines() if path.exists() else []:
        try:
            found.append(json.loads(line))
        except ValueError:
            continue
    return found


def read(path: Path) -> tuple[dict[str, Outcome], str | None]:
    """What has ended, by item, and the item that the last process began and did not end."""
    ended: dict[str, Outcome] = {}
    at_hand = None
    for line in lines(path):
        if "starts" in line:
            at_hand = None
        elif "begins" in line:
            at_hand = line["begins"]
        elif "what" in line:
            ended[line["item"]] = Outcome(**line)
            at_hand = None if at_hand == line["item"] else at_hand
    return ended, at_hand


def lost(path: Path) -> bool:
    """Whether the last process ended itself before all was run, since it could not use the device any more."""
    last = [line for line in lines(path) if "starts" in line or "lost" in line]
    return bool(last) and "lost" in last[-1]


def tell(path: Path | None, **line: Any) -> None:
    """Add a line."""
    if path is not None:
        with path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")


def begin(path: Path | None, item: str) -> None:
    """An item begins."""
    tell(path, begins=item)


def end(path: Path | None, outcome: Outcome) -> None:
    """An item has ended."""
    tell(path, **asdict(outcome))


# ---- pytest's hooks


_now: dict[str, Outcome] = {}
_began: dict[str, float] = {}


def pytest_collectreport(report: Any) -> None:
    """A file that cannot be imported is an item that failed."""
    if report.failed:
        end(here(), Outcome(report.nodeid, "failed", reason(report)))


def pytest_collection_finish(session: Any) -> None:
    """Tell what there is, or leave what this process is to run."""
    items, path = session.items, here()
    if session.config.option.collectonly:
        files: dict[str, list[Any]] = {}
        for item in items:
            files.setdefault(os.path.relpath(item.path, session.config.rootpath), []).append(item)
        for name, inside in files.items():
            tell(path, name=name, tests=len(inside), alone=any(item.get_closest_marker("alone") is not None for item in inside))
        return
    part, parts = (int(number) for number in os.environ.get(SHARE, "1/1").split("/"))
    ended = read(path)[0] if path is not None else {}
    share = items[(part - 1) * len(items) // parts : part * len(items) // parts]
    items[:] = [item for item in share if item.nodeid not in ended]


def pytest_runtest_logstart(nodeid: str) -> None:
    """A test begins."""
    begin(here(), nodeid)
    _now[nodeid], _began[nodeid] = Outcome(nodeid, "passed"), time.monotonic()


def pytest_runtest_logreport(report: Any) -> None:
    """Of set-up, call and tear-down the first that does not pass says what becomes of the test."""
    if not report.passed and _now[report.nodeid].what == "passed":
        _now[report.nodeid] = Outcome(report.nodeid, report.outcome, reason(report))


def pytest_runtest_logfinish(nodeid: str) -> None:
    """A test has ended; where no other can run in this process any more, so has that."""
    found = _now.pop(nodeid)
    end(here(), Outcome(found.item, found.what, found.why, round(time.monotonic() - _began.pop(nodeid), 3)))
    torch = sys.modules.get("torch")
    if found.what == "failed" and torch is not None and torch.cuda.is_initialized():
        import pytest

        from . import device

        if why := device.lost("cuda"):
            tell(here(), lost=why)
            pytest.exit(f"after {nodeid} this process cannot use the GPU any more: {why}", 1)


def reason(report: Any) -> str:
    """The first line of why a test or file failed or was skipped, with the place where it failed."""
    crash, text = getattr(report.longrepr, "reprcrash", None), report.longrepr
    if crash is not None:
        text = f"{Path(crash.path).name}:{crash.lineno}: {crash.message}"
    elif isinstance(text, tuple):
        text = text[2]
    elif report.failed and hasattr(text, "longrepr"):  # a file that cannot be imported: the last line names the error
        text = str(text.longrepr).strip().splitlines()[-1].removeprefix("E").strip()
    return next((line.strip() for line in str(text).splitlines() if line.strip()), "")
