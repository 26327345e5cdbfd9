"""Predict traffic, memory and waiting time per GPU in a training step under FSDP2, with the model below.

Every module with a number in its name, ``layers.3``, is a group that FSDP2 gathers at once; everything else is the root's group, which is
gathered once per pass and stays. Gathering or reducing a group of B bytes on S GPUs takes a ring (NCCL's algorithm for both)::

    all-gather, reduce-scatter:  start + steps · latency + (S-1)/S · B / bandwidth

The next group is gathered while the current one computes, and gradients are reduced at the same time, on the same network. With f and b the
forward and backward seconds of group i, g and r those of its gather and reduce-scatter, n groups and the root 0::

    forward  = g0 + g1 + Σ max(f_i, g_i+1) + f0
    backward = max(b0, g_n) + Σ max(b_i, g_i-1 + r_i+1) + r1 + r0

Both gathers of a step carry W̃, packed if its rows divide evenly among the GPUs: s·N/M + index bits instead of s bytes per element, 0.5625
of bfloat16 at 2:4, 0.15625 at 1:8. Gradients stay dense. W̃ is made from the shard at each gather and decompressed for dense GEMMs, because
the layouts of sparse tensor cores are not gathered; of the GEMMs only wgrad with an estimated gradient gains. ``Audit.step`` is for one
GPU.

Only linear layers and collectives are counted. torchtitan reports 5,762 tokens per second and GPU for Llama 3.1 8B on 8 H100 of 500 W, or
2.84 s for two sequences of 8192 (its docs/performance.md); this model predicts 1.08 s, without attention, norms, recomputation and the
optimizer.
"""

from __future__ import annotations

import math
import re
import textwrap
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import torch
from torch import nn

from ..arguments import whole_number
from ..gemm.devices import Device, Links
from ..gemm.problem import packed_bytes
from ..pattern import RecipeError
from ..train.report import Entry
from .flops import aligned, matrices_of
from .rules import GEMMS, Case

GROUP = re.compile(r"(?:.*?\.)??\d+(?=\.|$)")
STATES = 4  # tensors of the master weight's size: itself, gradient and Adam's two moments
DTYPES = ("float32", "bfloat16", "float16")


@dataclass(frozen=True)
class Cluster:
    """The GPUs of a training run with FSDP2.

    Args:
        gpus: number of GPUs.
        shards: number of shards per weight; None for one per GPU. With fewer it is HSDP with ``gpus / shards`` replicas.
        per_node: GPUs connected by NVLink.
        reduce_dtype: of the gradients' reduction, as in ``MixedPrecisionPolicy``.
        reshard_after_forward: whether weights are gathered again for backward, ``fully_shard``'s default.

    Raises:
        RecipeError: a number is not a positive integer, ``gpus`` is not a multiple of ``shards``, or the dtype is unknown.

    Example:
        >>> Cluster(64, shards=8).replicas
        8
    """

    gpus: int
    shards: int | None = None
    per_node: int = 8
    reduce_dtype: str = "float32"
    reshard_after_forward: bool = True

    def __post_init__(self) -> None:
        for name in ("gpus", "per_node", *(() if self.shards is None else ("shards",))):
            object.__setattr__(self, name, whole_number(RecipeError, f"Cluster: {name}", getattr(self, name)))
        if self.gpus % self.shard_count:
            raise RecipeError(f"Cluster: gpus={self.gpus} is not a multiple of shards={self.shard_count}.")
        if self.reduce_dtype not in DTYPES:
            raise RecipeError(f"Cluster: reduce_dtype={self.reduce_dtype!r} is unknown; choose one of {', '.join(DTYPES)}.")

    @property
    def shard_count(self) -> int:
        """The number of shards: ``shards``, or ``gpus`` if that is None."""
        return self.gpus if self.shards is None else self.shards

    @property
    def replicas(self) -> int:
        """Number of GPUs with the same shard."""
        return self.gpus // self.shard_count


