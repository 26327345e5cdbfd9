"""Processes of a step: what crashes, hangs or loses its device costs one item, and what was done is not done again."""

from __future__ import annotations

import math
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from itertools import accumulate
from pathlib import Path
from typing import Any

import pytest

from bench import gpu, outcomes
from bench.gpu import Job, Step

ITEMS = """
import os, signal, sys, time
from bench import outcomes
path = outcomes.here()
ended = outcomes.read(path).ended
bad = 0
for word in sys.argv[1:]:
    item, _, what = word.partition("=")
    if item in ended:
        continue
    outcomes.tell(path, begins=item)
    print("runs", item, flush=True)
    if what == "crash":
        os.kill(os.getpid(), signal.SIGSEGV)
    if what == "exit":
        os._exit(0)
    if what == "hang":
        time.sleep(600)
    failed = what in ("fail", "lost")
    bad += failed
    outcomes.end(path, outcomes.Outcome(item, "failed" if failed else "passed", what))
    if what == "lost":
        outcomes.tell(path, lost="an illegal memory access")
        os.abort()
sys.exit(bool(bad))
"""


def job(name: str, *items: str, limit: float = math.inf) -> Job:
    """A job whose items pass, ``=fail``, ``=crash``, ``=hang``, ``=exit``, or lose the device (``=lost``)."""
    return Job(name, (sys.executable, "-c", ITEMS, *items), limit)


def python(name: str, text: str, **options: object) -> Job:
    return Job(name, (sys.executable, "-c", text), **options)  # type: ignore[arg-type]


def run(folder: Path, *every: Job, workers: int = 1) -> tuple[Job, ...]:
    """The jobs, run with their files in ``folder``."""
    Step(folder.name, folder.parent, deadline=time.monotonic() + 60).run(*every, workers=workers)
    return every


def whats(job: Job) -> dict[str, str]:
    return {item: outcome.what for item, outcome in outcomes.read(job.file).ended.items()}


def ran(folder: Path, name: str) -> list[str]:
    """The items that a job's processes began, in order."""
    return re.findall(r"^runs (\S+)", (folder / f"{name}.log").read_text(), re.M)


def eventually(found: Callable[[], Any]) -> Any:
    """What ``found`` gives as soon as it is something."""
    end = time.monotonic() + 30
    while time.monotonic() < end:
        if value := found():
            return value
        time.sleep(0.02)
    raise AssertionError("it did not come to be")


@pytest.mark.parametrize(
    ("what", "why"),
    [
        ("crash", "its process was ended by SIGSEGV"),
        ("hang", "took more than 0.5 s and was ended"),
        ("exit", "its process ended during it, with exit status 0"),
        ("lost", "lost"),
        ("fail", "fail"),
    ],
)
def test_what_goes_wrong_costs_one_item(tmp_path: Path, what: str, why: str) -> None:
    bad, good = run(tmp_path, job("bad", "a", f"b={what}", "c", "d", limit=0.5), job("good", "x", "y"), workers=2)
    assert whats(bad) == {"a": "passed", "b": "failed", "c": "passed", "d": "passed"} and bad.items("failed")[0].why == why
    assert whats(good) == {"x": "passed", "y": "passed"} and not bad.left and not good.left
    assert ran(tmp_path, "bad") == ["a", "b", "c", "d"], "nothing runs twice"


def test_a_job_whose_items_all_crash_is_given_up(tmp_path: Path) -> None:
    (ended,) = run(tmp_path, job("all", *(f"{i}=crash" for i in range(gpu.LIVES + 3))))
    assert not ended.left and len(ran(tmp_path, "all")) == gpu.LIVES
    assert ended.items("failed")[-1].why == f"given up after {gpu.LIVES} processes; the rest was not run"


def test_when_time_is_up_another_call_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = time.monotonic
    monkeypatch.setattr(time, "monotonic", lambda: math.inf if outcomes.read(tmp_path / "b.jsonl").current == "4" else clock())
    first = run(tmp_path, job("a", "1", "2=fail"), job("b", "3", "4=hang", "5"), job("c", "6"))
    assert [(each.name, each.left) for each in first] == [("a", False), ("b", True), ("c", True)]
    assert whats(first[1]) == {"3": "passed"}, "the current item is left, and nothing fails"
    monkeypatch.undo()
    second = run(tmp_path, job("a", "1", "2=fail"), job("b", "3", "4", "5"), job("c", "6"))
    assert not any(each.left for each in second)
    assert [whats(each) for each in second] == [{"1": "passed", "2": "failed"}, dict.fromkeys("345", "passed"), {"6": "passed"}]
    assert ran(tmp_path, "a") == ["1", "2"] and ran(tmp_path, "b") == ["3", "4", "4", "5"]


