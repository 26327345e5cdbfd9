"""Programs that know nothing of nmkernels open compressed folders: the entry point that torch runs, and what ``import nmkernels`` does."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path

import pytest
import torch

import nmkernels as nm

ROOT = Path(__file__).resolve().parents[2]
ENTRY = "[torch.backends]\nnmkernels = nmkernels_autoload:autoload\n"

# ---- with a stand-in for transformers, since a process with the real one takes seconds

WHOLE = "AUTO_QUANTIZATION_CONFIG_MAPPING = {}\ndef get_hf_quantizer(): pass\n"
REGISTRIES = {
    "as it is": WHOLE,
    "another name": "MAPPING = {}\ndef get_hf_quantizer(): pass\n",
    "read-only": "import types\nAUTO_QUANTIZATION_CONFIG_MAPPING = types.MappingProxyType({})\ndef get_hf_quantizer(): pass\n",
    "None": "AUTO_QUANTIZATION_CONFIG_MAPPING = None\ndef get_hf_quantizer(): pass\n",
    "it fails": "raise ImportError('of its own')\n",
}


def stand_in(folder: Path, registry: str) -> Path:
    texts = {"__init__": "", "modeling_utils": "from .quantizers import auto\n", "quantizers/__init__": "", "quantizers/auto": registry}
    for name, text in texts.items():
        path = folder / "transformers" / f"{name}.py"
        path.parent.mkdir(exist_ok=True, parents=True)
        path.write_text(text)
    return folder


def process(code: str, *paths: Path, **env: str) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(map(str, (*paths, ROOT))), "PYTHONWARNINGS": "ignore"} | env
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300, env=environment, check=False)


FOUND = "import transformers.quantizers.auto as a; print(a.AUTO_QUANTIZATION_CONFIG_MAPPING['nmkernels'].__name__)"


LOADED = "import nmkernels_autoload as n; n.autoload()"
ORDERS = {
    "before": (LOADED, WHOLE),
    "twice": (f"{LOADED}; n.autoload(); import transformers.modeling_utils", WHOLE),
    "after": (f"import transformers.quantizers.auto; {LOADED}", WHOLE),
    "between": (f"import transformers; {LOADED}; import transformers.modeling_utils", WHOLE),
    "while the registry imports torch": ("import transformers.quantizers.auto, transformers.modeling_utils", f"{LOADED}\n{WHOLE}"),
}


@pytest.mark.parametrize("order", ORDERS)
def test_the_registry_has_the_method_in_any_order(order, tmp_path):
    first, registry = ORDERS[order]
    code = f"{first}\nimport sys\n{FOUND}\nprint(any(type(f).__name__ == '_Finder' for f in sys.meta_path), 'nmkernels' in sys.modules)"
    done = process(code, stand_in(tmp_path, registry))
    assert (done.stdout.split(), done.stderr) == (["_Config", "False", "False"], "")


@pytest.mark.parametrize("registry", REGISTRIES)
def test_nothing_else_changes(registry, tmp_path):
    """Whatever transformers has become, importing it does what it does without the entry point, without a word."""
    code = "try:\n import transformers.modeling_utils; print('imported')\nexcept Exception as e: print(type(e).__name__, e)"
    folder = stand_in(tmp_path, REGISTRIES[registry])
    want, got = process(code, folder), process(f"import nmkernels_autoload as n; n.autoload()\n{code}", folder)
    assert (got.stdout, got.stderr) == (want.stdout, want.stderr) and want.stdout


def test_its_own_switch(tmp_path):
    code = f"{LOADED}\nimport transformers.quantizers.auto as a; print(a.AUTO_QUANTIZATION_CONFIG_MAPPING)"
    assert process(code, stand_in(tmp_path, WHOLE), NMKERNELS_AUTOLOAD="0").stdout.strip() == "{}"


# ---- the real programs


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """(an entry point's metadata, a compressed folder, the dense one with zeros)."""
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    home = tmp_path_factory.mktemp("models")
    (home / "site" / "nmkernels_entry-1.dist-info").mkdir(parents=True)
    (home / "site" / "nmkernels_entry-1.dist-info" / "entry_points.txt").write_text(ENTRY)
    (home / "site" / "nmkernels_entry-1.dist-info" / "METADATA").write_text("Metadata-Version: 2.1\nName: nmkernels-entry\nVersion: 1\n")
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(vocab_size=128, bos_token_id=1, eos_token_id=2, **sizes))
    nm.sparsify_(model, "ste:2:4").finish(allow_unused=True)
    tokenizer = tokens()
    model.save_pretrained(home / "dense")
    nm.compress_(model).save_pretrained(home / "sparse")
    for name in ("dense", "sparse"):
        tokenizer.save_pretrained(home / name)
    encoder = transformers.BertModel(transformers.BertConfig(vocab_size=128, **sizes))
    nm.sparsify_(encoder, "ste:2:4").finish(allow_unused=True)
    nm.compress_(encoder).save_pretrained(home / "encoder")
    tokenizer.save_pretrained(home / "encoder")
    return home / "site", home / "sparse", home / "dense", home / "encoder"