@dataclass(frozen=True)
class ShardedStep:
    """Predicted traffic, memory and time of one GPU in an optimizer step.

    Args:
        gathered, reduced: bytes received in all-gathers of weights, and in reduce-scatters (and all-reduces) of gradients.
        memory: bytes of its shards of weights, gradients and Adam's moments, and of gathered weights, without activations.
        seconds: of all linear layers (and ``other``), gathers and reductions.
        waiting: seconds of these spent waiting for the network.
        seconds_range: ``seconds`` with the fastest and the slowest plausible network.
    """

    gathered: float
    reduced: float
    memory: float
    seconds: float
    waiting: float
    seconds_range: tuple[float, float]


@dataclass(frozen=True)
class ClusterAudit:
    """The predicted step on many GPUs, for the dense model and for the recipe with packed gathers; ``str(...)`` gives a table.

    Example:
        >>> import nmkernels as nm
        >>> found = nm.audit({"layers.0": (4096, 4096)}, 4096, device="H100", dtype="bfloat16", cluster=8).cluster
        >>> found.packed.gathered / found.dense.gathered
        0.5625
    """

    cluster: Cluster
    dense: ShardedStep
    packed: ShardedStep
    notes: tuple[str, ...]

    def as_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        return {**asdict(self), "notes": list(self.notes), "predicted": True}

    def __str__(self) -> str:
        cluster = self.cluster
        rows = [(f"one of {cluster.gpus} GPUs, predicted", "", "dense", "packed", "ratio", "")]
        for name, unit, size, each in (
            ("all-gathers of weights, received", "GB", 1e9, "gathered"),
            ("reduce-scatters of gradients, received", "GB", 1e9, "reduced"),
            ("memory without activations", "GB", 1e9, "memory"),
            ("step of linear layers and collectives", "ms", 1e-3, "seconds"),
            ("  of it waiting for the network", "ms", 1e-3, "waiting"),
        ):
            dense, packed = getattr(self.dense, each), getattr(self.packed, each)
            ratio = f"{packed / dense:.2f}" if dense else "-"
            rows.append((name, unit, f"{dense / size:.4g}", f"{packed / size:.4g}", ratio, ""))
        return "\n".join(aligned(rows))


@dataclass
class _Group:
    """One group: forward and backward seconds; bytes gathered, held unsharded, and reduced."""

    forward: float = 0.0
    backward: float = 0.0
    gathered: float = 0.0
    unsharded: float = 0.0
    gradients: float = 0.0
    reduced: float = 0.0
    extra: float = field(default=0.0)  # packed weights, in addition to unsharded ones


def predict(
    model: nn.Module, groups: list[tuple[list[Entry], Case]], cluster: Cluster, device: Device, accumulate: int, rest: float
) -> ClusterAudit:
    """Predict the step of a model with layers ``groups``; ``rest``: seconds of everything else in one forward pass."""
    links = device.links
    assert links is not None
    if not any(case.trains for _, case in groups):
        raise RecipeError("audit: cluster=... predicts training steps, and a finished or compressed model is not trained.")
    dense, packed = (_groups(model, groups, cluster, packed, rest) for packed in (False, True))
    steps = (_step(dense, model, cluster, links, accumulate), _step(packed, model, cluster, links, accumulate))
    notes = _notes(cluster, links, device, len(dense) - 1)
    if max(step.memory for step in steps) > device.capacity:
        notes = (f"It exceeds the {device.capacity / 1e9:g} GB of {device.name}: use more shards.", *notes)
    return ClusterAudit(cluster, *steps, notes)


