"""``python -m nmkernels prune``: data of every kind, what it prints and writes, and one sentence for whatever is wrong."""

from __future__ import annotations

import json
import os
import resource
import sys

import pytest
import torch

from nmkernels import cli
from nmkernels.cli import prune as verb
from nmkernels.cli.samples import draw, read
from nmkernels.pattern import NMError
from nmkernels.prune.plot import curves
from nmkernels.train.report import Pruned, Report
from python_tests.integrations.folders import CODE, VOCABULARY, content, saved, with_code, write_text

transformers = pytest.importorskip("transformers", minversion="5.0")
pytest.importorskip("accelerate")
np = pytest.importorskip("numpy")

SHORT = ["--samples", "8", "--length", "32", "--method", "wanda"]
pytestmark = pytest.mark.filterwarnings("ignore:prune_. layer")


@pytest.fixture(scope="module")
def places(tmp_path_factory):
    """Folders of dense models and a text, which no test changes."""
    root = tmp_path_factory.mktemp("prune")
    saved(root / "llama", layers=2)
    (root / "llama" / "pytorch_model.bin").write_bytes(b"the same weights")
    write_text(root / "a.txt")
    return root


def prune(model, data, out, *more):
    return cli.main(["prune", str(model), "--data", str(data), "--out", str(out), *SHORT, *more])


def test_a_folder_is_pruned(places, tmp_path, capsys):
    before, out = content(places), tmp_path / "out"
    assert prune(places / "llama", places / "a.txt", out) == 0
    said = capsys.readouterr()
    facts = json.loads((out / "report.json").read_text())
    dense, pruned = facts["perplexity"]["dense"], facts["perplexity"]["pruned"]
    assert "llama: 14 layers pruned to 2:4 by wanda on 256 tokens in " in said.out
    assert f"perplexity, 64 tokens  {dense:.3f}  {pruned:.3f}  {pruned / dense:.3f}" in said.out
    assert "Not carried over, since they hold the dense weights: pytorch_model.bin." in said.out and facts["blocks"] == "one by one"
    assert "  model.layers.*.mlp.up_proj " in said.out and "Left dense: lm_head (output head)." in said.out
    assert f'LlamaForCausalLM.from_pretrained("{out}")' in said.out
    assert f"reading {places / 'a.txt'}\n" in said.err and " left, evaluating dense: model.layers.0 (1 of 3)\n" in said.err
    assert " left, pruning model.layers.0 (1 of 2)\n" in said.err and "\ndone in 0:00:" in said.err
    model = transformers.AutoModelForCausalLM.from_pretrained(out)
    assert len(transformers.AutoTokenizer.from_pretrained(out)("w1 w2")["input_ids"]) == 2
    assert sum(type(m).__name__ == "CompressedLinear" for m in model.modules()) == 14
    assert content(places) == before and os.listdir(tmp_path) == ["out"]
    # what is there is not overwritten, and the same command elsewhere writes the same bytes
    assert prune(places / "llama", places / "a.txt", out) == 1
    assert f"error: {out} holds a finished result; pass a new folder, or delete this one.\n" in capsys.readouterr().err
    assert prune(places / "llama", places / "a.txt", tmp_path / "again" / "out", "--json") == 0
    assert json.loads(capsys.readouterr().out) == facts and content(tmp_path / "again" / "out") == content(out)


def test_options_reach_the_run(places, tmp_path, capsys):
    words = ["--pattern", "1:4", "--transposable", "--no-sequential", "--dtype", "bfloat16", "--skip", "q_proj", "--held-out", "0"]
    words += ["--values", "int4", "--group", "32", "--dense-values", "int8"]
    assert prune(places / "llama", places / "a.txt", tmp_path / "out", *words, "--batch", "3", "--json") == 0
    facts = json.loads(capsys.readouterr().out)
    assert (facts["values"], facts["group"]) == ("int4", 32)
    assert facts["dense values"]["values"] == "int8" and {"model.embed_tokens", "lm_head"} <= {*facts["dense values"]["layers"]}
    assert (facts["pattern"], facts["method"], facts["sequential"]) == ("1:4", "wanda(transposable=True)", False)
    assert facts["data"]["batches"] == 3 and facts["perplexity"] is None
    assert facts["left dense"]["model.layers.0.self_attn.q_proj"] == "named in skip"
    assert transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out").dtype == torch.bfloat16


