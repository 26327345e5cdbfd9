"""Tasks whose data has to be made, found or brought along."""

import numpy as np
import pytest
import torch

import nmkernels as nm
from bench.accuracy.tasks import finetune, hf
from python_tests.bench.accuracy.conftest import trained


def checked(task, pattern="2:4", steps=3):
    a, b, c = task.batch(1, 2), task.batch(1, 2), task.batch(1, 3)
    assert all(map(torch.equal, a, b)) and not torch.equal(a[0], c[0])
    torch.manual_seed(0)
    model = task.model()
    handle = nm.sparsify_(model, nm.recipes.SRSTE(pattern))
    optimizer = handle.attach(nm.optim.MaskedAdamW(model.parameters(), lr=1e-3))
    trained(task, model, optimizer, steps)
    handle.finish()
    result = task.evaluate(model.eval())
    assert all(np.isfinite(v) for v in result.values()) and task.digest
    return handle, result


# ---- fine-tuning


@pytest.mark.slow
def test_fine_tuning_starts_from_cached_pretraining(tmp_path, monkeypatch):
    before = torch.get_rng_state()
    weights = finetune.pretrained(tmp_path, steps=4)
    assert torch.equal(torch.get_rng_state(), before)
    assert len(list(tmp_path.glob("pretrained-4-*.pt"))) == len(list(tmp_path.iterdir())) == 1
    with monkeypatch.context() as patch:
        patch.setattr(finetune, "GPT", lambda config: pytest.fail("trained again"))
        assert all(torch.equal(value, weights[key]) for key, value in finetune.pretrained(tmp_path, steps=4).items())
    monkeypatch.setattr(finetune, "pretrained", lambda folder, steps: weights if steps == 2000 else pytest.fail("other weights"))
    task = finetune.FineTuneGPT()
    assert all(torch.equal(value, weights[key]) for key, value in task.model().state_dict().items())
    checked(task, "1:8")


# ---- brought along


def checkpoint(folder, kind):
    transformers, tokenizers = pytest.importorskip("transformers"), pytest.importorskip("tokenizers")
    letters = "abcdefghijklmnopqrstuvwxyz"
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *letters, *(f"##{c}" for c in letters), "."]
    raw = tokenizers.Tokenizer(tokenizers.models.WordPiece({word: i for i, word in enumerate(words)}, unk_token="[UNK]"))
    raw.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    special = {} if kind == "gpt2" else {f"{name}_token": f"[{name.upper()}]" for name in ("mask", "pad", "cls", "sep")}
    transformers.PreTrainedTokenizerFast(tokenizer_object=raw, unk_token="[UNK]", **special).save_pretrained(folder)
    sizes = {"hidden_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2, "max_position_embeddings": 128}
    config = transformers.AutoConfig.for_model(kind, vocab_size=len(words), **sizes)
    model = transformers.AutoModelForCausalLM if kind == "gpt2" else transformers.AutoModelForMaskedLM
    torch.manual_seed(0)
    model.from_config(config).save_pretrained(folder)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["gpt2", "bert"])
def test_hugging_face_checkpoints_train(tmp_path, monkeypatch, kind):
    checkpoint(tmp_path / "model", kind)
    (tmp_path / "text.txt").write_text("the quick brown fox jumps over the lazy dog . " * 200)
    monkeypatch.setenv(hf.MODEL, str(tmp_path / "model"))
    monkeypatch.setenv(hf.TEXT, str(tmp_path / "text.txt"))
    monkeypatch.setattr(hf, "BATCH", 2)
    task = hf.HuggingFace()
    assert task.causal is (kind == "gpt2")
    ids, labels = task.batch(0, 0)
    guesses = labels != -100
    if task.causal:
        assert torch.equal(labels[:, :-1], ids[:, 1:]) and guesses.sum() == 2 * 127
    else:
        assert torch.equal(ids == task.mask_token, guesses) and 0.05 < guesses.double().mean() < 0.3
    assert len(checked(task)[0].layers) >= 4
