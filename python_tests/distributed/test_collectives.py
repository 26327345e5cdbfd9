"""How many collectives a step does under FSDP2, and how many bytes: counted on gloo, and equal to those of the format, added up by hand."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import nmkernels as nm
from python_tests.distributed.ranks import needs_gloo, on_ranks

if dist.is_available():
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
    from torch.distributed.tensor.debug import CommDebugMode

pytestmark = needs_gloo
R, BLOCKS, DIM, HIDDEN = nm.recipes, 2, 32, 64
STATISTICS = {True: 9 * 8, False: 4 * 8}
"""Bytes of a rank's sums for the metrics and AutoSwitch: those of MaskedAdamW, and of any other optimizer."""

CASES: dict[str, tuple[Callable[[], nm.recipes.Recipe], float, dict[str, Any]]] = {
    "2:4": (lambda: R.SRSTE("2:4", packed=True), 1.125, {}),
    "1:8": (lambda: R.SRSTE("1:8", packed=True), 0.3125, {}),
    "gathered dense": (lambda: R.SRSTE("2:4", packed=False), 2, {}),
    "the master": (lambda: R.get("mdgf:2:4", total_steps=4, gradient="chain"), 4, {"steps": 4}),
    "dense": (lambda: R.get("dense"), 2, {}),
    "AutoSwitch": (lambda: R.STEP("2:4", t_min=1, t_max=3), 1.125, {"steps": 5}),
    "AdamW": (lambda: R.SRSTE("2:4", packed=True), 1.125, {"optimizer": torch.optim.AdamW}),
    "kept after forward": (lambda: R.SRSTE("2:4", packed=True), 1.125, {"reshard": False}),
    "reduced in bf16": (lambda: R.SRSTE("2:4", packed=True), 1.125, {"reduce_dtype": "bfloat16"}),
    "uneven": (lambda: R.SRSTE("2:4", packed=True), 2, {"hidden": HIDDEN - 1}),
    "dense layers": (lambda: R.SRSTE("2:4", packed=True), 1.125, {"filter_fn": lambda module, name: name.endswith("0.2")}),
}
"""A recipe, the bytes in which an element of its weights is gathered (FSDP2's own are in bf16), and what differs."""


class Net(nn.Module):
    def __init__(self, hidden: int = HIDDEN) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(DIM, hidden), nn.GELU(), nn.Linear(hidden, DIM)) for _ in range(BLOCKS))
        self.norm = nn.LayerNorm(DIM)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = x + block(x)
        return self.norm(x)


class Counted:
    """What this rank hands to collectives while it is entered: bytes of all-gathers, and of reduce-scatters."""

    KINDS = (("gathered", ("all_gather_single", "all_gather_into_tensor")), ("reduced", ("reduce_scatter_single", "reduce_scatter_tensor")))

    def __enter__(self) -> dict[str, int]:
        self.bytes = {kind: 0 for kind, _ in self.KINDS}
        self.originals = {name: (kind, getattr(dist, name)) for kind, names in self.KINDS for name in names if hasattr(dist, name)}
        for name, (kind, fn) in self.originals.items():
            setattr(dist, name, self.counted(kind, fn))
        return self.bytes

    def counted(self, kind: str, fn: Any) -> Any:
        def call(*args: Any, **keywords: Any) -> Any:
            given = inspect.signature(fn).bind(*args, **keywords).args[1]
            self.bytes[kind] += given.numel() * given.element_size()
            return fn(*args, **keywords)

        return call

    def __exit__(self, *_: object) -> None:
        for name, (_, fn) in self.originals.items():
            setattr(dist, name, fn)


def one_step(
    make: Callable[[], nm.recipes.Recipe],
    *,
    hidden: int = HIDDEN,
    steps: int = 1,
    reshard: bool = True,
    reduce_dtype: str = "float32",
    optimizer: Any = None,
    filter_fn: Any = None,
) -> tuple[dict[str, int], dict[str, int]]:
    """Bytes and numbers of the collectives of the last of ``steps`` steps."""
    torch.manual_seed(0)
    model, recipe, mesh = Net(hidden), make(), init_device_mesh("cpu", (dist.get_world_size(),))
    handle = nm.sparsify_(model, recipe, filter_fn)
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=getattr(torch, reduce_dtype))
    for block in model.blocks:
        fully_shard(block, mesh=mesh, mp_policy=policy, reshard_after_forward=reshard)
    fully_shard(model, mesh=mesh, mp_policy=policy)
    update = handle.attach((optimizer or recipe.optimizer)(model.parameters(), lr=1e-2))
    for _ in range(steps):
        update.zero_grad()
        with Counted() as found, CommDebugMode() as counts:
            model(torch.randn(4, DIM)).float().sum().backward()
            update.step()
            handle.metrics()
    return found, {str(op).rpartition(".")[2]: count for op, count in counts.get_comm_counts().items() if count}


def every_case() -> dict[str, Any]:
    return {name: one_step(make, **keywords) for name, (make, _, keywords) in CASES.items()}


def moved_by_hand(
    ranks: int, each: float, hidden: int = HIDDEN, reshard: bool = True, reduce_dtype: str = "float32", filter_fn: Any = None, **_: Any
) -> tuple[float, float]:
    """Bytes that the other ranks hand to one in gathers, and it to them in reductions; rows are padded to a multiple of the ranks."""
    gathered = reduced = 0.0
    for name, p in Net(hidden).named_parameters():
        rows, *rest = p.shape
        elements = -(-rows // ranks) * ranks * math.prod(rest)
        sparse = p.dim() == 2 and (filter_fn is None or filter_fn(None, name.removesuffix(".weight")))
        gathered += elements * (each if sparse else 2) * (2 if reshard and name.startswith("blocks") else 1)
        reduced += elements * getattr(torch, reduce_dtype).itemsize
    return gathered * (ranks - 1) / ranks, reduced * (ranks - 1) / ranks


def check(ranks: int, results: list[dict[str, Any]]) -> None:
    for rank, name in ((rank, name) for rank in range(ranks) for name in CASES):
        _, each, keywords = CASES[name]
        moved, counts = results[rank][name]
        gathered, reduced = moved_by_hand(ranks, each, **keywords)
        # a rank hands over its part of what is gathered, of which it gets the others', and the whole of what is reduced
        weights = moved["gathered"] - STATISTICS["optimizer" not in keywords]
        assert weights * (ranks - 1) == gathered, name
        assert moved["reduced"] * (ranks - 1) / ranks == reduced, name
        gathers = BLOCKS * (2 if keywords.get("reshard", True) else 1) + 1
        seen = {
            kind: sum(count for op, count in counts.items() if word in op) for kind, word in (("gathers", "gather"), ("sums", "scatter"))
        }
        assert seen == {"gathers": gathers + 1, "sums": BLOCKS + 1}, (name, counts)
        assert sum(counts.values()) == sum(seen.values()), f"{name}: {counts} has collectives of other kinds"


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [2, 4])
def test_collectives_of_a_step(tmp_path: Path, ranks: int) -> None:
    check(ranks, on_ranks(ranks, every_case, tmp_path))
