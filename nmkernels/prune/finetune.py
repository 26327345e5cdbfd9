"""``finetune_folder``: what ``prune_folder`` wrote, trained on with its masks held."""

from __future__ import annotations

import json
import math
import os
import platform
import shutil
import time
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
import transformers
from torch import Tensor, nn

from .._version import __version__
from ..export.card import end_card
from ..export.folders import REPORT, carry_over, check_out, read_config
from ..export.tensors import INDEX, shortened, sparse_layers, weight_files
from ..files import atomic_write, writing
from ..nn.compress import compress_
from ..nn.compressed import CompressedLinear
from ..nn.dense import has_dense_integers
from ..nn.experts import CompressedStack
from ..ops import Compressed, compress
from ..pattern import CheckpointError, RecipeError
from ..train.handle import Handle, densify_
from .disk import class_of, load_whole
from .folder import check_device, check_tokens, loss_of, new_result, put_in_place, work_folder
from .methods.magnitude import Magnitude
from .progress import Progress
from .prune import choose, hold_
from .results import Results, digest, owned

CHECKPOINT = "checkpoint.pt"
EVERY = 300.0
"""Seconds after which a checkpoint is written in any case."""
CALIBRATION = 128
"""The most windows on which integers are rounded again."""
WARM_UP = 0.1
"""Share of the steps in which the learning rate rises; then it falls to zero as a cosine."""
HOW = "## How it was fine-tuned"


def finetune_folder(
    model_dir: str | os.PathLike[str],
    windows: Tensor,
    out: str | os.PathLike[str],
    *,
    tests: Sequence[Tensor] = (),
    teacher: str | os.PathLike[str] | None = None,
    steps: int = 300,
    batch: int = 8,
    lr: float = 1e-5,
    seed: int = 0,
    device: torch.device | str = "cpu",
    bfloat16: bool = False,
    save_every: int = 50,
    trust_remote_code: bool = False,
    progress: Progress | None = None,
) -> dict[str, Any]:
    """Fine-tune the compressed causal language model in a folder with its masks held, write it to another, and return its report.

    Weights are decoded and trained in float32 by ``MaskedAdamW``, the learning rate rising for a tenth of the steps and then falling to
    zero as a cosine, and written in the dtype that they had; integers are rounded again, on the first windows. An interrupted call resumes
    from its last checkpoint, which is in a hidden folder next to ``out``, with the same result on the same machine.

    Args:
        model_dir: what ``prune_folder`` or ``save_pretrained`` wrote; only read.
        windows: token ids ``(samples, length)``, taken in a new order again and again.
        out: the folder to write; new or empty.
        tests: batches of held-out token ids for the perplexity before and after, each measured on the model as it is in its folder.
        teacher: the folder of the dense model: the loss is the mean over tokens of KL(teacher ‖ model), and else the cross-entropy.
        lr: the highest learning rate.
        bfloat16: compute forward and backward passes under autocast.
        save_every: steps after which a checkpoint is written, besides every five minutes.
        trust_remote_code: as for ``prune_folder``, for the teacher too.

    Raises:
        CheckpointError: a folder cannot be read or written, is not compressed, or holds another run.
        RecipeError: the teacher has another vocabulary, or the loss is not finite.
    """
    source, place = Path(model_dir), Path(out)
    check_out(source, place)
    check_compressed(source)
    work, progress, device = work_folder(place, "finetune"), progress or Progress(), check_device(device)
    progress.device = device
    with owned(work):
        try:
            options = {"steps": steps, "batch": batch, "lr": lr, "seed": seed, "bfloat16": bfloat16}
            run = _Tuning(source, work, windows, tests, teacher, options, device, trust_remote_code, progress)
            run.train(save_every)
            return run.write(place)
        finally:
            if not (work / CHECKPOINT).is_file():
                shutil.rmtree(work, ignore_errors=True)


def check_compressed(folder: Path) -> dict[str, Any]:
    """The configuration of a folder; CheckpointError unless its weights are compressed."""
    config = read_config(folder)
    about = config.get("quantization_config")
    if not isinstance(about, dict) or about.get("quant_method") != "nmkernels":
        raise CheckpointError(f"{folder} is not compressed by nmkernels; pass a folder that python -m nmkernels prune wrote.")
    return config


