"""A model on disk is pruned to what the same model in memory is, whatever interrupts it, with one block in memory at a time."""

from __future__ import annotations

import functools
import json
import math
import os
import resource
import shutil
import signal
import subprocess
import sys

import pytest
import torch
from safetensors.torch import load_file, save_file

import nmkernels as nm
from nmkernels.pattern import CheckpointError, OptionError, RecipeError
from nmkernels.prune import prune as engine
from nmkernels.prune import prune_, relay
from nmkernels.recipes import search_permutation
from nmkernels.testing import equal_bits
from nmkernels.train.report import Pruned, Report
from python_tests.house.paths import ROOT
from python_tests.integrations.folders import batches, built, content, saved

transformers = pytest.importorskip("transformers", minversion="5.0")
pytest.importorskip("accelerate")

from nmkernels.prune.folder import by_type, prune_folder, work_folder  # noqa: E402

transformers.logging.disable_progress_bar()
pytestmark = pytest.mark.filterwarnings("ignore:prune_. layer")


def in_memory(folder, out, data, dense_values=None, skip=(), **options):
    model = transformers.AutoModelForCausalLM.from_pretrained(folder)
    chosen = (lambda module, name: name != "lm_head" and not any(part in name for part in skip)) if skip else None
    handle = prune_(model, "2:4", data, chosen, **options)
    handle.finish(allow_unused=True)
    nm.compress_(model)
    if dense_values:
        dense = [name for name, module in model.named_modules() if type(module) in (torch.nn.Linear, torch.nn.Embedding)]
        nm.compress_(model, values=dense_values, dense=dense)
    model.save_pretrained(out)
    return handle.report


def loaded(folder, kind=transformers.AutoModelForCausalLM):
    model, info = kind.from_pretrained(folder, output_loading_info=True)
    assert not any(info.values()), info
    return model


def same(one, other):
    a, b = one.state_dict(), other.state_dict()
    return a.keys() == b.keys() and all(equal_bits(a[key], b[key]) for key in a)


@pytest.fixture(autouse=True)
def short_search(monkeypatch):
    monkeypatch.setattr(engine, "search_permutation", functools.partial(search_permutation, escapes=1))


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("llama", {}),
        pytest.param("llama", {"sequential": False}, marks=pytest.mark.slow),
        pytest.param("llama-tied", {"method": "sparsegpt"}, marks=pytest.mark.slow),
        ("qwen3-moe", {"method": "wanda"}),
        ("gpt2", {"method": "wanda(refit=2)", "values": "int4", "group": 32}),
        pytest.param("llama", {"method": "wanda", "values": "int8"}, marks=pytest.mark.slow),
        pytest.param("qwen3-moe", {"method": "wanda", "values": "int4"}, marks=pytest.mark.slow),
        pytest.param("llama", {"method": "wanda", "permute": True}, marks=pytest.mark.slow),
        pytest.param("gpt2", {"method": "wanda", "permute": True}, marks=pytest.mark.slow),
        ("llama-tied", {"method": "magnitude", "values": "int4", "dense_values": "int8"}),
        pytest.param("gpt2", {"method": "magnitude", "dense_values": "int4"}, marks=pytest.mark.slow),
        pytest.param(
            "llama",
            {"method": "wanda", "permute": True, "skip": ["layers.0.mlp.up_proj", "layers.1.mlp.down_proj"], "dense_values": "int8"},
            marks=pytest.mark.slow,
        ),
    ],
    ids=str,
)
def test_is_what_the_model_in_memory_becomes(tmp_path, name, options):
    source, data = saved(tmp_path / "dense", name, shard="100KB"), batches()
    assert len(list(source.glob("*.safetensors"))) > 2
    before = content(source)
    report = in_memory(source, tmp_path / "memory", data, **options)
    done = prune_folder(source, "2:4", data, tmp_path / "out", **options)
    assert same(loaded(tmp_path / "out"), loaded(tmp_path / "memory"))
    assert load_file(tmp_path / "out" / "model.safetensors").keys() == load_file(tmp_path / "memory" / "model.safetensors").keys()
    config, other = (json.loads((tmp_path / each / "config.json").read_text()) for each in ("out", "memory"))
    assert config == other
    assert [(n, row.error, row.rounded, row.tokens) for n, row in done.report.pruned.items()] == [
        (n, row.error, row.rounded, row.tokens) for n, row in report.pruned.items()
    ]
    if "skip" in options:  # with other words for why a layer is dense
        return
    assert (done.report.entries, done.report.channels, done.report.remark) == (report.entries, report.channels, report.remark)
    assert content(source) == before and sorted(os.listdir(tmp_path)) == ["dense", "memory", "out"]