def test_a_pattern_for_each_layer(places, tmp_path, capsys):
    """From a table, then from the report of that run; the sparse layers of an audit."""
    table = {"*.0.*": "4:8", "*.up_proj": "1:4", "*.self_attn.*": "dense", "*": "2:4"}
    (tmp_path / "table.json").write_text(json.dumps(table))
    assert prune(places / "llama", places / "a.txt", tmp_path / "out", "--patterns", str(tmp_path / "table.json")) == 0
    assert "llama: 10 layers pruned to 1:4, 2:4, 4:8 by wanda on " in capsys.readouterr().out
    facts = json.loads((tmp_path / "out" / "report.json").read_text())
    assert facts["pattern"] == table and facts["patterns"]["model.layers.1.mlp.up_proj"] == "1:4"
    assert facts["patterns"]["model.layers.0.mlp.up_proj"] == "4:8" and "lm_head" not in facts["patterns"]
    assert "1:4, 2:4, 4:8 by `wanda`" in (tmp_path / "out" / "README.md").read_text()
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    found = {name: str(m.pattern) for name, m in model.named_modules() if type(m).__name__ == "CompressedLinear"}
    assert found == facts["patterns"]
    report = tmp_path / "out" / "report.json"
    assert prune(places / "llama", places / "a.txt", tmp_path / "again", "--patterns", str(report)) == 0
    weights = [(tmp_path / each / "model.safetensors").read_bytes() for each in ("out", "again")]
    assert weights[0] == weights[1]
    groups = [{"names": ["a", "b"], "pattern": "2:4", "sparse": True}, {"names": ["c"], "pattern": "", "sparse": False}]
    (tmp_path / "audit.json").write_text(json.dumps({"layers": groups}))
    assert verb.patterns_of(tmp_path / "audit.json") == {"a": "2:4", "b": "2:4"}


def test_code_in_the_folder_runs_if_it_is_trusted(places, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(transformers.dynamic_module_utils, "HF_MODULES_CACHE", str(tmp_path / "modules"))
    monkeypatch.setattr("sys.path", [*sys.path])
    source = with_code(saved(tmp_path / "mine", layers=2))
    before = content(source)
    assert prune(source, places / "a.txt", tmp_path / "out") == 1
    said = capsys.readouterr().err
    assert "names the architecture 'MineForCausalLM', whose code lies in the folder (modeling_mine.py) and is not run; read it" in said
    assert "pass --trust-remote-code (in Python trust_remote_code=True) if you trust it." in said
    assert prune(source, places / "a.txt", tmp_path / "out", "--trust-remote-code") == 0
    said = capsys.readouterr().out
    call = f'AutoModelForCausalLM.from_pretrained("{tmp_path / "out"}", trust_remote_code=True)'
    assert call in said and "perplexity, 64 tokens" in said and content(source) == before
    assert 'AutoModelForCausalLM.from_pretrained("out", trust_remote_code=True)' in (tmp_path / "out" / "README.md").read_text()
    for folder in ("out", "tuned"):
        assert all((tmp_path / folder / name).read_bytes() == before[name] for name in CODE)
        model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / folder, trust_remote_code=True)
        assert type(model).__name__ == "MineForCausalLM" and sum(hasattr(m, "indices") for m in model.modules()) == 14
        tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / folder, trust_remote_code=True)
        assert type(tokenizer).__name__.startswith("MineTokenizer")
        if folder == "out":
            words = ["finetune", str(tmp_path / "out"), "--data", str(places / "a.txt"), "--out", str(tmp_path / "tuned"), "--length", "32"]
            assert cli.main([*words, "--steps", "1"]) == 1 and "whose code lies in the folder" in capsys.readouterr().err
            assert cli.main([*words, "--steps", "1", "--trust-remote-code", "--teacher", str(source)]) == 0