def tokens():
    """A tokenizer of single characters."""
    from tokenizers import Regex, Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    vocabulary = {"[UNK]": 0, "<s>": 1, "</s>": 2, "[PAD]": 3} | {chr(c): c for c in range(4, 128)}
    inner = Tokenizer(models.WordLevel(vocabulary, unk_token="[UNK]"))
    inner.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    names = {"unk_token": "[UNK]", "bos_token": "<s>", "eos_token": "</s>", "pad_token": "[PAD]"}
    made = PreTrainedTokenizerFast(tokenizer_object=inner, **names)
    made.chat_template = "{% for m in messages %}{{ m['content'] }}{% endfor %}"
    return made


IMPORTS = {
    "nothing": "",
    "the registry first": "import transformers.quantizers.auto",
    "models first": "import transformers.modeling_utils",
    "nmkernels before": "import nmkernels",
    "nmkernels after": "import transformers; import nmkernels",
    "the adapter": "import nmkernels.integrations.hf",
}
LOAD = """
import sys, torch
from transformers import AutoModelForCausalLM, LlamaForCausalLM
ids = torch.arange(4, 36).view(2, 16)
for kind in (AutoModelForCausalLM, LlamaForCausalLM):
    sparse, dense = kind.from_pretrained(sys.argv[1]), kind.from_pretrained(sys.argv[2])
    assert torch.equal(sparse.generate(ids, max_new_tokens=8, do_sample=False), dense.generate(ids, max_new_tokens=8, do_sample=False))
print("same")
"""


def with_entry(folders, code, *more, **env):
    site, *rest = folders
    return process(f"import sys; sys.argv[1:] = {[str(p) for p in rest]!r}\n{code}", site, *more, **env)


@pytest.mark.slow
@pytest.mark.parametrize("first", IMPORTS)
def test_a_process_that_names_nmkernels_nowhere(first, folders):
    done = with_entry(folders, f"{IMPORTS[first]}\n{LOAD}")
    assert done.stdout.strip().endswith("same"), done.stderr


def test_only_a_compressed_folder_imports_it(folders):
    code = (
        "import torch, transformers\nfrom transformers import AutoModelForCausalLM\nAutoModelForCausalLM.from_pretrained(sys.argv[2])\n"
        "print('nmkernels' in sys.modules)\nAutoModelForCausalLM.from_pretrained(sys.argv[1])\nprint('nmkernels' in sys.modules)"
    )
    done = with_entry(folders, code)
    assert done.stdout.split() == ["False", "True"], done.stderr


@pytest.mark.slow
def test_two_pipelines_and_generate_batch(folders):
    code = """
import torch
from transformers import AutoModelForCausalLM, GenerationConfig, pipeline
sparse, dense = (pipeline("text-generation", model=path, max_new_tokens=8, do_sample=False) for path in sys.argv[1:3])
assert sparse("some text") == dense("some text")
labels = pipeline("text-classification", model=sys.argv[3])
assert "score" in labels("some text")[0]
config = GenerationConfig(max_new_tokens=8, do_sample=False, eos_token_id=2, pad_token_id=3)
prompts = [list(range(4, 20)), list(range(30, 40))]
models = [AutoModelForCausalLM.from_pretrained(path, attn_implementation="paged|sdpa").eval() for path in sys.argv[1:3]]
sparse, dense = ([r.generated_tokens for r in m.generate_batch(prompts, generation_config=config).values()] for m in models)
assert sparse == dense and sparse
print("same")
"""
    done = with_entry(folders, code)
    assert done.stdout.strip().endswith("same"), done.stderr


