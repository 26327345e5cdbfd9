"""What ``make gpu`` runs: build, tests, benchmarks, loss curves, tables, compute-sanitizer; a summary of what failed comes last.

For a machine with an NVIDIA GPU, a torch already installed and no network, and for visits to it that are cut short::

    python -m bench.gpu                        # every step, each for at most 7.5 minutes
    python -m bench.gpu build tests            # some steps
    python -m bench.gpu tests --tests python_tests/backends/cuda/test_gemm.py
    python -m bench.gpu --out DIR              # rows, logs and what was done go there
    python -m bench.gpu --dry-run              # the same steps without a GPU: the emulator in its place

A step that runs out of time says what was left, and the same command goes on with that. What was done is forgotten when the sources
change, and with ``--again``. Each test file, family of benchmarks and training recipe has a process of its own under a limit: what
crashes, hangs or loses the device costs the test or case at hand. Test files run side by side, those with a test marked ``alone`` after
the others, one at a time.

Without ``--out`` rows go to ``bench/results`` and the rest to ``build/gpu``. ``python -m bench.report --add DIR`` adds the rows of
``--out DIR`` to ``bench/results``, on any machine; the step report does it too.

Exit status 0: everything passed. 1: something failed, the summary says what. 2: there is no GPU here that torch can use, or no step of that
name. 3: nothing failed, and some of it is left. 130: interrupted.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib.util
import math
import os
import shutil
import sys
import time
import traceback
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from . import outcomes
from .jobs import ROOT, Ended, Job, Pool
from .outcomes import Outcome

MINUTES = 7.5
TEST_SECONDS, SANITIZED_SECONDS, CASE_SECONDS, CURVE_SECONDS = 120.0, 240.0, 180.0, 240.0
"""What a test, a test under compute-sanitizer, a case of a benchmark and the curves of a recipe may take."""

SHARE = 200
"""Tests that a process gets at most; the conformance tests are 1300 in one file."""

MOST_WORKERS = 8
"""Each holds half a gigabyte of the GPU beside its tensors."""

PYTEST = (sys.executable, "-m", "pytest", "-p", "bench.outcomes", "-p", "no:cacheprovider", "-c", "pyproject.toml", "--rootdir", ".")
PLAIN = {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
"""No plugins of this machine's: none is needed."""

NO_TESTS_LEFT = 5
TESTS = ("python_tests",)
SOURCES = ("nmkernels", "csrc", "cmake", "python_tests", "bench")
SUFFIXES = {".py", ".c", ".cpp", ".h", ".cu", ".cuh", ".cmake", ".txt", ".toml"}
CORE = "from nmkernels import capability as c; print(c.compiled_core().reason); raise SystemExit(not c.compiled_core().ok)"

LINES, WIDTH, LENGTH = 6, 200, 8000
"""The summary shows so many failures of a file, so many characters of each, and so many characters in all."""


@dataclass(frozen=True)
class Visit:
    """What a call was asked for: where rows and logs go, which tests, how many at a time."""

    rows: Path
    logs: Path
    tests: tuple[str, ...]
    workers: int
    dry: bool = False

    @property
    def device(self) -> str:
        """Where benchmarks run."""
        return "cpu" if self.dry else "cuda"

    @property
    def csv(self) -> Path:
        """The file that the benchmarks write."""
        from .rows import machine, slug

        return self.rows / f"{slug(machine(self.device))}.csv"


def python(*words: str) -> tuple[str, ...]:
    """This Python with ``words``."""
    return sys.executable, *words


# ---- the steps


def architecture(capability: tuple[int, int]) -> str:
    """The one of ``cmake/architectures.cmake`` that a GPU of this compute capability runs."""
    return {8: "80-real", 9: "90a-real"}.get(capability[0], "90-virtual")


def build(visit: Visit, pool: Pool) -> None:
    """The compiled core, in place, for the GPU at hand; in a dry run for the CPU, with the emulator."""
    env = {"NMKERNELS_EMULATOR": "1"}
    if not visit.dry:
        from nmkernels.capability import compute_capability

        env = {"NMKERNELS_CUDA_ARCHITECTURES": architecture(compute_capability() or (0, 0))}
    env = {"NMKERNELS_CUDA": os.environ.get("NMKERNELS_CUDA", "auto"), **env}
    (made,) = pool.run([Job("compile", python("setup.py", "build_ext", "--inplace"), env=env)], fresh=True)
    if made.outcomes and not made.count("failed"):
        core = Job("core", python("-c", CORE), TEST_SECONDS)
        pool.run([core], fresh=True)
        pool.note = (pool.folder / "core.log").read_text().strip().splitlines()[-1]