@pytest.mark.parametrize("name", ["llama", "qwen3-moe"])
def test_errors_are_drawn(places, tmp_path, name):
    pytest.importorskip("matplotlib")
    source = places / "llama" if name == "llama" else saved(tmp_path / name, name, layers=2)
    assert prune(source, places / "a.txt", tmp_path / "out", "--plot", "--held-out", "0") == 0
    assert (tmp_path / "out" / "error.png").read_bytes()[:4] == b"\x89PNG"
    assert "\n![errors by layer](error.png)\n" in (tmp_path / "out" / "README.md").read_text()
    facts = json.loads((tmp_path / "out" / "report.json").read_text())
    rows = {layer: Pruned(row["error"], None, 0, 0.0, 0.0, 0) for layer, row in facts["layers"].items()}
    lines = curves(Report(pruned=rows))
    assert lines.keys() == facts["error by layer"].keys() and all(list(line) == [0, 1] for line in lines.values())
    means = {layer: sum(line.values()) / len(line) / 100 for layer, line in lines.items()}
    assert means == pytest.approx(facts["error by layer"])


def test_without_matplotlib_it_says_so_at_once(places, tmp_path, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert prune(places / "llama", places / "a.txt", tmp_path / "out", "--plot") == 1
    assert "error: the plot of errors needs matplotlib (pip install matplotlib): " in capsys.readouterr().err and os.listdir(tmp_path) == []


@pytest.mark.parametrize(
    ("name", "why"), [("bert", "BertForMaskedLM is not a causal"), ("t5", "T5ForConditionalGeneration is not a causal")]
)
def test_other_models_have_no_perplexity(places, tmp_path, capsys, name, why):
    saved(tmp_path / name, name, layers=2)
    assert prune(tmp_path / name, places / "a.txt", tmp_path / "out") == 0
    said = capsys.readouterr().out
    assert f"Perplexity was not measured: {why} language model." in said and "perplexity," not in said


def test_why_nothing_is_held_out(places, tmp_path, capsys):
    """Windows are cut from a text and have a least length; rows of token ids have their own."""

    def said(data, *more):
        assert prune(places / "llama", data, tmp_path / f"out{len(os.listdir(tmp_path))}", *more) == 0
        return capsys.readouterr().out

    few, many = (write(tmp_path / f"{rows}.npy", np.full((rows, 8), 5)) for rows in (4, 40))
    assert "Perplexity was not measured: it takes windows of 16 tokens, and these have 8." in said(places / "a.txt", "--length", "8")
    assert "perplexity, 16 tokens" in said(many, "--length", "8")
    assert "Perplexity was not measured: the data is too short to hold some out." in said(few, "--length", "8")


def test_ctrl_c_says_how_to_go_on(places, tmp_path, capsys, monkeypatch):
    def stop(self, done, total, what):
        if self.prefix + what == "pruning model.layers.1":
            raise KeyboardInterrupt

    monkeypatch.setattr(verb.Progress, "__call__", stop)
    monkeypatch.setattr("sys.argv", ["nmkernels", "prune", "a folder"])
    before = content(places)
    assert prune(places / "llama", places / "a.txt", tmp_path / "out") == 130
    said = capsys.readouterr().err
    assert said.endswith(
        f"\nStopped.\nFinished blocks are kept in {tmp_path / '.out.nmkernels-prune'}. To resume:\n  python -m nmkernels prune 'a folder'\n"
    )
    monkeypatch.undo()
    assert content(places) == before and prune(places / "llama", places / "a.txt", tmp_path / "out") == 0
    assert os.listdir(tmp_path) == ["out"]


def test_a_full_disk_says_how_to_go_on(places, tmp_path, capsys):
    before, limits = content(places), resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (150_000, limits[1]))  # of a block's results, not of the model
    try:
        assert prune(places / "llama", places / "a.txt", tmp_path / "out") == 1
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    said = capsys.readouterr().err
    assert "model.safetensors could not be written: File too large (" in said
    assert f"\nFinished blocks are kept in {tmp_path / '.out.nmkernels-prune'}. To resume:\n" in said
    assert content(places) == before and not (tmp_path / "out").exists()
    assert prune(places / "llama", places / "a.txt", tmp_path / "out") == 0


