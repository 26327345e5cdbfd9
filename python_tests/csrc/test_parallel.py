"""parallel_for: every chunk once, errors come back; on torch's threads, alone in a forked child, on its own where torch is not loaded."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from nmkernels.dispatch import implementations


def total(chunks: int) -> int:
    return chunks * (chunks + 1) // 2


@pytest.mark.parametrize("threads", [0, 1, 2, 3, 8])
def test_every_chunk_runs_once(core, threads):
    for chunks in (0, 1, 2, 3, 1000):
        assert core.parallel_probe(chunks, threads, -1) == total(chunks)


@pytest.mark.parametrize("threads", [1, 2, 4])
def test_an_exception_reaches_the_caller_and_the_threads_go_on(core, threads):
    for at in 20 * (0, 57, 99):
        with pytest.raises(RuntimeError, match=f"chunk {at} failed"):
            core.parallel_probe(100, threads, at)
        assert core.parallel_probe(100, threads, -1) == total(100)


@pytest.fixture
def three_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    yield
    torch.set_num_threads(before)


def threads_here() -> set[str]:
    return set(os.listdir("/proc/self/task"))


def test_the_threads_are_those_of_torch(core, three_threads):
    """None of its own is started, and none that torch's next op would not use."""
    x = torch.randn(1 << 20)
    x.add(1)
    started = threads_here()
    for _ in range(50):
        core.parallel_probe(100, 3, -1)
        x.add(1)
    assert threads_here() <= started  # one of before may end, none may begin
    assert core.pool_workers() == 0
    assert "torch's OpenMP threads" in core.threads_in_use()


def test_concurrent_python_threads(core):
    def hammer(_: int) -> bool:
        return all(core.parallel_probe(200, 3, -1) == total(200) for _ in range(100))

    with ThreadPoolExecutor(6) as executor:
        assert all(executor.map(hammer, range(6)))


def test_the_interpreter_lock_is_released(core):
    """A Python thread that is ready to run gets to run while a kernel does."""
    g, values = torch.randn(512, 4096), torch.empty(512, 4096)
    call = core.MvueCall(g.data_ptr(), 512, 4096, 1, 1, 2, False)
    ready, go, ran = threading.Event(), threading.Event(), []

    def other() -> None:
        ready.set()
        go.wait()
        ran.append(True)

    thread = threading.Thread(target=other)
    thread.start()
    ready.wait()
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1000)  # the lock is not taken away: only a release lets the thread go on
    try:
        go.set()
        for _ in range(200):  # a kernel may end before the thread has woken up
            core.mvue(call, 0, 4, 8, values.data_ptr(), 1)
        assert ran
    finally:
        sys.setswitchinterval(interval)
        thread.join()


def wait_for(pid: int, seconds: float = 60) -> int:
    """The child's exit code; a child that hangs is killed and counts as a failure."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        done, status = os.waitpid(pid, os.WNOHANG)
        if done:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.01)
    os.kill(pid, 9)
    os.waitpid(pid, 0)
    return -1


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
@pytest.mark.parametrize("busy", [False, True], ids=["", "while another thread starts threads"])
def test_a_forked_child_works_alone(core, busy):
    """One that starts threads crashes now and then: glibc may give them what the parent's thread had half set up."""
    core.parallel_probe(100, 3, -1)
    stop = threading.Event()

    def once() -> None:
        core.parallel_probe(300, 3, -1)
        torch.randn(1 << 16).exp()

    def starts_threads() -> None:
        while busy and not stop.is_set():
            thread = threading.Thread(target=once)
            thread.start()
            thread.join()

    thread = threading.Thread(target=starts_threads)
    thread.start()
    try:
        for _ in range(10):
            pid = os.fork()
            if pid == 0:
                right = all(core.parallel_probe(500, 3, -1) == total(500) for _ in range(20))
                os._exit(0 if right and len(threads_here()) == 1 and "alone" in core.threads_in_use() else 1)
            assert wait_for(pid) == 0
    finally:
        stop.set()
        thread.join()
    assert core.parallel_probe(100, 3, -1) == total(100)


ENDINGS = {
    "falls off the end": "",
    "exits at once": "import os; os._exit(0)",
    "raises": "raise SystemExit(0)",
    "while daemon threads are in a kernel": "for _ in range(3): threading.Thread(target=busy, daemon=True).start()",
}


@pytest.mark.parametrize("ending", ENDINGS)
def test_the_process_ends_cleanly(core, ending):
    """The module is imported by itself, which saves the child the seconds that torch takes."""
    code = f"""
import sys, threading
sys.path.insert(0, {str(Path(core.__file__).parent)!r})
import _C
def busy():
    while True:
        _C.parallel_probe(1000, 3, -1)
assert _C.parallel_probe(1000, 3, -1) == {total(1000)} and _C.pool_workers() == 2, _C.threads_in_use()
{ENDINGS[ending]}
"""
    for _ in range(3):
        done = subprocess.run([sys.executable, "-c", code], timeout=60, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr


def test_flushing_denormals_reaches_the_workers(core, three_threads):
    """A caller that flushes denormals gets the same bits from every thread, and later callers are not affected."""
    tiny = torch.full((4096, 64), 1e-39)
    tiny[:, ::2] = 2e-39
    soft = next(i.fn for i in implementations("nm_soft_threshold") if i.backend == "cpu")
    kept = soft(tiny, 2, 4)
    if not torch.set_flush_denormal(True):
        pytest.skip("this CPU cannot flush denormals")
    try:
        flushed = soft(tiny, 2, 4)
    finally:
        torch.set_flush_denormal(False)
    assert (flushed.view(torch.int32) == 0).all()
    assert torch.equal(soft(tiny, 2, 4), kept)
    assert kept.count_nonzero() == tiny.numel() // 2
