"""The device at hand: its GPU where the table has it, else what a short measurement finds, once per process."""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache

import torch
import torch.nn.functional as F

from ..autograd.choice.product import device_name
from ..pattern import Pattern
from .devices import DEVICES, Device, named, unknown
from .measure import tasks_of
from .rules import Layer, Rules, packed_bytes
from .timing import Task, Timer, take_turns, timer_for

COPY = 1 << 26
"""Bytes of the copied tensor; above any cache that it would have to itself."""

PROBE = Layer((1024, 1024), 256, torch.float32, torch.float32)
"""The layer whose products stand for all: large enough for the kernels' rate, measured in a second."""


def find(spec: str | torch.device | None, default: torch.device) -> tuple[str | Device, torch.device | None]:
    """A device of the table, or the name of one to measure; and where it is at hand, the device to measure on.

    Raises:
        RecipeError: nothing is called that.
    """
    target = default if spec is None else spec
    if isinstance(target, str) and target.upper() in DEVICES:
        found = DEVICES[target.upper()]
        here = torch.cuda.is_available() and named(torch.cuda.get_device_name()) == found
        return found, torch.device("cuda") if here else None
    if isinstance(target, str) and named(target) is not None:
        return find(next(key for key, device in DEVICES.items() if device == named(target)), default)
    try:
        device = torch.device(target)
    except RuntimeError:
        raise unknown(str(target)) from None
    if device.type not in ("cpu", "cuda") or (device.type == "cuda" and not torch.cuda.is_available()):
        raise unknown(str(target))
    name = device_name(device)
    return named(name) or name, device


def measured(name: str, device: torch.device, dtype: torch.dtype, pattern: Pattern, timer: Timer | None = None) -> Device:
    """``device`` by a short measurement: bandwidth of ``copy_``, dense products, those of this pattern, and what a small call costs."""
    if timer is not None:
        return _measure(name, device, dtype, pattern, timer)
    return _cached(name, device, dtype, pattern, torch.get_num_threads())


@lru_cache(maxsize=64)
def _cached(name: str, device: torch.device, dtype: torch.dtype, pattern: Pattern, threads: int) -> Device:
    return _measure(name, device, dtype, pattern, timer_for(device))


def _measure(name: str, device: torch.device, dtype: torch.dtype, pattern: Pattern, timer: Timer) -> Device:
    probe = replace(PROBE, dtype=dtype, master=dtype)
    # groups of any M: the last dimension is cut to whole ones
    cols = probe.shape[1] // pattern.m * pattern.m
    probe = replace(probe, shape=(cols, cols), tokens=probe.tokens // pattern.m * pattern.m or pattern.m)
    rules = Rules(pattern, estimate=pattern, prepare="mask")
    source = torch.zeros(COPY, dtype=torch.uint8, device=device)
    target = torch.zeros_like(source)
    tiny = torch.randn((1, pattern.m), dtype=dtype, device=device)
    weight = torch.randn((pattern.m, pattern.m), dtype=dtype, device=device)
    values, indices = torch.ops.nmkernels.nm_compress(weight, pattern.n, pattern.m, None)
    names = [f"{role} {form}" for role in ("fprop", "dgrad", "wgrad") for form in ("dense", "sparse")]
    tasks = [
        Task("copy", lambda: target.copy_(source)),
        Task("launch", lambda: F.linear(tiny, weight)),
        Task("call", lambda: torch.ops.nmkernels.nm_linear(tiny, values, indices, pattern.n, pattern.m, pattern.m)),
        *tasks_of(probe, rules, device, turned=True, names=[*names, "estimate", "weight rows"]),
    ]
    took = take_turns(tasks, timer, 1.5, least=7, of=min)  # what the device can do, whoever else is using it
    bandwidth = 2 * COPY / took["copy"]
    operations = 2.0 * probe.shape[0] * probe.shape[1] * probe.tokens
    ratio = {role: took[f"{role} dense"] / took[f"{role} sparse"] for role in ("fprop", "dgrad", "wgrad")}
    packed = dtype.itemsize + packed_bytes(pattern, dtype)
    kind = str(dtype).removeprefix("torch.")
    return Device(
        name,
        bandwidth,
        {kind: operations / took["fprop dense"]},
        ratio,
        min(ratio.values()),
        max(ratio.values()),
        share=1.0,
        passes=min(1.0, probe.shape[0] * cols * packed / took["weight rows"] / bandwidth),
        estimate=min(1.0, probe.tokens * cols * packed / took["estimate"] / bandwidth),
        launch=took["launch"],
        call=took["call"],
        few=None,
        turned=True,
    )