# ---- what is wrong


def write(path, content):
    if isinstance(content, np.ndarray):
        np.save(path, content)
    else:
        path.write_bytes(content.encode() if isinstance(content, str) else content)
    return path


def configure(model, **values):
    write(model / "config.json", json.dumps({**json.loads((model / "config.json").read_text()), **values}))


def replace_weights(model, name="", content=""):
    (model / "model.safetensors").unlink()
    if name:
        write(model / name, content)


SPOILED = {
    "nothing there": lambda root, model: {"model": root / "nowhere"},
    "no configuration": lambda root, model: (model / "config.json").unlink(),
    "damaged configuration": lambda root, model: write(model / "config.json", "{"),
    "no weights": lambda root, model: replace_weights(model),
    "older format": lambda root, model: replace_weights(model, "pytorch_model.bin"),
    "no shard": lambda root, model: replace_weights(model, "model.safetensors.index.json", '{"weight_map": {"a": "model-1.safetensors"}}'),
    "unknown architecture": lambda root, model: configure(model, architectures=["NewForCausalLM"]),
    "unknown type": lambda root, model: configure(model, model_type="new"),
    "other sizes": lambda root, model: configure(model, intermediate_size=96),
    "activation": lambda root, model: configure(model, hidden_act="nope"),
    "no heads": lambda root, model: configure(model, num_key_value_heads=0),
    "no model": lambda root, model: configure(model, architectures=["AutoConfig"]),
    "a configuration": lambda root, model: configure(model, architectures=["LlamaConfig"]),
    "one architecture": lambda root, model: configure(model, architectures="LlamaForCausalLM"),
    "compressed": lambda root, model: configure(model, quantization_config={"quant_method": "nmkernels"}),
    "quantised": lambda root, model: configure(model, quantization_config={"quant_method": "gptq"}),
    "no tokenizer": lambda root, model: [path.unlink() for path in model.glob("tokenizer*")],
    "no data": lambda root, model: {"data": root / "b.txt"},
    "empty data": lambda root, model: write(root / "a.txt", " \n"),
    "too little text": lambda root, model: write(root / "a.txt", "w1 w2 w3"),
    "no text": lambda root, model: write(root / "a.txt", b"\xff\xfe\x00"),
    "not JSON": lambda root, model: {"data": write(root / "a.jsonl", "w1")},
    "other JSON": lambda root, model: {"data": write(root / "a.jsonl", '{"content": "w1"}')},
    "empty folder": lambda root, model: (root / "texts").mkdir() or {"data": root / "texts"},
    "no ids": lambda root, model: {"data": write(root / "a.npy", np.zeros(100))},
    "foreign tokens": lambda root, model: {"data": write(root / "a.npy", np.full(1000, VOCABULARY))},
    "pattern": lambda root, model: {"more": ["--pattern", "5:4"]},
    "patterns of nothing": lambda root, model: {"more": ["--patterns", str(write(root / "p.json", '{"*.attn.*": "2:4"}'))]},
    "patterns that are none": lambda root, model: {"more": ["--patterns", str(write(root / "p.json", '{"*": "half"}'))]},
    "patterns without names": lambda root, model: {"more": ["--patterns", str(write(root / "p.json", '["2:4"]'))]},
    "two patterns": lambda root, model: {"more": ["--patterns", "p.json", "--pattern", "2:4"]},
    "method": lambda root, model: {"more": ["--method", "admm(refit=)"]},
    "setting": lambda root, model: {"more": ["--method", "admm(foo=1)"]},
    "device": lambda root, model: {"more": ["--device", "nothing"]},
    "share": lambda root, model: {"more": ["--held-out", "2"]},
    "file": lambda root, model: write(root / "out", ""),
    "inside": lambda root, model: {"out": model / "out"},
}
"""What is done to the model, the data or the arguments; arguments that are others are returned."""

