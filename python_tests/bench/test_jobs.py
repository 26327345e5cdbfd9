"""Processes of a step: what crashes, hangs or loses its device costs one item, and what was done is not done again."""

from __future__ import annotations

import math
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from bench import jobs, outcomes
from bench.jobs import Ended, Job, Pool

ITEMS = """
import os, signal, sys, time
from bench import outcomes
path = outcomes.here()
ended, _ = outcomes.read(path)
bad = 0
for word in sys.argv[1:]:
    item, _, what = word.partition("=")
    if item in ended:
        continue
    outcomes.begin(path, item)
    print("runs", item, time.time(), flush=True)
    if what == "crash":
        os.kill(os.getpid(), signal.SIGSEGV)
    if what == "exit":
        os._exit(0)
    if what in ("hang", "slow"):
        time.sleep(600 if what == "hang" else 0.4)
    bad += what in ("fail", "lost", "aborts")
    outcomes.end(path, outcomes.Outcome(item, "failed" if what in ("fail", "lost", "aborts") else "passed", what))
    if what in ("lost", "aborts"):
        outcomes.tell(path, lost="an illegal memory access")
        os.abort() if what == "aborts" else os._exit(9)
print("ends", time.time())
sys.exit(bool(bad))
"""


def job(name: str, *items: str, limit: float = math.inf, alone: bool = False) -> Job:
    """A job whose items pass, ``=fail``, ``=crash``, ``=hang``, ``=exit``, are ``=slow``, or lose the device (``=lost``, ``=aborts``)."""
    return Job(name, (sys.executable, "-c", ITEMS, *items), limit, alone)


def python(name: str, text: str, **options: object) -> Job:
    return Job(name, (sys.executable, "-c", text), **options)  # type: ignore[arg-type]


def pool(folder: Path, seconds: float = 60.0) -> Pool:
    return Pool(folder, time.monotonic() + seconds, lambda text: None)


def whats(ended: Ended) -> dict[str, str]:
    return {item: outcome.what for item, outcome in ended.outcomes.items()}


def ran(folder: Path, name: str) -> list[str]:
    """The items that a job's processes began, in order."""
    return [line.split()[1] for line in (folder / f"{name}.log").read_text().splitlines() if line.startswith("runs")]


@pytest.mark.parametrize(
    ("what", "why"),
    [
        ("crash", "its process was ended by SIGSEGV"),
        ("hang", "took more than 0.5 s and was ended"),
        ("exit", "its process ended in the middle of it, with exit status 0"),
        ("lost", "lost"),
        ("aborts", "aborts"),
        ("fail", "fail"),
    ],
)
def test_what_goes_wrong_costs_one_item(tmp_path: Path, what: str, why: str) -> None:
    here = pool(tmp_path)
    bad, good = here.run([job("bad", "a", f"b={what}", "c", "d", limit=0.5), job("good", "x", "y")], workers=2)
    assert whats(bad) == {"a": "passed", "b": "failed", "c": "passed", "d": "passed"} and bad.outcomes["b"].why == why
    assert whats(good) == {"x": "passed", "y": "passed"} and not bad.left and not good.left
    assert ran(tmp_path, "bad") == ["a", "b", "c", "d"], "nothing runs twice"
    assert str(bad).startswith("FAILED") and str(bad).endswith("bad: 3 passed, 1 failed") and str(good).startswith("ok")


def test_a_job_whose_items_all_crash_is_given_up(tmp_path: Path) -> None:
    items = [f"{i}=crash" for i in range(jobs.LIVES + 3)]
    (ended,) = pool(tmp_path).run([job("all", *items)])
    assert not ended.left and len(ran(tmp_path, "all")) == jobs.LIVES
    assert ended.outcomes["all"].why == f"given up after {jobs.LIVES} processes; what was left was not run"


def test_when_time_is_up_another_call_goes_on(tmp_path: Path) -> None:
    every = [job("a", "1", "2=fail"), job("b", "3", "4=hang", "5"), job("c", "6")]
    here = pool(tmp_path)

    def time_is_up() -> None:
        while outcomes.read(tmp_path / "b.jsonl")[1] != "4":
            time.sleep(0.02)
        here.deadline = 0.0

    threading.Thread(target=time_is_up, daemon=True).start()
    first = here.run(every)
    assert [(e.job.name, e.left) for e in first] == [("a", False), ("b", True), ("c", True)]
    assert whats(first[1]) == {"3": "passed"}, "what was at hand is left, and nobody is blamed"
    every[1] = job("b", "3", "4", "5")
    said: list[str] = []
    second = Pool(tmp_path, time.monotonic() + 60, said.append).run(every)
    assert said[0] == "1 of 3 were finished by an earlier call" and not any(e.left for e in second)
    assert [whats(e) for e in second] == [{"1": "passed", "2": "failed"}, dict.fromkeys("345", "passed"), {"6": "passed"}]
    assert ran(tmp_path, "a") == ["1", "2"] and ran(tmp_path, "b") == ["3", "4", "4", "5"]
    (again,) = pool(tmp_path).run([job("a", "1", "2")], fresh=True)
    assert whats(again) == {"1": "passed", "2": "passed"}