def test_failures_are_printed_as_a_job_ends(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    many = [f"{i}=fail" for i in range(gpu.LINES + 2)]
    (bad, _) = run(tmp_path, job("bad", "a", *many), job("good", "b"))
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "bad: 1 passed" and lines[-1] == "good: 1 passed"
    assert lines[1:-1] == [*(f"    {i}: fail" for i in range(gpu.LINES)), f"    and 2 more, see {bad.file}"]


@pytest.mark.skipif(not shutil.which("flock"), reason="flock is not installed")
def test_no_process_is_left_behind(tmp_path: Path) -> None:
    lock = tmp_path / "lock"
    # a process that inherits the open file holds the lock as long as it lives
    child = f"""
import fcntl, os, subprocess
file = open({str(lock)!r}, "w")
fcntl.flock(file, fcntl.LOCK_SH)
os.set_inheritable(file.fileno(), True)
subprocess.Popen(["sleep", "600"], close_fds=False)
"""
    free, hangs = ["flock", "--wait", "30", str(lock), "true"], (sys.executable, "-c", f"{child}\n{ITEMS}", "a=hang")
    run(tmp_path, python("left", child), Job("hangs", hangs, 1.0))
    subprocess.run(free, check=True)
    text = f"""
import signal, sys, time
from pathlib import Path
from bench.gpu import Job, Step
signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
Step({tmp_path.name!r}, Path({str(tmp_path.parent)!r})).run(Job("ended", {hangs!r}))
"""
    driver = subprocess.Popen([sys.executable, "-c", text], cwd=gpu.ROOT)
    eventually(lambda: outcomes.read(tmp_path / "ended.jsonl").current == "a")
    driver.terminate()
    assert driver.wait(30) == 143
    subprocess.run(free, check=True)


@pytest.mark.slow
def test_jobs_run_in_parallel(tmp_path: Path) -> None:
    log = tmp_path / "log"
    text = f"import time; f = open({str(log)!r}, 'a', 1); print(1, file=f); time.sleep(0.5); print(-1, file=f)"
    run(tmp_path, *(python(name, text) for name in "abcd"), workers=2)
    assert max(accumulate(map(int, log.read_text().split()))) == 2


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("print('a.cu(3): error: why'); print('ninja: stopped'); raise SystemExit(1)", "exit status 1: a.cu(3): error: why"),
        ("raise ValueError('why')", "exit status 1: ValueError: why"),
        ("print('========= Invalid __global__ read')", "========= Invalid __global__ read"),
    ],
)
def test_a_job_without_items_is_one(tmp_path: Path, text: str, why: str) -> None:
    bad, good = run(tmp_path, python("bad", text), python("good", "print('error: it is only said')"))
    assert [(each.item, each.why) for each in bad.items("failed")] == [("bad", why)]
    assert whats(good) == {"good": "passed"}


def test_what_a_record_says(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    for line in ({"file": "a.py", "alone": True}, {"file": "a.py", "alone": False}, {"file": "b.py", "alone": False}, {"lost": "why"}):
        outcomes.tell(path, **line)
    assert outcomes.read(path) == ({}, "", True, False, {"a.py": True, "b.py": False})
    outcomes.tell(path, starts=True)  # another process has the device
    assert not outcomes.read(path).lost


def test_unfinished_items_of_other_processes(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    outcomes.end(path, outcomes.Outcome("1", "passed"))
    outcomes.tell(path, begins="older")
    path.write_bytes(path.read_bytes() + b'{"item": "older", "wha\n')
    assert outcomes.read(path)[:2] == ({"1": outcomes.Outcome("1", "passed")}, "older")
    (ended,) = run(tmp_path, python("a", "import os; os.abort()"))
    assert list(whats(ended)) == ["1", "a"] and outcomes.read(tmp_path / "none") == ({}, "", False, False, {})