SENTENCES = {
    "nothing there": "{root}/nowhere: there is no such folder; pass one that save_pretrained wrote, with config.json and ",
    "no configuration": "{model} has no config.json; pass a folder that save_pretrained wrote.",
    "damaged configuration": "{model}/config.json is damaged (Expecting property name enclosed in double quotes",
    "no weights": "{model} has no weights in model.safetensors or model.safetensors.index.json.",
    "older format": "index.json; pytorch_model.bin is an older format: load the model and call save_pretrained.",
    "no shard": "{model} lacks model-1.safetensors, which model.safetensors.index.json names; download it again.",
    "unknown architecture": "{model}/config.json names the architecture 'NewForCausalLM'; transformers ",
    "unknown type": "transformers cannot read {model}/config.json: The checkpoint you are trying to load has model type `new` but ",
    "other sizes": "{model}: 'model.layers.0.mlp.down_proj.weight' has shape (64, 128) in the files, and (64, 96) in a LlamaForCausalLM ",
    "activation": "transformers cannot build a LlamaForCausalLM as {model}/config.json says: KeyError: 'nope'.",
    "no heads": "transformers cannot build a LlamaForCausalLM as {model}/config.json says: integer ",
    "no model": "{model}/config.json names the architecture 'AutoConfig'; transformers ",
    "a configuration": "{model}/config.json names the architecture 'LlamaConfig'; transformers ",
    "one architecture": "{model}/config.json is damaged: its architectures are 'LlamaForCausalLM', not a list of names.",
    "compressed": "{model} is compressed by nmkernels already; pass the folder of the dense model.",
    "quantised": "{model} is quantised (gptq); pass the folder of the unquantised model.",
    "no tokenizer": "the model's folder has no tokenizer, which text needs; pass token ids (.npy, .pt, .safetensors), or add its files.",
    "no data": "--data {root}/b.txt cannot be read: No such file or directory.",
    "empty data": "--data {root}/a.txt is empty.",
    "too little text": "--data has 3 tokens for calibration, and one sample takes 32; pass more, or a smaller --length.",
    "no text": "--data {root}/a.txt is not text in UTF-8; files of token ids end in .npy, .pt, .safetensors.",
    "not JSON": "--data {root}/a.jsonl, line 1 is not JSON; write one object in each line, or one array of them.",
    "other JSON": '--data {root}/a.jsonl, line 1 has no "text"; write lines such as {{"text": "..."}}, or pass --text-column.',
    "empty folder": "--data {root}/texts: the folder has no files that end in .arrow, .json, ",
    "no ids": "--data {root}/a.npy cannot be read as token ids: Cannot cast array data from dtype('float64') to dtype('int64')",
    "foreign tokens": "batch 1 of the data has token 128, and the model's vocabulary has 0 to 127; take the tokenizer of this model.",
    "pattern": "5:4",
    "patterns of nothing": "prune_: pattern names '*.attn.*', which matches no layer of the model",
    "patterns that are none": "prune_folder: the pattern of '*': ",
    "patterns without names": "--patterns {root}/p.json has no pattern of a layer; write {{",
    "two patterns": "--pattern and --patterns both set the patterns; pass one of them.",
    "method": "'admm(refit=)' is not a one-shot method: write it as name, or name(keyword=value, ...), for instance admm(refit=0).",
    "setting": "the method admm has no keyword 'foo'. It takes damping, ",
    "device": "device 'nothing' cannot be used here: ",
    "share": "--held-out 2 is not a share from 0 to 0.5.",
    "file": "{out} is not a folder; pass a new one.",
    "inside": "{out} is inside the model's folder {model}, which is not changed; pass a folder elsewhere.",
}


