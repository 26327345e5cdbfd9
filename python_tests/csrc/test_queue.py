"""The host's side of ``csrc/cuda`` on a runtime and driver without GPUs, ``csrc/tests/cudart/fake.cpp``: contexts and attributes."""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Barrier
from typing import Any

import pytest

CSRC = Path(__file__).resolve().parents[2] / "csrc"
SOURCES = ["tests/cudart/fake.cpp", "cuda/queue.cu", "cuda/probe.cu", "cuda/gemm/tensor_map.cu"]
INVALID_CONTEXT = 201


def headers() -> Path | None:
    """The folder of CUDA's headers."""
    homes = [os.environ.get("CUDA_HOME"), os.environ.get("CUDA_PATH"), "/usr/local/cuda"]
    nvcc = shutil.which("nvcc")
    homes += [str(Path(nvcc).resolve().parents[1])] if nvcc else []
    found = (Path(home) / "include" for home in homes if home)
    return next((folder for folder in found if (folder / "cuda_runtime.h").is_file() and (folder / "cuda.h").is_file()), None)


pytestmark = pytest.mark.skipif(
    headers() is None or not CSRC.is_dir() or shutil.which("c++") is None,
    reason="no CUDA headers, sources or C++ compiler",
)


class Gpus:
    """Two of them; nothing is known of either, and no thread has a context."""

    def __init__(self, path: Path) -> None:
        library = ctypes.CDLL(str(path))
        for name in ("call", "call_with_map", "probe", "taken_log"):
            getattr(library, name).restype = ctypes.c_char_p
        library.has_context.restype = ctypes.c_bool
        self.library = library

    def __getattr__(self, name: str) -> Callable[..., Any]:
        def run(*args: int) -> Any:
            found = getattr(self.library, name)(*args)
            return found.decode() if isinstance(found, bytes) else found

        return run

    def log(self) -> list[str]:
        """What was asked of them since the last look."""
        return self.taken_log().splitlines()


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("cudart") / "gpus.so"
    words = ["-std=c++17", "-shared", "-fPIC", "-pthread", "-Wl,-Bsymbolic", f"-I{headers()}"]  # never to call the CUDA of torch
    subprocess.run(["c++", *words, "-o", str(path), "-x", "c++", *(str(CSRC / source) for source in SOURCES)], check=True)
    return path


@pytest.fixture
def gpus(built: Path, tmp_path: Path) -> Gpus:
    """A copy of the library, which remembers nothing yet."""
    return Gpus(Path(shutil.copy(built, tmp_path / "gpus.so")))


@pytest.fixture
def thread() -> Iterator[Callable[..., Any]]:
    """``thread(f, ...)`` runs f on one thread that has done nothing before."""
    with ThreadPoolExecutor(1) as pool:
        yield lambda f, *args: pool.submit(f, *args).result()


@pytest.mark.parametrize("device", [0, 1])
def test_a_fresh_thread_has_a_context_before_a_map_is_encoded(gpus: Gpus, thread: Any, device: int) -> None:
    """As autograd's threads and a server's workers are; the primary context is there, as tensors are on that GPU."""
    gpus.make_current(device)
    gpus.log()
    assert thread(gpus.encode_alone) == INVALID_CONTEXT, "the driver asks for one"
    assert thread(gpus.call_with_map, device) == ""
    assert gpus.log() == [f"{what} on {device}" for what in ("retain", "push", "encode", "launch", "pop")]
    assert thread(gpus.current_device) == -1
    assert thread(gpus.call_with_map, device) == ""
    assert gpus.log() == [f"{what} on {device}" for what in ("push", "encode", "launch", "pop")]


def test_nothing_is_switched_where_the_gpu_is_current(gpus: Gpus, thread: Any) -> None:
    thread(gpus.make_current, 1)
    gpus.log()
    assert thread(gpus.call, 1, 0, True) == "" and gpus.log() == ["launch on 1"] * 2
    assert thread(gpus.call_with_map, 1) == "" and gpus.log() == ["encode on 1", "launch on 1"]


def test_a_gpu_that_the_process_does_not_use_is_left_alone(gpus: Gpus, thread: Any) -> None:
    """Tensors on GPU 1, while GPU 0 is the current one by default: no context is created there, and all launches of a call switch once."""
    gpus.make_current(1)
    gpus.log()
    for _ in range(3):
        assert thread(gpus.call, 1, 0, True) == ""
    assert gpus.log()[1:] == ["push on 1", "launch on 1", "launch on 1", "pop on 1"] * 3
    assert not gpus.has_context(0) and thread(gpus.current_device) == -1


def test_the_current_gpu_is_so_again_afterwards(gpus: Gpus, thread: Any) -> None:
    gpus.make_current(1)
    thread(gpus.make_current, 0)
    gpus.log()
    thread(gpus.call, 1, 0, False)
    assert thread(gpus.current_device) == 0
    assert gpus.log() == ["retain on 1", "push on 1", "launch on 1", "launch on 1", "pop on 1"]


def test_shared_memory_is_allowed_once_for_each_kernel_and_gpu(gpus: Gpus) -> None:
    def allowances(*call: Any) -> list[str]:
        assert gpus.call(*call) == ""
        return [line for line in gpus.log() if line.startswith("allow")]

    assert allowances(0, 16 << 10, False) == []
    assert allowances(0, 100 << 10, False) == [f"allow {100 << 10} on 0"]
    assert allowances(0, 100 << 10, False) == allowances(0, 64 << 10, False) == []
    assert allowances(0, 100 << 10, True) == [f"allow {100 << 10} on 0"]
    assert allowances(0, 200 << 10, True) == [f"allow {200 << 10} on 0"] * 2
    assert allowances(1, 100 << 10, True) == [f"allow {100 << 10} on 1"] * 2


def test_attributes_are_read_once_for_each_gpu(gpus: Gpus) -> None:
    for device in (0, 1):
        assert gpus.processors(device) == 100 + device
        assert set(gpus.log()) == {f"ask on {device}"}
    assert [gpus.processors(device) for device in (1, 0)] == [101, 100] and gpus.log() == []
    assert not gpus.has_context(0) and not gpus.has_context(1)


def test_a_gpu_that_is_not_there(gpus: Gpus) -> None:
    for words in (gpus.call(2, 0, False), gpus.probe(2)):
        assert words.startswith("GPU 2: ") and "101" in words  # cudaErrorInvalidDevice
    assert gpus.log() == [] and gpus.probe(1) == ""


def test_many_threads(gpus: Gpus) -> None:
    start = Barrier(8)

    def work(i: int) -> str:
        start.wait()
        words = "".join(gpus.call((i + j) % 2, 100 << 10, True) + gpus.call_with_map(j % 2) for j in range(50))
        return words if gpus.current_device() == -1 and gpus.processors(1) == 101 else "a context was left"

    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(work, range(8))) == [""] * 8
    assert sum(line.startswith("allow") for line in gpus.log()) == 4
