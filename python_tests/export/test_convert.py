"""Folders that other libraries compressed or pruned: every weight is what they decode, whatever interrupts it, and damage is refused."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

import nmkernels as nm
from nmkernels.export.foreign import marlin24
from nmkernels.export.tensors import read
from nmkernels.pattern import CheckpointError
from nmkernels.testing import equal_bits
from python_tests.house.paths import ROOT
from python_tests.integrations.folders import built, content, saved

transformers = pytest.importorskip("transformers", minversion="5.0")

from nmkernels.export.convert import convert_folder, work_folder  # noqa: E402
from nmkernels.prune.disk import class_of  # noqa: E402

transformers.logging.disable_progress_bar()
FIXTURES = Path(__file__).parent / "fixtures" / "compressed_tensors"
FOLDERS = ("bitmask", "bitmask-fp16", "bitmask-int8", "bitmask-fp8", "marlin")


def converted(folder: Path, out: Path, **options: Any) -> dict[str, Any]:
    kind, settings = class_of(folder, json.loads((folder / "config.json").read_text()))
    with torch.device("meta"):
        model = kind(settings)
    return convert_folder(folder, out, model, **options)


def loaded(folder: Path) -> Any:
    model, about = transformers.AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
    assert not any(about.values()), about
    return model


def digest(w: Tensor) -> str:
    return hashlib.sha256((w.float() + 0.0).contiguous().numpy().tobytes()).hexdigest()  # without negative zeros


# ---- files of compressed-tensors 0.9.4


@pytest.mark.parametrize("name", FOLDERS)
def test_every_weight_is_what_its_library_decodes(name: str, tmp_path: Path) -> None:
    facts = converted(FIXTURES / name, tmp_path / "out", exact=True)
    model, truth = loaded(tmp_path / "out"), json.loads((FIXTURES / name / "truth.json").read_text())
    assert truth.keys() <= facts["layers"].keys() and len(facts["layers"]) == 7
    for layer, want in truth.items():
        weight = model.get_submodule(layer).weight
        assert isinstance(weight, nm.Compressed) and digest(weight.dense(torch.float32)) == want, layer
    dense = {n: t for file in (FIXTURES / name).glob("*.safetensors") for n, t in load_file(file).items() if "norm" in n or "embed" in n}
    state = model.state_dict()
    assert dense and all(torch.equal(state[n], t.to(state[n].dtype)) for n, t in dense.items())
    assert model(torch.arange(8)[None]).logits.isfinite().all()


@pytest.mark.parametrize("name", FOLDERS)
def test_what_is_rounded_is_reported(name: str, tmp_path: Path) -> None:
    """Scales become bfloat16 steps, float8 the model's dtype; nothing else changes."""
    facts, exact = converted(FIXTURES / name, tmp_path / "out"), converted(FIXTURES / name, tmp_path / "exact", exact=True)
    errors = {layer: row["error"] for layer, row in facts["layers"].items()}
    changed = {"bitmask-int8": ["model.layers.0.mlp.down_proj"], "bitmask-fp8": list(errors), "marlin": list(errors)}.get(name, [])
    assert [layer for layer, error in errors.items() if error] == changed and facts["exact"] == (not changed)
    assert all(row["error"] < 1e-7 for row in exact["layers"].values())
    now, before = loaded(tmp_path / "out"), loaded(tmp_path / "exact")
    for layer, error in errors.items():
        one, other = (model.get_submodule(layer).weight.dense(torch.float32).double() for model in (now, before))
        assert error == pytest.approx(float((one - other).norm() / other.norm()), rel=1e-3, abs=0) and error < 2**-8
    assert json.loads((tmp_path / "out" / "report.json").read_text()) == facts
    assert facts["notes"] == (["activations, which the model's own library quantises too, stay in floating point"] if "8" in name else [])