@pytest.mark.parametrize("what", SENTENCES)
def test_what_is_wrong_is_one_sentence_and_changes_nothing(tmp_path, capsys, what):
    model, data, out = saved(tmp_path / "model", layers=2), tmp_path / "a.txt", tmp_path / "out"
    write_text(data)
    changed = SPOILED[what](tmp_path, model)
    args = {"model": model, "data": data, "out": out, "more": (), **(changed if isinstance(changed, dict) else {})}
    capsys.readouterr()
    before = content(tmp_path)
    assert prune(args["model"], args["data"], args["out"], *args["more"]) == 1
    said = capsys.readouterr().err
    lines = [line for line in said.splitlines() if not line.startswith(("reading ", "note: "))]
    assert len(lines) == 1 and lines[0].startswith("python -m nmkernels prune: error: "), said
    assert SENTENCES[what].format(root=tmp_path, model=args["model"], out=args["out"]) in lines[0]
    assert content(tmp_path) == before


@pytest.mark.parametrize("verb", ["prune", "finetune"])
@pytest.mark.parametrize("seed", [2**63, -(2**70)])
def test_seeds_are_bounded(capsys, verb, seed):
    with pytest.raises(SystemExit):
        cli.main([verb, "model", "--data", "a.txt", "--out", "out", "--seed", str(seed)])
    assert f"argument --seed: {seed} is not between -2^32 and 2^32" in capsys.readouterr().err


def test_models_that_take_no_text(places, tmp_path, capsys):
    saved(tmp_path / "vit", "vit", tokenizer=False)
    assert prune(tmp_path / "vit", places / "a.txt", tmp_path / "out") == 1
    assert "ViTForImageClassification takes pixel_values and not text; pass batches" in capsys.readouterr().err


# ---- data


def letters(text):
    return [ord(letter) for letter in text]


def test_every_kind_of_file_is_read(tmp_path):
    from safetensors.torch import save_file

    (tmp_path / "b.txt").write_text("plain")
    (tmp_path / "a.jsonl").write_text('{"text": "one"}\n\n{"text": "two", "id": 3}\n"three"\n')
    (tmp_path / ".hidden.txt").write_text("no")
    (tmp_path / "z.bin").write_text("no")
    (tmp_path / "inner").mkdir()
    ids = torch.arange(6, dtype=torch.int32)
    torch.save({"input_ids": ids.view(2, 3)}, tmp_path / "inner" / "c.pt")
    save_file({"other": ids.float(), "input_ids": ids}, tmp_path / "inner" / "d.safetensors")
    np.save(tmp_path / "inner" / "e.npy", ids.numpy().astype("uint16"))
    found = read(tmp_path)
    assert found[:4] == ["one", "two", "three", "plain"]
    assert [(t.dtype, t.tolist()) for t in found[4:]] == [
        (torch.int64, [[0, 1, 2], [3, 4, 5]]),
        (torch.int64, [0, 1, 2, 3, 4, 5]),
        (torch.int64, [0, 1, 2, 3, 4, 5]),
    ]
    for bad in ({"x": 1}, torch.zeros(3), torch.zeros(1, 1, 1).long()):
        torch.save(bad, tmp_path / "bad.pt")
        with pytest.raises(NMError, match="has no token ids, which are integers"):
            read(tmp_path / "bad.pt")
    (tmp_path / "bad.safetensors").write_bytes(b"junk")
    with pytest.raises(NMError, match=r"bad\.safetensors cannot be read as token ids: "):
        read(tmp_path / "bad.safetensors")


