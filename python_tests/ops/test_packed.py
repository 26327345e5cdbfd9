"""pack and what it returns: thin over the raw op, frozen, pytrees, usable under torch.compile. relayout, and GEMMs of its results."""

from __future__ import annotations

import copy
import pickle
import sys

import pytest
import torch
from torch.utils import _pytree as pytree

from nmkernels import Compressed, CompressedLinear, Pattern, autograd, dispatch, ops, reference, testing
from nmkernels.backends import shared
from nmkernels.ops import DeviceCompressed, Packed
from python_tests.for_each import for_each

BF16 = torch.bfloat16
linear_ops, autograd_linear = (sys.modules[f.__module__] for f in (ops.linear, autograd.linear_compressed))
W = torch.randn(64, 128, generator=torch.Generator().manual_seed(4))


def both(layout: str = "canonical", **kwargs: object) -> Packed:
    return ops.pack(W, "2:4", "transposable", columns=True, dtype=BF16, layout=layout, **kwargs)


@for_each("layout", ["canonical", "mma.sp", "wgmma.sp"])
def test_rows_and_columns_are_one_weight(layout: str) -> None:
    p, expected = both(layout), (W * ops.transposable_mask(W, "2:4")).to(BF16)
    assert p.rows.shape == (64, 128) and p.columns.shape == (128, 64) and isinstance(p.rows.shape, torch.Size)
    assert torch.equal(p.rows.dense(), expected) and torch.equal(p.columns.dense(), expected.T)
    assert type(p.rows) is type(p.columns) is (Compressed if layout == "canonical" else DeviceCompressed)


def test_one_operand_is_compress_and_a_tensor_is_a_mask() -> None:
    rows, columns = ops.pack(W, "2:4"), ops.pack(W, "1:8", rows=False, columns=True)
    assert rows.columns is None and columns.rows is None
    testing.assert_equal_bits((rows.rows, columns.columns), (ops.compress(W, "2:4"), ops.compress(W.T, "1:8")))
    keep = ops.transposable_mask(W, "2:4") & (W > 0)
    p = ops.pack(W, "2:4", keep, columns=True)
    testing.assert_equal_bits(ops.pack(W, "2:4", keep, columns=True, check=False), p)
    testing.assert_equal_bits((p.rows, p.columns), (ops.compress(W, "2:4", keep), ops.compress(W.T, "2:4", keep.T)))


def test_device_forms_come_back_canonical() -> None:
    plain = both()
    for layout in ("mma.sp", "wgmma.sp"):
        p = both(layout)
        testing.assert_equal_bits((p.rows.compressed(), p.columns.compressed()), (plain.rows, plain.columns))
        assert p.rows.compressed().values is p.rows.values and p.rows.pattern == Pattern("2:4")
        baseline = DeviceCompressed(p.rows.values, p.rows.meta, layout, "2:4", (64, 128))  # type: ignore[arg-type]
        testing.assert_equal_bits(baseline, p.rows)
        assert baseline != p.rows


@for_each("layout", ["canonical", "mma.sp"])
def test_pytrees_and_copies(layout: str) -> None:
    p = both(layout)
    leaves, spec = pytree.tree_flatten(p)
    assert len(leaves) == 5 and leaves[0] is p.rows.values
    testing.assert_equal_bits(pytree.tree_unflatten(leaves, spec), p)
    assert len(pytree.tree_leaves(ops.pack(W, "2:4"))) == 4  # None is a leaf of torch's
    assert pytree.treespec_loads(pytree.treespec_dumps(spec)) == spec
    for baseline in (copy.deepcopy(p), pickle.loads(pickle.dumps(p))):
        testing.assert_equal_bits(baseline, p)
        assert baseline.rows.values is not p.rows.values


@pytest.mark.filterwarnings("error")
@for_each("layout", ["canonical", "wgmma.sp"])
def test_compiles_in_one_graph(layout: str) -> None:
    torch._dynamo.reset()

    @torch.compile(fullgraph=True, backend="aot_eager")
    def step(w: torch.Tensor) -> Packed:
        return ops.pack(w * 2, "2:4", "transposable", columns=True, dtype=BF16, layout=layout)

    made = step(W)
    testing.assert_equal_bits(made, ops.pack(W * 2, "2:4", "transposable", columns=True, dtype=BF16, layout=layout))
    assert type(made) is Packed and made.columns.shape == (128, 64)


def test_a_weight_of_transposed_memory_is_not_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    """The columns of an (in, out) weight seen as (out, in) are contiguous already."""
    w = W.T.contiguous().T
    copies: list[torch.Size] = []
    contiguous = torch.Tensor.contiguous

    def watched(x: torch.Tensor, *args: object) -> torch.Tensor:
        if not x.is_contiguous():
            copies.append(x.shape)
        return contiguous(x, *args)

    monkeypatch.setenv(dispatch.ENV, "cpu")
    monkeypatch.setattr(torch.Tensor, "contiguous", watched)
    ops.pack(w, "2:4", rows=False, columns=True)
    assert copies == []


@for_each("pattern", ["2:4", "1:4", "2:8", "1:16", "1:64"])
@for_each("layout", ["mma.sp", "wgmma.sp"])
def test_relayout(pattern: str, layout: str) -> None:
    w = ops.prune(torch.randn(64, 192), pattern).bfloat16()
    c = ops.compress(w, pattern)
    d = ops.relayout(c, layout)
    assert d.layout == layout and str(d.pattern) == "2:4"
    assert (d.values is c.values) == (pattern == "2:4")
    testing.assert_equal_bits(d.dense(), w)
    x, r = torch.randn(5, 192).bfloat16(), torch.randn(5, 64).bfloat16()
    for activation in (None, "gelu", "relu2"):
        expected = reference.linear(x, *reference.compress(w, 2, 4), 2, 4, 192, r[0], activation or "", r)
        testing.assert_equal_bits(ops.linear(x, d, r[0], activation, r), expected)
    t = torch.randn(192, 8).bfloat16()
    testing.assert_equal_bits(ops.linear_wgrad(d, t), reference.linear_wgrad(*reference.compress(w, 2, 4), 2, 4, 192, t))


