"""Dense layers and embeddings with integers as weights: they compute what dense layers with the decoded weights do, and stay tied."""

from __future__ import annotations

import copy
import io
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import nmkernels as nm
from nmkernels.capability import compiled_core
from nmkernels.export.tensors import read
from nmkernels.nn.dense import CompressedEmbedding
from nmkernels.ops.integers import nm_linear_integers
from nmkernels.testing import assert_no_worse, equal_bits
from python_tests.export.editing import edited, layers

IDS, WIDTH = 96, 192
KINDS = (("int8", None), ("int8", 64), ("int4", None), ("int4", 0))


class Tied(nn.Module):
    """An embedding, a linear layer to prune, and a head that is the embedding."""

    def __init__(self, dtype: torch.dtype = torch.float32, tied: bool = True) -> None:
        super().__init__()
        self.embed, self.body = nn.Embedding(IDS, WIDTH, padding_idx=3), nn.Linear(WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, IDS)
        if tied:
            self.head.weight = self.embed.weight
        self.to(dtype)

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.body(self.embed(ids)))


def compressed(values: str = "int8", group: int | None = None, **options: Any) -> Any:
    model = Tied(**options)
    nm.sparsify_(model, "ste:2:4").finish(allow_unused=True)
    nm.compress_(model, values="int4")
    return nm.compress_(model, values=values, group=group, dense=["embed", "head"])


def is_tied(model: Any) -> bool:
    return all(getattr(model.embed, part).data_ptr() == getattr(model.head, part).data_ptr() for part in ("values", "step"))


@pytest.mark.parametrize(("values", "group"), KINDS)
def test_equals_dense_layers_with_the_decoded_weights(values: str, group: int | None) -> None:
    model = compressed(values, group)
    ids = torch.tensor([[0, 3, 95], [7, 7, 1]])
    for dtype in (torch.float32, torch.bfloat16, torch.float16, torch.float64):
        model.to(dtype)
        want = F.embedding(ids, model.embed.dense())
        assert equal_bits(model.embed(ids), want) and model.embed(ids.int()).dtype == dtype
        w = model.head.dense(torch.float64)
        for tokens in (1, 2, 7, 17, 40, 0):
            x = torch.randn(tokens, WIDTH, dtype=dtype)
            bias = model.head.bias.detach()
            exact = F.linear(x.double(), w, bias.double())
            with torch.no_grad():
                for _ in range(2):  # the second call takes the short way
                    assert_no_worse(model.head(x), F.linear(x, w.to(dtype), bias), exact)
            given = x.clone().requires_grad_()
            y = model.head(given)
            y.sum().backward()
            assert_no_worse(y.detach(), F.linear(x, w.to(dtype), bias), exact)
            torch.testing.assert_close(given.grad, w.sum(0).to(dtype).expand_as(x), rtol=0.02, atol=0.1 if dtype.itemsize == 2 else 1e-4)
    bits = {"int8": 8, "int4": 4}[values]
    assert model.embed.values.nbytes * 8 == IDS * WIDTH * bits and model.head.indices.numel() == 0


