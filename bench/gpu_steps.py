"""The steps of ``make gpu`` in order, and the processes that each runs."""

from __future__ import annotations

import hashlib
import math
import os
import shutil
import sys
import sysconfig
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from . import outcomes
from .jobs import ROOT, Job, run

TEST_SECONDS, SANITIZED_SECONDS, CASE_SECONDS, CURVE_SECONDS = 120.0, 240.0, 180.0, 240.0
"""Time limits: of a test (Triton compiles some for a minute), one under compute-sanitizer, a benchmark case and the curves of a recipe."""

SHARE = 40
"""The most tests of one process; the conformance tests are 1300 in one file."""


@dataclass(frozen=True)
class Visit:
    """One call of ``make gpu``: the folder of logs, rows and state, the tests that were named, and how many run in parallel."""

    work: Path
    tests: tuple[str, ...]
    workers: int
    dry: bool = False

    @property
    def device(self) -> str:
        """The device of the benchmarks."""
        return "cpu" if self.dry else "cuda"

    @property
    def marked(self) -> str:
        """The marker of the tests that run; in a dry run those that need no GPU, with the CUDA kernels on the emulator."""
        return "not gpu" if self.dry else "gpu"

    @property
    def rows(self) -> Path:
        """The folder of the benchmarks' CSV files."""
        return self.work / "rows"


@dataclass
class Step:
    """A step that was started: the folder of its files, until when it may run, its jobs, and what the summary says of it."""

    folder: Path
    deadline: float = math.inf
    jobs: list[Job] = field(default_factory=list)
    note: str = ""
    seconds: float = 0.0

    def run(self, *jobs: Job, workers: int = 1, fresh: bool = False) -> None:
        """Run the jobs that no earlier call finished; ``fresh``: all."""
        self.folder.mkdir(parents=True, exist_ok=True)
        self.jobs += jobs
        for job in jobs:
            job.folder = self.folder
            if fresh:
                job.file.unlink(missing_ok=True)
        run(jobs, self.deadline, workers, say)

    def count(self, what: str) -> int:
        """Number of items that passed, failed or were skipped."""
        return sum(job.count(what) for job in self.jobs)

    @property
    def left(self) -> list[str]:
        """The jobs left for another call."""
        return [job.name for job in self.jobs if job.left]

    def __str__(self) -> str:
        left, counts = self.left, [f"{n} {what}" for what in ("passed", "failed", "skipped") if (n := self.count(what))]
        if left:
            counts.append(f"left: {', '.join(left[:4])}{f' and {len(left) - 4} more' if len(left) > 4 else ''}")
        verdict = "FAILED" if self.count("failed") else "left" if left else "ok" if self.jobs else "skipped"
        return f"  {self.folder.name:<12}{self.seconds:>6.0f} s  {verdict:<8}{'; '.join(filter(None, [*counts, self.note]))}"


def say(text: str) -> None:
    """Print at once."""
    print(text, flush=True)


def python(*words: str) -> tuple[str, ...]:
    """The command line of this Python with ``words``."""
    return sys.executable, *words


SUFFIXES = {".py", ".c", ".cpp", ".h", ".cu", ".cuh", ".cmake", ".sh", ".txt", ".toml"}


def digest(folders: Iterable[str], *facts: str) -> str:
    """A checksum of the sources in these folders, the build files, and ``facts``."""
    found = hashlib.sha256(repr(facts).encode())
    files = [path for folder in folders for path in sorted((ROOT / folder).rglob("*")) if path.suffix in SUFFIXES]
    for path in [*files, ROOT / "setup.py", ROOT / "pyproject.toml"]:
        if path.is_file() and not path.is_relative_to(ROOT / "bench" / "results"):
            found.update(str(path.relative_to(ROOT)).encode() + b"\0" + path.read_bytes())
    return found.hexdigest()


# ---- build and smoke test

CORE = "from nmkernels import capability as c; print(c.{0}().reason); raise SystemExit(not c.{0}().ok)"


def architecture(capability: tuple[int, int]) -> str:
    """The entry of ``cmake/architectures.cmake`` for a GPU of this compute capability."""
    return {8: "80", 9: "90", 10: "100", 12: "120"}.get(capability[0], "ptx")


