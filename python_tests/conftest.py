"""Seeds, one thread, and what is left out where there is no GPU, for every test."""

from __future__ import annotations

import gc
import os
import signal
import zlib
from collections import Counter
from collections.abc import Iterable, Iterator
from operator import attrgetter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from nmkernels import capability, dispatch, testing
from nmkernels.backends.triton import interpreted
from nmkernels.gemm.choose import forget as forget_choices

TENTH = "NMKERNELS_TENTH"
"""A digit: of each sweep only that tenth of the cases runs. Unset or empty: all of them."""


@pytest.hookimpl(tryfirst=True)  # before -m looks at the markers
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    gpu = [item for item in items if item.get_closest_marker("gpu")]
    if gpu and (interpreted() or not capability.cuda_device().ok):  # Triton interprets on the CPU
        config.hook.pytest_deselected(items=gpu)
        items[:] = [item for item in items if not item.get_closest_marker("gpu")]
    mark_slow(items)
    if tenth := os.environ.get(TENTH):
        others = sweeps_left_out(items, tenth)
        config.hook.pytest_deselected(items=[item for item in items if item.nodeid in others])
        items[:] = [item for item in items if item.nodeid not in others]


def pytest_collection_finish() -> None:
    gc.freeze()  # modules and thousands of tests stay to the end; looking through them took half a second for each gc.collect()


def mark_slow(items: Iterable[Any]) -> None:
    """Of the cases of a test marked ``quick(count, per=...)``, mark all but the first ``count`` of each kind as slow.

    ``per``: the name of a parameter, ``"backend"``, or of an attribute of one, ``"entry.recipe.name"``; or several names. To a test without
    such a parameter, in a class or file that is marked, all its cases are of one kind.
    """
    seen: Counter[tuple[str, ...]] = Counter()
    for item in items:
        quick, call = item.get_closest_marker("quick"), getattr(item, "callspec", None)
        if quick is None or call is None:
            continue
        names = quick.kwargs.get("per", ())
        names = [name for name in ([names] if isinstance(names, str) else names) if name.partition(".")[0] in call.params]
        parameters = SimpleNamespace(**call.params)
        kind = (item.nodeid.partition("[")[0], *(str(attrgetter(name)(parameters)) for name in names))
        seen[kind] += 1
        if seen[kind] > (quick.args[0] if quick.args else 1):
            item.add_marker(pytest.mark.slow)


def sweeps_left_out(items: Iterable[Any], tenth: str) -> set[str]:
    """The cases in the other nine tenths of the sweeps; a sweep is a test with five slow cases or more.

    A case's tenth depends on its name alone, so it is the same in every process and on every machine.
    """
    if tenth not in set("0123456789"):
        raise pytest.UsageError(f"{TENTH}={tenth} is not a digit; unset it to run all cases of every sweep.")
    slow = [item.nodeid for item in items if item.get_closest_marker("slow")]
    cases = Counter(name.partition("[")[0] for name in slow)
    return {name for name in slow if cases[name.partition("[")[0]] >= 5 and zlib.crc32(name.encode()) % 10 != int(tenth)}


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    if tenth := os.environ.get(TENTH):
        terminalreporter.write_line(f"{TENTH}={tenth}: of every test with five slow cases or more, a tenth of these ran.")
    can, reason = capability.cuda_device()
    if not can:
        terminalreporter.write_line(f"Tests marked gpu were left out, they need an NVIDIA GPU: {reason}")


@pytest.fixture(autouse=True, scope="session")
def _one_thread() -> None:
    # the tensors of tests are small; a pool of threads only costs, and the tests run side by side
    torch.set_num_threads(int(os.environ.get("NMKERNELS_TEST_THREADS", "1")))


@pytest.fixture(autouse=True, scope="session")
def _nothing_measured(tmp_path_factory: pytest.TempPathFactory) -> None:
    # tests neither follow what this machine measured, nor store where a user would find it
    os.environ["NMKERNELS_CACHE"] = str(tmp_path_factory.mktemp("cache"))
    os.environ.pop("NMKERNELS_CHOICE", None)
    # they exchange kernels by hand and count their calls, and a check would be one more; NMKERNELS_VERIFY=1 runs them with it
    os.environ.setdefault("NMKERNELS_VERIFY", "0")


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)
    dispatch.forget()  # tests exchange backends by hand, and each makes its first calls itself


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A table of measurements of the test's own, and the choices that follow it."""
    monkeypatch.setenv("NMKERNELS_CACHE", str(tmp_path / "cache"))
    forget_choices()
    yield tmp_path / "cache"
    forget_choices()


@pytest.fixture
def poison() -> Iterator[None]:
    """Fresh memory is NaN while the test runs."""
    with testing.poison():
        yield


def _waited(*args: object) -> None:
    raise TimeoutError("a pipe was opened, into which nobody writes")


@pytest.fixture
def pipe(tmp_path: Path) -> Iterator[Path]:
    """A named pipe into which nobody writes: to open it would be to wait for ever, and ends the test after five seconds."""
    os.mkfifo(tmp_path / "pipe")
    before = signal.signal(signal.SIGALRM, _waited)
    signal.alarm(5)
    yield tmp_path / "pipe"
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)