RECORDS = {
    "a line separator inside": '{"text": "one\u2028half"}\n{"text": "two"}\n',
    "another, as Windows wrote it": '{"text": "one\x85half"}\r\n{"text": "two"}\r\n',
    "a byte order mark": '\ufeff{"text": "one"}\n{"text": "two"}\n',
    "an array": '[{"text": "one"}, "two"]',
    "an array over many lines": '[\n  {\n    "text": "one"\n  },\n  {\n    "text": "two"\n  }\n]\n',
    "an array after a mark": '\ufeff[{"text": "one"}, {"text": "two"}]',
}


@pytest.mark.parametrize("form", RECORDS)
def test_records_of_other_programs(tmp_path, form):
    (tmp_path / "a.jsonl").write_bytes(RECORDS[form].encode())
    first, second = read(tmp_path / "a.jsonl")
    assert first in ("one", "one\u2028half", "one\x85half") and len(first) == (8 if "half" in RECORDS[form] else 3) and second == "two"


def test_one_record_over_many_lines_is_one_text(tmp_path):
    (tmp_path / "a.json").write_text('{\n  "text": "one",\n  "id": 3\n}\n')
    assert read(tmp_path / "a.json") == ["one"]
    (tmp_path / "a.json").write_text('[{"text": "one"}, {"content": "two"}]')
    with pytest.raises(NMError, match='a.json, record 2 has no "text"'):
        read(tmp_path / "a.json")
    (tmp_path / "a.txt").write_bytes("\ufeffplain".encode())
    assert read(tmp_path / "a.txt") == ["plain"]


def arrow(path, table, stream=True):
    pa = pytest.importorskip("pyarrow")
    table = pa.table(table)
    with pa.OSFile(str(path), "wb") as file, (pa.ipc.new_stream if stream else pa.ipc.new_file)(file, table.schema) as writer:
        writer.write_table(table, max_chunksize=2)
    return path


def test_what_datasets_saved_is_read(tmp_path):
    """In several files, with the remains of ``map``, with splits, and tokenized."""
    datasets = pytest.importorskip("datasets")
    datasets.disable_progress_bars()
    texts = [f"text {i}" for i in range(7)]
    one = datasets.Dataset.from_dict({"text": texts, "label": list(range(7)), "body": [t.upper() for t in texts]})
    one.save_to_disk(tmp_path / "one", num_shards=3)
    loaded = datasets.load_from_disk(tmp_path / "one").map(lambda row: {"text": f"new {row['text']}"})
    assert loaded[0]["text"] == "new text 0" and list((tmp_path / "one").glob("cache-*.arrow"))
    assert read(tmp_path / "one") == texts and read(tmp_path / "one", "body")[6] == "TEXT 6"
    datasets.DatasetDict(train=one.select(range(5)), test=one.select([5, 6])).save_to_disk(tmp_path / "splits")
    assert read(tmp_path / "splits") == texts[:5] and read(tmp_path / "splits" / "test") == texts[5:]
    datasets.DatasetDict(valid=one, test=one).save_to_disk(tmp_path / "others")
    with pytest.raises(NMError, match='others has no split "train"; pass the folder of one of its splits: test, valid.'):
        read(tmp_path / "others")
    datasets.Dataset.from_dict({"input_ids": [[1, 2, 3], [4, 5, 6]], "attention_mask": [[1] * 3] * 2}).save_to_disk(tmp_path / "ids")
    assert [t.tolist() for t in read(tmp_path / "ids")] == [[[1, 2, 3], [4, 5, 6]]]


