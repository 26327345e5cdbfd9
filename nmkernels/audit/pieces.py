"""Measure the pieces of a layer's step on this machine, with random tensors of its shape and dtype; the model is not used.

The device's own speed is measured once per process, unless its GPU is in the table of devices.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import lru_cache, partial
from statistics import median
from typing import Any

import torch
import torch.nn.functional as F

from .. import ops
from ..gemm.candidates import measure
from ..gemm.devices import DEVICES, Device, named
from ..gemm.forms import forms
from ..gemm.problem import ROLES, Problem, packed_bytes, plain
from ..ops.integers import BITS
from ..pattern import NMError, Pattern, RecipeError
from ..recipes.registry import suggestion
from ..timing import Seconds, Task, Timer, device_name
from .rules import Layer, LayerCosts, Pieces, Rules

LEAST = 3  # fewest rounds per piece
CHECKED = 8  # so many times a GEMM is done, about, to check and to time a candidate
LITTLE = 0.5  # seconds per layer even if the budget is spent
FEWEST = 256  # a GEMM is not shortened to fewer tokens, which would be another regime
CHUNK = 1 << 24  # elements compared in float64 at a time
MEMORY = 0.5  # largest share of free memory for a measurement
COPY = 1 << 26  # bytes of the copied tensor, more than any cache

PROBE = Layer((1024, 1024), 256, torch.float32, torch.float32)
"""The layer used to measure a device: large enough to reach the kernels' full rate, measured in a second."""

Progress = Callable[[int, int, str], None]


@dataclass(frozen=True)
class Timings:
    """Seconds of the pieces by name, empty if nothing was measured; ``note`` says why, or on how many tokens.

    ``kernels``: the fastest of the sparse methods (``nmkernels.gemm``), by GEMM.
    """

    seconds: dict[str, float] = field(default_factory=dict)
    note: str = ""
    kernels: dict[str, str] = field(default_factory=dict)

    def cost(self, piece: str) -> float | None:
        """Seconds of a piece; ``"weight rows+dense"`` is the sum of its two parts."""
        if piece == "weight rows+dense":
            rows, dense = self.seconds.get("weight rows"), self.seconds.get("weight dense")
            return None if rows is None or dense is None else rows + dense
        return self.seconds.get(piece)

    def named(self, pieces: Pieces) -> Pieces:
        """``pieces`` with the name of the kernel for sparse ones."""
        return tuple(replace(p, form=self.kernels[p.name]) if p.form == "sparse" and p.name in self.kernels else p for p in pieces)


def gemms(costs: LayerCosts) -> list[str]:
    """The GEMMs that may have a sparse operand."""
    rules = costs.rules
    if not costs.sparse:
        return []
    dgrad = costs.trains and any(packed for _, _, packed in rules.preparations(costs.device.transposed))
    wgrad = costs.trains and rules.trains and rules.estimate is not None
    return ["fprop", *["dgrad"] * dgrad, *["wgrad"] * wgrad]


def needed(costs: LayerCosts) -> list[str]:
    """The pieces to time for a layer, in addition to its sparse GEMMs."""
    dense = [f"{role} dense" for role in ROLES if role == "fprop" or costs.trains]
    if not costs.sparse:
        return dense
    names = [name for name in dense if name.partition(" ")[0] not in gemms(costs) or name == "wgrad dense"]
    names += ["expand", "adapter"] if costs.rules.rank else ["expand"]
    for weight, _, _ in costs.rules.preparations(costs.device.transposed) if costs.trains else ():
        names += [weight.removesuffix("+dense")] if weight else []  # the dense layout alone is measured anyway
    return list(dict.fromkeys(names))


def gemm_of(costs: LayerCosts, role: str, device: torch.device) -> Problem:
    """What is measured for a role: the dense layout against every kernel, for the forms that the operand can have."""
    p, columns = costs.problem(role, device), role == "dgrad" and not costs.device.transposed
    available = forms(p.rows, p.tokens if role == "wgrad" else p.cols, p.n, p.m, p.dtype, device, columns=columns)
    if p.integers:  # which have canonical indices only
        available = tuple(form for form in available if ":" not in form)
    return p._replace(forms=available, rule="exact" if role == "wgrad" else "")