def test_marlin_by_groups() -> None:
    """Scales have another order if there are more kept columns than a group has, and the library asks of the kept ones."""
    contents = read(FIXTURES / "wide.safetensors")
    for name, want in json.loads(contents.metadata["truth"]).items():
        weight = marlin24(name, *(contents.tensors[f"{name}.{part}"] for part in ("weight_packed", "scale_packed", "meta")))
        assert (
            digest(weight.decoded(torch.float32).dense()) == want
            and weight.scale is not None
            and weight.scale.shape[1] == weight.shape[1] // 128
        )
        rounded = weight.converted(torch.float16, exact=False)
        assert (
            rounded.group == 128 and rounded.kind == f"int{weight.bits}" and weight.error(weight.converted(torch.float32, exact=True)) == 0
        )
        # only steps have changed
        steps = torch.ones_like(rounded.step)
        one = nm.Compressed(rounded.values, rounded.indices, "2:4", rounded.shape, steps).dense(torch.float32)
        fine = (one.unflatten(1, (-1, 128)) * weight.scale.float().unsqueeze(-1)).flatten(1)
        assert digest(fine) == want and torch.equal(rounded.step, weight.scale.bfloat16())
        assert 2**-12 < weight.error(rounded) < 2**-8


# ---- folders made here


def bitmask(w: Tensor) -> dict[str, Tensor]:
    """The tensors of one 2:4 weight."""
    mask = nm.ops.mask(w, "2:4")
    bits = torch.from_numpy(np.packbits(mask.numpy(), axis=-1, bitorder="little"))
    return {"compressed": w[mask].view(len(w), -1), "bitmask": bits, "shape": torch.tensor(w.shape).view(-1, 1)}


def pruned(folder: Path, name: str = "llama", pattern: str = "2:4", dtype: torch.dtype = torch.bfloat16, **options: Any) -> Path:
    """A dense folder whose linear layers have zeros."""
    saved(folder, name, dtype=dtype, layers=2, **options)
    for file in folder.glob("*.safetensors"):
        tensors = load_file(file)
        for key, w in tensors.items():
            if key.endswith("proj.weight") or (".c_" in key and w.dim() == 2):
                tensors[key] = nm.ops.prune(w.t().contiguous(), pattern).t().contiguous() if ".c_" in key else nm.ops.prune(w, pattern)
        save_file(tensors, file, {"format": "pt"})
    return folder