def test_layers_outside_blocks_are_written_in_the_order_of_their_outputs(tmp_path):
    sizes = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2, "max_position_embeddings": 70}
    torch.manual_seed(0)
    kind = transformers.RobertaForSequenceClassification
    model, data = kind(transformers.RobertaConfig(vocab_size=128, num_labels=32, **sizes)).eval(), batches()
    model.save_pretrained(tmp_path / "dense")
    done = prune_folder(tmp_path / "dense", "2:4", data, tmp_path / "out", method="wanda", permute=True)
    assert done.report.channels["classifier.out_proj"].startswith("reordered with the outputs of classifier.dense")
    prune_(model, "2:4", data, method="wanda", permute=True).finish(allow_unused=True)
    assert same(loaded(tmp_path / "out", kind), nm.compress_(model))


@pytest.mark.quick(1)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_dtypes_are_kept(tmp_path, dtype):
    source = saved(tmp_path / "dense", dtype=dtype, layers=2)
    prune_folder(source, "2:4", batches(2), tmp_path / "out", method="wanda")
    assert {t.dtype for t in loaded(tmp_path / "out").state_dict().values()} == {dtype, torch.uint8}
    prune_folder(source, "2:4", batches(2), tmp_path / "wide", method="wanda", dtype=torch.float32)
    assert {t.dtype for t in loaded(tmp_path / "wide").state_dict().values()} == {torch.float32, torch.uint8}


def test_any_name_will_do(tmp_path):
    """Also that of the folder in which results are kept until then."""
    source = saved(tmp_path / "dense", layers=1, tokenizer=False)
    prune_folder(source, "2:4", batches(1), tmp_path / "units", method="magnitude")
    assert loaded(tmp_path / "units") and sorted(os.listdir(tmp_path)) == ["dense", "units"]


def test_other_libraries_are_told_of_compressed_layers(tmp_path, monkeypatch):
    """So that transformers can load the folder in the same process, without an import of the adapter."""
    models = []
    monkeypatch.setattr("nmkernels.nn.swap.post_swap_hooks", [models.append])
    prune_folder(saved(tmp_path / "dense", layers=1, tokenizer=False), "2:4", batches(1), tmp_path / "out", method="magnitude")
    assert len(models) == 1


@pytest.mark.parametrize(
    ("layers", "options"),
    [(3, {}), (1, {}), pytest.param(3, {"skip": ["layers.1.mlp"], "dense_values": "int4"}, marks=pytest.mark.slow)],
    ids=["on disk", "loaded whole", "dense layers in integers"],
)
def test_perplexity_is_that_of_the_whole_models(tmp_path, layers, options):
    source, tests = saved(tmp_path / "dense", layers=layers), batches(2, 3, 20, seed=5)
    done = prune_folder(source, "2:4", batches(), tmp_path / "out", method="wanda", held_out=tests, **options)
    for value, folder in zip(done.perplexity, (source, tmp_path / "out"), strict=True):
        with torch.no_grad():
            model = loaded(folder)
            losses = [float(model(**batch, labels=batch["input_ids"]).loss) for batch in tests]
        assert value == pytest.approx(math.exp(sum(losses) / 2), rel=1e-5)
    if layers == 1 or options:
        return
    # padding counts for nothing
    padded = [{"input_ids": torch.cat([b["input_ids"], b["input_ids"]], 1), "attention_mask": torch.ones(3, 40).long()} for b in tests]
    for batch in padded:
        batch["attention_mask"][:, 20:] = 0
    again = prune_folder(source, "2:4", batches(), tmp_path / "padded", method="wanda", held_out=padded)
    assert again.perplexity == pytest.approx(done.perplexity, rel=1e-5)


