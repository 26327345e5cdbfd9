"""MaskedAdamW in CUDA equals the reference: params and states to the bit, its sums to rounding, in three launches."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from nmkernels.backends import adamw_plan as shared
from nmkernels.backends.cuda import adamw
from nmkernels.backends.cuda import adamw as _adamw_plan
from nmkernels.pattern import BackendError
from nmkernels.testing import assert_equal_bits
from python_tests.backends.adamw_calls import LAYOUTS, copied, hyper, make, same_as_reference, seeded, shifted
from python_tests.backends.adamw_suite import AdamWSuite

F32, BF16, F16 = torch.float32, torch.bfloat16, torch.float16


def compare(device: str, call: dict[str, Any], h: Tensor, n: int, m: int, **options: Any) -> Tensor:
    """Run both on copies; everything they write must agree. Returns the statistics."""
    return same_as_reference(adamw.masked_adamw_, copied(call, device), call, h, n, m, **options)


def run(call: dict[str, Any], h: Tensor, n: int = 2, m: int = 4, geometric: bool = False, found: Tensor | None = None) -> Tensor:
    return adamw.masked_adamw_(*call.values(), h, n, m, False, False, False, geometric, None, found)


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
    for module in (adamw, _adamw_plan):
        monkeypatch.setattr(module, "core", lambda x: kernels)
    return kernels.called


class TestAgainstTheReference(AdamWSuite):
    step = staticmethod(adamw.masked_adamw_)


def test_ties_and_neighbours_of_every_pattern(device):
    """Groups in one thread and over several lanes, whose last warp is not full; many equal magnitudes."""
    for n, m in [(1, 4), (2, 4), (1, 8), (2, 8), (1, 16), (3, 4)]:
        call = make(seeded(20), (37, 5 * m), (3, m), out=BF16)
        call["params"] = [torch.randint(-2, 3, x.shape, generator=seeded(21)).float() * 0.5 for x in call["params"]]
        compare(device, call, hyper(lr=0.0), n, m)
        compare(device, call, hyper(lr=0.1), n, m, geometric=True)
        turned = {k: [LAYOUTS["transposed"](x) if x.dim() else x for x in v] for k, v in call.items()}
        compare(device, turned, hyper(lr=0.1), n, m)


def test_one_pass_whatever_the_number_of_params(device, called):
    """40 params of mixed sizes: one call once their addresses are known, and the same bits in every run."""
    shapes = [(8 * (i % 5 + 1),) if i % 3 else (i % 7 + 1, 16) for i in range(39)]
    call, h = make(seeded(10), *shapes, (40, 640), out=BF16), hyper().to(device)
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
    call = make(seeded(22), *((4 * i, 40) for i in range(12)), (300, 64), (0, 8), (8,), out=F32)
    alone = compare(device, call, hyper(), 2, 4, geometric=True)
    for blocks in (1, 3, 7):
        monkeypatch.setattr(_adamw_plan, "BLOCKS", blocks)
        stats = compare(device, call, hyper(), 2, 4, geometric=True)
        torch.testing.assert_close(stats, alone, rtol=1e-12, atol=0)


def test_every_kind_in_one_call(device):
    """Aligned, unaligned, transposed and half-precision params."""
    parts = [make(seeded(i), (8, 16), out=BF16, dtype=dtype) for i, dtype in enumerate((F32, F32, F32, BF16, F16))]
    parts[2] = {k: [LAYOUTS["transposed"](x) if x.dim() else x for x in v] for k, v in parts[2].items()}
    for step in (2.0, 5.0):  # counts of their own, though the table is in another order
        parts[2]["steps"][0].fill_(step)
        ours = [shifted(copied(x, device), 1) if i == 1 else copied(x, device) for i, x in enumerate(parts)]
        call, mixed = ({k: [x[k][0] for x in side for _ in x[k][:1]] for k in parts[0]} for side in (parts, ours))
        same_as_reference(adamw.masked_adamw_, mixed, call, hyper(), 2, 4, geometric=True)


@pytest.mark.parametrize("steps", [(7.0, 7.0, 7.0), (7.0, 8.0, 0.0)])
def test_counts_and_numbers_on_the_host(device, steps, monkeypatch, called):
    call = make(seeded(15), (8, 16), (3, 8), (4,), out=F32)
    call["params"][0] = LAYOUTS["transposed"](call["params"][0])  # the last row of the table
    call["steps"] = [torch.tensor(t) for t in steps]
    monkeypatch.setattr(adamw, "on_host", lambda x, device: x.numel() == 9 or (x.is_cpu and x.dim() == 0))
    for found in (None, torch.zeros(1), torch.ones(1)):
        for frozen in (False, True):
            ours = {**copied(call, device), "steps": copied(call)["steps"]}
            same_as_reference(adamw.masked_adamw_, ours, call, hyper(lr=-0.1, v_step=3.0, clamp=0.5), 2, 4, found=found, frozen=frozen)
    assert len(set(steps)) == 1 or called.count("upload_words") > called.count("adamw_owners")
    ours = {**copied(call, device), "steps": copied(call)["steps"]}
    monkeypatch.setattr(shared, "capturing", lambda device: True)
    with pytest.raises(BackendError, match="capturable=True"):
        run(ours, hyper().to(device))
    assert_equal_bits(ours, call)


def test_what_a_graph_reads_stays_and_what_it_makes_is_its_own(monkeypatch):
    cache, where = shared.Cache(), torch.device("cpu")
    cache.put("eager", 1, where)
    cache.put("other", 2, where)
    monkeypatch.setattr(shared, "capturing", lambda device: True)
    assert cache.put("captured", 3, where) == 3
    assert cache.get("captured", where) is None
    assert cache.get("eager", where) == 1
    monkeypatch.setattr(shared, "capturing", lambda device: False)
    for i in range(shared.KEPT):
        cache.put(i, i, where)
    assert cache.get("eager", where) == 1
    assert cache.get("other", where) is None
    assert cache.get(0, where) == 0


def test_tables_longer_than_a_launch(device):
    words = torch.randint(-(2**62), 2**62, (1201,), generator=seeded(23))
    for count in (0, 1, 479, 480, 481, 1201):
        table = _adamw_plan.upload(words[:count].tolist(), torch.empty(0, device=device))
        assert torch.equal(table[:count].cpu(), words[:count])


@pytest.mark.gpu
def test_captured_steps_are_replayed():
    call = make(seeded(16), (8, 16), (300, 40), out=BF16)
    ours, theirs, h = copied(call, "cuda"), copied(call, "cuda"), hyper().to("cuda")
    run(ours, h)  # knows the addresses
    ours.update({k: [x.copy_(y) for x, y in zip(ours[k], call[k], strict=True)] for k in call})
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        ours["grads"] = [g * 1.0 for g in ours["grads"]]
        stats = run(ours, h)
    for lr in (1e-2, 1e-2, 3e-2):
        h[0] = lr  # read at each replay
        graph.replay()
        assert_equal_bits(stats, run(theirs, h))
    ours.pop("grads"), theirs.pop("grads")
    assert_equal_bits(ours, theirs)


def test_declines_float64(device, ours):
    def ask(**kinds: torch.dtype) -> tuple[bool, str]:
        x = {name: [torch.zeros(4, dtype=kinds.get(name, F32), device=device)] for name in ("params", "grads", "outs")}
        state, options = [torch.zeros(4, device=device)], (hyper(), 2, 4, False, False, False, False, None, None)
        return ours("nm_masked_adamw_").supports(x["params"], x["grads"], state, state, [], [torch.tensor(0.0)], x["outs"], *options)

    assert ask()[0]
    for name in ("params", "grads", "outs"):
        can, why = ask(**{name: torch.float64})
        assert not can
        assert "float64" in why
