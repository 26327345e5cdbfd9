"""``make gpu``: build, one call of each kernel, tests, memcheck and benchmarks on a GPU, with a summary of failures at the end.

For a machine with an NVIDIA GPU, torch and pytest installed and no network, where a run may be cut short::

    python -m bench.gpu                                       # every step
    python -m bench.gpu --deadline 570 --out DIR              # stop after 9.5 minutes, with the results as two files in DIR
    python -m bench.gpu --deadline 570 --out DIR --resume gpu.tar.gz    # continue from those, on another machine too
    python -m bench.gpu build benchmarks                      # some steps, in their order
    python -m bench.gpu build tests --tests python_tests/backends/cuda/test_gemm.py
    python -m bench.gpu --dry-run                             # the same steps without a GPU, on the emulator

A step is a list of jobs: a process for each test file and family of benchmarks, with a time limit for each test and case. A crash, a hang
or a lost device fails the current test, and another process continues with the rest. At the deadline, or at SIGTERM, the summary lists
what is left, and the same command continues with it, unless the sources, the versions or the architecture of the GPU change. With a
deadline, each step except build and smoke takes at most half of the remaining time, so that every step is reached.

Logs, rows and state are in ``build/gpu``; ``gpu.tar.gz`` in ``--out DIR`` contains all of it, ``summary.txt`` the summary.
``python -m bench.report --add`` adds the rows of an archive to ``bench/results``, on any machine; the step report adds those of this one.

Exit status 0: everything passed. 1: something failed, see the summary. 2: torch can use no GPU here, or there is no step of that name.
3: nothing failed, but some of it is left. 130: interrupted, 143: terminated.
"""

from __future__ import annotations

import argparse
import hashlib
import math
import os
import re
import shutil
import signal
import subprocess
import sys
import sysconfig
import tarfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from . import outcomes
from .outcomes import Outcome

ROOT = Path(__file__).resolve().parents[1]
WORK, ARCHIVE, SUMMARY = ROOT / "build", "gpu.tar.gz", "summary.txt"
CLOSING = 10.0
"""Seconds reserved before the deadline for the summary and the archive."""

TEST_SECONDS, SANITIZED_SECONDS, CASE_SECONDS = 120.0, 240.0, 180.0
"""Time limits of a test (Triton compiles some for a minute), of one under compute-sanitizer, and of a benchmark case."""

say = partial(print, flush=True)

START, LIVES, LINES, WIDTH = 60.0, 6, 6, 200
"""The least seconds that a process has to start, how often it is started, and how many failures are shown, in how many characters."""