def collected(visit: Visit, pool: Pool, paths: Sequence[str], marked: str) -> list[tuple[str, int, bool]]:
    """The test files under ``paths``: name, number of tests, whether one must be alone; those that cannot be imported have failed."""
    (result,) = pool.run([Job("collect", (*PYTEST, "--collect-only", "-qq", "-m", marked, *paths), env=PLAIN)], fresh=True)
    found = [line for line in outcomes.lines(pool.folder / "collect.jsonl") if "file" in line]
    if found and not result.count("failed"):
        pool.ended.remove(result)
    return [(line["file"], line["tests"], line["alone"]) for line in found]


def test_jobs(
    files: list[tuple[str, int, bool]], marked: str, limit: float, before: tuple[str, ...] = (), more: Sequence[str] = (), **options: Any
) -> list[Job]:
    """A job for each file, several for one of many tests, those with most tests first."""
    found = []
    for name, tests, alone in sorted(files, key=lambda file: -file[1]):
        parts = 1 if alone else math.ceil(tests / SHARE)
        for part in range(1, parts + 1):
            env = {**PLAIN, outcomes.SHARE: f"{part}/{parts}", **options.get("env", {})}
            env |= {"NMKERNELS_TEST_THREADS": str(os.cpu_count() or 1)} if alone else {"OMP_NUM_THREADS": "1"}
            title = f"{name} [{part} of {parts}]" if parts > 1 else name
            fine = (0, NO_TESTS_LEFT)
            found.append(
                Job(title, (*before, *PYTEST, "-q", "-m", marked, *more, name), limit, alone, env, fine, options.get("refused", ""))
            )
    return found


def tests(visit: Visit, pool: Pool) -> None:
    """The tests marked gpu; in a dry run those that run on the emulator."""
    if importlib.util.find_spec("pytest") is None:
        pool.run([Job("pytest", python("-c", "raise SystemExit('pytest is not installed; it is all that the tests need beside torch')"))])
        return
    marked = "not gpu" if visit.dry else "gpu"
    pool.run(test_jobs(collected(visit, pool, visit.tests, marked), marked, TEST_SECONDS), visit.workers)
    skipped = Counter(o.why.removeprefix("Skipped: ") for e in pool.ended for o in e.outcomes.values() if o.what == "skipped")
    if skipped:
        pool.note = f"skipped: {'; '.join(f'{count} {why[:100]}' for why, count in skipped.most_common(4))}"


def benchmarks(visit: Visit, pool: Pool) -> None:
    """The quick cases, a process for each file of ``bench/cases``, one after the other."""
    from . import cases, tables, targets  # noqa: F401 - the cases register themselves
    from .registry import FAMILIES
    from .rows import load, machine

    ops: dict[str, dict[str, None]] = {}
    for spec in targets.quick(visit.device):
        ops.setdefault(FAMILIES[spec.op].build.__module__.rpartition(".")[2], {})[spec.op] = None
    words = python("-m", "bench.run", "--quick", "--device", visit.device, "--out", str(visit.csv))
    env = {"NMKERNELS_CACHE": str(visit.logs / "cache")}  # what this machine measured before is no part of it
    pool.run([Job(name, (*words, "--op", *those), CASE_SECONDS, env=env) for name, those in ops.items()])
    rows = [r for r in load(visit.csv) if r["machine"] == machine(visit.device)]
    pool.note = tables.targets_text(targets.verdicts(rows, visit.device)).splitlines()[-1]


def curves(visit: Visit, pool: Pool) -> None:
    """Loss curves of each recipe."""
    from .studies import RECIPES

    words = python("-m", "bench.studies", "loss_curves", "--device", visit.device, "--out", str(visit.rows / "loss_curves.csv"))
    words += ("--steps", "2", "--width", "32") if visit.dry else ()
    pool.run([Job(name, (*words, "--recipes", name), CURVE_SECONDS) for name in RECIPES])


def report(visit: Visit, pool: Pool) -> None:
    """The tables, from the rows of ``bench/results`` and those of this visit."""
    if visit.dry:
        pool.note = "a dry run writes no tables"
        return
    pool.run([Job("tables", python("-m", "bench.report", "--add", str(visit.rows)), CASE_SECONDS)], fresh=True)


TOOLS = ("memcheck", "racecheck")
FOUND = 9
NO_SANITIZER = "compute-sanitizer is not installed: not on PATH and not in the CUDA toolkit (CUDA_HOME, /usr/local/cuda)"
KERNELS = "kns=_kernel"
"""Only kernels whose name contains this: all of this package, few of the vendor's GEMMs, whose hazards are not ours."""