def _groups(model: nn.Module, groups: list[tuple[list[Entry], Case]], cluster: Cluster, packed: bool, rest: float) -> dict[str, _Group]:
    """The groups that FSDP2 gathers at once, by name, in the model's order, the root first; for the dense model or the recipe."""
    found: dict[str, _Group] = {"": _Group()}
    layers = {e.name: (e, case) for entries, case in groups for e in entries}
    usual = next(case for _, case in groups).layer.dtype
    reduce = getattr(torch, cluster.reduce_dtype).itemsize
    for name, p in model.named_parameters():
        owner = name.removesuffix(".weight")
        entry, case = layers.get(name) or layers.get(owner) or (None, None)
        group = found.setdefault(_group(name), _Group())
        dtype = usual if case is None else case.layer.dtype
        whole = _padded(p.shape, cluster.shard_count)
        each = float(dtype.itemsize)
        if packed and entry is not None and case is not None and case.sparse:
            if _packs(entry, case, cluster):
                each = packed_bytes(case.rules.pattern, dtype)
                group.extra += whole * each
            elif not case.rules.straight:  # backward needs the master weight
                each = float(p.element_size())
        group.gathered += whole * each
        group.unsharded += whole * dtype.itemsize
        if p.requires_grad:
            group.reduced += whole * reduce
            group.gradients += whole * dtype.itemsize
    for name, (entry, case) in layers.items():  # here, because a tied weight is a parameter of another module
        _compute(found[_group(name)], entry, case, cluster, packed and case.sparse)
    blocks = [group for name, group in found.items() if name] or [found[""]]
    for group in blocks:
        group.forward += rest / len(blocks)
        group.backward += 2 * rest / len(blocks)
    return found


def _group(name: str) -> str:
    """The name of a parameter's group; empty for the root."""
    match = GROUP.match(name)
    return match.group() if match else ""


