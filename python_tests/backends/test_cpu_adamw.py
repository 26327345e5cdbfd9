"""The compiled AdamW equals the reference: the shared suite, float64 gradients, and what threads and strips may not change."""

from __future__ import annotations

from importlib import import_module
from itertools import product

import pytest
import torch

from nmkernels.capability import compiled_core
from nmkernels.dispatch import implementations
from nmkernels.testing import assert_equal_bits
from python_tests.backends.adamw_calls import copied, held, hyper, make, seeded
from python_tests.backends.adamw_suite import AdamWSuite


class TestAgainstTheReference(AdamWSuite):
    """Also strips of 64, blocks of 256, tiles of 4096."""

    edges = 0, 64, 256, 4096
    places = tuple(product((0, 1, 3), (torch.float32, torch.bfloat16)))

    @pytest.fixture(autouse=True)
    def compiled(self, cpu):
        self.step = cpu("nm_masked_adamw_")

    def test_float64_gradients(self, device):
        for dtype in (torch.float32, torch.bfloat16, torch.float16):
            self.test_dtypes_and_patterns(device, dtype, torch.float64)

    def test_sums_that_only_doubles_hold(self, device):
        """A few of these terms already exceed fp32; the second row is ordinary."""
        for n, m in [(0, 0), (2, 4), (1, 8), (3, 5)]:
            call = make(seeded(17), (2, 320))
            call["params"][0][0], call["grads"][0][0], call["exp_avg_sqs"][0][0] = -3e38, 3e18, 3e38
            stats = self.compare(device, call, hyper(beta2=0.5, decay=0.0), n, m)
            assert stats[1] > 1e40 and stats.isfinite().all() and (not m or stats[5] > 1e40)

    def test_the_sum_of_logarithms_keeps_to_its_range(self, device):
        """Changes from denormal to huge, and so many alike that a plain GEMM of them would leave the doubles."""
        for change in (0.0, 1e-30, 3e-5, 1.9999999, 1e19):
            call = make(seeded(15), (3, 8192))
            call["exp_avg_sqs"] = [torch.zeros(3, 8192)]
            call["grads"] = [torch.full((3, 8192), change).sqrt()]
            self.compare(device, call, hyper(beta2=0.0), 2, 4, geometric=True)
        for bad in (float("inf"), float("nan")):
            call["grads"][0][1, 5] = bad
            assert not self.compare(device, call, hyper(), 2, 4, geometric=True)[2].isfinite()


@pytest.mark.skipif(not compiled_core().ok, reason=compiled_core().reason)
def test_statistics_have_equal_bits_on_every_isa():
    core = import_module("nmkernels._C")
    run = next(i.fn for i in implementations("nm_masked_adamw_") if i.backend == "cpu")
    call = make(seeded(16), (40, 104), (5, 8), (7, 24), (4, 1028), amsgrad=True)
    call = {k: [x.t().contiguous().t() if x.shape == (7, 24) else x for x in v] for k, v in call.items()}
    masks = held(seeded(2), call)
    before, results = core.isa(), []
    for isa in core.isas():
        core.use_isa(isa)
        ours, theirs = copied(call), copied(call)
        stats = run(*theirs.values(), hyper(), 0, 0, False, False, False, True, None, None, masks, True)
        results.append((run(*ours.values(), hyper(), 2, 4, False, False, False, True, None, None), ours, stats, theirs))
    core.use_isa(before)
    for other in results[1:]:
        assert_equal_bits(other, results[0])


def test_same_bits_on_any_number_of_threads(cpu, on_threads):
    call = make(seeded(10), (300, 104), (5, 8), (64, 52))
    call = {k: [x.t().contiguous().t() if x.shape == (64, 52) else x for x in v] for k, v in call.items()}

    def step():
        ours = copied(call)
        return cpu("nm_masked_adamw_")(*ours.values(), hyper(), 2, 4, False, False, False, True, None, None), ours

    one, two, three = on_threads(step)
    assert_equal_bits([two, three], [one, one])


def test_declines_float64_parameters_only(cpu):
    entry = next(i for i in implementations("nm_masked_adamw_") if i.backend == "cpu")
    rest = ([torch.zeros(4)], [torch.zeros(4)], [], [torch.tensor(0.0)], hyper(), 2, 4, False, False, False, False, None, None)
    assert entry.supports([torch.zeros(4)], [torch.zeros(4, dtype=torch.float64)], *rest)[0]
    can, why = entry.supports([torch.zeros(4, dtype=torch.float64)], [torch.zeros(4)], *rest)
    assert not can
    assert "float64" in why