class _Tuning:
    """One call of ``finetune_folder``: the model with its masks held, the data, and how far it is."""

    def __init__(
        self,
        source: Path,
        work: Path,
        windows: Tensor,
        tests: Sequence[Tensor],
        teacher: str | os.PathLike[str] | None,
        options: dict[str, Any],
        device: torch.device,
        trusted: bool,
        progress: Progress,
    ) -> None:
        self.source, self.work, self.windows, self.tests, self.options = source, work, windows, tests, options
        self.device, self.progress, self.teacher_dir = device, progress, None if teacher is None else Path(teacher)
        progress(0, 1, f"reading {source}")
        self.pruning = _report(source / REPORT)
        kind, settings = class_of(source, read_config(source), trusted)
        self.model = load_whole(kind, source, dtype="auto").to(device)
        check_tokens(self.model, [{"input_ids": ids} for ids in (windows, *tests)])
        self.dtype = next(p.dtype for p in self.model.parameters())
        self.teacher = None if self.teacher_dir is None else self._teacher(self.teacher_dir, settings, trusted)
        layers = sparse_layers(self.model)
        stored = {name: layer.weight for name, layer in layers.items() if isinstance(layer, (CompressedLinear, CompressedStack))}
        self.dense = {name: (stored[name].kind, stored[name].group) for name, layer in layers.items() if has_dense_integers(layer)}
        weights = {name: weight for name, weight in stored.items() if name not in self.dense}
        if not weights:
            raise CheckpointError(f"{source} has no N:M layer to hold, only dense integers; train the dense model that it was made from.")
        self.patterns = {name: str(weight.pattern) for name, weight in weights.items()}
        self.integers = {name: (weight.kind, weight.group) for name, weight in weights.items() if weight.step is not None}
        teaching = None if self.teacher is None else digest([self.teacher.state_dict()])
        data = {"data": digest([windows, *tests]), "weights": digest([self.model.state_dict()]), "teacher": teaching}
        Results(work, {**options, **data})
        self.digest = data["data"]
        size = sum(t.numel() for t in self.model.parameters()) + sum(weight.values.numel() for weight in weights.values())
        self.work_of_step = (6.0 if self.teacher is None else 8.0) * size * windows.shape[1] * options["batch"]
        self.work_of_token = 2.0 * size
        self.step, self.losses, saved = 0, list[float](), None
        if (work / CHECKPOINT).is_file():
            saved = _read(work / CHECKPOINT)
            self.step, self.losses, self.before = saved["step"], saved["losses"], saved["before"]
        rounds = 2 if saved is None else 1
        progress.plan("train", (options["steps"] - self.step) * self.work_of_step)
        progress.plan("evaluate", rounds * self.work_of_token * sum(ids.numel() for ids in tests))
        if saved is None:
            self.before = self.perplexity("before")
        self.handle = _held(self.model, weights, self.integers)
        self.optimizer = self.handle.recipe.optimizer(self.model.parameters(), lr=options["lr"], weight_decay=0.0)
        if saved is not None:
            for name, p in self.model.named_parameters():
                p.data.copy_(saved["model"][name])
            self.optimizer.load_state_dict(saved["optimizer"])
        self.handle.attach(self.optimizer)

    def _teacher(self, folder: Path, settings: Any, trusted: bool) -> Any:
        """The dense model; RecipeError if it cannot teach this one."""
        kind, own = class_of(folder, read_config(folder), trusted)
        theirs, mine = (getattr(each.get_text_config(), "vocab_size", None) for each in (own, settings))
        if theirs != mine:
            raise RecipeError(
                f"the teacher {folder} has a vocabulary of {theirs} tokens, and {self.source} one of {mine}; pass the dense model that it "
                "was pruned from."
            )
        return load_whole(kind, folder, dtype="auto").to(self.device).requires_grad_(False)

    # ---- training

    def train(self, save_every: int) -> None:
        """The steps that are left."""
        steps, lr, written = self.options["steps"], self.options["lr"], time.monotonic()
        self.model.train()
        while self.step < steps:
            torch.manual_seed(self.options["seed"] + self.step)  # so that a resumed run drops out the same
            for group in self.optimizer.param_groups:
                group["lr"] = lr * share(self.step, steps)
            loss = self._loss(self._windows())
            if not bool(loss.isfinite()):
                raise RecipeError(f"the loss of step {self.step + 1} is not finite; start again with a learning rate below {lr:g}.")
            self.optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
            self.optimizer.step()
            self.losses.append(float(loss.detach()))
            self.progress.did("train", self.work_of_step)
            self.progress(self.step, steps, f"training, loss {self.losses[-1]:.3f}")
            self.step += 1
            if self.step % save_every == 0 or self.step == steps or time.monotonic() - written > EVERY:
                self._save()
                written = time.monotonic()

    def _windows(self) -> Tensor:
        """The windows of this step, which depends on the seed and the step alone: all windows in a new order, again and again."""
        count, batch, chosen = len(self.windows), self.options["batch"], []
        for i in range(self.step * batch, (self.step + 1) * batch):
            generator = torch.Generator().manual_seed(self.options["seed"] * 1_000_003 + i // count)
            chosen.append(int(torch.randperm(count, generator=generator)[i % count]))
        return self.windows[chosen].to(self.device)

    def _loss(self, ids: Tensor) -> Tensor:
        """The mean over tokens of the cross-entropy with the text, or of KL(teacher ‖ model)."""
        with torch.autocast(self.device.type, torch.bfloat16) if self.options["bfloat16"] else nullcontext():
            logits = self.model(input_ids=ids, use_cache=False).logits
            if self.teacher is not None:
                with torch.no_grad():
                    wanted = self.teacher(input_ids=ids, use_cache=False).logits
        if self.teacher is None:
            return F.cross_entropy(logits[:, :-1].flatten(0, 1).float(), ids[:, 1:].flatten())
        wanted, logits = (F.log_softmax(each.float(), -1) for each in (wanted, logits))
        return F.kl_div(logits, wanted, log_target=True, reduction="none").sum(-1).mean()

    def _save(self) -> None:
        model = {name: p.detach() for name, p in self.model.named_parameters()}
        about = {"step": self.step, "losses": self.losses, "before": self.before}
        saved = {**about, "model": model, "optimizer": self.optimizer.state_dict()}
        atomic_write(self.work / CHECKPOINT, lambda temporary: torch.save(saved, temporary))

    # ---- before and after

    @torch.no_grad()
    def perplexity(self, when: str) -> float | None:
        """The perplexity of the present model on the held-out windows; None if there are none."""
        total, count = 0.0, 0
        self.model.eval()
        for number, ids in enumerate(self.tests):
            self.progress(number, len(self.tests), f"evaluating {when}")
            loss, tokens = loss_of(self.model(input_ids=ids.to(self.device)), {"input_ids": ids})
            total, count = total + loss, count + tokens
            self.progress.did("evaluate", ids.numel() * self.work_of_token)
        return math.exp(total / count) if count else None

    def write(self, out: Path) -> dict[str, Any]:
        """Finish and compress the model, write the folder, and return the facts of its report."""
        self.handle.finish()
        self.model.to(self.dtype)
        rounded = any(layer.integers is not None for layer in self.handle.layers.values())
        compress_(self.model, data=[{"input_ids": ids[None].to(self.device)} for ids in self.windows[:CALIBRATION]] if rounded else None)
        for values, group in dict.fromkeys(self.dense.values()):  # layers that stay dense, with integers
            names = [name for name, form in self.dense.items() if form == (values, group)]
            compress_(self.model, values=values, group=group, dense=names)
        after = self.perplexity("after")
        self.progress(0, 1, f"writing {out}")
        folder = new_result(self.work, out)
        with writing(folder):
            carry_over(self.source, folder, {*weight_files(self.source), INDEX})
            self.model.save_pretrained(folder)
            facts = self._facts(after, sum(file.stat().st_size for file in folder.glob("*.safetensors")))
            (folder / REPORT).write_text(json.dumps(facts, indent=2) + "\n", encoding="utf-8")
            end_card(folder, HOW, how(facts))
            put_in_place(folder, out)
        shutil.rmtree(self.work, ignore_errors=True)
        return facts

    def _facts(self, after: float | None, size: int) -> dict[str, Any]:
        few = -(-len(self.losses) // 10)
        return {
            "format": "nmkernels-finetune-report-1",
            "model": self.source.resolve().name,
            "teacher": None if self.teacher_dir is None else self.teacher_dir.resolve().name,
            "patterns": self.patterns,
            "values": sorted({kind for kind, _ in (*self.integers.values(), *self.dense.values())}),
            **self.options,
            "data": {"windows": len(self.windows), "length": self.windows.shape[1], "digest": self.digest},
            "held_out": {"tokens": sum(ids.numel() for ids in self.tests)} if self.tests else None,
            "perplexity": None if after is None else {"before": self.before, "after": after},
            "loss": {"first": _mean(self.losses[:few]), "last": _mean(self.losses[-few:])},
            "bytes": size,
            "pruning": self.pruning,
            "device": self.device.type,
            "versions": {
                "nmkernels": __version__,
                **{lib.__name__: str(lib.__version__) for lib in (torch, transformers)},
                "python": platform.python_version(),
            },
        }


def share(step: int, steps: int) -> float:
    """The learning rate of a step, from 0, as a share of the highest."""
    warm = max(1, round(WARM_UP * steps))
    if step < warm:
        return (step + 1) / warm
    return 0.5 * (1 + math.cos(math.pi * (step - warm) / max(1, steps - warm)))


def _held(model: Any, weights: dict[str, Compressed], integers: dict[str, tuple[str, int]]) -> Handle:
    """``model`` with float32 weights and the masks of ``weights`` held."""
    forms = {}
    for name, weight in weights.items():
        rows, cols = weight.shape
        # the stored places are the mask: a value may be zero, above all as an integer
        ones = torch.ones(rows, weight.pattern.kept(cols), device=weight.indices.device)
        indices = weight.indices if weight.indices.numel() else compress(ones, weight.pattern).indices  # of experts at 1:1
        forms[name] = Compressed(ones, indices, weight.pattern, weight.shape), integers.get(name)
    densify_(model)
    model.float()
    chosen, report = choose(model, {name: weight.pattern for name, weight in weights.items()}, None, Magnitude())
    return hold_(model, chosen, report, forms)


def _report(path: Path) -> Any:
    """The report of pruning; None if there is no such file."""
    try:
        return json.loads(path.read_bytes()) if path.is_file() else None
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} is damaged ({shortened(error)}); copy it again, or delete it.") from error


def _read(path: Path) -> dict[str, Any]:
    try:
        return dict(torch.load(path, map_location="cpu", weights_only=True))
    except Exception as error:  # many types
        raise CheckpointError(f"{path} is damaged; delete {path.parent} to start again.") from error


def _mean(values: Sequence[float]) -> float:
    return sum(values) / max(1, len(values))


def how(facts: Mapping[str, Any]) -> str:
    """The section of the model card, from the facts of ``report.json``."""
    data, ppl = facts["data"], facts["perplexity"]
    aim = f"towards the output distribution of {facts['teacher']} (KL divergence)" if facts["teacher"] else "on text"
    rounded = f" Values were rounded to {', '.join(facts['values'])} again afterwards." if facts["values"] else ""
    lines = [
        f"From {facts['model']}, with its masks held: {facts['steps']} steps of {facts['batch']} windows of {data['length']} tokens "
        f"(digest {data['digest']}) {aim}, learning rate {facts['lr']:g}.{rounded}",
    ]
    if ppl is not None:
        tokens = facts["held_out"]["tokens"]
        lines += ["", "| | before | after |", "| --- | --- | --- |"]
        lines.append(f"| perplexity on {tokens:,} held-out tokens | {ppl['before']:.3f} | {ppl['after']:.3f} |")
    versions = ", ".join(f"{name} {version}" for name, version in facts["versions"].items())
    return "\n".join([*lines, "", f"Made with {versions}.", ""])