def _padded(shape: Iterable[int], shards: int) -> int:
    """Number of elements after FSDP2's padding of rows."""
    rows, *rest = tuple(shape) or (1,)
    return -(-rows // shards) * shards * math.prod(rest)


def _packs(entry: Entry, case: Case, cluster: Cluster) -> bool:
    """Whether the weight is gathered packed, as ``nn.sharding`` decides."""
    matrix = len(entry.shape) == 2 and not entry.kind.endswith("Conv1D")
    return matrix and cluster.shard_count > 1 and case.rules.packed and case.rules.straight and entry.shape[0] % cluster.shard_count == 0


def _compute(group: _Group, entry: Entry, case: Case, cluster: Cluster, sparse: bool) -> None:
    """Add the seconds of a layer: its GEMMs, the estimate, and at each gather making W̃ from the shard and decompressing it."""
    device, layer = case.device, case.layer
    times = matrices_of(entry.shape)
    dtype, pattern = float(layer.dtype.itemsize), case.rules.pattern
    elements = math.prod(layer.shape)
    made = 0.0
    if sparse:
        packs = _packs(entry, case, cluster)
        written = packed_bytes(pattern, layer.dtype) if packs else dtype
        moved = elements / cluster.shard_count * (layer.master.itemsize + written) + packs * elements * (written + dtype)
        made = moved / (device.passes * device.bandwidth) + (1 + packs) * device.call
    elif layer.master != layer.dtype:
        made = elements / cluster.shard_count * (layer.master.itemsize + dtype) / (device.passes * device.bandwidth) + device.launch
    seconds = {role: 0.0 for role in GEMMS}
    if layer.tokens:
        seconds = {role: case.predict(f"{role} dense") or 0.0 for role in GEMMS if role != "wgrad" or case.rules.trains}
        if sparse and case.rules.estimate is not None:
            seconds["wgrad"] = sum(piece.used for piece in case.step() if piece.name in ("wgrad", "estimate"))
    group.forward += times * (seconds.pop("fprop") + made)
    group.backward += times * (sum(seconds.values()) + made * cluster.reshard_after_forward)


def _step(found: dict[str, _Group], model: nn.Module, cluster: Cluster, links: Links, accumulate: int) -> ShardedStep:
    root, blocks = found[""], [group for name, group in found.items() if name]
    again = 2 if cluster.reshard_after_forward else 1
    part, replicas = (cluster.shard_count - 1) / cluster.shard_count, cluster.replicas
    gathered = part * (root.gathered + again * sum(group.gathered for group in blocks))
    reduced = sum(group.reduced for group in found.values())
    state = sum((STATES if p.requires_grad else 1) * _padded(p.shape, cluster.shard_count) * p.element_size() for p in model.parameters())
    largest = max(blocks, key=lambda group: group.unsharded, default=_Group())
    # one group computes while the next one arrives; unsharded gradients exist too, the root's until the end, plus a copy while reduced
    at_once = largest.unsharded + largest.gathered + largest.extra + largest.gradients + largest.reduced
    memory = state / cluster.shard_count + root.unsharded + root.extra + root.gradients + max(at_once, root.reduced)
    most, taken, least = (_seconds(root, blocks, cluster, replace(links, across=(across,) * 3)) for across in links.across)
    computed = sum(group.forward + group.backward for group in found.values())
    moved = part * reduced + 2 * (replicas - 1) / replicas * reduced / cluster.shard_count
    return ShardedStep(
        accumulate * gathered,
        accumulate * moved,
        memory,
        accumulate * taken,
        accumulate * (taken - computed),
        (accumulate * least, accumulate * most),
    )


def _seconds(root: _Group, blocks: list[_Group], cluster: Cluster, links: Links) -> float:
    """Seconds of one forward and backward pass, by the formulas in the module docstring."""
    gather = [_ring(group.gathered, cluster, links) for group in (root, *blocks)]
    back = gather if cluster.reshard_after_forward else [0.0] * len(gather)
    reduce = [_ring(group.reduced, cluster, links) + _replicas(group.reduced, cluster, links) for group in (root, *blocks)]
    n = len(blocks)
    forward = gather[0] + (gather[1] if n else 0.0) + root.forward
    backward = max(root.backward, back[n] if n else 0.0) + reduce[0] + (reduce[1] if n else 0.0)
    for i, group in enumerate(blocks, 1):
        forward += max(group.forward, gather[i + 1] if i < n else 0.0)
        backward += max(group.backward, (back[i - 1] if i > 1 else 0.0) + (reduce[i + 1] if i < n else 0.0))
    return forward + backward


def _ring(size: float, cluster: Cluster, links: Links) -> float:
    """Seconds of an all-gather or a reduce-scatter of ``size`` bytes."""
    count, nodes = cluster.shard_count, -(-cluster.shard_count // cluster.per_node)
    if count == 1 or not size:
        return 0.0
    bandwidth = links.node if nodes == 1 else links.across[1]
    return links.start + (count - nodes) * links.hop + (nodes - 1) * links.far + (count - 1) / count * size / bandwidth


def _replicas(size: float, cluster: Cluster, links: Links) -> float:
    """Seconds of the all-reduce between HSDP's replicas, of the shards of ``size`` bytes."""
    replicas = cluster.replicas
    if replicas == 1 or not size:
        return 0.0
    near = cluster.gpus <= cluster.per_node
    bandwidth, hop = (links.node, links.hop) if near else (links.nic, links.far)
    return links.start + 2 * (replicas - 1) * hop + 2 * (replicas - 1) / replicas * size / cluster.shard_count / bandwidth


def _notes(cluster: Cluster, links: Links, device: Device, groups: int) -> tuple[str, ...]:
    low, taken, high = (f"{across / 1e9:g}" for across in links.across)
    nodes = -(-cluster.shard_count // cluster.per_node)
    wires = f"{links.node / 1e9:g} GB/s of bus bandwidth in a node"
    if nodes > 1:
        wires = f"{taken} GB/s of bus bandwidth over {nodes} nodes ({low} to {high})"
    how = f"{cluster.shard_count} ways" + (f", {cluster.replicas} replicas" if cluster.replicas > 1 else "")
    return (
        f"FSDP2, predicted and not measured: {device.name}, sharded {how}, {groups} groups and the root, gradients reduced in "
        f"{cluster.reduce_dtype}; {wires}, {1e6 * links.hop:g} µs a step of the ring in a node and {1e6 * links.far:g} between nodes.",
        "Packed weights are decompressed and multiplied dense. Not included: activations, attention, norms, recomputation, the optimizer.",
    )


def text(audit: ClusterAudit, width: int) -> str:
    """The table, the range and the notes."""
    lines = [str(audit)]
    if audit.dense.seconds_range[0] != audit.dense.seconds_range[1]:
        words = ", ".join(
            f"{name} {1e3 * found.seconds_range[0]:.4g} to {1e3 * found.seconds_range[1]:.4g} ms"
            for name, found in (("dense", audit.dense), ("packed", audit.packed))
        )
        lines.append(f"With the fastest and the slowest network below: {words}.")
    return "\n".join([*lines, *("\n".join(textwrap.wrap(note, width, break_long_words=False)) for note in audit.notes)])
