"""What is a product, how it is called in the table, and that all ways of doing it do the same."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import nmkernels as nm
from nmkernels.autograd import choice
from nmkernels.autograd.choice import Product, choose, product
from nmkernels.autograd.choice.operands import operands
from nmkernels.testing import no_worse
from python_tests.autograd.choice.products import CPU, FPROP

# ---- what a product is


@pytest.mark.parametrize(
    "change",
    [{"role": "fwd"}, {"forms": ()}, {"forms": ("dense", "tiles")}, {"rule": "exact"}, {"role": "wgrad"}, {"role": "wgrad", "rule": "x"}],
)
def test_what_is_no_product_raises(change: dict[str, Any]) -> None:
    with pytest.raises(nm.NMError, match="choice: "):
        choose(FPROP._replace(**change))


def test_every_part_of_the_key_matters(monkeypatch: pytest.MonkeyPatch) -> None:
    changes: list[dict[str, Any]] = [
        {"role": "dgrad"}, {"tokens": 33}, {"tokens": 16}, {"rows": 17}, {"cols": 36}, {"n": 1}, {"m": 8}, {"dtype": torch.bfloat16},
        {"forms": ("rows",)}, {"forms": ("dense", "rows", "columns")}, {"changing": True},
    ]  # fmt: skip
    keys = [choice.key(FPROP), *(choice.key(FPROP._replace(**change)) for change in changes)]
    wgrad = FPROP._replace(role="wgrad", rule="exact")
    keys += [choice.key(wgrad), choice.key(wgrad._replace(rule="approx"))]
    for name in ("device_name", "versions"):
        with monkeypatch.context() as m:
            m.setattr(product, name, lambda _: "another")
            keys.append(choice.key(FPROP))
    assert len(set(keys)) == len(keys)
    assert choice.key(FPROP._replace(tokens=17)) == choice.key(FPROP._replace(tokens=32)) == choice.key(FPROP)


def test_what_a_machine_is_called(monkeypatch: pytest.MonkeyPatch) -> None:
    before = product.device_name(CPU)
    assert f", {torch.get_num_threads()} threads, " in before
    monkeypatch.setattr(torch, "get_num_threads", lambda: 77)
    assert ", 77 threads, " in product.device_name(CPU)
    monkeypatch.setattr(product, "_cpu_model", lambda: "a CPU")
    assert product.device_name(CPU).startswith("a CPU, 77 threads")
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "a GPU")
    assert product.device_name(torch.device("cuda")) == "a GPU"
    versions = product.versions("cpu")
    assert f"nmkernels {nm.__version__}" in versions and f"torch {torch.__version__}" in versions and "triton" not in versions


@pytest.mark.parametrize(("tokens", "expected"), [(0, 1), (1, 1), (2, 2), (3, 4), (4, 4), (5, 8), (8192, 8192), (8193, 16384)])
def test_token_classes(tokens: int, expected: int) -> None:
    assert choice.token_class(tokens) == expected


# ---- the candidates compute the same


@pytest.mark.parametrize("forms", [("dense", "rows", "columns"), ("dense", "rows:mma.sp", "columns:mma.sp"), ("rows",), ("columns",)])
@pytest.mark.parametrize("role", ["fprop", "dgrad"])
def test_every_way_is_the_same_product(role: str, forms: tuple[str, ...]) -> None:
    p = Product(role, 20, 64, 128, 2, 4, torch.bfloat16, CPU, forms)
    names = [name for name in choice.candidates.names(p) if " " not in name or name.startswith("cpu")]
    other, operand, _ = operands(p)
    w = operand["dense"]
    assert nm.ops.is_nm(w, "2:4")
    exact, theirs = (other.to(d) @ (w.t() if role == "fprop" else w).to(d) for d in (torch.float64, torch.bfloat16))
    if role == "fprop" and forms == ("columns",):
        return  # nobody has those alone
    for name in names:
        form = name.partition(" ")[2]
        if ":" in form and form.startswith("columns" if role == "dgrad" else "rows"):
            assert "metadata" in choice.candidates.declined(p, name, choice.candidates.arguments(p, form, operand[form], other))
        y = choice.call(name, p, other, operand)
        assert y.dtype == torch.bfloat16
        no_worse(y, theirs, exact)
        out = torch.full_like(y, torch.nan)
        assert choice.call(name, p, other, operand, out=out).equal(y) and out.equal(y)


@pytest.mark.parametrize("pattern", [(1, 4), (2, 8), (1, 16)])
def test_sparser_patterns_are_2_4_on_tensor_cores(pattern: tuple[int, int]) -> None:
    p = Product("fprop", 20, 64, 128, *pattern, torch.bfloat16, CPU, ("dense", "rows:mma.sp"))
    x, operand, _ = operands(p)
    assert choice.forms(64, 128, *pattern, torch.bfloat16, "cuda") == ("dense", "rows", "rows:mma.sp")
    torch.testing.assert_close(choice.call("auto", p, x, operand), choice.call("dense", p, x, operand))


def test_a_bias_is_added_by_every_way() -> None:
    other, operand, _ = operands(FPROP)
    bias = torch.randn(16)
    expected = other @ operand["dense"].t() + bias
    for name in ("dense", "expand", "auto", "cpu rows"):
        torch.testing.assert_close(choice.call(name, FPROP, other, operand, bias=bias), expected)


@pytest.mark.parametrize("tokens", [20, 22])
@pytest.mark.parametrize("rule", ["exact", "approx", "magnitude"])
def test_every_way_of_wgrad_multiplies_the_same_estimate(rule: str, tokens: int) -> None:
    p = Product("wgrad", tokens, 16, 32, 2, 4, torch.float32, CPU, ("dense", "rows"), rule)
    x, g, seed = operands(p)
    dense, packed = choice.estimate(p, g, seed), choice.pack_estimate(p, g, seed)
    assert dense.shape == (16, tokens)
    assert torch.equal(dense, torch.ops.nmkernels.nm_decompress(*packed, 2, 4, tokens))
    if rule != "magnitude":
        assert torch.equal(dense, nm.ops.mvue(g, "2:4", dim=0, seed=seed, method=rule).t())
    else:
        assert torch.equal(dense[:, :20], nm.ops.prune(g[:20].t().contiguous(), "2:4"))
    for name in ("dense", "expand", "auto", "cpu rows"):
        torch.testing.assert_close(choice.call(name, p, x, g, seed=seed), dense @ x)


def test_an_estimate_in_the_order_of_tensor_cores() -> None:
    p = Product("wgrad", 64, 32, 48, 2, 4, torch.bfloat16, CPU, ("dense", "rows:mma.sp"), "exact")
    x, g, seed = operands(p)
    assert choice.pack_estimate(p, g, seed, "rows:mma.sp")[1].dtype == torch.int32
    torch.testing.assert_close(choice.call("auto", p, x, g, seed=seed), choice.call("dense", p, x, g, seed=seed), atol=0.1, rtol=0.02)


def test_a_backend_that_declines_now_is_replaced(mine: list[str]) -> None:
    other, operand, _ = operands(FPROP)
    mine[0] = "declines"
    torch.testing.assert_close(choice.call("mine rows", FPROP, other, operand), other @ operand["dense"].t())
    torch.testing.assert_close(choice.call("nobody rows", FPROP, other, operand), other @ operand["dense"].t())


def test_who_takes_part() -> None:
    names = choice.candidates.names(FPROP)
    assert names[0] == "dense" and {"cpu rows", "triton rows", "cuda rows"} <= set(names)
    assert not any(name.startswith(("reference", "cuda-emulated", "expand", "auto")) for name in names)
    assert choice.candidates.names(FPROP._replace(forms=("rows",)))[:2] == ["auto", "expand"]
    columns = choice.candidates.names(FPROP._replace(role="dgrad", forms=("dense", "columns")))
    assert "cpu columns" in columns and not any(name.endswith("rows") for name in columns)