@pytest.mark.skipif(not compiled_core().ok, reason=compiled_core().reason)
def test_kernels_of_rows_that_fill_no_register() -> None:
    """Rows, columns, steps and tokens around the sizes of blocks, pieces and lanes."""
    for cols, steps in ((1, 1), (63, 1), (64, 1), (65, 1), (511, 1), (576, 9), (640, 5), (1024, 1), (1100, 25), (48, 12)):
        for rows in (1, 3, 4, 33, 65):
            for values in ("int8", "int4"):
                w = torch.randn(rows, cols)
                c = nm.ops.quantize_values(nm.ops.compress(w, "1:1"), values, 0 if steps == 1 else cols // steps)
                for tokens in (1, 2, 5, 6, 9, 16, 25):
                    for dtype in (torch.bfloat16, torch.float32):
                        x, b = torch.randn(tokens, cols).to(dtype), torch.randn(rows).to(dtype)
                        if tokens == 5:
                            x[2, 0] = float("inf")
                        y = nm_linear_integers(x, c.values, c.indices, c.step, 1, 1, cols, b, backend="cpu")
                        exact, near = (F.linear(x.to(d), c.dense(d), b.to(d)) for d in (torch.float64, dtype))
                        finite = exact.isfinite()
                        assert torch.equal(y.isfinite(), finite), (cols, steps, rows, values, tokens, dtype)
                        assert_no_worse(y[finite], near[finite], exact[finite])


def test_integers_stay_shared_whatever_happens_to_the_model() -> None:
    model, ids = compressed(), torch.arange(9)
    want = model(ids)
    assert is_tied(model) and set(model.state_dict()) == {
        "embed.values", "embed.step", "head.values", "head.step", "head.bias",
        "body.values", "body.indices", "body.step", "body.bias",
    }  # fmt: skip
    copied = copy.deepcopy(model)
    assert is_tied(copied) and copied.head.values is not model.head.values
    stream = io.BytesIO()
    torch.save(model, stream)
    stream.seek(0)
    unpickled = torch.load(stream, weights_only=False)
    for assign in (False, True):
        other = compressed()
        other.load_state_dict(model.state_dict(), assign=assign)
        assert is_tied(other) and equal_bits(other(ids), want)
    for one in (copied, unpickled):
        assert is_tied(one) and equal_bits(one(ids), want)
        for change in (lambda m: m.to(torch.bfloat16), lambda m: m.half(), lambda m: m._apply(lambda t: t.clone()), lambda m: m.float()):
            change(one)
            assert is_tied(one) and one.embed.step.dtype == torch.bfloat16
        torch.testing.assert_close(one(ids), want, rtol=0.02, atol=0.02)  # the bias was rounded
    meta = copy.deepcopy(model).to("meta")
    assert meta.embed.values.is_meta and meta.head.indices.is_meta


def test_densify_gives_tied_dense_layers_back() -> None:
    model, ids = compressed(values="int4"), torch.arange(9)
    want = model.embed(ids)
    model.embed.register_forward_hook(lambda module, args, y: y * 2)
    assert not model.embed.sparse and not model.embed.scale_grad_by_freq
    nm.densify_(model)
    assert type(model.embed) is nn.Embedding and model.embed.padding_idx == 3 and model.embed.weight is model.head.weight
    assert type(model.head) is nn.Linear and equal_bits(model.embed(ids), want * 2)
    other = nn.Sequential(nn.Embedding(8, 16, scale_grad_by_freq=True, sparse=True))
    nm.densify_(nm.compress_(other, values="int8", dense=["0"]))
    assert other[0].scale_grad_by_freq and other[0].sparse and other[0].padding_idx is None


def test_names() -> None:
    model = Tied(tied=False)
    nm.sparsify_(model, "ste:2:4").finish(allow_unused=True)
    nm.compress_(model, values="int8", dense="h*d")  # body too
    assert isinstance(model.embed, nn.Embedding) and type(model.embed) is nn.Embedding
    assert model.head.weight.kind == model.body.weight.kind == "int8"
    nm.compress_(model, values="int4", dense=["embed"])
    assert isinstance(model.embed, CompressedEmbedding) and model.embed.weight.kind == "int4" and model.embed.weight.group == 64
    assert model.head.weight.kind == "int8" and "values=int4" in repr(model.embed)
    whole = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 8))
    want = [layer.weight.detach().clone() for layer in whole]
    nm.compress_(whole, values="int8", dense=["*"])  # a model without sparse layers
    for layer, w in zip(whole, want, strict=True):
        assert (layer.dense() - w).abs().max() <= w.abs().max() / 127
    floats = Tied()
    nm.sparsify_(floats, "ste:2:4").finish(allow_unused=True)
    nm.compress_(nm.compress_(floats), values="int8", dense=["head"])
    assert floats.body.weight.step is None and is_tied(floats)  # naming one of both is enough
    nm.compress_(floats, values="int4")
    assert floats.body.weight.kind == "int4" and floats.head.weight.kind == "int8"


class Scaled(nn.Embedding):
    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input) * 8


def refused(change: Any, match: str, **options: Any) -> Any:
    return pytest.param(change, match, options, id=match[:30])


@pytest.mark.parametrize(
    ("change", "match", "options"),
    [
        refused(None, r"dense='lm_head' names no dense .* has 'embed', 'head'", dense=["lm_head"]),
        refused(None, "'body' is sparse: values= rounds it without being named", dense=["body"]),
        refused(lambda m: nm.compress_(m), "'body' is compressed already", dense=["body"]),
        refused(None, "pass values='int8' or 'int4' with it", values=None),
        refused(None, "pass values='int8' or 'int4' with it", values="float"),
        refused(None, "group=100 does not divide 192 columns", group=100),
        refused(lambda m: m.embed.weight.data[3].fill_(float("nan")), "NaN or infinite values"),
        refused(lambda m: m.half().embed.weight.data[3].fill_(65504), "'embed' .* it has weights of up to 6.55e.04, which rounded to int8"),
        refused(lambda m: m.embed.__setattr__("max_norm", 1.0), "set max_norm = None once training is over"),
        refused(lambda m: m.__setattr__("embed", Scaled(IDS, WIDTH)), "it is a Scaled, which may do more"),
        refused(lambda m: m.__setattr__("other", Other(m.embed.weight)), "shares its weight with 'other', a Other", dense=["head"]),
        refused(lambda m: nn.utils.parametrizations.weight_norm(m.head), "computed by torch.nn.utils.parametrize", dense=["head"]),
        refused(lambda m: m.embed.to("meta"), "it has no data to round"),
        refused(lambda m: m.__setattr__("embed", nn.Linear(0, 8)), "its weight is empty", values="int4"),
        refused(None, "values='int2' is unknown; choose one of 'int8', 'int4', 'float', or None", values="int2"),
        refused(lambda m: nm.compress_(m), "all sparse layers are compressed already. nm.densify_", dense=(), values=None),
    ],
)
def test_refuses_before_anything_changes(change: Any, match: str, options: dict[str, Any]) -> None:
    model = Tied()
    nm.sparsify_(model, "ste:2:4").finish(allow_unused=True)
    if change is not None:
        change(model)
    before = {name: type(module) for name, module in model.named_modules()}
    with pytest.raises(nm.NMError, match=match) as caught:
        nm.compress_(model, **{"values": "int8", "dense": ["embed"], **options})
    assert str(caught.value).startswith("compress_: ") and str(caught.value).endswith(".")
    assert before == {name: type(module) for name, module in model.named_modules()}