def test_the_folder_has_all_that_belongs_to_the_model(tmp_path):
    source = saved(tmp_path / "dense", tokenizer=True)
    (source / "README.md").write_bytes("---\nlicense: mit\n---\n\n# Modèle\n".encode("latin-1"))  # other bytes than UTF-8 are kept
    (source / "LICENSE").write_text("free")
    (source / "notes.bin").write_text("large")
    (source / ".cache").mkdir()
    (source / "1_Dense").mkdir()
    (source / "1_Dense" / "model.safetensors").write_text("a module of its own")
    (source / "modules.json").write_text(json.dumps([{"path": ""}, {"path": "1_Dense"}]))
    for name in ("onnx/config.json", "onnx/model.onnx", "pytorch_model.bin", "model.fp16.safetensors", "scripts/own.py"):
        (source / name).parent.mkdir(exist_ok=True)
        (source / name).write_text("")
    done = prune_folder(source, "2:4", batches(), tmp_path / "out", skip=["o_proj", "layers.0.*"], held_out=batches(1))
    files = ["1_Dense", "LICENSE", "README.md", "config.json", "generation_config.json", "model.safetensors", "modules.json", "notes.bin"]
    assert sorted(os.listdir(done.folder)) == [*files, "report.json", "scripts", "tokenizer.json", "tokenizer_config.json"]
    assert (done.folder / "1_Dense" / "model.safetensors").read_text() == "a module of its own"
    assert (done.folder / "scripts" / "own.py").is_file()
    left = json.loads((done.folder / "report.json").read_text())["not carried over"]
    assert left == ["model.fp16.safetensors", "onnx", "pytorch_model.bin"]
    card = (done.folder / "README.md").read_text(encoding="latin-1")
    assert "license: mit" in card and "# Modèle" in card and "- nmkernels" in card and 'LlamaForCausalLM.from_pretrained("out")' in card
    assert "2:4 by `admm` on 192 tokens in 3 batches" in card and f"| {done.perplexity[1]:.3f} |" in card
    facts = json.loads((done.folder / "report.json").read_text())
    assert len(facts["layers"]) == 12 and facts["left dense"]["model.layers.1.self_attn.o_proj"] == "named in skip"
    assert facts["bytes"] == {"dense": done.dense_bytes, "compressed": done.compressed_bytes}
    assert facts["bytes"]["dense"] == sum(p.nbytes for p in built().parameters())
    assert done.compressed_bytes == sum(t.nbytes for t in loaded(done.folder).state_dict().values())


def test_a_model_without_blocks_is_loaded_whole_and_says_so(tmp_path, caplog):
    source = saved(tmp_path / "dense", "albert", tokenizer=False)
    with caplog.at_level("INFO", "nmkernels.prune"):
        prune_folder(source, "2:4", batches(), tmp_path / "out", method="wanda")
    assert f"{source} is loaded whole: it has no blocks" in caplog.text
    model = transformers.AlbertForMaskedLM.from_pretrained(source)
    prune_(model, "2:4", batches(), method="wanda").finish(allow_unused=True)
    assert same(loaded(tmp_path / "out", transformers.AlbertForMaskedLM), nm.compress_(model))


# ---- interruptions


def killer(moment):
    """Ends this process at the progress report of that number."""
    count = iter(range(10**6))

    def progress(done, total, what):
        if next(count) == moment:
            os.kill(os.getpid(), signal.SIGKILL)

    return progress