CHILD = """
import subprocess, sys
print("child", subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"]).pid, flush=True)
"""


def child(folder: Path, name: str) -> int:
    """The process that a job started beside itself, as soon as it tells."""
    end = time.monotonic() + 30
    while time.monotonic() < end:
        words = (folder / f"{name}.log").read_text().split() if (folder / f"{name}.log").exists() else []
        if "child" in words[:-1]:
            return int(words[words.index("child") + 1])
        time.sleep(0.02)
    raise AssertionError(f"{name} has told of no child")


def is_dead(pid: int) -> bool:
    end = time.monotonic() + 30
    while time.monotonic() < end:
        try:
            if Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] == "Z":
                return True
        except OSError:
            return True
        time.sleep(0.02)
    return False


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="processes are looked up in /proc")
def test_no_process_is_left_behind(tmp_path: Path) -> None:
    hanging = Job("hangs", (sys.executable, "-c", f"{CHILD}\n{ITEMS}", "a=hang"), 1.0)
    left, hangs = pool(tmp_path).run([python("left", CHILD), hanging])
    assert left.count("passed") == 1 and hangs.count("failed") == 1
    assert is_dead(child(tmp_path, "left")) and is_dead(child(tmp_path, "hangs"))


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="processes are looked up in /proc")
def test_nor_when_it_is_told_to_end(tmp_path: Path) -> None:
    text = f"""
import sys, time
from pathlib import Path
from bench.jobs import Job, Pool
Pool(Path({str(tmp_path)!r}), time.monotonic() + 600).run([Job("a", (sys.executable, "-c", {CHILD + "import time; time.sleep(600)"!r}))])
"""
    driver = subprocess.Popen([sys.executable, "-c", text], cwd=jobs.ROOT)
    pid = child(tmp_path, "a")
    driver.terminate()
    assert driver.wait(30) == 143 and is_dead(pid)


def _times(folder: Path, name: str) -> tuple[float, float]:
    words = (folder / f"{name}.log").read_text().split()
    return float(words[2]), float(words[-1])


@pytest.mark.slow
def test_jobs_run_side_by_side_and_some_alone(tmp_path: Path) -> None:
    every = [
        job("alone", "1=slow", alone=True),
        *(job(name, "1=slow", "2=slow", "3=slow") for name in "abc"),
        job("too", "1=slow", alone=True),
    ]
    pool(tmp_path).run(every, workers=2)
    spans = {e.name: _times(tmp_path, e.name) for e in every}
    for name in ("alone", "too"):
        start, end = spans[name]
        assert all(other_end <= start or end <= other for key, (other, other_end) in spans.items() if key != name), spans
    at_once = [sum(start <= moment < end for start, end in spans.values()) for moment in (span[0] for span in spans.values())]
    assert max(at_once) == 2
    assert min(spans["alone"][0], spans["too"][0]) >= max(spans[name][1] for name in "abc")


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("raise SystemExit(3)", "exit status 3: it said nothing"),
        (
            "print('a.cu(3): error: no such thing'); print('ninja: build stopped'); raise SystemExit(1)",
            "exit status 1: a.cu(3): error: no such thing",
        ),
        ("raise ValueError('why')", "exit status 1: ValueError: why"),
        ("import os; os.abort()", "its process was ended by SIGABRT"),
        ("print('========= Invalid __global__ read')", "========= Invalid __global__ read"),
    ],
)
def test_a_job_without_items_is_one(tmp_path: Path, text: str, why: str) -> None:
    bad, good = pool(tmp_path).run([python("bad", text, refused="^========= .*"), python("good", "print('error: it is only said')")])
    assert bad.outcomes["bad"].what == "failed" and bad.outcomes["bad"].why == why
    assert whats(good) == {"good": "passed"}


def test_what_was_begun_by_another_process_is_not_blamed(tmp_path: Path) -> None:
    outcomes.begin(tmp_path / "a.jsonl", "older")
    (ended,) = pool(tmp_path).run([python("a", "import os; os.abort()")])
    assert list(ended.outcomes) == ["a"]


def test_a_line_cut_short_says_nothing(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    outcomes.end(path, outcomes.Outcome("1", "passed"))
    outcomes.begin(path, "2")
    path.write_bytes(path.read_bytes() + b'{"item": "2", "wha\n')
    assert outcomes.read(path) == ({"1": outcomes.Outcome("1", "passed")}, "2")
    assert outcomes.read(tmp_path / "none") == ({}, None)