WORKERS = max(1, min(8, (os.cpu_count() or 1) // 2))
"""Test processes at once; each takes half a gigabyte of the GPU in addition to its tensors."""

FINDING = r"^========= (?!COMPUTE-SANITIZER|(?:ERROR|RACECHECK) SUMMARY: 0 |Target application returned|.*=$).*"
"""A line of compute-sanitizer that reports an error, also if the process was ended before its exit status could."""


@dataclass
class Job:
    """A process, and its successors if it dies; if it records no outcomes, the job counts as one item.

    Args:
        name: shown, and used for its files; words: the command, run in the repository's root; env: more environment variables.
        limit: the most seconds of an item, or of a job without items; folder: of its files.
    """

    name: str
    words: tuple[str, ...]
    limit: float = math.inf
    env: Mapping[str, str] = field(default_factory=dict)
    folder: Path = Path()
    lives: int = LIVES

    @property
    def file(self) -> Path:
        """The file of its outcomes; its log is next to it."""
        return self.folder / f"{re.sub('[^A-Za-z0-9_]+', '-', self.name).strip('-')}.jsonl"

    @property
    def output(self) -> str:
        """What its processes wrote."""
        log = self.file.with_suffix(".log")
        return log.read_text(encoding="utf-8", errors="replace").strip() if log.exists() else ""

    @property
    def left(self) -> bool:
        """Whether some of it is left for another call."""
        return not outcomes.read(self.file).finished

    def items(self, what: str) -> list[Outcome]:
        """The items that passed, failed or were skipped."""
        return [outcome for outcome in outcomes.read(self.file).ended.values() if outcome.what == what]

    def start(self) -> None:
        """Start a process that continues with the items that have not ended."""
        self.before, self.began, self.lives = len(outcomes.read(self.file).ended), time.time(), self.lives - 1
        outcomes.tell(self.file, starts=True)
        env = {**os.environ, "PYTHONUNBUFFERED": "1", **self.env, outcomes.ENV: str(self.file)}
        with self.file.with_suffix(".log").open("ab") as log:
            self.process = subprocess.Popen(
                self.words, cwd=ROOT, env=env, stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT, start_new_session=True
            )

    def kill(self) -> None:
        """Kill the process and those that it started."""
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()

    def over(self) -> bool:
        """Whether the job has ended; a process that died is replaced by another one."""
        status, (ended, item, *_), why = self.process.poll(), outcomes.read(self.file), ""
        if status is None:
            if time.time() - max(self.began, self.file.stat().st_mtime) <= (self.limit if item else max(self.limit, START)):
                return False
            why = f"took more than {self.limit:g} s and was ended"
        elif status < 0:
            why = f"its process was ended by {signal.Signals(-status).name}"
        elif item:
            why = f"its process ended during it, with exit status {status}"
        self.kill()
        lost = outcomes.read(self.file).lost  # whatever the exit status, which may be that of a wrapping tool
        died = bool(why) or lost
        if not died and (finding := re.search(FINDING, self.output, re.M)):
            why = finding[0]
        elif not died and status not in (0, 5) and not self.items("failed"):  # pytest's 5: no tests are left
            lines = self.output.splitlines() or ["no output"]
            # a compiler's first error, otherwise the last line
            error = next((line for line in lines if re.search(r"(^|[\s:])error:|CMake Error|ninja: error", line)), lines[-1])
            why = f"exit status {status}: {error.strip()}"
        if not lost and (why or not ended):
            outcomes.end(self.file, Outcome(item or self.name, "failed" if why else "passed", why))
        if died and (item or len(ended) > self.before):  # not before its first item, or after its last
            if self.lives:
                self.start()
                return False
            outcomes.end(self.file, Outcome(self.name, "failed", f"given up after {LIVES} processes; the rest was not run"))
        outcomes.tell(self.file, finished=True)
        return True


@dataclass
class Step:
    """A step of one call, and what the summary says of it.

    Args:
        work: the folder of logs, rows and state; tests: the test files or folders that were named; deadline: until when it may run.
    """

    name: str
    work: Path
    dry: bool = False
    tests: tuple[str, ...] = ()
    deadline: float = math.inf
    jobs: list[Job] = field(default_factory=list)
    note: str = ""

    @property
    def device(self) -> str:
        """The device of the benchmarks."""
        return "cpu" if self.dry else "cuda"

    def run(self, *jobs: Job, workers: int = 1, fresh: bool = False) -> bool:
        """Run the jobs that no earlier call finished (``fresh``: all); whether all of them passed."""
        self.jobs += jobs
        for job in jobs:
            job.folder = self.work / self.name
            job.folder.mkdir(parents=True, exist_ok=True)
            if fresh:
                job.file.unlink(missing_ok=True)
                job.file.with_suffix(".log").unlink(missing_ok=True)
        waiting, running = [job for job in jobs if job.left], list[Job]()
        try:
            while (waiting or running) and time.monotonic() < self.deadline:
                while waiting and len(running) < workers:
                    running.append(waiting.pop(0))
                    running[-1].start()
                for job in [job for job in running if job.over()]:
                    running.remove(job)
                    say("\n".join([f"{job.name}: {len(job.items('passed'))} passed", *failures(job)]))
                time.sleep(0.05)
        finally:  # no process is left behind, even if this one is ending
            for job in running:
                job.kill()
        return not any(job.left or job.items("failed") for job in jobs)

    def __str__(self) -> str:
        counts = [f"{n} {what}" for what in ("passed", "failed", "skipped") if (n := sum(len(job.items(what)) for job in self.jobs))]
        left = [job.name for job in self.jobs if job.left]
        counts += [f"left: {', '.join(left[:4])}{f' and {len(left) - 4} more' if len(left) > 4 else ''}"] if left else []
        failed = any(job.items("failed") for job in self.jobs)
        verdict = "FAILED" if failed else "left" if left else "ok" if self.jobs else "skipped"
        return f"  {self.name:<12}{verdict:<8}{'; '.join(filter(None, [*counts, self.note]))}"


def failures(job: Job) -> list[str]:
    """A line for each of the first failures of a job, and how many more there are."""
    found = job.items("failed")
    more = [f"    and {len(found) - LINES} more, see {job.file}"] if len(found) > LINES else []
    return [*(f"    {outcome.item.partition('::')[2] or outcome.item}: {outcome.why}"[:WIDTH] for outcome in found[:LINES]), *more]


def digest(folders: Sequence[str], *facts: str) -> str:
    """A checksum of the sources in these folders, the build files, and ``facts``."""
    kinds = {".py", ".c", ".cpp", ".h", ".cu", ".cuh", ".cmake", ".sh", ".txt", ".toml"}
    total = hashlib.sha256(repr(facts).encode())
    files = [path for folder in folders for path in sorted((ROOT / folder).rglob("*")) if path.suffix in kinds]
    for path in [*files, ROOT / "setup.py", ROOT / "pyproject.toml"]:
        if path.is_file() and not path.is_relative_to(ROOT / "bench" / "results"):
            total.update(str(path.relative_to(ROOT)).encode() + b"\0" + path.read_bytes())
    return total.hexdigest()


# ---- the steps

CORE = "from nmkernels import capability as c; print(c.{0}().reason); raise SystemExit(not c.{0}().ok)"


def build(step: Step) -> None:
    """Compile the core, with CUDA for this GPU, in a dry run with the emulator; once for the same sources."""
    suffix, env = str(sysconfig.get_config_var("EXT_SUFFIX")), {"NMKERNELS_EMULATOR": "1"}
    if not step.dry:
        from nmkernels.capability import compute_capability

        # the entry of cmake/architectures.cmake for this compute capability
        architecture = {8: "80", 9: "90", 10: "100", 12: "120"}.get((compute_capability() or (0,))[0], "ptx")
        env = {"NMKERNELS_CUDA": "on", "NMKERNELS_CUDA_ARCHITECTURES": architecture}
    modules = [f"{name}{suffix}" for name in ("_C", *(("_emulated",) if step.dry else ()))]
    built = step.work / "core" / digest(("csrc", "cmake"), suffix, *map(str, env.items()))
    if built.exists():
        for name in modules:
            shutil.copy2(built / name, ROOT / "nmkernels" / name)
    elif not step.run(Job("compile", (sys.executable, "setup.py", "build_ext", "--inplace"), env=env), fresh=True):
        return
    # the build may succeed and yet not run here: without CUDA kernels, or for another driver
    core = Job("core", (sys.executable, "-c", CORE.format("compiled_core" if step.dry else "cuda_kernels")), TEST_SECONDS)
    if step.run(core, fresh=True) and not built.exists():
        shutil.rmtree(built.parent, ignore_errors=True)
        built.mkdir(parents=True)
        for name in modules:
            shutil.copy2(ROOT / "nmkernels" / name, built / name)
    step.note = core.output.rpartition("\n")[2]


def smoke(step: Step) -> None:
    """Run each family of kernels once, with a line for each, and one large GEMM."""
    job = Job("smoke", (sys.executable, "-m", "bench.smoke", "--device", step.device), TEST_SECONDS)
    step.run(job)
    say(job.output)


CUDA = "python_tests/backends/cuda"
KERNELS = (
    *(f"{CUDA}/test_{name}.py" for name in ("threads", "wgmma", "wgmma_8bit", "gemm")),
    CUDA, "python_tests/backends/cusparselt", "python_tests/backends/triton",
)  # fmt: skip
"""In order: a GEMM as a thread's first work, wgmma in 16 and in 8 bits, mma.sp; memory-bound kernels; libraries; Triton."""

PYTEST = (sys.executable, "-m", "pytest", "-p", "bench.outcomes", "-p", "no:cacheprovider", "-c", "pyproject.toml", "--rootdir", ".")
PLAIN = {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
"""Plugins installed on this machine are not loaded: none is needed."""


def test_jobs(step: Step, paths: Sequence[str], limit: float) -> tuple[list[Job], list[Job]]:
    """A job for each test file under ``paths``, in their order: those that run in parallel, and those that need the GPU alone."""
    marked = "not gpu" if step.dry else "gpu"  # in a dry run the CUDA kernels run on the emulator
    collect = Job("collect", (*PYTEST, "--collect-only", "-qq", "-m", marked, *paths), TEST_SECONDS, PLAIN)
    passed = step.run(collect, fresh=True)
    alone = outcomes.read(collect.file).alone
    if passed and alone:
        step.jobs.remove(collect)
    elif passed:
        outcomes.end(collect.file, Outcome("collect", "failed", f"no test in {', '.join(paths)}"))
    jobs: tuple[list[Job], list[Job]] = [], []
    for file in sorted(alone, key=lambda file: [not file.startswith(path) for path in paths]):
        threads = {"NMKERNELS_TEST_THREADS": str(os.cpu_count() or 1)} if alone[file] else {"OMP_NUM_THREADS": "1"}
        jobs[alone[file]].append(Job(file, (*PYTEST, "-q", "-m", marked, file), limit, {**PLAIN, **threads}))
    return jobs


def kernels(step: Step) -> None:
    """Run the kernels' tests, starting with those that no GPU has run before."""
    step.run(*test_jobs(step, KERNELS, TEST_SECONDS)[0], workers=WORKERS)


def tests(step: Step) -> None:
    """Run the tests that were named, otherwise all that are not in ``kernels``, conformance first."""
    paths = step.tests or (("python_tests/backends",) if step.dry else ("python_tests/ops", "python_tests"))
    several, alone = test_jobs(step, paths, TEST_SECONDS)
    step.run(*(job for job in several if step.tests or not job.name.startswith(KERNELS)), workers=WORKERS)
    step.run(*alone)


def sanitize(step: Step) -> None:
    """Run the CUDA kernels' tests with memcheck, or with racecheck, which looks for races in shared memory.

    Racecheck does not track copies by the tensor memory accelerator, and would report every stage of a pipeline, so wgmma is left out.
    """
    homes = [os.environ.get("CUDA_HOME"), os.environ.get("CUDA_PATH"), "/usr/local/cuda"]
    inside = [f"{home}/{part}" for home in homes if home for part in ("bin", "compute-sanitizer")]
    path = shutil.which("compute-sanitizer", path=os.pathsep.join([os.environ.get("PATH", ""), *inside]))
    if path is None or step.dry:
        step.note = "nothing runs on a GPU" if step.dry else "compute-sanitizer is neither on PATH nor in CUDA_HOME or /usr/local/cuda"
        return
    races = step.name == "racecheck"
    # only kernels named so: all of this package and few of the vendor's, whose hazards are not ours
    tool: tuple[str, ...] = path, "--tool", step.name, "--error-exitcode", "9", "--kernel-name", "kns=_kernel"
    tool += ("--kernel-name-exclude", "kns=wgmma") if races else ()
    # without torch's cache each tensor is its own allocation, which ends where the tensor ends; graphs cannot be captured so
    env, chosen = {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}, ("-k", "not graph and not captur and not replay")
    several, _ = test_jobs(step, step.tests or (*KERNELS[:4], CUDA), SANITIZED_SECONDS)
    jobs = [job for job in several if not (races and "wgmma" in job.name)]
    step.run(*(replace(job, words=(*tool, *job.words, *chosen), env={**job.env, **env}) for job in jobs), workers=WORKERS)


FIRST = ("gemm", "linear", "integers", "quantized", "power_or_port", "groups", "pack", "adamw")
"""Files of ``bench/cases`` that are measured first: GEMMs, compression, MVUE, AdamW."""


def benchmarks(step: Step) -> None:
    """Run the quick cases, a process for each file of ``bench/cases``, one after the other."""
    from . import cases, tables, targets  # noqa: F401 - the cases register themselves
    from .registry import FAMILIES
    from .rows import load, machine, slug

    ops: dict[str, dict[str, None]] = {name: {} for name in FIRST}
    for spec in targets.quick(step.device):
        ops.setdefault(FAMILIES[spec.op].build.__module__.rpartition(".")[2], {})[spec.op] = None
    csv = step.work / "rows" / f"{slug(machine(step.device))}.csv"
    words = (sys.executable, "-m", "bench.run", "--quick", "--device", step.device, "--out", str(csv))
    env = {"NMKERNELS_CACHE": str(step.work / "cache")}  # do not use what this machine measured before
    step.run(*(Job(name, (*words, "--op", *those), CASE_SECONDS, env=env) for name, those in ops.items() if those))
    rows = [r for r in load(csv) if r["machine"] == machine(step.device)]
    step.note = tables.targets_text(targets.verdicts(rows, step.device)).splitlines()[-1]


def report(step: Step) -> None:
    """Write the tables, from the rows of ``bench/results`` and those of this call."""
    step.note = "a dry run writes no tables" if step.dry else ""
    if not step.dry:
        step.run(Job("tables", (sys.executable, "-m", "bench.report", "--add", str(step.work / "rows")), CASE_SECONDS), fresh=True)


STEPS: dict[str, Callable[[Step], None]] = {
    "build": build, "smoke": smoke, "kernels": kernels, "memcheck": sanitize,
    "benchmarks": benchmarks, "tests": tests, "racecheck": sanitize, "report": report,
}  # fmt: skip
"""Ordered by what is most likely to fail, then by value. Without the build nothing else runs."""


# ---- one call


def fingerprint(device: str) -> str:
    """A digest of the sources, the versions and the architecture of the GPU or CPU; results with another digest do not count."""
    from nmkernels.capability import compute_capability

    from .rows import machine, versions

    sources = ("nmkernels", "csrc", "cmake", "python_tests", "bench", "examples")
    return digest(sources, machine(device) if device == "cpu" else f"compute capability {compute_capability()}", versions())


def prepare(work: Path, device: str, archive: Path | None) -> None:
    """Make the folders, from an archive if there is one, and discard results of other sources."""
    if archive:
        shutil.rmtree(work, ignore_errors=True)
        with tarfile.open(archive) as file:
            file.extractall(work, filter="data")
    (work / "rows").mkdir(parents=True, exist_ok=True)
    path, present = work / "sources.txt", fingerprint(device)
    if path.exists() and path.read_text() != present:
        say("the sources, versions or architecture changed: earlier results are discarded")
        for name in STEPS:
            shutil.rmtree(work / name, ignore_errors=True)
    path.write_text(present)


def pack(work: Path, folder: Path | None) -> None:
    """Write the archive atomically, replacing an earlier one."""
    if folder is not None:
        folder.mkdir(parents=True, exist_ok=True)
        with tarfile.open(folder / f"{ARCHIVE}.part", "w:gz", compresslevel=6) as archive:
            archive.add(work, ".")
        os.replace(folder / f"{ARCHIVE}.part", folder / ARCHIVE)
        if (work / SUMMARY).exists():
            shutil.copy2(work / SUMMARY, folder / SUMMARY)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the steps, continuing after failures except of the build, and print the summary."""
    start, parser = time.monotonic(), argparse.ArgumentParser(prog="python -m bench.gpu", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("steps", nargs="*", metavar="STEP", help=f"{', '.join(STEPS)}; all if none is named")
    parser.add_argument("--deadline", type=float, default=math.inf, metavar="SECONDS", help="time limit; another call does the rest")
    parser.add_argument("--out", type=Path, metavar="DIR", help=f"folder for {ARCHIVE} (logs, rows and state) and {SUMMARY}")
    parser.add_argument("--resume", type=Path, metavar="ARCHIVE", help="continue from this archive")
    parser.add_argument("--tests", nargs="+", metavar="PATH", default=(), help="test files or folders for tests, memcheck, racecheck")
    parser.add_argument("--dry-run", action="store_true", help="without a GPU: tests on the emulator, benchmarks on the CPU")
    args = parser.parse_args(argv)
    if unknown := set(args.steps) - set(STEPS):
        parser.error(f"unknown step {', '.join(sorted(unknown))}; choose from {', '.join(STEPS)}")
    if args.resume and not (args.resume.is_file() and tarfile.is_tarfile(args.resume)):
        parser.error(f"--resume {args.resume}: not an archive of an earlier call")
    from nmkernels import capability

    if not args.dry_run and not capability.cuda_device()[0]:
        print(f"make gpu: no usable NVIDIA GPU: {capability.cuda_device()[1]}")
        return 2
    work = WORK / ("gpu-dry" if args.dry_run else "gpu")
    names = [name for name in STEPS if name in (args.steps or (("build", "tests") if args.tests else STEPS))]
    prepare(work, "cpu" if args.dry_run else "cuda", args.resume)

    def terminate(*_: Any) -> None:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)  # the summary must still be written
        raise KeyboardInterrupt("terminated")  # as with Ctrl-C, processes are ended and the summary is printed

    before = signal.signal(signal.SIGTERM, terminate)
    steps: list[Step] = []
    stopped = 0
    try:
        for name in names:
            now, end = time.monotonic(), start + args.deadline - CLOSING
            share = 1.0 if name in ("build", "smoke", names[-1]) else 0.5
            step = Step(name, work, args.dry_run, tuple(args.tests), now + share * (end - now))
            steps.append(step)
            say(f"== {name}")
            try:
                STEPS[name](step)
            except Exception as error:  # the other steps still run
                step.run(Job("error", (sys.executable, "-c", f"raise SystemExit({f'{type(error).__name__}: {error}'!r})")), fresh=True)
            pack(work, args.out)
            if name == "build" and any(job.left or job.items("failed") for job in step.jobs):
                break
    except KeyboardInterrupt as stop:
        stopped = 143 if stop.args else 130
    jobs = [job for step in steps for job in step.jobs]
    left = any(job.left for job in jobs)
    status = stopped or (1 if any(job.items("failed") for job in jobs) else 3 if left else 0)
    details = ((f"  {step.name}: {job.name}", failures(job)) for step in steps for job in step.jobs)
    lines = ["== summary", *map(str, steps), *(line for head, shown in details if shown for line in (head, *shown))]
    verdict = {0: "all passed", 1: "FAILED", 3: "nothing failed so far", 130: "interrupted", 143: "terminated"}[status]
    again = "; the same command continues with what is left" if left or stopped else ""
    text = "\n".join([*lines, f"  rows in {work / 'rows'}, logs in {work}", f"  {verdict}{again}"])
    say(text)
    (work / SUMMARY).write_text(f"{text}\n", encoding="utf-8")
    pack(work, args.out)
    signal.signal(signal.SIGTERM, before)
    return status


if __name__ == "__main__":
    raise SystemExit(main())