SANITIZED = ("python_tests/backends/cuda",)
CHOSEN = "not graph and not captur and not replay"
ENVIRONMENT = {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
"""Each tensor is an allocation of its own, which ends where the tensor ends. Graphs cannot be captured without the cache."""

FINDING = r"^========= (?!COMPUTE-SANITIZER|(?:ERROR|RACECHECK) SUMMARY: 0 |Target application returned|.*=$).*"
"""A line of its output that tells of a finding: it is there also where the process was ended before its exit status could tell."""


def sanitizer_path() -> str | None:
    """Where compute-sanitizer is: on PATH, or in the CUDA toolkit."""
    homes = [os.environ.get("CUDA_HOME"), os.environ.get("CUDA_PATH"), "/usr/local/cuda"]
    inside = [Path(home) / part for home in homes if home for part in ("bin", "compute-sanitizer")]
    return shutil.which("compute-sanitizer", path=os.pathsep.join([os.environ.get("PATH", ""), *map(str, inside)]))


def sanitized(path: str, tool: str) -> tuple[str, ...]:
    """What goes before a command that is to run under a tool."""
    return path, "--tool", tool, "--error-exitcode", str(FOUND), "--kernel-name", KERNELS


def sanitizer(visit: Visit, pool: Pool) -> None:
    """The tests of the CUDA kernels under each tool of compute-sanitizer."""
    path = sanitizer_path()
    if path is None or visit.dry:
        pool.note = "nothing runs on a GPU" if visit.dry else NO_SANITIZER
        return
    files = collected(visit, pool, SANITIZED if visit.tests == TESTS else visit.tests, "gpu")
    for tool in TOOLS:
        jobs = test_jobs(
            [file for file in files if not file[2]], "gpu", SANITIZED_SECONDS, sanitized(path, tool), ("-k", CHOSEN),
            env=ENVIRONMENT, refused=FINDING,
        )  # fmt: skip
        pool.run([Job(f"{tool} {j.name}", j.words, j.limit, j.alone, j.env, j.fine, j.refused) for j in jobs], visit.workers)


STEPS: dict[str, Callable[[Visit, Pool], None]] = {step.__name__: step for step in (build, tests, benchmarks, curves, report, sanitizer)}


# ---- the summary


@dataclass
class Done:
    """A step that was run: its name, its jobs, its seconds, and what else there is to say."""

    name: str
    ended: list[Ended]
    seconds: float
    note: str

    @property
    def left(self) -> list[str]:
        """The jobs that another call is to go on with."""
        return [e.job.name for e in self.ended if e.left]

    @property
    def failed(self) -> int:
        """Items that failed."""
        return sum(e.count("failed") for e in self.ended)

    def __str__(self) -> str:
        counts = [f"{n} {what}" for what in ("passed", "failed", "skipped") if (n := sum(e.count(what) for e in self.ended))]
        left = self.left
        if left:
            counts.append(f"left: {', '.join(left[:4])}{f' and {len(left) - 4} more' if len(left) > 4 else ''}")
        verdict = "FAILED" if self.failed else "left" if left else "ok" if self.ended else "skipped"
        return f"  {self.name:<12}{self.seconds:>6.0f} s  {verdict:<8}{'; '.join([*counts, *([self.note] if self.note else [])])}"


def failures(done: Sequence[Done], lines: float = LINES, length: float = LENGTH, width: int | None = WIDTH) -> list[str]:
    """What failed: step and file, then each test or case with the first line of its error; what does not fit is counted."""
    groups: dict[str, list[str]] = {}
    for step in done:
        for ended in step.ended:
            for o in (o for o in ended.outcomes.values() if o.what == "failed"):
                title = f"{step.name}: {ended.job.name.partition(' [')[0]}"
                groups.setdefault(title, []).append(f"    {o.item.partition('::')[2] or o.item}: {o.why}"[:width])
    found, size = [], 0.0
    for title, failed in groups.items():
        size += len(title)
        shown = failed[: int(min(lines, len(failed)))]
        while shown and size + sum(map(len, shown)) > length:
            shown.pop()
        size += sum(map(len, shown))
        found += [f"  {title}, {len(failed)} failed", *shown]
        if len(shown) < len(failed):
            found.append(f"    and {len(failed) - len(shown)} more")
    return found


def summary(done: Sequence[Done], visit: Visit, status: int) -> str:
    """The last words; what failed is told in full in ``failed.txt``."""
    lines = ["== summary", *map(str, done)]
    if failed := failures(done):
        path = visit.logs / "failed.txt"
        path.write_text("\n".join(failures(done, math.inf, math.inf, None)) + "\n", encoding="utf-8")
        lines += ["-- what failed", *failed, f"  in full: {path}"]
    lines.append(f"  rows in {visit.rows}, logs in {visit.logs}")
    verdicts = {0: "all passed", 1: "FAILED", 3: "nothing failed so far", 130: "interrupted"}
    again = "; the same command goes on with what is left" if any(step.left for step in done) or status == 130 else ""
    return "\n".join([*lines, f"  {verdicts[status]}{again}"])


# ---- the command


def missing() -> str:
    """Why this machine cannot do it, in words; empty when it can."""
    if importlib.util.find_spec("torch") is None:
        return f"{sys.executable} has no torch; choose another with make gpu PYTHON=..."
    from nmkernels import capability

    can, reason = capability.cuda_device()
    return "" if can else reason


def fingerprint(device: str) -> str:
    """The sources, the machine and its versions: what was done with others does not count."""
    from .rows import machine, versions

    digest = hashlib.sha256(f"{machine(device)} {versions()}".encode())
    files = [path for folder in SOURCES for path in sorted((ROOT / folder).rglob("*")) if path.suffix in SUFFIXES]
    for path in [*files, ROOT / "setup.py", ROOT / "pyproject.toml"]:
        if path.is_file() and not path.is_relative_to(ROOT / "bench" / "results"):
            digest.update(str(path.relative_to(ROOT)).encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()


def prepare(visit: Visit, names: Sequence[str], again: bool) -> None:
    """Make the folders, and forget what was done with other sources or is to be done again."""
    visit.rows.mkdir(parents=True, exist_ok=True)
    visit.logs.mkdir(parents=True, exist_ok=True)
    path, present = visit.logs / "sources.txt", fingerprint(visit.device)
    changed = path.exists() and path.read_text() != present
    for name in STEPS if changed else names if again else ():
        shutil.rmtree(visit.logs / name, ignore_errors=True)
    if changed:
        print("the sources or the machine changed: what was done before is forgotten")
    path.write_text(present)


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """The options."""
    parser = argparse.ArgumentParser(prog="python -m bench.gpu", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("steps", nargs="*", metavar="STEP", help=f"{', '.join(STEPS)}; all if none is named")
    parser.add_argument("--out", type=Path, metavar="DIR", help="for rows, logs and what was done; else bench/results and build/gpu")
    parser.add_argument("--tests", nargs="+", metavar="PATH", help="test files and folders to look in, by default all there are")
    parser.add_argument(
        "--jobs", type=int, metavar="N", help=f"test processes at a time, by default half the CPU cores, at most {MOST_WORKERS}"
    )
    parser.add_argument("--minutes", type=float, default=MINUTES, help=f"for each step, by default {MINUTES:g}; 0: no limit")
    parser.add_argument("--again", action="store_true", help="do anew what these steps did before")
    parser.add_argument("--dry-run", action="store_true", help="without a GPU: tests on the emulator, benchmarks on the CPU")
    args = parser.parse_args(argv)
    if unknown := set(args.steps) - set(STEPS):
        parser.error(f"no step is called {', '.join(sorted(unknown))}; there are {', '.join(STEPS)}")
    return args


def main(argv: Sequence[str] | None = None, lacks: Callable[[], str] = missing) -> int:
    """Run the steps, each also after one that failed, then print the summary; after an unfinished build nothing else."""
    args = parse(argv)
    if not args.dry_run and (reason := lacks()):
        print(f"make gpu: no NVIDIA GPU to use here: {reason}")
        return 2
    logs = (args.out or ROOT / "build" / ("gpu-dry" if args.dry_run else "gpu")).resolve()
    rows = logs if args.out or args.dry_run else ROOT / "bench" / "results"
    paths = args.tests or (SANITIZED if args.dry_run else TESTS)
    workers = args.jobs or max(1, min(MOST_WORKERS, (os.cpu_count() or 1) // 2))
    visit = Visit(rows, logs, tuple(paths), workers, args.dry_run)
    names = [name for name in STEPS if not args.steps or name in args.steps]
    prepare(visit, names, args.again)
    done: list[Done] = []
    interrupted = False
    for name in names:
        print(f"== {name}", flush=True)
        start = time.monotonic()
        pool = Pool(visit.logs / name, start + (60 * args.minutes or math.inf), lambda text: print(text, flush=True))
        try:
            STEPS[name](visit, pool)
        except KeyboardInterrupt:
            interrupted = True
        except Exception as error:  # of one step; the others run
            traceback.print_exc()
            why = f"{type(error).__name__}: {error}"
            pool.ended.append(Ended(Job(name, ()), {name: Outcome(name, "failed", why)}, False))
        done.append(Done(name, pool.ended, time.monotonic() - start, pool.note))
        if interrupted or (name == "build" and done[-1].left):
            break
    failed, left = any(step.failed for step in done), any(step.left for step in done)
    status = 130 if interrupted else 1 if failed else 3 if left else 0
    print(summary(done, visit, status), flush=True)
    return status


if __name__ == "__main__":
    raise SystemExit(main())