def test_tables_are_read_or_said_to_be_wrong(tmp_path, monkeypatch):
    pytest.importorskip("pyarrow")
    from pyarrow import parquet, table

    rows = {"text": ["one", None, "two", "three"], "input_ids": [[1, 2], [3], [], [4]], "n": [1, 2, 3, 4]}
    files = [arrow(tmp_path / "a.arrow", rows), arrow(tmp_path / "b.arrow", rows, stream=False), tmp_path / "c.parquet"]
    parquet.write_table(table(rows), files[2])
    for file in files:
        assert read(file) == ["one", "two", "three"]
        assert [t.tolist() for t in read(file, "input_ids")] == [[1, 2], [3], [4]]
        with pytest.raises(NMError, match="has no column 'body'; name one of its columns with --text-column: text, input_ids, n."):
            read(file, "body")
        with pytest.raises(NMError, match="has neither texts nor lists of token ids in the column it is read from, but int64"):
            read(file, "n")
    for damaged in (tmp_path / "d.arrow", tmp_path / "d.parquet"):
        damaged.write_bytes(b"not a table")
        with pytest.raises(NMError, match=rf"{damaged.name} is damaged: "):
            read(damaged)
    (tmp_path / "e.jsonl").write_text('{"body": "one"}')
    assert read(tmp_path / "e.jsonl", "body") == ["one"]
    monkeypatch.setitem(__import__("sys").modules, "pyarrow", None)
    with pytest.raises(NMError, match=r"a table of Arrow or Parquet, which needs pyarrow \(pip install pyarrow\)"):
        read(files[0])


def test_a_folder_is_pruned_on_a_table(places, tmp_path, capsys):
    words = (places / "a.txt").read_text().split("\n")
    arrow(tmp_path / "a.arrow", {"body": words})
    assert prune(places / "llama", tmp_path / "a.arrow", tmp_path / "out", "--text-column", "body", "--json") == 0
    assert json.loads(capsys.readouterr().out)["data"]["tokens"] == 256


def test_held_out_text_is_the_end_and_not_calibrated_on():
    text = "".join(chr(33 + i % 90) + (" " if i % 10 == 9 else "") for i in range(5000))
    found = draw([text], letters, samples=1000, length=50, share=0.2)
    assert found[0].shape == (88, 50) and found[1].shape == (22, 50)
    assert found[0].flatten().tolist() == letters(text)[:4400]
    cut = len(text) - 1100
    assert 0 <= cut - (start := text.rfind(" ", 0, cut) + 1) < 11
    assert found[1].flatten().tolist() == letters(text)[start:][:1100]
    several = draw(["a" * 800, "b" * 100, "c" * 100], letters, samples=40, length=50, share=0.2)
    assert several[1].tolist() == [[98] * 50] * 2 + [[99] * 50] * 2
    few = draw([text], letters, samples=8, length=50, share=0.2)
    assert few[0].shape == (8, 50) and few[1].shape == (2, 50)
    assert draw([text], letters, samples=8, length=50, share=0.0)[1].shape[0] == 0
    assert draw([text[:100]], letters, samples=8, length=20, share=0.1)[1].shape[0] == 0  # too short


def test_windows_are_drawn_from_all_of_a_long_text_by_the_seed():
    text = ("a" * 999 + "\n") * 2000
    numbered = "".join(f"{i:07} " for i in range(250_000))
    one, other, again = (draw([numbered, text], letters, samples=4, length=100, seed=seed, share=0) for seed in (0, 1, 0))
    assert torch.equal(one[0], again[0]) and not torch.equal(one[0], other[0])
    ids = torch.arange(10_000)
    spread = draw([ids], None, samples=200, length=50, share=0)[0].flatten()
    assert sorted(spread.tolist()) == list(range(10_000))


def test_rows_of_token_ids_are_the_windows():
    table = torch.arange(60).view(20, 3)
    found = draw([table[:12], table[12:]], None, samples=5, length=2, share=0.1)
    assert found[1].tolist() == table[18:, :2].tolist()
    rows = {tuple(row) for row in found[0].tolist()}
    assert len(rows) == 5 and rows <= {tuple(row) for row in table[:18, :2].tolist()}