class Other(nn.Module):
    def __init__(self, weight: nn.Parameter) -> None:
        super().__init__()
        self.weight = weight


def test_files_store_shared_integers_once(tmp_path: Any) -> None:
    model, path, ids = compressed(dtype=torch.bfloat16), tmp_path / "m.safetensors", torch.arange(9)
    nm.save_compressed(model, path)
    contents = read(path)
    assert contents.metadata["version"] == "7" and "head.values" not in contents.tensors
    assert contents.json("layers")["embed"] == {
        "pattern": "1:1", "shape": [IDS, WIDTH], "dtype": "bfloat16", "layout": "embedding", "values": "int8", "group": 0,
    }  # fmt: skip
    for device in ("cpu", "meta"):
        with torch.device(device):
            fresh = Tied(torch.bfloat16)
        loaded: Any = nm.load_compressed(fresh, path)
        assert is_tied(loaded) and equal_bits(loaded(ids), model(ids)) and loaded.embed.padding_idx == 3
        assert loaded.embed.dtype == torch.bfloat16 and not loaded.head.indices.is_meta
    untied: Any = nm.load_compressed(Tied(torch.bfloat16, tied=False), path)
    assert equal_bits(untied(ids), model(ids)) and not is_tied(untied)
    nm.save_dense(model, tmp_path / "dense.safetensors")
    dense = read(tmp_path / "dense.safetensors")
    assert equal_bits(dense.tensors["embed.weight"], model.embed.dense()) and "head.weight" not in dense.tensors
    assert dense.metadata["head.weight"] == "embed.weight" and dense.json("nm") == {"body": "2:4"}
    nm.save_compressed(untied, path)
    assert "head.values" in read(path).tensors


def test_files_that_do_not_fit_are_refused(tmp_path: Any) -> None:
    model, path = compressed(), tmp_path / "m.safetensors"
    nm.save_compressed(model, path)
    whole = path.read_bytes()
    scaled = Tied(tied=False)
    scaled.embed = Scaled(IDS, WIDTH)
    with pytest.raises(nm.CheckpointError, match="the file holds an embedding layer, the model a Scaled"):
        nm.load_compressed(scaled, path)
    for change, match in (
        (layers('"1:1"', '"2:4"'), "the rows of an embedding are dense integers"),
        (layers('"layout": "embedding"', '"layout": "embedding", "columns": true'), "embeddings and experts have no adapter and no"),
        (lambda tensors, about: tensors["embed.step"][0].fill_(torch.nan), "a step is NaN"),
    ):
        path.write_bytes(whole)
        with pytest.raises(nm.CheckpointError, match=match):
            nm.load_compressed(Tied(), edited(path, change))


def test_traces_and_graphs() -> None:
    model, ids = compressed(), torch.arange(9)
    want = model(ids)
    traced = torch.jit.trace(model, (torch.arange(4),))
    torch.testing.assert_close(traced(ids), want, rtol=1e-4, atol=1e-4)
    graph = torch.fx.symbolic_trace(model)
    assert equal_bits(graph(ids), want)
    with pytest.raises(nm.RecipeError, match="an embedding reads rows"):
        nm.explain(model.embed, ids)
    assert [name for name, *_ in model.embed.tunable([1])] == []


@pytest.mark.slow
def test_compiles() -> None:
    model, ids = compressed(), torch.arange(9)
    compiled = torch.compile(copy.deepcopy(model), fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(ids), model(ids), rtol=1e-4, atol=1e-4)
    x = torch.randn(3, WIDTH, requires_grad=True)
    torch.compile(model.head, fullgraph=True, backend="aot_eager")(x).sum().backward()
    torch.testing.assert_close(x.grad, model.head.dense().sum(0).expand_as(x), rtol=1e-4, atol=1e-4)
