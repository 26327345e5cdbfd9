"""Run the benchmarks: ``python -m bench.run``.

By default all cases (forty minutes on two cores). ``--targets`` runs only the cases of the device's speed targets (eight minutes), and
``--quick`` a handful (seconds; on a GPU its targets, minutes). Rows are written to ``bench/results/<machine>.csv`` after each case;
``python -m bench.report`` makes the tables. If a case leaves the GPU unusable, it is reported and the run continues in a new process.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import torch

from nmkernels import DtypeError, NMError, Pattern

from . import cases, runner, shapes, tables, targets
from .cases import _ours
from .registry import DTYPES, Ask, Spec
from .rows import RESULTS, Row, load, machine, slug

SECONDS = {"quick": 0.25, "targets": 1.4, "all": 1.2}
"""Seconds of timing per case, by suite."""

SECONDS_CUDA = 0.6
"""The same on a GPU, where a sample is a batch of 4 ms; most of a case's time is spent compiling its kernels."""

HOME = Path(__file__).resolve().parents[1]

SHORT = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}


def main(argv: Sequence[str] | None = None) -> int:
    """Parse the arguments and run; errors are printed on one line. The exit status is ``execute``'s, or 2 for wrong usage."""
    parser = argparse.ArgumentParser(prog="python -m bench.run", description=(__doc__ or "").splitlines()[0])
    what = parser.add_mutually_exclusive_group()
    what.add_argument("--targets", action="store_true", help="only the cases of the speed targets, and whether they are met (minutes)")
    what.add_argument("--quick", action="store_true", help="only a handful of cases (seconds; on a GPU the targets, minutes)")
    parser.add_argument("--op", nargs="+", metavar="OP", help="only these: linear, nm_mask, 'mvue*', CompressedLinear, train_step, ...")
    what_shapes = "weights: 4096x11008, or of a model: gpt2, llama3-8b, vit-l, bert-large:fc"
    parser.add_argument("--shapes", nargs="+", metavar="S", help=what_shapes)
    parser.add_argument("--pattern", nargs="+", metavar="N:M", help="patterns, such as 2:4 1:8")
    parser.add_argument("--dtype", nargs="+", metavar="D", help="fp32, bf16, fp16")
    parser.add_argument("--tokens", nargs="+", type=int, metavar="T", help="token counts of the GEMMs, such as 1 16 256")
    parser.add_argument("--device", help="cpu, cuda, cuda:1; default: a GPU if torch has one")
    parser.add_argument("--threads", type=int, metavar="N", help="threads of torch and of the kernels")
    parser.add_argument("--isas", nargs="+", metavar="ISA", help="CPU: also time these instruction sets, or all (portable, avx2, ...)")
    parser.add_argument("--seconds", type=float, metavar="S", help="approximate time to spend on each case")
    parser.add_argument("--resume", action="store_true", help="skip cases that the file already has from this commit and machine")
    parser.add_argument("--from", type=int, default=1, dest="first", metavar="I", help="start with the I-th case of --list")
    parser.add_argument("--list", action="store_true", help="list the cases and exit")
    parser.add_argument("--out", type=Path, metavar="CSV", help="file to add rows to; default bench/results/<machine>.csv")
    try:
        return execute(parser.parse_args(argv))
    except NMError as error:
        print(f"{parser.prog}: error: {error}", file=sys.stderr)
        return 2


def execute(args: argparse.Namespace) -> int:
    """Run the cases that the options select: 0 all timed, 1 a case was wrong or failed, 130 interrupted (rows so far are kept)."""
    if args.threads:
        torch.set_num_threads(args.threads)
    if args.isas:
        _ours.also_time(args.isas)
    device = args.device or ("cuda" if torch.cuda.is_available() else "cpu")
    try:
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        raise NMError(f"--device {device}: torch cannot use it here: {str(error).splitlines()[0]}") from error
    if device.startswith("cuda:"):
        torch.cuda.set_device(device)
    specs = chosen(args, device)[max(0, args.first - 1) :]
    if not specs:
        raise NMError("no case matches these options; --list alone shows all cases.")
    if args.list:
        print("\n".join(map(str, specs)))
        return 0
    out = args.out or RESULTS / f"{slug(machine(device))}.csv"
    suite = "quick" if args.quick else "targets" if args.targets else "all"
    outcome = runner.run(
        specs,
        device,
        out,
        args.seconds or (SECONDS_CUDA if device.startswith("cuda") else SECONDS[suite]),
        resume=args.resume,
        show=lambda row: print(line(row)),
        complain=lambda text: print(text, file=sys.stderr),
    )
    if outcome.next is not None and outcome.next < len(specs):
        again = [sys.executable, "-m", "bench.run", *_words(args), "--from", str(max(1, args.first) + outcome.next)]
        return max(outcome.status, subprocess.run(again, cwd=HOME).returncode)
    _closing(outcome, specs, out, device, args.targets or (args.quick and device.startswith("cuda")))
    return outcome.status


def _words(args: argparse.Namespace) -> list[str]:
    """The command-line options for a process that continues this run."""
    found = [f"--{name}" for name in ("targets", "quick", "resume") if getattr(args, name)]
    for name in ("op", "shapes", "pattern", "dtype", "tokens", "device", "threads", "isas", "seconds"):
        value = getattr(args, name)
        if value is not None:
            found += [f"--{name}", *map(str, value if isinstance(value, list) else [value])]
    return [*found, "--out", str(args.out.resolve())] if args.out else found


def chosen(args: argparse.Namespace, device: str) -> list[Spec]:
    """The cases that the options select."""
    if args.dtype and any(SHORT.get(d, d) not in DTYPES for d in args.dtype):
        raise DtypeError(f"--dtype takes {', '.join((*SHORT, *DTYPES))}; got {', '.join(args.dtype)}.")
    ask = Ask(
        ops=cases.matching(args.op or ()),
        matrices=shapes.parse(args.shapes or ()),
        patterns=tuple(str(Pattern(p)) for p in args.pattern or ()),
        dtypes=tuple(SHORT.get(d, d) for d in args.dtype or ()),
        tokens=tuple(args.tokens or ()),
    )
    if args.targets:
        return cases.narrow(targets.specs(device), ask)
    if args.quick:
        return cases.narrow(targets.quick(device), ask)
    return cases.select(ask, device)


def line(row: Row) -> str:
    """One row, as printed during the run."""
    spread = f"({row.p20:.4g} to {row.p80:.4g})" if row.p20 != row.p80 else ""
    what = " ".join(part for part in (row.op, row.pattern, row.dtype, row.shape) if part)
    return f"{what:<52} {row.provider:<42} {row.p50:>10.4g} {row.metric:<22}{spread}".rstrip()


def _closing(outcome: runner.Measured, specs: list[Spec], out: Path, device: str, against_targets: bool) -> None:
    if against_targets:
        mine = [r for r in load(out) if r["machine"] == machine(device)]
        print(tables.targets_text(targets.verdicts(mine, device)))
    if outcome.skipped:
        print(f"{outcome.skipped} of {len(specs)} cases were already done")
    for spec, why in outcome.wrong:
        print(f"{spec}: {why}")
    if outcome.interrupted:
        print("stopped; the rows so far are kept, and --resume continues from here")
    print(f"written to {out}")


if __name__ == "__main__":
    raise SystemExit(main())