def stored(folder: Path, change: Callable[[dict[str, Tensor]], object] | None = None, names: Any = (), **about: Any) -> Path:
    """The same as ``sparse-24-bitmask``, in the same files: ``names``, or all projections; ``change`` may edit all tensors."""
    for file in sorted(folder.glob("*.safetensors")):
        tensors: dict[str, Tensor] = {}
        for key, w in load_file(file).items():
            name = key.removesuffix(".weight")
            tensors |= (
                {f"{name}.{part}": t for part, t in bitmask(w).items()}
                if (key in names if names else key.endswith("proj.weight"))
                else {key: w}
            )
        if change is not None:
            change(tensors)
        save_file(tensors, file, {"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "compressed-tensors", "sparsity_config": {"format": "sparse-24-bitmask"}, **about}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def same_model(folder: Path, dense: Path) -> None:
    one, other = nm.densify_(loaded(folder)).state_dict(), loaded(dense).state_dict()
    assert one.keys() == other.keys() and all(equal_bits(one[name], tensor) for name, tensor in other.items())


@pytest.mark.parametrize(
    ("name", "pattern"), [("llama-tied", "2:4"), ("gpt2", "1:4"), pytest.param("qwen3-moe", "4:8", marks=pytest.mark.slow)]
)
def test_dense_with_zeros(name: str, pattern: str, tmp_path: Path) -> None:
    """The pattern of each layer is found; ``sparsity_config`` makes no difference; tied embeddings and other layers are copied."""
    dense = pruned(tmp_path / "dense", name, pattern, shard="100KB")
    shutil.copytree(dense, tmp_path / "source")
    config = json.loads((dense / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "compressed-tensors", "format": "dense", "sparsity_config": {"format": "dense"}}
    (tmp_path / "source" / "config.json").write_text(json.dumps(config))
    before = content(tmp_path / "source")
    facts = converted(tmp_path / "source", tmp_path / "out")
    assert facts["exact"] and {row["now"] for row in facts["layers"].values()} == {f"{pattern} bfloat16"}
    same_model(tmp_path / "out", dense)
    assert content(tmp_path / "source") == before and sorted(os.listdir(tmp_path)) == ["dense", "out", "source"]
    assert (tmp_path / "out" / "tokenizer.json").is_file() and "## How it was converted" in (tmp_path / "out" / "README.md").read_text()


def test_patterns_and_masks_by_layer(tmp_path: Path) -> None:
    """apex's buffers agree with the zeros and are dropped; a layer without zeros stays dense."""
    folder = pruned(tmp_path / "dense")
    tensors = load_file(folder / "model.safetensors")
    q, k, v = (f"model.layers.1.self_attn.{name}_proj.weight" for name in "qkv")
    tensors[k], tensors[v] = nm.ops.prune(tensors[k], "1:4"), torch.randn_like(tensors[v])
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    shutil.copytree(folder, tmp_path / "apex")
    (tmp_path / "apex" / "README.md").write_bytes("# Modèle".encode("latin-1"))
    masks = {n.replace("weight", "__weight_mma_mask"): nm.ops.mask(tensors[n], "2:4") for n in (q, k)}
    others = {n.replace("mask", "pruned_p"): torch.zeros(2) for n in masks}
    save_file(tensors | masks | others, tmp_path / "apex" / "model.safetensors", {"format": "pt"})
    facts = converted(tmp_path / "apex", tmp_path / "out")
    assert [facts["layers"][n.removesuffix(".weight")]["now"] for n in (q, k)] == ["2:4 bfloat16", "1:4 bfloat16"]
    assert facts["left dense"][v.removesuffix(".weight")]["reason"] == "0 % of its weights are 0, in no N:M pattern"
    assert sorted(facts["dropped"]) == sorted(masks | others)
    assert "# Modèle\n\n## N:M".encode("latin-1") in (tmp_path / "out" / "README.md").read_bytes()
    same_model(tmp_path / "out", folder)
    masks[q.replace("weight", "__weight_mma_mask")][3, :4] = torch.tensor([True, True, False, False])
    save_file(tensors | masks, tmp_path / "apex" / "model.safetensors", {"format": "pt"})
    with pytest.raises(CheckpointError, match=r"q_proj.weight': \d weights outside its mask of apex are not 0; multiply them"):
        converted(tmp_path / "apex", tmp_path / "other")


def test_what_has_no_module_is_decoded(tmp_path: Path) -> None:
    """A tied head, and experts that are stacked here: dense under their own names, which transformers knows."""
    dense = pruned(tmp_path / "dense", "qwen3-moe", shard="60KB")
    shutil.copytree(dense, tmp_path / "source")
    facts = converted(stored(tmp_path / "source"), tmp_path / "out")
    left = {name: row["reason"] for name, row in facts["left dense"].items() if "experts" in name}
    assert len(left) == 24 and set(left.values()) == {"Qwen3MoeForCausalLM has no such linear layer"}
    assert len(facts["layers"]) == 8 and facts["exact"]
    same_model(tmp_path / "out", dense)


def test_experts_that_stay_dense_are_named(tmp_path: Path) -> None:
    """With the zeros that they have, which ``adopt`` takes over once the folder is loaded."""
    dense = pruned(tmp_path / "dense", "qwen3-moe")
    facts = converted(dense, tmp_path / "out")
    left = {name: row for name, row in facts["left dense"].items() if "experts" in name}
    assert len(left) == 24 and {row["reason"] for row in left.values()} == {"Qwen3MoeForCausalLM has no such linear layer"}
    assert {(row["values"], row["now"], row["error"]) for row in left.values()} == {("bfloat16 with 2:4 zeros", "dense bfloat16", 0.0)}
    assert left.keys() | {"lm_head"} == facts["left dense"].keys() and len(facts["layers"]) == 8
    line = "| `model.layers.*.mlp.experts.*.up_proj` | 8 | dense, bfloat16 with 2:4 zeros | dense bfloat16 | exact |"
    assert line in (tmp_path / "out" / "README.md").read_text().splitlines()
    model = loaded(tmp_path / "out")
    nm.recipes.adopt(model).finish(allow_unused=True)
    nm.compress_(model).save_pretrained(tmp_path / "whole")
    assert len(json.loads((tmp_path / "whole" / "config.json").read_text())["quantization_config"]["layers"]) == 12
    same_model(tmp_path / "whole", dense)


def test_stacked_experts_are_named(tmp_path: Path) -> None:
    facts = converted(pruned(tmp_path / "dense", "gpt-oss"), tmp_path / "out")
    note = "stacked experts are copied as they are (model.layers.0.mlp.experts.down_proj and 3 more); "
    assert [n for n in facts["notes"] if n.startswith(note)] and len(facts["layers"]) == 8
    assert note.capitalize() in (tmp_path / "out" / "README.md").read_text()
    before, after = (load_file(tmp_path / name / "model.safetensors") for name in ("dense", "out"))
    assert all(torch.equal(after[name], w) for name, w in before.items() if ".experts." in name)


SIZES = {"vocab_size": 32, "hidden_size": 36, "intermediate_size": 60, "num_hidden_layers": 1, "num_attention_heads": 2}


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        ("Qwen2", {"num_key_value_heads": 1}),  # with biases
        pytest.param("Mistral", {"num_key_value_heads": 1, "head_dim": 10}, marks=pytest.mark.slow),
        pytest.param("Phi3", {"num_key_value_heads": 1, "pad_token_id": 0}, marks=pytest.mark.slow),  # fused q, k, v
    ],
)
def test_architectures_whose_head_is_compressed_too(kind: str, options: dict[str, Any], tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = getattr(transformers, f"{kind}ForCausalLM")(getattr(transformers, f"{kind}Config")(**SIZES, **options)).half()
    linear = [m for m in model.modules() if isinstance(m, torch.nn.Linear)]
    for module in linear:
        module.weight.data = nm.ops.prune(module.weight.data, "2:4")
    model.save_pretrained(tmp_path / "dense")
    shutil.copytree(tmp_path / "dense", tmp_path / "source")
    names = {f"{name}.weight" for name, m in model.named_modules() if m in linear}
    facts = converted(stored(tmp_path / "source", names=names), tmp_path / "out")
    assert len(facts["layers"]) == len(linear) > 4 and facts["exact"] and not facts["left dense"]
    same_model(tmp_path / "out", tmp_path / "dense")


@pytest.mark.parametrize("dtype", [torch.int8, torch.float8_e4m3fn], ids=str)
def test_eight_bits_with_zeros_but_no_mask(dtype: torch.dtype, tmp_path: Path, dense_folder: Path) -> None:
    """``sparsity_config`` dense over int-quantized or float-quantized; what has no zeros is decoded."""
    folder = shutil.copytree(dense_folder, tmp_path / "source")
    tensors = load_file(folder / "model.safetensors")
    k, truth = f"{Q.replace('q_proj', 'k_proj')}", {}
    for name in (Q, k):
        w = tensors[f"{Q}.weight"].float() if name == Q else torch.randn(32, 64)
        scale = (w.abs().amax(1, keepdim=True) / 127).bfloat16()
        tensors[f"{name}.weight"], tensors[f"{name}.weight_scale"] = (w / scale.float()).round().to(dtype), scale
        truth[name] = tensors[f"{name}.weight"].float() * scale.float()
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = {"format": "int-quantized", "sparsity_config": {"format": "dense"}, "config_groups": {}}
    (folder / "config.json").write_text(json.dumps(config))
    facts = converted(folder, tmp_path / "out")
    state = nm.densify_(loaded(tmp_path / "out")).state_dict()
    kind = "int8, a bfloat16 step per row" if dtype == torch.int8 else "bfloat16"
    assert facts["layers"][Q]["now"] == f"2:4 {kind}" and facts["left dense"][k]["now"] == "dense bfloat16"
    for name, want in truth.items():
        assert torch.equal(state[f"{name}.weight"], want.bfloat16()), name


# ---- interruptions


def forked(run: Callable[[], object]) -> int:
    child = os.fork()
    if child == 0:
        with open(os.devnull, "w") as sink:
            os.dup2(sink.fileno(), 2)
            try:
                run()
            finally:
                os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def test_killed_at_any_moment_it_goes_on_to_the_same_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = stored(pruned(tmp_path / "source", shard="50KB"))
    files = len(list(source.glob("*.safetensors")))
    converted(source, tmp_path / "whole" / "out")
    calls = 0

    def killer(moment: int) -> Callable[..., None]:
        def progress(done: int, total: int, what: str) -> None:
            nonlocal calls
            calls += 1
            if calls == moment:
                os.kill(os.getpid(), signal.SIGKILL)

        return progress

    out, done = tmp_path / "out", 0
    for moment in range(1, 2 * files + 2):
        assert forked(lambda moment=moment: converted(source, out, progress=killer(moment))) == -signal.SIGKILL
        now = len(list(work_folder(out).glob("result/out/*.safetensors")))
        assert not out.exists() and done <= now
        done = now
    assert done == files
    # in the middle of a file, and after the last
    next(work_folder(out).glob("result/out/model-00002-*")).unlink()
    for name in ("close", "write"):
        with monkeypatch.context() as patch:
            patch.setattr("nmkernels.export.convert.ShardWriter." + name, lambda *_: os.kill(os.getpid(), signal.SIGKILL))
            assert forked(lambda: converted(source, out)) == -signal.SIGKILL
    with monkeypatch.context() as patch:
        patch.setattr("nmkernels.export.convert.write_card", lambda *_: os.kill(os.getpid(), signal.SIGKILL))
        assert forked(lambda: converted(source, out)) == -signal.SIGKILL
    with monkeypatch.context() as patch:  # nothing is read again
        patch.setattr("nmkernels.export.convert.ShardWriter", None)
        converted(source, out)
    assert content(out) == content(tmp_path / "whole" / "out") and sorted(os.listdir(tmp_path)) == ["out", "source", "whole"]


@pytest.mark.parametrize("name", ["writing", "run.json"])
def test_any_name_will_do(name: str, tmp_path: Path, dense_folder: Path) -> None:
    """Also that of what is in the folder of finished files."""
    converted(dense_folder, tmp_path / name)
    same_model(tmp_path / name, dense_folder)
    assert os.listdir(tmp_path) == [name]


def test_another_folder_starts_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    one, other = (stored(pruned(tmp_path / name, dtype=dtype)) for name, dtype in (("a", torch.bfloat16), ("b", torch.float16)))
    with monkeypatch.context() as patch:
        patch.setattr("nmkernels.export.convert.write_card", lambda *_: os.kill(os.getpid(), signal.SIGKILL))
        assert forked(lambda: converted(one, tmp_path / "out")) == -signal.SIGKILL
    converted(other, tmp_path / "out")
    converted(other, tmp_path / "whole" / "out")
    assert content(tmp_path / "out") == content(tmp_path / "whole" / "out") and not work_folder(tmp_path / "out").exists()


@pytest.mark.slow
def test_memory_is_that_of_one_file(tmp_path: Path) -> None:
    """Less than twice the largest of several files, beyond what a small folder takes."""
    small = stored(pruned(tmp_path / "small"))
    source = stored(pruned(tmp_path / "source", hidden_size=1024, intermediate_size=24576, shard="200MB"))
    sizes = [file.stat().st_size for file in source.glob("*.safetensors")]
    assert len(sizes) >= 2

    done = subprocess.run([sys.executable, "-c", GROWTH, small, source, tmp_path], cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-2000:]
    assert 0 < int(done.stdout) < 2 * max(sizes)


GROWTH = """
import re, sys
from pathlib import Path
from python_tests.export.test_convert import converted
def peak():  # getrusage has that of the process before exec too
    return 1024 * int(re.search(r"VmHWM:\\s+(\\d+)", Path("/proc/self/status").read_text())[1])
small, source, home = map(Path, sys.argv[1:])
converted(small, home / "a")
before = peak()
converted(source, home / "b")
print(peak() - before)
"""


# ---- damage

Q = "model.layers.0.self_attn.q_proj"
Edit = Callable[[dict[str, Tensor]], object]


def scaled(scale: Tensor | None) -> Edit:
    def edit(tensors: dict[str, Tensor]) -> None:
        tensors[f"{Q}.compressed"] = tensors[f"{Q}.compressed"].to(torch.int8)
        tensors |= {} if scale is None else {f"{Q}.weight_scale": scale}

    return edit


def cut(part: str) -> Edit:
    return lambda tensors: tensors.update({f"{Q}.{part}": tensors[f"{Q}.{part}"][:, :-1].contiguous()})


DAMAGE: dict[str, tuple[Edit, str]] = {
    "three bits": (lambda t: t[f"{Q}.bitmask"][5, 1].bitwise_or_(0x0F), "row 5 of its bitmask has a group of four without exactly two"),
    "no bits": (lambda t: t[f"{Q}.bitmask"][5, 1].bitwise_and_(0xF0), "row 5 of its bitmask has a group"),
    "short mask": (cut("bitmask"), r"its bitmask has shape \(64, 7\), and for"),
    "short values": (cut("compressed"), r"its compressed has shape \(64, 31\), and for"),
    "other shape": (lambda t: t[f"{Q}.shape"].fill_(32), r"its compressed has shape \(64, 32\), and for a weight of \(32, 32\)"),
    "no shape": (lambda t: t[f"{Q}.shape"].fill_(-1), r"its shape is \[-1, -1\], not that of a matrix"),
    "NaN": (lambda t: t[f"{Q}.compressed"][3, 2].fill_(torch.nan), "a value is NaN or infinite; the file is damaged"),
    "lost": (lambda t: t.pop(f"{Q}.bitmask"), "the files lack its bitmask; download the folder again"),
    "no scale": (scaled(None), "are torch.int8, and the files lack its weight_scale"),
    "NaN scale": (scaled(torch.full((64, 1), torch.nan)), "a scale is NaN or infinite"),
    "scale shape": (scaled(torch.ones(32, 1)), r"its scales have shape \(32, 1\); for 64 rows"),
    "integer scale": (scaled(torch.ones(64, 1, dtype=torch.int32)), "its scales are torch.int32"),
    "zero points": (lambda t: t.update({f"{Q}.weight_zero_point": torch.ones(64, 1)}), "it has zero points, and integers here"),
    "order": (lambda t: t.update({f"{Q}.weight_g_idx": torch.arange(64)}), "its columns are in an order of their own"),
    "twice": (lambda t: t.update({f"{Q}.weight": torch.zeros(64, 64)}), "it is stored twice, as sparse-24-bitmask and as dense"),
    "int32": (lambda t: t.update({f"{Q}.compressed": t[f"{Q}.compressed"].to(torch.int32)}), "its values are torch.int32; floating point"),
}  # fmt: skip


@pytest.mark.parametrize("what", DAMAGE)
def test_damage_is_one_sentence_with_the_layer(what: str, tmp_path: Path, dense_folder: Path) -> None:
    edit, message = DAMAGE[what]
    shutil.copytree(dense_folder, tmp_path / "source")
    stored(tmp_path / "source", edit)
    with pytest.raises(CheckpointError, match=f"^layer '{Q}': .*{message}"):
        converted(tmp_path / "source", tmp_path / "out")
    assert os.listdir(tmp_path) == ["source"]


INCOMPLETE: dict[str, tuple[Edit, str]] = {
    "layer": (lambda t: [t.pop(f"{Q}.{part}") for part in ("compressed", "bitmask", "shape")], f" lacks '{Q}.weight', which Llama"),
    "layers": (lambda t: [t.pop(key) for key in list(t) if ".q_proj." in key], f" lacks '{Q}.weight', which LlamaForCausalLM has; "),
    "embedding": (lambda t: t.pop("model.embed_tokens.weight"), " lacks 'model.embed_tokens.weight', which"),
    "norm": (lambda t: t.pop("model.layers.1.input_layernorm.weight"), " lacks 'model.layers.1.input_layernorm.weight', which"),
    "head": (lambda t: t.pop("lm_head.weight"), " lacks 'lm_head.weight', which"),
    "rows": (
        lambda t: t.update({"model.embed_tokens.weight": t["model.embed_tokens.weight"][:50].clone()}),
        r": 'model.embed_tokens.weight' has shape \(50, 64\) in the files, and \(128, 64\) in a LlamaForCausalLM with this config.json; ",
    ),
}


@pytest.mark.parametrize("what", INCOMPLETE)
def test_incomplete_folders_are_refused(what: str, tmp_path: Path, dense_folder: Path) -> None:
    """Which would load, with random weights for the rest."""
    edit, message = INCOMPLETE[what]
    source = stored(shutil.copytree(dense_folder, tmp_path / "source"), edit)
    with pytest.raises(CheckpointError, match=f"^{source}{message}"):
        converted(source, tmp_path / "out")
    assert os.listdir(tmp_path) == ["source"]


def test_a_lost_expert_is_refused(tmp_path: Path) -> None:
    """The files have no such name as the model's stack."""
    folder = pruned(tmp_path / "source", "qwen3-moe")
    tensors = load_file(folder / "model.safetensors")
    del tensors["model.layers.1.mlp.experts.2.up_proj.weight"]
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    with pytest.raises(CheckpointError, match=r"transformers cannot load .*source: .* during automatic conversion of the weights\.$"):
        converted(folder, tmp_path / "out")


@pytest.fixture(scope="module")
def dense_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return pruned(tmp_path_factory.mktemp("convert") / "dense")


MARLIN: dict[str, tuple[Edit, str]] = {
    "positions": (lambda t: t["two.meta"][0, 0].fill_(0), "the positions of a group of four in its meta do not increase"),
    "short meta": (lambda t: t.update({"two.meta": t["two.meta"][:, :-1]}), "its meta is torch.int16"),
    "rows": (lambda t: t.update({"two.scale_packed": t["two.scale_packed"][:, :32]}), "with 4 or 8 bits and a multiple of 64 rows"),
    "scales": (lambda t: t.update({"two.scale_packed": t["two.scale_packed"].repeat(2, 1)}), "one for 128 of 256 columns"),
    "NaN": (lambda t: t["two.scale_packed"][0, 0].fill_(torch.nan), "a scale is NaN or infinite"),
    "dtype": (lambda t: t.update({"two.weight_packed": t["two.weight_packed"].long()}), "its weight_packed is torch.int64"),
}


@pytest.mark.parametrize("what", MARLIN)
def test_damage_of_marlin(what: str) -> None:
    tensors = load_file(FIXTURES / "wide.safetensors")
    MARLIN[what][0](tensors)
    with pytest.raises(CheckpointError, match=f"^layer 'two': .*{MARLIN[what][1]}"):
        marlin24("two", *(tensors[f"two.{part}"] for part in ("weight_packed", "scale_packed", "meta")))


def truncate(folder: Path) -> None:
    with (folder / "model.safetensors").open("r+b") as file:
        file.truncate(5000)


FOLDER: dict[str, tuple[Callable[[Path], object], str]] = {
    "unknown": (lambda f: stored(f, format="mixed"), "is stored as 'mixed', which convert does not read; it reads dense, "),
    "unstructured": (lambda f: stored(f, sparsity_config={"format": "sparse-bitmask"}), "is stored as 'sparse-bitmask', which"),
    "gptq": (lambda f: stored(f, quant_method="gptq"), "is quantised by 'gptq'; convert reads formats of compressed-tensors"),
    "ours": (lambda f: stored(f, quant_method="nmkernels"), "is compressed by nmkernels already"),
    "config": (lambda f: (f / "config.json").write_text('{"quantization_config": 3, "architectures": ["LlamaForCausalLM"]}'), "is damaged"),
    "truncated": (truncate, "is not a valid safetensors file, or is truncated"),
    "no zeros": (lambda f: saved(f), r"no layer with N:M zeros that can .* \(.*: 0 % of its weights are 0, in no N:M pattern\); python"),
    "other zeros": (
        lambda f: pruned(f, pattern="3:4"),
        r"\(model.*_proj: 25 % of its weights are 0, in no pattern that is looked for \(N ≤ M/2, M = 4, 8, 16, 32\); give another one: .*",
    ),
}  # fmt: skip


@pytest.mark.parametrize("what", FOLDER)
def test_other_folders_are_refused(what: str, tmp_path: Path, dense_folder: Path) -> None:
    change, message = FOLDER[what]
    shutil.copytree(dense_folder, tmp_path / "source")
    kind, settings = class_of(tmp_path / "source", json.loads((tmp_path / "source" / "config.json").read_text()))
    change(tmp_path / "source")
    with pytest.raises(CheckpointError, match=message), torch.device("meta"):
        convert_folder(tmp_path / "source", tmp_path / "out", kind(settings))
    assert os.listdir(tmp_path) == ["source"]


def test_experts_alone_are_no_folder(tmp_path: Path) -> None:
    """The reason is that of a layer with zeros, and not of one without."""
    folder = pruned(tmp_path / "source", "qwen3-moe")
    tensors = load_file(folder / "model.safetensors")
    save_file({name: t if "experts" in name else t + 1 for name, t in tensors.items()}, folder / "model.safetensors", {"format": "pt"})
    with pytest.raises(CheckpointError, match=r"compressed \(.*experts.*: Qwen3MoeForCausalLM has no such linear layer\); python"):
        converted(folder, tmp_path / "out")


def test_a_model_of_another_size(tmp_path: Path, dense_folder: Path) -> None:
    with pytest.raises(CheckpointError, match=r"the files have a weight of \(64, 128\), the model one of \(32, 128\)"):
        convert_folder(dense_folder, tmp_path / "out", built(layers=2, hidden_size=32).to("meta"))
