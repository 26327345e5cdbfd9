"""How far is a sparse model from its dense twin? Validation loss of both over seeds, on the demo's job.

``python -m bench.step_vs_dense`` runs ``python -m nmkernels train --demo --twin`` once per seed: same first weights, same batches,
the twin on plain PyTorch. Rows go to ``bench/results/accuracy.csv``.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from .rows import RESULTS, Row, append, commit, row

LOSS, RATIO, WORST = (
    "validation loss, nats per byte",
    "validation loss over the dense twin's",
    "worst seed's validation loss over its dense twin's",
)
BYTES = "compressed bytes over dense, sparse layers"


def run(recipe: str, seed: int, more: list[str]) -> dict[str, Any]:
    """The result of one run with its twin, in a process and a folder of its own; its progress goes to standard error."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "nmkernels", "train", "--demo", "--twin", "--json", "--recipe", recipe, "--seed", str(seed), *more]
        done = subprocess.run([*command, "--out", str(Path(folder, "out"))], stdout=subprocess.PIPE, check=True)
    result: dict[str, Any] = json.loads(done.stdout)
    return result


def rows(results: list[dict[str, Any]]) -> list[Row]:
    """Rows for the runs of one recipe over seeds."""
    name, _, pattern = results[0]["config"]["recipe"].partition(":")
    config = results[0]["config"]
    shape = f"byte GPT {config['width']}x{config['layers']}, {config['steps']} steps, {len(results)} seeds"
    sparse = [r["sparse"]["val_loss"] for r in results]
    twin = [r["twin"]["val_loss"] for r in results]
    ratios = [r["val_loss_ratio"] for r in results]
    sizes = [r["sparse"]["bytes"]["layers_compressed"] / r["sparse"]["bytes"]["layers_dense"] for r in results]
    cases = [("dense twin", LOSS, twin), (name, LOSS, sparse), (name, RATIO, ratios), (name, WORST, [max(ratios)]), (name, BYTES, sizes)]
    return [row("train", provider, metric, values, pattern=pattern, dtype="float32", shape=shape) for provider, metric, values in cases]


def main(argv: list[str] | None = None, path: Path = RESULTS / "accuracy.csv") -> int:
    """Run every recipe over the seeds, write the rows, and print each seed's ratio; unknown options go to ``train``."""
    parser = argparse.ArgumentParser(prog="python -m bench.step_vs_dense", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--recipes", nargs="+", default=["step:2:4"], metavar="NAME:N:M")
    parser.add_argument("--seeds", type=int, default=3)
    args, more = parser.parse_known_args(argv)
    commit()  # what the tree is now, not what it may have become when the last row is written
    for recipe in args.recipes:
        results = [run(recipe, seed, more) for seed in range(args.seeds)]
        append(rows(results), path)
        print(f"{recipe}: " + ", ".join(f"{r['val_loss_ratio']:.4f}" for r in results))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
