"""Locks a GPU's clock with nvidia-smi, and reads the clock under load. Setting it usually needs root, and is done only on request.

The clock is reset even if this process is killed: another process, in its own session, waits for the end of a pipe from this one.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager

from nmkernels import NMError

ASKED = "NMKERNELS_BENCH_CLOCK"
"""Environment variable that ``--lock-clocks`` sets: the MHz at which ``power_or_port`` is measured again."""

RESTORE = 'cat > /dev/null; exec "$0" -i "$1" -rgc'


def ask(mhz: int, gpu: str) -> None:
    """Let ``requested`` return ``mhz`` from now on; NMError if this GPU's clock cannot be set, which is tried."""
    if mhz <= 0:
        raise NMError(f"--lock-clocks takes a clock in MHz, such as 900; got {mhz}.")
    with locked(mhz, gpu):
        pass
    os.environ[ASKED] = str(mhz)


def requested() -> int:
    """The MHz passed to ``ask``; 0 if it was not called."""
    return int(os.environ.get(ASKED, "0"))


def nvidia_smi() -> str:
    """The path of nvidia-smi; NMError if it is not installed."""
    found = shutil.which("nvidia-smi")
    if found is None:
        raise NMError("--lock-clocks needs nvidia-smi, which is not on PATH.")
    return found


@contextmanager
def locked(mhz: int, gpu: str) -> Iterator[None]:
    """Lock the multiprocessors' clock at ``mhz`` inside; afterwards the driver chooses it, even if it was locked before.

    Raises:
        NMError: the clock cannot be set or reset; the message has nvidia-smi's output.
    """
    program = nvidia_smi()
    with subprocess.Popen(
        ["/bin/sh", "-c", RESTORE, program, gpu], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        start_new_session=True,
    ) as keeper:  # fmt: skip
        try:
            done = subprocess.run([program, "-i", gpu, "-lgc", f"{mhz},{mhz}"], capture_output=True, text=True)
            said = f"{done.stdout} {done.stderr}".strip()
            # it returns 0 too when it only warns that this is not supported
            refused = done.returncode or "not supported" in said.lower() or "permission" in said.lower()
            if refused:
                raise NMError(f"--lock-clocks: the clock of GPU {gpu} cannot be set here (root can): {said}")
            yield
        finally:
            output, _ = keeper.communicate()
    if keeper.returncode and not refused:
        raise NMError(f"--lock-clocks: the clock of GPU {gpu} was not reset; run `nvidia-smi -i {gpu} -rgc`: {output.strip()}")


def under_load(gpu: str) -> tuple[float, float]:
    """Current MHz and watts; NMError if nvidia-smi does not report them."""
    words = [nvidia_smi(), "-i", gpu, "--query-gpu=clocks.sm,power.draw", "--format=csv,noheader,nounits"]
    done = subprocess.run(words, capture_output=True, text=True)
    try:
        mhz, watts = map(float, done.stdout.strip().split(","))
    except ValueError:
        raise NMError(f"nvidia-smi does not report the clock of GPU {gpu}: {done.stdout} {done.stderr}".strip()) from None
    return mhz, watts
