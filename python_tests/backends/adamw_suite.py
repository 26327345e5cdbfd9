"""Tests of MaskedAdamW for every compiled backend: params and states equal the reference's to the bit, sums to rounding.

    class TestAgainstTheReference(GpuAdamWSuite):
        step = staticmethod(masked_adamw_)

Modules that use it have the fixtures ``device`` and, for GPUs, ``ours``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from nmkernels.backends import adamw as shared
from nmkernels.backends import streams
from nmkernels.pattern import BackendError
from nmkernels.testing import assert_equal_bits
from python_tests.backends.adamw_calls import LAYOUTS, copied, edge, held, hyper, make, same_as_reference, seeded, shifted

F32, BF16, F16 = torch.float32, torch.bfloat16, torch.float16


class AdamWSuite:
    """Subclass with ``step``, the backend's function."""

    step: Callable[..., Tensor]
    edges: tuple[int, ...] = (0, 512, 1024)
    """Sizes of what is walked at once."""
    places: Sequence[tuple[int, torch.dtype]] = ((0, F32), (1, BF16), (4, BF16))
    """Elements past the beginning of memory, and dtypes of params."""

    def compare(self, device: str, call: dict[str, Any], h: Tensor, n: int, m: int, **options: Any) -> Tensor:
        """Run both on copies; everything they write must agree. Returns the statistics."""
        return same_as_reference(self.step, copied(call, device), call, h.to(device), n, m, **options)

    def run(self, call: dict[str, Any], h: Tensor, n: int = 2, m: int = 4, geometric: bool = False) -> Tensor:
        return self.step(*call.values(), h, n, m, False, False, False, geometric, None, None)

    @pytest.mark.parametrize(("dtype", "grad"), [(F32, F32), (F32, BF16), (BF16, F32), (BF16, BF16), (F16, F16)], ids=str)
    def test_dtypes_and_patterns(self, device, dtype, grad):
        for n, m in [(0, 0), (2, 4), (1, 1), (1, 16), (3, 5), (7, 256)]:
            cols = m * (5 if m < 256 else 2) or 37
            call = make(seeded(1), (6, cols), (cols,), (2, 3, cols), dtype=dtype, grad=grad)
            stats = self.compare(device, call, hyper(lr=0.3), n, m)
            assert stats[0] == 1
            assert (stats[4] > 0) == (n < m)

    @pytest.mark.parametrize("flags", [{}, {"frozen": True}, {"eps_inside": True}, {"maximize": True}, {"geometric": True},
                                       {"frozen": True, "eps_inside": True, "maximize": True, "geometric": True}], ids=str)  # fmt: skip
    def test_flags_and_numbers(self, device, flags):
        for amsgrad in [False, True]:
            call = make(seeded(3), (7, 40), (3, 8), amsgrad=amsgrad)
            call["grads"][0][0] = 0.0
            call["exp_avg_sqs"][0][0] = 0.0  # v does not change here: log of the smallest denormal
            for numbers in ({}, {"v_step": 7.0}, {"clamp": 0.5}, {"decay": 0.0, "wd": 0.0}, {"eps": 0.0, "beta1": 0.0}):
                for n, m in ((2, 4), (0, 0)):
                    self.compare(device, call, hyper(**numbers), n, m, **flags)

    def test_gradient_scaling_and_skipping(self, device):
        call = make(seeded(4), (5, 16))
        self.compare(device, call, hyper(), 2, 4, scale=torch.tensor([3.0]), found=torch.zeros(1), maximize=True)
        for bad in (1.0, float("nan")):
            stats = self.compare(device, call, hyper(), 2, 4, scale=torch.tensor([3.0]), found=torch.tensor([bad]), geometric=True)
            assert not stats.any()

    @pytest.mark.parametrize("flags", [{}, {"eps_inside": True}, {"frozen": True}, {"maximize": True}], ids=str)
    def test_edge_values(self, device, flags):
        for dtype in [F32, BF16, F16]:
            call = edge(seeded(5), dtype)
            for number in ({}, {"clamp": 1.0, "decay": 0.0}):
                self.compare(device, call, hyper(**number), 2, 4, geometric=True, **flags)
            self.compare(device, call, hyper(), 0, 0, **flags)
            call["params"] = [torch.tensor([0.0, -0.0, 1e-40, 1.0, -1.0]).to(dtype)[torch.randint(5, (60, 24))]]
            call["grads"], call["exp_avgs"], call["exp_avg_sqs"] = ([torch.rand(60, 24)] for _ in range(3))
            assert self.compare(device, call, hyper(), 2, 4, geometric=True, **flags)[:8].isfinite().all()

    @pytest.mark.parametrize("layout", LAYOUTS)
    def test_strided_tensors_are_stepped_in_place(self, device, layout):
        change, groups = LAYOUTS[layout], [(0, 0, (9, 120)), (2, 4, (9, 120)), (3, 5, (9, 120)), (7, 256, (3, 512))]
        for n, m, shape, holds in [*((*group, False) for group in groups), (0, 0, (9, 40), True), (0, 0, (7, 21), True)]:
            call = make(seeded(7), shape, amsgrad=True)
            options = [{"masks": held(seeded(8), call), "fixed": fixed} for fixed in (False, True)] if holds else [{}]
            for names in (tuple(call), ("params",), ("grads",)):
                mixed = {k: [change(x) for x in v] if k in names and k != "steps" else v for k, v in call.items()}
                for option in options:
                    self.compare(device, mixed, hyper(), n, m, geometric=True, **option)

    @pytest.mark.quick(3, per="isa")
    @pytest.mark.parametrize("n, m", [(0, 0), (2, 4), (3, 5), (1, 8), (1, 32)])
    def test_sizes_around_a_tile_at_any_address(self, device, n, m):
        group = m or 1
        sizes = sorted({max(1, around // group + extra) * group for around in self.edges for extra in (-1, 0, 1)})
        for shift, dtype in self.places:
            call = make(seeded(13), *((size,) for size in sizes), (17, 4 * group), dtype=dtype, amsgrad=True)
            same_as_reference(self.step, shifted(copied(call, device), shift), call, hyper(eps=0.0, beta1=0.0), n, m, geometric=shift != 1)
        wide = {
            k: [LAYOUTS["transposed"](x) if x.dim() else x for x in v] for k, v in make(seeded(19), (7, 24 * group), (300, group)).items()
        }
        self.compare(device, wide, hyper(), n, m)

    def test_nothing_is_written_outside_a_parameter(self, device):
        for size in (4, 60, 64, 1020, 1024, 1028):
            for layout in (lambda x: x, lambda x: x.view(-1, 4).t()):
                inner = copied(make(seeded(14), (size,), amsgrad=True), device)
                around = {k: [x.new_full((size + 128,), 5.0) for x in v] for k, v in inner.items() if k != "steps"}
                for name, (x,) in around.items():
                    inner[name] = [layout(x[64:-64].copy_(inner[name][0]))]
                self.run(inner, hyper().to(device), 1, 1)
                for name, (x,) in around.items():
                    assert (x[:64] == 5.0).all(), name
                    assert (x[-64:] == 5.0).all(), name

    def test_expanded_gradients_and_tensors_without_one_row_stride(self, device):
        call = make(seeded(8), (4, 6, 8))
        strange = {k: [x.transpose(0, 1).contiguous().transpose(0, 1) if x.dim() else x for x in v] for k, v in call.items()}
        assert strange["params"][0].stride() == (8, 32, 1)
        self.compare(device, strange, hyper(), 2, 4)
        self.compare(device, {**call, "grads": [torch.randn(1, 1, 8).expand(4, 6, 8)]}, hyper(), 2, 4)
        conv = make(torch.Generator(), (2, 3, 4, 4))
        last = {k: [x.to(memory_format=torch.channels_last) if x.dim() else x for x in v] for k, v in conv.items()}
        self.compare(device, last, hyper(), 0, 0)
        self.compare(device, {**conv, "params": last["params"], "exp_avgs": last["exp_avgs"]}, hyper(), 0, 0)
        minus = torch.randn(4, 6, 8)
        negative = {**copied(call, device), "grads": [torch._neg_view(minus.to(device))]}
        same_as_reference(self.step, negative, {**call, "grads": [-minus]}, hyper(), 2, 4)

    def test_scalars_empty_tensors_and_no_tensors(self, device):
        assert self.compare(device, make(seeded(9), (), (0, 8), (3, 0), (5,)), hyper(), 0, 0, geometric=True)[0] == 1
        self.compare(device, make(torch.Generator(), (0, 8), (3, 0)), hyper(), 2, 4)
        self.compare(device, make(torch.Generator()), hyper(), 2, 4)
        call = make(seeded(9), (5,))
        self.compare(device, {**call, "steps": [torch.ones(1, 1)]}, hyper(), 0, 0)

    def test_steps_with_late_counts_and_new_gradients(self, device):
        call = make(seeded(11), (8, 16), (3, 8), (2, 4))
        call["steps"] = [torch.tensor(99_990.0), torch.tensor(0.0), torch.tensor(2.0**24)]
        ours, gen, kept = copied(call, device), seeded(12), []
        for i in range(10):
            theirs = copied(ours, "cpu")
            theirs["grads"] = [torch.randn(x.shape, generator=gen) for x in theirs["params"]]
            ours["grads"] = copied(theirs, device)["grads"]
            kept += ours["grads"] if i % 2 else []  # so that addresses are met again, and new ones
            same_as_reference(self.step, ours, theirs, hyper(), 2, 4, found=torch.tensor([float(i % 5 == 4)]))

    @pytest.mark.parametrize("fixed", [False, True])
    @pytest.mark.parametrize(("dtype", "grad"), [(F32, F32), (F32, BF16), (BF16, BF16), (F16, F32)], ids=str)
    def test_held_masks(self, device, dtype, grad, fixed):
        """Rows of whole bytes and others, flags of every kind, spare bits set or not; no bit flips."""
        shapes = (6, 40), (5, 13), (1, 27), (19,), (2, 3, 16), (2, 5, 7), (70, 72), (0, 8), (3, 0)
        every = {"frozen": True, "eps_inside": True, "maximize": True, "geometric": True}
        for i, flags in enumerate(({}, {"geometric": True}, {"frozen": True}, {"maximize": True, "eps_inside": True}, every)):
            call = make(seeded(24 + i), *shapes, dtype=dtype, grad=grad, amsgrad=i % 2 == 1)
            scale, found = (torch.tensor([3.0]), torch.zeros(1)) if i > 1 else (None, None)
            masks, numbers = held(seeded(i), call, spare=0xFF * (i % 2)), {"clamp": 0.5 * (i == 2), "decay": 2e-4 * (i != 1), "v_step": 7.0}
            options = {"scale": scale, "found": found, "masks": masks, "fixed": fixed, **flags}
            stats = self.compare(device, call, hyper(lr=0.3, **numbers), 0, 0, **options)
            assert stats[0] == 1 and stats[4] == 0 and stats[5] > 0 and (stats[6] > 0) == (not fixed)
        assert not self.compare(device, call, hyper(), 0, 0, masks=masks, fixed=fixed, found=torch.ones(1)).any()

    def test_what_lies_outside_a_fixed_mask_is_held_at_zero(self, device):
        """Whatever the gradients and the weights are there; -0.0 becomes +0.0."""
        for dtype in (F32, BF16, F16):
            call = edge(seeded(5), dtype)
            masks = held(seeded(6), call)
            for fixed in (False, True):
                self.compare(device, call, hyper(clamp=1.0), 0, 0, geometric=True, masks=masks, fixed=fixed)
                self.compare(device, call, hyper(eps=0.0), 0, 0, frozen=True, masks=masks, fixed=fixed)
            call = make(seeded(25), (9, 40), (3, 9), dtype=dtype)
            masks, keep = held(seeded(26), call), held(seeded(26), call)
            for x, bits in zip(call["grads"], keep, strict=True):
                outside = (bits.repeat_interleave(8, -1)[:, : x.shape[1]] >> torch.arange(x.shape[1]) % 8 & 1) == 0
                x[outside] = float("nan")
                x[0] = -x[0]
            ours = copied(call, device)
            stats = same_as_reference(self.step, ours, call, hyper(eps=1e-8), 0, 0, masks=masks, fixed=True)
            assert stats[[1, 5, 7, 8]].isfinite().all() and stats[6] == 0
            for p, m in zip(ours["params"], ours["exp_avgs"], strict=True):
                assert p.isfinite().all() and m.isfinite().all()
                assert not p[p == 0].signbit().any() and 0.3 < (p == 0).float().mean() < 0.7

    def test_held_masks_and_states_in_bf16_of_sizes_around_a_tile_at_any_address(self, device):
        sizes = [around + extra for around in (64, 512, 1024, 4096) for extra in (-3, -1, 0, 1, 8)]
        for shift, dtype in ((0, F32), (1, BF16), (4, F32)):
            call = make(seeded(13), *((size,) for size in sizes), (17, 1032), (33, 130), dtype=dtype)
            narrow = {k: [x.to(BF16) if "exp_avg" in k else x for x in v] for k, v in call.items()}
            masks = shifted({"masks": [x.to(device) for x in held(seeded(14), call)]}, shift)["masks"]
            for flag in (False, True):
                ours = shifted(copied(call, device), shift)
                same_as_reference(self.step, ours, call, hyper(), 0, 0, masks=masks, fixed=flag)
                ours = shifted(copied(narrow, device), shift)
                same_as_reference(self.step, ours, narrow, hyper(), 0, 0, stochastic=flag, seed=9)

    @pytest.mark.quick(1, per="stochastic")
    @pytest.mark.parametrize("stochastic", [False, True])
    @pytest.mark.parametrize(("dtype", "grad"), [(BF16, BF16), (F32, F32), (F32, BF16), (F16, F32)], ids=str)
    def test_states_in_bf16(self, device, dtype, grad, stochastic):
        """Rounded to nearest or by random words, under every pattern, flag and layout; nothing else of the step changes."""
        every = {"frozen": True, "eps_inside": True, "maximize": True, "geometric": True}
        seeds = iter((0, 1, -(2**63), 2**63 - 1, 5, 2**40 + 3))
        for n, m in [(0, 0), (2, 4), (1, 16), (3, 5), (7, 256)]:
            cols = m * (5 if m < 256 else 2) or 37
            options = {"stochastic": stochastic, "seed": next(seeds)}
            call = make(seeded(1), (6, cols), (cols,), (2, 3, cols), (0, cols), dtype=dtype, grad=grad, amsgrad=m == 4, state=BF16)
            self.compare(device, call, hyper(lr=0.3), n, m, **options)
            self.compare(device, call, hyper(v_step=7.0), n, m, scale=torch.tensor([3.0]), found=torch.zeros(1), **every, **options)
            strided = {k: [LAYOUTS["transposed"](x) if x.dim() == 2 else x for x in v] for k, v in call.items()}
            self.compare(device, strided, hyper(), n, m, geometric=True, **options)
            assert not self.compare(device, call, hyper(), n, m, found=torch.ones(1), **options).any()
        call = make(seeded(2), (7, 40), (5, 13), (19,), dtype=dtype, grad=grad, amsgrad=True, state=BF16)
        self.compare(device, call, hyper(), 0, 0, masks=held(seeded(3), call), fixed=True, **options)
        call = edge(seeded(5), dtype, BF16)
        for flags in ({}, {"eps_inside": True}, {"maximize": True, "geometric": True}):
            self.compare(device, call, hyper(clamp=1.0), 2, 4, **options, **flags)

    def test_random_roundings_are_those_of_the_element_the_step_and_the_param(self, device):
        """The same words twice, others for another step, param or seed; unbiased."""
        shape = (16, 64)
        call = {k: [x.clone() for x in xs * 2] for k, xs in make(seeded(1), shape, state=BF16).items()}
        h, rest = hyper(decay=0.0).to(device), (0, 0, False, False, False, False, None, None, None, False, True)

        def moments(seed: int = 0, step: float = 0.0) -> list[Tensor]:
            ours = copied({**call, "steps": [torch.tensor(step)] * 2}, device)
            self.step(*ours.values(), h, *rest, seed)
            return [x.cpu().float() for x in (*ours["exp_avgs"], *ours["exp_avg_sqs"])]

        first = moments()
        assert_equal_bits(moments(), first)
        assert not any(map(torch.equal, first, moments(seed=1))) and not any(map(torch.equal, first, moments(step=1.0)))
        assert not torch.equal(first[0], first[1]) and not torch.equal(first[2], first[3])
        exact = 0.9 * call["exp_avgs"][0].float() + 0.1 * call["grads"][0].float()
        drawn = torch.stack([moments(seed=i)[0] for i in range(24)])
        unit = torch.ldexp(torch.ones_like(exact), torch.frexp(exact).exponent - 8)  # of the last of bf16's eight bits
        assert (drawn - exact).abs().lt(unit).all() and (drawn != exact.to(BF16)).any(0).float().mean() > 0.5
        assert ((drawn - exact) / unit).mean().abs() < 5 * 0.5 / drawn.numel() ** 0.5

    def test_every_kind_in_one_call(self, device):
        """Aligned, unaligned, transposed and half-precision params, twice."""
        parts = [make(seeded(i), (8, 16), dtype=dtype) for i, dtype in enumerate((F32, F32, F32, BF16, F16))]
        parts[2] = {k: [LAYOUTS["transposed"](x) if x.dim() else x for x in v] for k, v in parts[2].items()}
        for step in (2.0, 5.0):  # counts of their own, though a table may be in another order
            parts[2]["steps"][0].fill_(step)
            ours = [shifted(copied(x, device), 1) if i == 1 else copied(x, device) for i, x in enumerate(parts)]
            call, mixed = ({k: [x[k][0] for x in side for _ in x[k][:1]] for k in parts[0]} for side in (parts, ours))
            again = copied(mixed)
            stats = same_as_reference(self.step, mixed, call, hyper(), 2, 4, geometric=True)
            assert_equal_bits(self.run(again, hyper().to(device), geometric=True).cpu(), stats)
            assert_equal_bits(again, mixed)


class GpuAdamWSuite(AdamWSuite):
    """Also step counts on the host, graphs, and declined calls."""

    @pytest.mark.parametrize("steps", [(7.0, 7.0, 7.0), (7.0, 8.0, 0.0)])
    def test_counts_and_numbers_on_the_host(self, device, steps, monkeypatch):
        call = make(seeded(15), (8, 16), (3, 8), (4,))
        call["params"][0] = LAYOUTS["transposed"](call["params"][0])  # the last row of a table
        call["steps"] = [torch.tensor(t) for t in steps]
        monkeypatch.setattr(shared, "on_host", lambda x, device: x.numel() == 9 or (x.is_cpu and x.dim() == 0))
        for found in (None, torch.zeros(1), torch.ones(1)):
            for frozen in (False, True):
                ours = {**copied(call, device), "steps": copied(call)["steps"]}
                same_as_reference(self.step, ours, call, hyper(lr=-0.1, v_step=3.0, clamp=0.5), 2, 4, found=found, frozen=frozen)
        narrow = {k: [x.to(BF16) if "exp_avg" in k else x for x in v] for k, v in call.items()}
        ours = {**copied(narrow, device), "steps": copied(call)["steps"]}
        same_as_reference(self.step, ours, narrow, hyper(), 2, 4, stochastic=True, seed=3)
        ours = {**copied(call, device), "steps": copied(call)["steps"]}
        monkeypatch.setattr(streams, "capturing", lambda device: True)
        with pytest.raises(BackendError, match="capturable=True"):
            self.run(ours, hyper().to(device))
        assert_equal_bits(ours, call)

    @pytest.mark.gpu
    def test_captured_steps_are_replayed(self):
        call = make(seeded(16), (8, 16), (300, 40))
        ours, theirs, h = copied(call, "cuda"), copied(call, "cuda"), hyper().to("cuda")
        self.run(ours, h)  # compiles, or knows the addresses
        ours.update({k: [x.copy_(y) for x, y in zip(ours[k], call[k], strict=True)] for k in call})
        graph, read = torch.cuda.CUDAGraph(), ours["grads"]  # by each replay, so they must stay
        with torch.cuda.graph(graph):
            ours["grads"] = [g * 1.0 for g in read]
            stats = self.run(ours, h)
        for lr in (1e-2, 1e-2, 3e-2):
            h[0] = lr  # read at each replay
            graph.replay()
            assert_equal_bits(stats, self.run(theirs, h))
        ours.pop("grads"), theirs.pop("grads")
        assert_equal_bits(ours, theirs)

    def test_declines_float64(self, device, ours):
        def ask(**kinds: torch.dtype) -> tuple[bool, str]:
            x = {name: [torch.zeros(4, dtype=kinds.get(name, F32), device=device)] for name in ("params", "grads")}
            state, options = [torch.zeros(4, device=device)], (hyper(), 2, 4, False, False, False, False, None, None)
            return ours("nm_masked_adamw_").supports(x["params"], x["grads"], state, state, [], [torch.tensor(0.0)], *options)

        assert ask()[0]
        for name in ("params", "grads"):
            can, why = ask(**{name: torch.float64})
            assert not can and "float64" in why
