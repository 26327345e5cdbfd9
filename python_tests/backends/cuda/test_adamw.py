"""MaskedAdamW in CUDA equals the reference: params and states to the bit, its sums to rounding, in three launches."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from nmkernels.backends import adamw as shared
from nmkernels.backends import streams
from nmkernels.backends.cuda import adamw
from nmkernels.testing import assert_equal_bits
from python_tests.backends.adamw_calls import LAYOUTS, copied, hyper, make, same_as_reference, seeded
from python_tests.backends.adamw_suite import GpuAdamWSuite

F32, BF16, F16 = torch.float32, torch.bfloat16, torch.float16


class Kernels:
    """The module of kernels, which notes what is called of it."""

    def __init__(self, real: Any) -> None:
        self.real, self.called = real, []

    def __getattr__(self, name: str) -> Callable[..., Any]:
        self.called.append(name)
        return getattr(self.real, name)


@pytest.fixture
def called(device, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The functions of the kernels' module that are called, by name."""
    kernels = Kernels(adamw.core(torch.empty(0, device=device)))
    monkeypatch.setattr(adamw, "core", lambda x: kernels)
    return kernels.called


class TestAgainstTheReference(GpuAdamWSuite):
    step = staticmethod(adamw.masked_adamw_)


compare, run = TestAgainstTheReference().compare, TestAgainstTheReference().run


def test_ties_and_neighbours_of_every_pattern(device):
    """Groups in one thread and over several lanes, whose last warp is not full; many equal magnitudes."""
    for n, m in [(1, 4), (2, 4), (1, 8), (2, 8), (1, 16), (3, 4)]:
        call = make(seeded(20), (37, 5 * m), (3, m))
        call["params"] = [torch.randint(-2, 3, x.shape, generator=seeded(21)).float() * 0.5 for x in call["params"]]
        compare(device, call, hyper(lr=0.0), n, m)
        compare(device, call, hyper(lr=0.1), n, m, geometric=True)
        transposed = {k: [LAYOUTS["transposed"](x) if x.dim() else x for x in v] for k, v in call.items()}
        compare(device, transposed, hyper(lr=0.1), n, m)


def test_one_pass_whatever_the_number_of_params(device, called):
    """40 params of mixed sizes: one call once their addresses are known, and the same bits in every run."""
    shapes = [(8 * (i % 5 + 1),) if i % 3 else (i % 7 + 1, 16) for i in range(39)]
    call, h = make(seeded(10), *shapes, (40, 640)), hyper().to(device)
    ours = copied(call, device)
    first = same_as_reference(adamw.masked_adamw_, ours, call, hyper(), 2, 4, geometric=True)
    called.clear()
    before = copied(ours, device)
    run(ours, h)
    assert called == ["masked_adamw"]
    called.clear()
    same_as_reference(adamw.masked_adamw_, {**ours, "grads": copied(ours, device)["grads"]}, copied(ours, "cpu"), hyper(), 2, 4)
    assert called == ["upload_words", "masked_adamw"], "only the gradients' addresses are new"
    again = copied(call, device)
    assert_equal_bits(run(again, h, geometric=True).cpu(), first)
    assert_equal_bits(again, before)


def test_blocks_of_several_tiles_and_params(device, monkeypatch):
    """Few blocks: each goes through many tiles, of many params, some of them empty."""
    call = make(seeded(22), *((4 * i, 40) for i in range(12)), (300, 64), (0, 8), (8,))
    alone = compare(device, call, hyper(), 2, 4, geometric=True)
    for blocks in (1, 3, 7):
        monkeypatch.setattr(adamw, "BLOCKS", blocks)
        stats = compare(device, call, hyper(), 2, 4, geometric=True)
        torch.testing.assert_close(stats, alone, rtol=1e-12, atol=0)


def test_only_counts_that_differ_are_sent(device, monkeypatch, called):
    call = make(seeded(15), (8, 16), (3, 8))
    call["steps"] = [torch.tensor(7.0), torch.tensor(8.0)]
    monkeypatch.setattr(shared, "on_host", lambda x, device: x.numel() == 9 or (x.is_cpu and x.dim() == 0))
    for found in (None, torch.zeros(1)):
        ours = {**copied(call, device), "steps": copied(call)["steps"]}
        same_as_reference(adamw.masked_adamw_, ours, call, hyper(), 2, 4, found=found)
    assert called.count("upload_words") > called.count("adamw_owners")


def test_what_a_graph_reads_stays_and_what_it_makes_is_its_own(monkeypatch):
    cache, where = adamw.Cache(), torch.device("cpu")
    cache.put("eager", 1, [], where)
    cache.put("other", 2, [], where)
    monkeypatch.setattr(streams, "capturing", lambda device: True)
    cache.put("captured", 3, [], where)
    assert cache.get("captured") is None
    assert cache.get("eager") == 1
    monkeypatch.setattr(streams, "capturing", lambda device: False)
    for i in range(adamw.MOST_TABLES + 2):
        cache.put(i, i, [], where)
    assert cache.get("eager") == 1
    assert cache.get("other") is None and cache.get(0) is None
    assert cache.get(2) == 2


def test_a_step_reads_its_tables_through_what_orders_streams(device, monkeypatch):
    """The table and the owners of a plan, and the gradients' addresses; ``backends/test_streams.py`` has what reading does."""
    read = []

    class Made(streams.Made):
        def get(self):
            read.append([x.dtype for x in self.tensors])
            return super().get()

    monkeypatch.setattr(adamw, "Made", Made)
    for cache in ("_plans", "_grads"):
        monkeypatch.setattr(adamw, cache, adamw.Cache())
    ours, h = copied(make(seeded(15), (8, 16), (3, 8)), device), hyper().to(device)
    run(ours, h)
    assert not read
    run(ours, h)
    assert read == [[torch.int64, torch.int32], [torch.int64]]


def test_tables_longer_than_a_launch(device):
    words = torch.randint(-(2**62), 2**62, (1201,), generator=seeded(23))
    for count in (0, 1, 479, 480, 481, 1201):
        table = adamw.upload(words[:count].tolist(), torch.empty(0, device=device))
        assert torch.equal(table[:count].cpu(), words[:count])