def tasks_of(layer: Layer, rules: Rules, device: torch.device, names: Sequence[str]) -> list[Task]:
    """Calls for the named pieces, with random tensors of the layer's shape."""
    (out, cols), t, raw = layer.shape, layer.tokens, torch.ops.nmkernels
    wanted = {name.partition(" ")[0] for name in names}
    x, w = (torch.randn(size, dtype=layer.dtype, device=device) for size in ((t, cols), (out, cols)))
    g = torch.randn((t, out), dtype=layer.dtype, device=device) if wanted & {"dgrad", "wgrad", "estimate"} else x
    calls: dict[str, Callable[[], object]] = {
        "fprop dense": lambda: F.linear(x, w),
        "dgrad dense": lambda: g @ w,
        "wgrad dense": lambda: g.t() @ x,
    }
    if calls.keys() >= set(names):  # a layer that stays dense, whose shape may not be divisible by M
        return [Task(name, calls[name]) for name in names]
    left, right = (torch.randn(size, dtype=layer.dtype, device=device) for size in ((cols, rules.rank), (rules.rank, out)))
    calls["adapter"] = lambda: x @ left @ right
    n, m = rules.pattern.n, rules.pattern.m
    values, indices = raw.nm_compress(w, n, m, None)
    calls["fprop sparse"] = lambda: raw.nm_linear(x, values, indices, n, m, cols)
    calls["expand"] = lambda: raw.nm_decompress(values, indices, n, m, cols)
    if rules.values != "float":
        integers, step = raw.nm_quantize_values(values, BITS[rules.values], cols // rules.group if rules.group else 1)
        stored = values.shape[1]
        packed = indices if m > 1 else indices[:, :0]  # dense integers have none
        calls["fprop sparse"] = lambda: raw.nm_linear_integers(x, integers, packed, step, n, m, cols)
        calls["expand"] = lambda: raw.nm_decompress(raw.nm_dequantize_values(integers, step, stored, layer.dtype), indices, n, m, cols)
    calls["dgrad sparse"] = lambda: raw.nm_linear_dgrad(g, values, indices, n, m, cols)
    if rules.estimate is not None and "estimate" in wanted:
        p, seed = rules.estimate, torch.zeros(2, dtype=torch.int64, device=device)
        gv, gi = raw.nm_mvue_compress(g, p.n, p.m, 0, seed, "exact")
        calls["wgrad sparse"] = lambda: raw.nm_linear_wgrad(gv, gi, p.n, p.m, t, x)
        calls["estimate"] = lambda: raw.nm_mvue_compress(g, p.n, p.m, 0, seed, "exact")
    if "weight" in wanted:
        pattern, dtype, master = rules.pattern, layer.dtype, w if layer.master == layer.dtype else w.to(layer.master)
        select: Any = "magnitude"
        options: dict[str, Any] = {"dtype": dtype}
        calls["weight dense"] = lambda: raw.nm_prune(master, n, m).to(dtype)
        if rules.prepare == "threshold":
            select, scale = "threshold", ops.soft_threshold_scale(master, pattern)
            options["scale"] = scale
            calls["weight dense"] = lambda: (ops.soft_threshold(master, pattern) * scale).to(dtype)
        elif rules.prepare == "transposable":
            select = mask = ops.transposable_mask(master, pattern)  # held for many steps, so its search is not part of a step
            calls["weight dense"] = lambda: (master * mask).to(dtype)
        calls["weight rows"] = lambda: ops.pack(master, pattern, select, **options)
        calls["weight both"] = lambda: ops.pack(master, pattern, select, columns=True, **options)
    return [Task(name, calls[name]) for name in names]


def expected(costs: LayerCosts) -> float:
    """Approximate seconds for measuring, from the predicted times of the pieces."""
    once = sum(costs.predict(name) or 0.0 for name in needed(costs) if name.partition(" ")[0] in ROLES)
    return (LEAST + 1) * once + CHECKED * 2 * sum(costs.predict(f"{role} dense") or 0.0 for role in gemms(costs))


def time_layers(
    layers: Iterable[LayerCosts], device: torch.device, timer: Seconds | None, budget: float, progress: Progress | None = None
) -> dict[LayerCosts, Timings]:
    """Measure every distinct layer within a budget of seconds, short ones first, so that long ones get the remaining time."""
    order = sorted(dict.fromkeys(layers), key=expected)
    end, timings = time.perf_counter() + budget, dict[LayerCosts, Timings]()
    for done, costs in enumerate(order):
        layer = costs.layer
        if progress is not None:
            progress(done, len(order), f"{layer.shape[0]}x{layer.shape[1]}, {layer.tokens} tokens")
        share = max(LITTLE, (end - time.perf_counter()) / (len(order) - done))
        try:
            timings[costs] = time_layer(costs, device, timer, share)
        except (NMError, RuntimeError) as error:  # one failing layer must not lose the others' numbers
            timings[costs] = Timings(note=f"not measured: {str(error).splitlines()[0]}")
    return timings


def time_layer(costs: LayerCosts, device: torch.device, timer: Seconds | None, share: float) -> Timings:
    """Measure the pieces within ``share`` seconds, on fewer tokens if necessary."""
    layer, tokens, long = costs.layer, costs.layer.tokens, expected(costs)
    while long * tokens / layer.tokens > share and tokens >= 2 * FEWEST:
        tokens //= 2
    if long * tokens / layer.tokens > 2 * share:
        return Timings(note=f"not measured: it would take about {long * tokens / layer.tokens:.0f} s of the budget")
    small = costs.but(layer={"tokens": tokens})
    (out, cols), size = layer.shape, layer.dtype.itemsize
    # operands and copies, results of the candidates, and parts of them in float64
    wanted = size * (4 * tokens * (cols + out) + 6 * out * cols) + layer.master.itemsize * out * cols + 4 * CHUNK * 8
    free = free_bytes(device)
    if wanted > MEMORY * free:
        return Timings(note=f"not measured: it needs about {wanted / 1e9:.1f} GB of memory, {free / 1e9:.1f} are free")
    with torch.no_grad():
        samples_of = time_tasks(tasks_of(small.layer, costs.rules, device, needed(costs)), device, timer, share / 4)
    seconds = {name: median(samples) for name, samples in samples_of.items()}
    kernels: dict[str, str] = {}
    for role in gemms(costs):
        named = f"{role} estimated" if role == "wgrad" else role
        call_timer = None if timer is None else partial(lambda named, call: timer(Task(f"{named} {call.name}", call.run)), named)
        best = measure(gemm_of(small, role, device), timer=call_timer, budget=share / 4).seconds
        # each candidate of wgrad makes the estimate, so all other methods are measured apart
        sparse = best if role == "wgrad" else {name: took for name, took in best.items() if name != "dense"}
        if role != "wgrad":
            seconds[f"{role} dense"] = best["dense"]
        if sparse:
            kernels[role] = min(sparse, key=sparse.__getitem__)
            seconds["wgrad estimated" if role == "wgrad" else f"{role} sparse"] = sparse[kernels[role]]
    grown = layer.tokens / tokens
    scaled = {name: took * grown if name.partition(" ")[0] in ROLES else took for name, took in seconds.items()}
    return Timings(scaled, "" if tokens == layer.tokens else f"measured on {tokens} tokens, scaled", kernels)


def free_bytes(device: torch.device) -> float:
    """Free memory; infinite if unknown."""
    if device.type == "cuda":
        return float(torch.cuda.mem_get_info(device)[0])
    try:
        with open("/proc/meminfo", encoding="ascii") as lines:
            return next((1024.0 * int(line.split()[1]) for line in lines if line.startswith("MemAvailable")), math.inf)
    except OSError:
        return math.inf


def time_tasks(
    tasks: Sequence[Task], device: torch.device, timer: Seconds | None, seconds: float, least: int = LEAST
) -> dict[str, list[float]]:
    times = Timer(device, timer).turns({task.name: [task.run] for task in tasks}, seconds, least=least)
    if times.failed:
        raise RuntimeError(next(iter(times.failed.values())))
    return {task.name: times.of(task.name) for task in tasks}


# ---- the device


def find_device(spec: str | torch.device | None, default: torch.device) -> tuple[str | Device, torch.device | None]:
    """A device of the table, or the name of one to measure; and the torch device to measure on, if available."""
    target = default if spec is None else spec
    if isinstance(target, str) and (gpu := DEVICES.get(target.upper()) or named(target)) is not None:
        present = torch.cuda.is_available() and named(torch.cuda.get_device_name()) is gpu
        return gpu, torch.device("cuda") if present else None
    device = None
    with suppress(RuntimeError):
        device = torch.device(target)
    if device is not None and device.type == "cuda" and not torch.cuda.is_available():
        raise RecipeError(
            f"audit: {str(target)!r} is a GPU of this machine, and torch can use none here; `python -m nmkernels doctor` says why. Choose "
            f"one that need not be present: {', '.join(DEVICES)}."
        )
    if device is None or device.type not in ("cpu", "cuda"):
        near = suggestion(str(target), [*DEVICES, "cpu", "cuda"]) or "."
        raise RecipeError(
            f"audit: no device is called {str(target)!r}{near} Choose one of {', '.join(DEVICES)}, which need not be present, "
            'or "cpu" or "cuda" for this machine.'
        )
    name = device_name(device)
    return named(name) or name, device


@lru_cache(maxsize=64)
def probe(
    name: str, device: torch.device, dtype: torch.dtype, pattern: Pattern, stored: str, timer: Seconds | None, threads: int
) -> Device:
    """Measure ``device``: bandwidth of ``copy_``, dense GEMMs, GEMMs of this pattern and these ``stored`` values, and a small call.

    Cached per number of ``threads``.
    """
    # round the last dimension down to a multiple of M
    cols = PROBE.shape[1] // pattern.m * pattern.m
    probe = Layer((cols, cols), PROBE.tokens // pattern.m * pattern.m or pattern.m, dtype, dtype)
    source = torch.zeros(COPY, dtype=torch.uint8, device=device)
    target = torch.zeros_like(source)
    tiny = torch.randn((1, pattern.m), dtype=dtype, device=device)
    weight = torch.randn((pattern.m, pattern.m), dtype=dtype, device=device)
    values, indices = torch.ops.nmkernels.nm_compress(weight, pattern.n, pattern.m, None)
    names = [f"{role} {form}" for role in ROLES for form in ("dense", "sparse")]
    tasks = [
        Task("copy", lambda: target.copy_(source)),
        Task("launch", lambda: F.linear(tiny, weight)),
        Task("call", lambda: torch.ops.nmkernels.nm_linear(tiny, values, indices, pattern.n, pattern.m, pattern.m)),
        *tasks_of(probe, Rules(pattern, estimate=pattern, values=stored), device, [*names, "estimate", "weight rows"]),
    ]
    # the minimum excludes interference by other processes
    took = {name: min(samples) for name, samples in time_tasks(tasks, device, timer, 1.5, least=7).items()}
    bandwidth = 2 * COPY / took["copy"]
    operations = 2.0 * cols * cols * probe.tokens
    ratio = {role: took[f"{role} dense"] / took[f"{role} sparse"] for role in ROLES}
    packed = dtype.itemsize + packed_bytes(pattern, dtype)
    return Device(
        name,
        bandwidth,
        {plain(dtype): operations / took["fprop dense"]},
        ratio,
        min(ratio.values()),
        max(ratio.values()),
        share=1.0,
        passes=min(1.0, cols * cols * packed / took["weight rows"] / bandwidth),
        estimate=min(1.0, probe.tokens * cols * packed / took["estimate"] / bandwidth),
        launch=took["launch"],
        call=took["call"],
        few=None,
        transposed=True,
    )