def forked(action):
    """The exit status of ``action`` in a forked process, or minus the signal."""
    if process := os.fork():
        return os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])
    try:
        action()
        os._exit(0)
    except BaseException:
        os._exit(1)


# while the dense model is evaluated, at the second block, while files are written
@pytest.mark.parametrize("moment", [7, *(pytest.param(moment, marks=pytest.mark.slow) for moment in (4, 16, None))])
def test_killed_at_any_moment_it_goes_on_to_the_same_bytes(tmp_path, moment):
    source, data, tests = saved(tmp_path / "dense"), batches(), batches(1)
    before = content(source)

    def run(out, progress=None):
        return prune_folder(source, "2:4", data, out, method="sparsegpt", held_out=tests, progress=progress)

    reports = []
    run(tmp_path / "whole" / "out", lambda *report: reports.append(report))
    whole = content(tmp_path / "whole" / "out")
    for each in range(len(reports)) if moment is None else (moment,):
        out = tmp_path / str(each) / "out"
        out.parent.mkdir()
        assert forked(lambda each=each, out=out: run(out, killer(each))) == -signal.SIGKILL
        kept = len(list((work_folder(out) / "units").glob("unit-*")))
        done, total, what = reports[each]
        assert kept == (done if done < total else total + 1) or not what.startswith("pruning")
        if not out.exists():
            run(out)
        assert content(out) == whole and os.listdir(out.parent) == ["out"]
    assert content(source) == before


def test_finished_blocks_are_not_pruned_again(tmp_path, monkeypatch):
    source, solved = saved(tmp_path / "dense"), []
    solve = engine.solve
    monkeypatch.setattr(engine, "solve", lambda *args: solved.append(args[1].shape) or solve(*args))

    def stop(done, total, what):
        if what.startswith("pruning") and done == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        prune_folder(source, "2:4", batches(), tmp_path / "out", method="wanda", progress=stop)
    assert len(solved) == 14 and not (tmp_path / "out").exists()
    with pytest.raises(CheckpointError, match="holds the results of another run: its data is"):
        prune_folder(source, "2:4", batches(seed=9), tmp_path / "out", method="wanda")
    prune_folder(source, "2:4", batches(), tmp_path / "out", method="wanda")
    assert len(solved) == 21


CHANGES = {
    "the epsilon of norms": (None, "config.json is"),
    "a norm": ("model.norm.weight", "weights is"),
    "the embedding": ("model.embed_tokens.weight", "weights is"),
    "a matrix": ("model.layers.1.mlp.up_proj.weight", "weights is"),
}


@pytest.mark.parametrize("what", CHANGES)
def test_blocks_of_another_model_are_not_taken(tmp_path, what):
    source, (key, said) = saved(tmp_path / "dense", tokenizer=False), CHANGES[what]

    def stop(done, total, what):
        if what.startswith("pruning") and done == 1:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        prune_folder(source, "2:4", batches(), tmp_path / "out", method="wanda", progress=stop, held_out=batches(1))
    if key is None:
        config = json.loads((source / "config.json").read_text())
        (source / "config.json").write_text(json.dumps({**config, "rms_norm_eps": 30.0}))
    else:
        tensors = load_file(source / "model.safetensors")
        tensors[key].view(-1)[-1] += 0.01
        save_file(tensors, source / "model.safetensors", {"format": "pt"})
    with pytest.raises(CheckpointError, match=f"holds the results of another run: its {said}"):
        prune_folder(source, "2:4", batches(), tmp_path / "out", method="wanda", held_out=batches(1))
    # the user deletes the folder that the message names, and nothing of the other model is left
    shutil.rmtree(work_folder(tmp_path / "out") / "units")
    done = prune_folder(source, "2:4", batches(), tmp_path / "out", method="wanda", held_out=batches(1))
    fresh = prune_folder(source, "2:4", batches(), tmp_path / "fresh", method="wanda", held_out=batches(1))
    assert done.perplexity == fresh.perplexity and same(loaded(tmp_path / "out"), loaded(tmp_path / "fresh"))


