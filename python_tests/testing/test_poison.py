"""poison shows unwritten memory, and is gone afterwards."""

from __future__ import annotations

import pytest
import torch

from nmkernels import testing


def test_every_maker_is_poisoned_until_the_end() -> None:
    x, before = torch.zeros(3, 4), torch.empty
    with pytest.raises(KeyError), testing.poison():
        made = [torch.empty_like(x), torch.empty_strided((3, 4), (1, 3)), x.new_empty(5), x.new_empty_strided((2,), (3,))]
        made += [torch.empty(4, dtype=d) for d in (torch.float32, torch.bfloat16, torch.float16, torch.float64)]
        assert all(bool(y.isnan().all()) for y in made)
        assert torch.empty(3, dtype=torch.int64).tolist() == [-1] * 3
        assert torch.empty((), device="meta").is_meta and torch.empty(0).numel() == 0
        assert torch.nn.Parameter(x).new_empty(2).isnan().all()
        raise KeyError
    assert torch.empty is before and not hasattr(torch.Tensor.new_empty, "__wrapped__")


def test_fill_poison_reaches_the_whole_storage() -> None:
    x = torch.zeros(6)
    assert testing.fill_poison(x[1:3]).isnan().all() and x.isnan().all()


def test_the_fixture(poison: None) -> None:
    assert torch.empty(1).isnan().all()
