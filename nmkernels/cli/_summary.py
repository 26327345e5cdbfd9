"""The end of a run in a few lines that need no prior knowledge."""

from __future__ import annotations

import math
import textwrap
from typing import Any

ABOUT = {
    "model.safetensors": "the sparse model, compressed; nm.load_compressed(model, file) reads it",
    "model-dense.safetensors": "the same model in dense layout, for any other program",
    "curves.png": "loss and mask changes over the steps",
    "log.csv": "the same as numbers",
    "result.json": "everything above as data",
    "sample.txt": "text that the model wrote",
}
SAMPLE_LINES, SAMPLE_COLUMNS = 8, 100


def summary(result: dict[str, Any]) -> str:
    """The table, the sample and the list of files, as text."""
    config, corpus, sparse, twin = result["config"], result["corpus"], result["sparse"], result["twin"]
    tokens = config["steps"] * config["batch"] * config["context"]
    head = (
        f"{config['recipe']} on {corpus['source']}: {result['parameters']:,} parameters, {config['steps']:,} steps, "
        f"{tokens:,} bytes of text, {sparse['seconds']:.0f} s of training."
    )
    if sparse.get("switch_step"):
        head += f" Dense until step {sparse['switch_step']}, sparse from there."
    blocks = [head, _table(sparse, twin), _remarks(sparse, twin), _sample(sparse["sample"]), _files(result)]
    return "\n\n".join(block for block in blocks if block)


def _table(sparse: dict[str, Any], twin: dict[str, Any] | None) -> str:
    rows = [("", "dense", "sparse", "ratio")]
    loss = sparse["val_loss"]
    if twin is not None:
        rows.append(("validation loss, nats per byte", f"{twin['val_loss']:.4f}", f"{loss:.4f}", f"{loss / twin['val_loss']:.3f}"))
        rows.append(("training, bytes of text per second", *_pair(twin["train_tokens_per_s"], sparse["train_tokens_per_s"])))
    else:
        rows.append(("validation loss, nats per byte", "-", f"{loss:.4f}", ""))
    if "flops" in sparse:
        f = sparse["flops"]
        rows.append(("training, counted GFLOPs", *_pair(f["dense_training"] / 1e9, f["training"] / 1e9)))
        rows.append(("inference, counted kFLOPs per byte", *_pair(f["dense_inference"] / 1e3, f["inference"] / 1e3)))
    if "bytes" in sparse:
        b, speed = sparse["bytes"], sparse["tokens_per_s"]
        rows.append(("bytes of the sparse layers' weights", *_pair(b["layers_dense"], b["layers_compressed"])))
        rows.append(("bytes of the file", *_pair(b["file_dense"], b["file_compressed"])))
        rows.append(("generation at batch 1, tokens per second", *_pair(speed["dense"], speed["compressed"])))
    widths = [max(len(row[i]) for row in rows) for i in range(4)]
    return "\n".join("  ".join([row[0].ljust(widths[0]), *(row[i].rjust(widths[i]) for i in (1, 2, 3))]).rstrip() for row in rows)


def _pair(dense: float, sparse: float) -> tuple[str, str, str]:
    return f"{dense:,.0f}", f"{sparse:,.0f}", f"{sparse / dense:.3f}"


def _remarks(sparse: dict[str, Any], twin: dict[str, Any] | None) -> str:
    lines = [f"Guessing every byte alike would be a loss of {math.log(256):.2f}."]
    if twin is None:
        lines.append("Add --twin to train a dense model on the same text and compare.")
    if "reload" in sparse:
        difference = sparse["reload"]["max_difference_to_dense"]
        away = f"within {difference:.1e} of" if difference else "also those of"
        lines.append(f"The file was read back: logits are identical to the last bit, and {away} the same weights multiplied densely.")
        if sparse["tokens_per_s"]["compressed"] < sparse["tokens_per_s"]["dense"]:
            lines.append("At this size, on this machine, the compressed form saves memory and not time: generation is slower than dense.")
    return "\n".join(lines)


def _sample(text: str) -> str:
    lines = [line.expandtabs(4).rstrip()[:SAMPLE_COLUMNS] for line in text.splitlines()]
    lines = [line for line in lines if line][:SAMPLE_LINES]
    printable = "\n".join("".join(c if c.isprintable() else "?" for c in line) for line in lines)
    return 'The model continues "def ":\n' + textwrap.indent(printable, "  | ", lambda _: True)


def _files(result: dict[str, Any]) -> str:
    have = [name for name in ABOUT if name in result["files"]]
    width = max(map(len, have))
    return "\n".join([f"Files in {result['out']}/", *(f"  {name.ljust(width)}  {ABOUT[name]}" for name in have)])
