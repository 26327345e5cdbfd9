"""The same job on every device: exact ops have the bits of the reference on the CPU, training agrees with it, files move across."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

import nmkernels as nm
from nmkernels import ops, reference
from nmkernels.testing import assert_equal_bits, cases

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
DTYPES = [torch.float32, torch.bfloat16]
SEED = torch.tensor([7, 3])


def exact(x: Tensor, p: nm.Pattern, module: object) -> list[Tensor]:
    """Every exact op of one input; ``module`` is the reference or the raw ops, which take the same arguments."""
    prefix = "" if module is reference else "nm_"

    def call(name: str, *args: object) -> object:
        return getattr(module, prefix + name)(*args)

    seed = SEED.to(x.device)
    values, indices = call("compress", x, p.n, p.m)
    results = [call(name, x, p.n, p.m) for name in ("mask", "prune", "soft_threshold")]
    if x.dim() > 1 and x.shape[-2] % p.m == 0 and (p.n, p.m) == (2, 4):
        results.append(call("transposable_mask", x, p.n, p.m))
    results += [values, indices, call("decompress", values, indices, p.n, p.m, x.shape[-1])]
    results += [call("mvue", x, p.n, p.m, -1, seed, "exact"), *call("mvue_compress", x, p.n, p.m, -1, seed, "exact")]
    return results


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("pattern", ["2:4", "1:8"])
def test_exact_ops_have_the_same_bits(device: str, dtype: torch.dtype, pattern: str) -> None:
    p = nm.Pattern(pattern)
    for case in cases(pattern, dtype):
        want = exact(case.x, p, reference)
        got = exact(case.x.to(device), p, torch.ops.nmkernels)
        for a, b in zip(got, want, strict=True):
            assert_equal_bits(a.cpu(), b)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("counted_on_the_host", [True, False])
def test_masked_adamw_has_the_same_bits(device: str, counted_on_the_host: bool) -> None:
    shape = (24, 32)
    params, grads, first = (torch.randn(shape) for _ in range(3))
    second = torch.rand(shape)
    hyper = torch.tensor([1e-2, 0.9, 0.99, 1e-8, 0.1, 1e-3, 0, 2.0, 0], dtype=torch.float64)
    want = [t.clone() for t in (params, first, second)]
    reference.masked_adamw_(
        [want[0]], [grads], [want[1]], [want[2]], [], [torch.tensor(3.0)], [], hyper, 2, 4, False, False, False, False, None, None
    )
    got = [t.to(device) for t in (params.clone(), first.clone(), second.clone())]
    host = "cpu" if counted_on_the_host else device
    step = torch.tensor(3.0, device=host)
    ops.masked_adamw_([got[0]], [grads.to(device)], [got[1]], [got[2]], [step], hyper.to(host), "2:4")
    for a, b in zip([*got, step], [*want, torch.tensor(4.0)], strict=True):
        assert_equal_bits(a.cpu(), b)


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32))


def trained(device: str, capturable: bool) -> nn.Module:
    """A model after twelve steps of STEP 2:4 that cross the switch, finished."""
    sparse = model().to(device)
    recipe = nm.recipes.STEP("2:4", t_min=3, t_max=5, decay=1e-4)
    handle = nm.sparsify_(sparse, recipe)
    optimizer = handle.attach(recipe.optimizer(sparse.parameters(), lr=1e-2, capturable=capturable))
    gen = torch.Generator().manual_seed(1)
    for _ in range(12):
        x = torch.randn(16, 32, generator=gen).to(device)
        optimizer.zero_grad()
        nn.functional.mse_loss(sparse(x), x).backward()
        optimizer.step()
    assert handle.metrics()["phase"].item() == 1
    return handle.finish()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("capturable", [False, True])
def test_training_agrees_and_the_file_moves_across(device: str, capturable: bool, tmp_path) -> None:
    if capturable and device == "cpu":
        pytest.skip("torch has capturable optimizers on accelerators only")
    sparse = trained(device, capturable)
    want = trained("cpu", False)
    for a, b in zip(sparse.parameters(), want.parameters(), strict=True):
        torch.testing.assert_close(a.detach().cpu(), b.detach(), atol=1e-4, rtol=1e-4)
    x = torch.randn(4, 32)
    dense = copy.deepcopy(sparse)(x.to(device))
    nm.compress_(sparse)
    torch.testing.assert_close(sparse(x.to(device)), dense, atol=1e-5, rtol=1e-4)
    nm.save_compressed(sparse, tmp_path / "m.safetensors")
    again = nm.load_compressed(model(), tmp_path / "m.safetensors")
    torch.testing.assert_close(again(x), dense.cpu(), atol=1e-5, rtol=1e-4)