class OnGpu:
    """What the choice of an operand asks of an input on a GPU that is not there."""

    is_cuda, device = True, torch.device("cuda", 0)

    def __init__(self, tokens: int, cols: int = 192) -> None:
        self.numel = lambda: tokens * cols


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> dict[str, object]:
    """Settings of a GPU that is not there: the layout of its tensor cores, and whether a graph is captured."""
    state: dict[str, object] = {"layout": "wgmma.sp", "captured": False}
    monkeypatch.delenv(dispatch.ENV, raising=False)
    monkeypatch.setattr(linear_ops, "Tensor", OnGpu)
    monkeypatch.setattr(linear_ops, "preferred_layout", lambda op, device: state["layout"])
    monkeypatch.setattr(linear_ops, "capturing", lambda device: state["captured"])
    return state


def weight_of(rows: int = 64, cols: int = 192, pattern: str = "2:4", dtype: torch.dtype = BF16) -> Compressed:
    return ops.compress(torch.randn(rows, cols).to(dtype), pattern)


@pytest.mark.parametrize(("layout", "few"), [("wgmma.sp", 1), ("mma.sp", 16)])
def test_more_than_a_few_tokens_are_multiplied_by_metadata(layout: str, few: int, gpu: dict[str, object]) -> None:
    """Made once, and kept with the weight, whose values it shares."""
    gpu["layout"], c = layout, weight_of()
    assert linear_ops.operand_for(OnGpu(few), c)[1] is c.indices and not c._layouts
    values, meta = linear_ops.operand_for(OnGpu(few + 1), c)
    assert values is c.values and torch.equal(meta, reference.to_layout(c.indices, 192, layout))
    assert linear_ops.operand_for(OnGpu(500), c)[1] is meta
    c.indices.copy_(c.indices.clone())
    assert linear_ops.operand_for(OnGpu(500), c)[1] is not meta, "written since"


def test_who_keeps_canonical_indices(gpu: dict[str, object], monkeypatch: pytest.MonkeyPatch) -> None:
    def canonical(c: Compressed, tokens: int = 20) -> bool:
        return linear_ops.operand_for(OnGpu(tokens, c.shape[1]), c)[1] is c.indices

    assert not canonical(weight_of())
    for other in (weight_of(72), weight_of(64, 96), weight_of(pattern="1:4"), weight_of(dtype=torch.float32)):
        assert canonical(other), other
    assert not canonical(weight_of(80)) and canonical(weight_of(80), 16), "tiles of 16 rows, for mma.sp"
    with torch.inference_mode():
        assert canonical(weight_of()), "torch counts no writes"
    made, written, new = weight_of(), weight_of(), weight_of()
    assert not canonical(made) and not canonical(written)
    written.values.copy_(written.values.clone())
    gpu["captured"] = True
    assert [canonical(c) for c in (made, written, new)] == [False, True, True]
    gpu.update(captured=False, layout="")
    assert canonical(weight_of())
    gpu["layout"], new = "wgmma.sp", weight_of()
    monkeypatch.setenv(dispatch.ENV, "triton")
    assert canonical(new), "that backend reads them"


def test_linear_multiplies_the_operand_for_its_input(monkeypatch: pytest.MonkeyPatch) -> None:
    """The public function, and a frozen layer, which on some CPUs would rather read a dense copy."""
    monkeypatch.setenv("NMKERNELS_CHOICE", "packed")
    c, x = weight_of(), torch.randn(3, 192).to(BF16)
    layer, seen = CompressedLinear(c), []
    ordered = c.values, reference.to_layout(c.indices, 192, "wgmma.sp")
    for module in (linear_ops, autograd_linear):
        monkeypatch.setattr(module, "operand_for", lambda x, c: seen.append(c) or ordered)
    with torch.no_grad():
        for y in (ops.linear(x, c), layer(x)):
            testing.assert_equal_bits(y, reference.linear(x, c.values, c.indices, 2, 4, 192))
    assert seen == [c, c]


def test_pack_compiles_with_a_chosen_layout() -> None:
    """What a choice returned is a constant of the trace (assume_constant_result), whose type torch.compile cannot ask for."""
    chosen = torch.compiler.assume_constant_result(lambda: "wgmma.sp")

    def packed(w: torch.Tensor) -> list[torch.Tensor]:
        return pytree.tree_leaves(ops.pack(w, "2:4", dtype=BF16, layout=chosen()).rows)

    assert all(map(torch.equal, torch.compile(packed, fullgraph=True, backend="eager")(W), packed(W)))


@for_each("select", ["held", "threshold", "transposable"])
def test_the_dense_form_alone_checks_no_mask(select: str) -> None:
    """Which backends without a kernel for it would wait for, once per layer and step."""

    def refused(*_: object) -> tuple[torch.Tensor, torch.Tensor]:
        raise AssertionError("compress checks the mask")

    parts = shared.Parts(reference.mask, reference.soft_threshold, reference.transposable_mask, refused, reference.decompress)
    mask = reference.mask(W, 2, 4) if select == "held" else None
    scale = torch.tensor(1.37) if select == "threshold" else None
    args = W, 2, 4, select, mask, scale, BF16, False, False, "canonical", True
    testing.assert_equal_bits(shared.pack(parts, *args), reference.pack(*args))