def build(visit: Visit, step: Step) -> None:
    """Compile the core, with CUDA for this GPU, in a dry run with the emulator; once for the same sources."""
    probe, suffix = "compiled_core" if visit.dry else "cuda_kernels", str(sysconfig.get_config_var("EXT_SUFFIX"))
    modules = [f"_C{suffix}", *([f"_emulated{suffix}"] if visit.dry else [])]
    env = {"NMKERNELS_EMULATOR": "1"}
    if not visit.dry:
        from nmkernels.capability import compute_capability

        env = {"NMKERNELS_CUDA": "on", "NMKERNELS_CUDA_ARCHITECTURES": architecture(compute_capability() or (0, 0))}
    built, sources = visit.work / "core", digest(("csrc", "cmake"), suffix, *map(str, env.items()))
    if (built / "sources.txt").exists() and (built / "sources.txt").read_text() == sources:
        for name in modules:
            shutil.copy2(built / name, ROOT / "nmkernels" / name)
    else:
        step.run(Job("compile", python("setup.py", "build_ext", "--inplace"), env=env), fresh=True)
        if step.left or step.count("failed"):
            return
    # the build may succeed and yet not run here: without CUDA kernels, or for another driver
    core = Job("core", python("-c", CORE.format(probe)), TEST_SECONDS)
    step.run(core, fresh=True)
    step.note = core.output.rpartition("\n")[2]
    if core.count("passed"):
        built.mkdir(exist_ok=True)
        for name in modules:
            shutil.copy2(ROOT / "nmkernels" / name, built / name)
        (built / "sources.txt").write_text(sources)


def smoke(visit: Visit, step: Step) -> None:
    """Run each family of kernels once, with a line for each, and one large GEMM."""
    job = Job("smoke", python("-m", "bench.smoke", "--device", visit.device), TEST_SECONDS)
    step.run(job)
    say(job.output)


# ---- tests

CUDA = "python_tests/backends/cuda"
KERNELS = (
    *(f"{CUDA}/test_{name}.py" for name in ("threads", "wgmma", "wgmma_8bit", "gemm")),
    CUDA, "python_tests/backends/cusparselt", "python_tests/backends/triton",
)  # fmt: skip
"""In order: a GEMM as a thread's first work, wgmma in 16 and in 8 bits, mma.sp; memory-bound kernels; libraries; Triton."""

OTHERS, OTHERS_DRY = ("python_tests/ops", "python_tests"), ("python_tests/backends",)