def test_of_two_runs_at_once_one_is_refused_and_the_other_is_whole(tmp_path):
    source, refused = saved(tmp_path / "dense", tokenizer=False), []

    def second(done, total, what):
        if what.startswith(("pruning", "writing")) and done == 1:
            before = content(work_folder(tmp_path / "out"))
            with pytest.raises(CheckpointError, match=rf"out\.nmkernels-prune is in use: process {os.getpid()} on "):
                prune_folder(source, "2:4", batches(), tmp_path / "out", method="wanda")
            refused.append(content(work_folder(tmp_path / "out")) == before)

    prune_folder(source, "2:4", batches(), tmp_path / "out", method="wanda", progress=second)
    prune_folder(source, "2:4", batches(), tmp_path / "alone", method="wanda")
    assert refused == [True, True] and same(loaded(tmp_path / "out"), loaded(tmp_path / "alone"))
    assert sorted(os.listdir(tmp_path)) == ["alone", "dense", "out"]


def test_several_processes_of_torchrun_are_refused(tmp_path, monkeypatch):
    source = saved(tmp_path / "dense", tokenizer=False)
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "none")
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(RecipeError, match="2 processes were started, and one prunes a folder; start it without torchrun"):
        prune_folder(source, "2:4", batches(), tmp_path / "out")
    assert os.listdir(tmp_path) == ["dense"]
    monkeypatch.setenv("WORLD_SIZE", "1")
    prune_folder(source, "2:4", batches(), tmp_path / "out", method="magnitude")


def test_blocks_that_cannot_run_alone_stay_in_memory(tmp_path, monkeypatch):
    """With weights on disk too, and perplexity of the pruned weights."""
    source, tests = saved(tmp_path / "dense", tokenizer=False), batches(1, seed=5)
    want = prune_folder(source, "2:4", batches(), tmp_path / "out", method="wanda", held_out=tests)
    monkeypatch.setattr(relay.Relay, "_difference", lambda *args: "a test says so")
    with pytest.warns(UserWarning, match="cannot be run one by one: a test says so"):
        done = prune_folder(source, "2:4", batches(), tmp_path / "whole", method="wanda", held_out=tests)
    assert same(loaded(tmp_path / "whole"), loaded(tmp_path / "out")) and done.perplexity == pytest.approx(want.perplexity)
    assert "each pass ran the whole model" in done.report.remark


@pytest.mark.parametrize("limit", [20_000, *(pytest.param(limit, marks=pytest.mark.slow) for limit in (100, 60_000, 250_000))])
def test_a_full_disk_is_named_and_changes_nothing(tmp_path, limit):
    name = "qwen3-moe" if limit == 20_000 else "llama"  # whose experts transformers writes itself
    source, out = saved(tmp_path / "dense", name, shard="100KB"), tmp_path / "out"
    before, limits = content(source), resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limits[1]))
    try:
        with pytest.raises(CheckpointError, match=r"could not be written: File too large \(.*B free in .*\)\."):
            prune_folder(source, "2:4", batches(), out, method="wanda")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert content(source) == before and not out.exists()
    prune_folder(source, "2:4", batches(), out, method="wanda")
    assert loaded(out) and sorted(os.listdir(tmp_path)) == ["dense", "out"]


# ---- memory


PROCESS = """
import sys, threading, time
import torch
from python_tests.integrations.folders import batches
from nmkernels.prune.folder import prune_folder

def anonymous():
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) for line in file if line.startswith("RssAnon"))

start, peak = anonymous(), 0
def watch():
    global peak
    while True:
        peak = max(peak, anonymous())
        time.sleep(0.002)

threading.Thread(target=watch, daemon=True).start()
prune_folder(sys.argv[1], "2:4", batches(2, 1), sys.argv[2], method="wanda")
print(peak - start)
"""