@pytest.mark.slow
def test_sentence_transformers(folders, tmp_path):
    pytest.importorskip("sentence_transformers")
    code = f"""
import numpy
from sentence_transformers import SentenceTransformer
model = SentenceTransformer(sys.argv[3])
one = model.encode(["some text", "other"])
model.save({str(tmp_path / "saved")!r})
assert numpy.array_equal(one, SentenceTransformer({str(tmp_path / "saved")!r}).encode(["some text", "other"]))
print("same")
"""
    done = with_entry(folders, code)
    assert done.stdout.strip().endswith("same"), done.stderr


TASK = """
task: letters
dataset_path: json
dataset_kwargs: {data_files: {test: FILE}}
output_type: multiple_choice
test_split: test
doc_to_text: "{{text}}"
doc_to_choice: "{{choices}}"
doc_to_target: label
metric_list: [{metric: acc}]
"""


@pytest.mark.slow
@pytest.mark.parametrize("way", ["the entry point", "run"])
def test_lm_eval_gives_the_figures_of_the_dense_model(way, folders, tmp_path):
    pytest.importorskip("lm_eval")
    rows = [{"text": f"{i} is ", "choices": ["odd", "even", "large"], "label": i % 3} for i in range(20)]
    (tmp_path / "test.jsonl").write_text("\n".join(map(json.dumps, rows)))
    (tmp_path / "letters.yaml").write_text(TASK.replace("FILE", str(tmp_path / "test.jsonl")))
    site, sparse, dense, _ = folders
    found = []
    for folder in (sparse, dense):
        out = tmp_path / folder.name
        words = ["--model", "hf", "--model_args", f"pretrained={folder},dtype=float32", "--tasks", "letters", "--device", "cpu"]
        words += ["--include_path", str(tmp_path), "--batch_size", "4", "--output_path", str(out)]
        start = ["-m", "lm_eval"] if way == "the entry point" else ["-m", "nmkernels", "run", "-m", "lm_eval"]
        done = started([*start, *words], site if way == "the entry point" else ROOT)
        assert done.returncode == 0, done.stderr[-2000:]
        found.append(json.loads(next(out.rglob("results*.json")).read_text())["results"]["letters"])
    assert found[0] == found[1] and "acc,none" in found[0]


def started(words, *paths):
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(map(str, (*paths, ROOT))), "HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1"}
    return subprocess.run([sys.executable, *words], capture_output=True, text=True, timeout=600, env=environment, check=False)


@pytest.mark.slow
def test_transformers_serve_streams_an_answer(folders):
    for needed in ("fastapi", "uvicorn", "openai"):
        pytest.importorskip(needed)
    site, sparse, *_ = folders
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(map(str, (site, ROOT))), "HF_HUB_OFFLINE": "1"}
    words = [sys.executable, "-m", "transformers.cli.transformers", "serve", str(sparse), "--device", "cpu", "--port", str(port)]
    server = subprocess.Popen(words, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    body = {"model": str(sparse), "stream": True, "max_tokens": 8, "messages": [{"role": "user", "content": "some text"}]}
    request = urllib.request.Request(
        f"http://127.0.0.1:{port}/v1/chat/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    try:
        for _ in range(240):
            assert server.poll() is None, server.stdout and server.stdout.read()
            try:
                with urllib.request.urlopen(request, timeout=240) as answer:
                    lines = [line.decode() for line in answer if line.strip()]
                break
            except urllib.error.URLError:
                time.sleep(0.5)
        assert any("chat.completion.chunk" in line for line in lines), lines[:3]
    finally:
        server.kill()
        server.wait()