PYTEST = (sys.executable, "-m", "pytest", "-p", "bench.outcomes", "-p", "no:cacheprovider", "-c", "pyproject.toml", "--rootdir", ".")
PLAIN = {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
"""Plugins installed on this machine are not loaded: none is needed."""

NO_TESTS_LEFT = 5


@dataclass(frozen=True)
class File:
    """A test file: its name, how many tests it has, and whether one of them must run alone."""

    name: str
    tests: int
    alone: bool


def collected(visit: Visit, step: Step, paths: Sequence[str]) -> list[File]:
    """The test files under ``paths``, in order; those that cannot be imported count as failed."""
    there = [path for path in paths if (ROOT / path.partition("::")[0]).exists()]
    job = Job("collect", (*PYTEST, "--collect-only", "-qq", "-m", visit.marked, *there), env=PLAIN)
    step.run(job, fresh=True)
    found = [File(**line) for line in outcomes.lines(job.file) if "tests" in line]
    if found and not job.count("failed"):
        step.jobs.remove(job)
    return sorted(found, key=lambda file: [not file.name.startswith(path) for path in there])


def test_jobs(files: Sequence[File], marked: str, limit: float) -> list[Job]:
    """A job for each file, or several for a file with many tests."""
    found = []
    for file in files:
        parts = 1 if file.alone else math.ceil(file.tests / SHARE)
        for part in range(1, parts + 1):
            threads = {"NMKERNELS_TEST_THREADS": str(os.cpu_count() or 1)} if file.alone else {"OMP_NUM_THREADS": "1"}
            title = f"{file.name} [{part} of {parts}]" if parts > 1 else file.name
            words, env = (*PYTEST, "-q", "-m", marked, file.name), {**PLAIN, outcomes.SHARE: f"{part}/{parts}", **threads}
            found.append(Job(title, words, limit, file.alone, env, (0, NO_TESTS_LEFT)))
    return found


def _test(visit: Visit, step: Step, paths: Sequence[str], without: tuple[str, ...] = ()) -> None:
    files = [file for file in collected(visit, step, paths) if not file.name.startswith(without)]
    step.run(*test_jobs(files, visit.marked, TEST_SECONDS), workers=visit.workers)
    skipped = Counter(o.why.removeprefix("Skipped: ") for job in step.jobs for o in job.outcomes.values() if o.what == "skipped")
    if skipped:
        step.note = f"skipped: {'; '.join(f'{count} {why[:100]}' for why, count in skipped.most_common(4))}"


def kernels(visit: Visit, step: Step) -> None:
    """Run the kernels' tests, starting with those that no GPU has run before."""
    _test(visit, step, KERNELS)


def tests(visit: Visit, step: Step) -> None:
    """Run the tests that were named, otherwise all that are not in ``kernels``, conformance first."""
    _test(visit, step, visit.tests or (OTHERS_DRY if visit.dry else OTHERS), () if visit.tests else KERNELS)


# ---- compute-sanitizer

FOUND = 9
NO_SANITIZER = "compute-sanitizer is not installed: not on PATH and not in the CUDA toolkit (CUDA_HOME, /usr/local/cuda)"
OURS = "--kernel-name", "kns=_kernel"
"""Only kernels whose name contains this: all of this package and few of the vendor's GEMMs, whose hazards are not ours."""
NO_TMA = "--kernel-name-exclude", "kns=wgmma"
"""Racecheck does not track copies by the tensor memory accelerator, and would report every stage of the pipeline."""

CHOSEN = "not graph and not captur and not replay"
ENVIRONMENT = {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
"""Without torch's cache each tensor is its own allocation, which ends where the tensor ends. Graphs cannot be captured without it."""

FINDING = r"^========= (?!COMPUTE-SANITIZER|(?:ERROR|RACECHECK) SUMMARY: 0 |Target application returned|.*=$).*"
"""A line of its output that reports an error, also if the process was ended before its exit status could."""


def sanitizer_path() -> str | None:
    """The path of compute-sanitizer: on PATH, or in the CUDA toolkit."""
    homes = [os.environ.get("CUDA_HOME"), os.environ.get("CUDA_PATH"), "/usr/local/cuda"]
    inside = [Path(home) / part for home in homes if home for part in ("bin", "compute-sanitizer")]
    return shutil.which("compute-sanitizer", path=os.pathsep.join([os.environ.get("PATH", ""), *map(str, inside)]))


def sanitized(job: Job, path: str, tool: str, *options: str) -> Job:
    """The jobs of the same tests under a tool of compute-sanitizer."""
    words = path, "--tool", tool, "--error-exitcode", str(FOUND), *OURS, *options, *job.words[:-1], "-k", CHOSEN, job.words[-1]
    return replace(job, words=words, env={**job.env, **ENVIRONMENT}, refused=FINDING)


def memcheck(visit: Visit, step: Step) -> None:
    """Run the CUDA kernels' tests with memcheck."""
    _sanitize(visit, step, "memcheck")


def racecheck(visit: Visit, step: Step) -> None:
    """Run them with racecheck, which looks for races in shared memory, without the kernels that it cannot track."""
    _sanitize(visit, step, "racecheck", *NO_TMA)


def _sanitize(visit: Visit, step: Step, tool: str, *options: str) -> None:
    path = sanitizer_path()
    if path is None or visit.dry:
        step.note = "nothing runs on a GPU" if visit.dry else NO_SANITIZER
        return
    files = collected(visit, step, visit.tests or [path for path in KERNELS if path.startswith(CUDA)])
    files = [f for f in files if not f.alone and not (tool == "racecheck" and "wgmma" in f.name)]
    jobs = (sanitized(job, path, tool, *options) for job in test_jobs(files, visit.marked, SANITIZED_SECONDS))
    step.run(*jobs, workers=visit.workers)


# ---- measurements

FIRST = ("gemm", "linear", "integers", "quantized", "power_or_port", "groups", "pack", "adamw")
"""Files of ``bench/cases`` that are measured first: GEMMs, compression, MVUE, AdamW."""


def benchmarks(visit: Visit, step: Step) -> None:
    """Run the quick cases, a process for each file of ``bench/cases``, one after the other."""
    from . import cases, tables, targets  # noqa: F401 - the cases register themselves
    from .registry import FAMILIES
    from .rows import load, machine, slug

    ops: dict[str, dict[str, None]] = {name: {} for name in FIRST}
    for spec in targets.quick(visit.device):
        ops.setdefault(FAMILIES[spec.op].build.__module__.rpartition(".")[2], {})[spec.op] = None
    csv = visit.rows / f"{slug(machine(visit.device))}.csv"
    words = python("-m", "bench.run", "--quick", "--device", visit.device, "--out", str(csv))
    env = {"NMKERNELS_CACHE": str(visit.work / "cache")}  # do not use what this machine measured before
    step.run(*(Job(name, (*words, "--op", *those), CASE_SECONDS, env=env) for name, those in ops.items() if those))
    rows = [r for r in load(csv) if r["machine"] == machine(visit.device)]
    step.note = tables.targets_text(targets.verdicts(rows, visit.device)).splitlines()[-1]


def curves(visit: Visit, step: Step) -> None:
    """Train the loss curves of each recipe."""
    from .studies import RECIPES

    words = python("-m", "bench.studies", "--device", visit.device, "--out", str(visit.rows / "loss_curves.csv"))
    words += ("--steps", "2", "--width", "32") if visit.dry else ()
    step.run(*(Job(name, (*words, "--recipes", name), CURVE_SECONDS) for name in RECIPES))


def report(visit: Visit, step: Step) -> None:
    """Write the tables, from the rows of ``bench/results`` and those of this call."""
    if visit.dry:
        step.note = "a dry run writes no tables"
        return
    step.run(Job("tables", python("-m", "bench.report", "--add", str(visit.rows)), CASE_SECONDS), fresh=True)


STEPS: dict[str, Callable[[Visit, Step], None]] = {
    step.__name__: step for step in (build, smoke, kernels, memcheck, benchmarks, tests, racecheck, curves, report)
}
"""Ordered by what is most likely to fail, then by value."""
