"""A GPU's clock, held for a while by nvidia-smi, and what it is under load. Only the owner of the GPU may set it, and only if asked.

The clock is given back also if this process is killed: another one, in a session of its own, waits for the end of a pipe from it.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager

from nmkernels import NMError

ASKED = "NMKERNELS_BENCH_CLOCK"
"""Environment variable that ``--lock-clocks`` sets: the MHz at which cases that want it are measured once more."""

RESTORE = 'cat > /dev/null; exec "$0" -i "$1" -rgc'


def ask(mhz: int, gpu: str) -> None:
    """Have ``asked`` say ``mhz`` from now on; NMError where the clock of this GPU cannot be set, which is tried."""
    if mhz <= 0:
        raise NMError(f"--lock-clocks takes a clock in MHz, such as 900; got {mhz}.")
    with locked(mhz, gpu):
        pass
    os.environ[ASKED] = str(mhz)


def asked() -> int:
    """The MHz that ``ask`` was called with; 0 where it was not."""
    return int(os.environ.get(ASKED, "0"))


def nvidia_smi() -> str:
    """Where it is; NMError if it is nowhere."""
    found = shutil.which("nvidia-smi")
    if found is None:
        raise NMError("--lock-clocks: nvidia-smi is not on PATH, and it is what sets the clock.")
    return found


@contextmanager
def locked(mhz: int, gpu: str) -> Iterator[None]:
    """The clock of the multiprocessors is ``mhz`` inside, and the driver's own choice afterwards, also if it was locked before.

    Raises:
        NMError: it may not be set, or not be given back; the message says what nvidia-smi says.
    """
    program = nvidia_smi()
    with subprocess.Popen(
        ["/bin/sh", "-c", RESTORE, program, gpu], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        start_new_session=True,
    ) as keeper:  # fmt: skip
        try:
            done = subprocess.run([program, "-i", gpu, "-lgc", f"{mhz},{mhz}"], capture_output=True, text=True)
            said = f"{done.stdout} {done.stderr}".strip()
            # it answers 0 also where it only warns that this is not supported
            refused = done.returncode or "not supported" in said.lower() or "permission" in said.lower()
            if refused:
                raise NMError(f"--lock-clocks: the clock of GPU {gpu} cannot be set here (the owner may, as root): {said}")
            yield
        finally:
            told, _ = keeper.communicate()
    if keeper.returncode and not refused:
        raise NMError(f"--lock-clocks: the clock of GPU {gpu} was not given back; run `nvidia-smi -i {gpu} -rgc`: {told.strip()}")


def under_load(gpu: str) -> tuple[float, float]:
    """MHz and watts at this moment; NMError if nvidia-smi does not tell."""
    words = [nvidia_smi(), "-i", gpu, "--query-gpu=clocks.sm,power.draw", "--format=csv,noheader,nounits"]
    done = subprocess.run(words, capture_output=True, text=True)
    try:
        mhz, watts = map(float, done.stdout.strip().split(","))
    except ValueError:
        raise NMError(f"nvidia-smi does not tell the clock of GPU {gpu}: {done.stdout} {done.stderr}".strip()) from None
    return mhz, watts