@pytest.mark.slow
@pytest.mark.parametrize("name", ["llama", "qwen3-moe"])
def test_the_memory_of_the_process_does_not_grow_with_the_number_of_blocks(tmp_path, name):
    grown, block, sizes = [], 0, {"hidden_size": 512, "intermediate_size": 1536, "moe_intermediate_size": 384, "num_attention_heads": 8}
    for layers in (4, 12):
        folder = saved(tmp_path / str(layers), name, layers=layers, tokenizer=False, **sizes)
        block = (folder / "model.safetensors").stat().st_size // layers // 1024
        command = [sys.executable, "-c", PROCESS, str(folder), str(tmp_path / f"out-{layers}")]
        # above this size freed memory goes back to the system at once, so that what is counted is what is held
        env = {**os.environ, "PYTHONPATH": str(ROOT), "MALLOC_MMAP_THRESHOLD_": "65536"}
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True, env=env)
        grown.append(int(done.stdout.split()[-1]))
    assert grown[1] - grown[0] < 2 * block, (grown, block)  # of 8 blocks more


# ---- what is refused


def test_errors_by_kind_of_layer_are_of_the_values_that_are_written():
    row = functools.partial(Pruned, wanda=None, tokens=1, damping=0.0, seconds=0.0, memory=0)
    pruned = {"h.0.up": row(0.1, rounded=0.2), "h.1.up": row(0.3, rounded=0.6), "h.0.down": row(0.5), "head": row(None)}
    assert by_type(Report(pruned=pruned)) == {"h.*.up": pytest.approx(0.4), "h.*.down": 0.5}


def test_integers_that_do_not_fit_are_refused_before_any_work(tmp_path):
    def reading(done, total, what):
        assert what.startswith("reading"), f"it went on to {what!r}"

    source = saved(tmp_path / "dense", layers=2)
    for options, said in (({"values": "int5"}, "values='int5' is unknown"), ({"values": "int4", "group": 24}, "layer .*group=24 does not")):
        with pytest.raises(OptionError, match=f"prune_folder: {said}"):
            prune_folder(source, "2:4", batches(1), tmp_path / "out", progress=reading, **options)
    assert os.listdir(tmp_path) == ["dense"]


def test_layers_to_skip_have_to_be_there(tmp_path):
    source = saved(tmp_path / "dense", tokenizer=False)
    with pytest.raises(RecipeError, match="skip names 'out_proj', which matches no layer to prune of the model; did you mean 'o_proj'"):
        prune_folder(source, "2:4", batches(), tmp_path / "out", skip=["out_proj"])
    with pytest.raises(RecipeError, match="skip leaves no layer"):
        prune_folder(source, "2:4", batches(), tmp_path / "out", skip=["*"])
    with pytest.raises(RecipeError, match="data has no batch"):
        prune_folder(source, "2:4", [], tmp_path / "out")
    assert os.listdir(tmp_path) == ["dense"]


def test_a_file_without_all_weights_is_refused(tmp_path):
    source = saved(tmp_path / "dense", tokenizer=False)
    tensors = load_file(source / "model.safetensors")
    del tensors["model.norm.weight"]
    save_file(tensors, source / "model.safetensors", {"format": "pt"})
    with pytest.raises(CheckpointError, match=r"lacks 'model\.norm\.weight', which LlamaForCausalLM has"):
        prune_folder(source, "2:4", batches(), tmp_path / "out")
    (source / "model.safetensors").write_bytes((source / "model.safetensors").read_bytes()[:1000])
    with pytest.raises(CheckpointError, match="is not a valid safetensors file, or is truncated"):
        prune_folder(source, "2:4", batches(), tmp_path / "out")
    assert os.listdir(tmp_path) == ["dense"]
