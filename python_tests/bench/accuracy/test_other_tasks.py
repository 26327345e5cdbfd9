"""Tasks whose data has to be made, found or brought along."""

import pickle

import numpy as np
import pytest
import torch

import nmkernels as nm
from bench.accuracy.tasks import cifar, finetune, hf, opcodes


def trained(task, pattern="2:4", steps=3):
    torch.manual_seed(0)
    model = task.model()
    handle = nm.sparsify_(model, nm.recipes.SRSTE(pattern))
    optimizer = handle.attach(nm.optim.MaskedAdamW(model.parameters(), lr=1e-3))
    for step in range(steps):
        loss = task.loss(model, task.batch(0, step))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        assert torch.isfinite(loss)
    model.eval()
    with handle.deployable():
        result = task.evaluate(model)
    assert all(np.isfinite(v) for v in result.values()) and task.data()
    return model, handle, result


def same_batches(task):
    a, b, c = task.batch(1, 2), task.batch(1, 2), task.batch(1, 3)
    assert all(map(torch.equal, a, b)) and not torch.equal(a[0], c[0])


# ---- opcodes


@pytest.fixture(scope="module")
def translation():
    return opcodes.ToOpcodes(pairs=600, test=100)


def test_pairs_are_real_and_the_test_set_is_apart(translation):
    assert len(translation.train[0]) == 500 and len(translation.test[0]) == 100
    texts = [bytes(row.tolist()).rstrip(b"\0") for row in torch.cat([translation.test[0], translation.train[0]])]
    assert len(set(texts)) == 600
    for text, row in list(zip(texts, translation.test[1], strict=False))[:20]:
        numbers = [n for n in row.tolist() if n != opcodes.PAD]
        assert numbers[0] == opcodes.BEGIN and numbers[-1] == opcodes.END
        assert tuple(translation.names[n - opcodes.FIRST] for n in numbers[1:-1]) == opcodes.instructions(text.decode())


@pytest.mark.slow
def test_translation_trains_its_feed_forward_layers(translation):
    same_batches(translation)
    _, handle, result = trained(translation)
    assert {name.rpartition(".")[2] for name in handle.layers} == {"linear1", "linear2"} and len(handle.layers) == 8
    assert 0 <= result["accuracy"] <= 100


def test_the_decoder_sees_no_later_instruction(translation):
    torch.manual_seed(0)
    model = translation.model().eval()
    source, target = translation.test[0][:2], translation.test[1][:2, :-1]
    other = target.clone()
    other[:, 5:] = opcodes.END
    assert torch.allclose(model(source, target)[:, :5], model(source, other)[:, :5], atol=1e-6)


def test_a_right_translation_counts(translation):
    class Oracle(torch.nn.Module):
        def forward(self, source, target):
            rows = [next(t for s, t in zip(*translation.test, strict=True) if torch.equal(s, one)) for one in source]
            return 50.0 * torch.nn.functional.one_hot(torch.stack(rows)[:, 1:], len(translation.names) + 3).float()

    result = translation.evaluate(Oracle())
    assert result["accuracy"] == 100 and result["val_loss"] < 1e-6


# ---- fine-tuning


@pytest.mark.slow
def test_pretraining_is_done_once(tmp_path, monkeypatch):
    before = torch.get_rng_state()
    first = finetune.pretrained(tmp_path, steps=4)
    assert torch.equal(torch.get_rng_state(), before)
    assert len(list(tmp_path.glob("pretrained-4-*.pt"))) == len(list(tmp_path.iterdir())) == 1
    monkeypatch.setattr(finetune, "_model", lambda: pytest.fail("trained again"))
    second = finetune.pretrained(tmp_path, steps=4)
    assert all(torch.equal(first[key], second[key]) for key in first)


@pytest.mark.slow
def test_fine_tuning_begins_with_the_pretrained_weights(tmp_path, monkeypatch):
    weights = finetune.pretrained(tmp_path, steps=4)
    monkeypatch.setattr(finetune, "pretrained", lambda folder: weights)
    task = finetune.FineTuneGPT()
    assert all(torch.equal(value, weights[key]) for key, value in task.model().state_dict().items())
    assert b"assignment" in bytes(task.corpus.train.tolist()) and b"def __init__" not in bytes(task.corpus.val[:2000].tolist())
    same_batches(task)
    trained(task, "1:8")


# ---- brought along


def pictures(folder, count=20):
    rng = np.random.default_rng(0)
    for name in [*(f"data_batch_{i}" for i in range(1, 6)), "test_batch"]:
        content = {b"data": rng.integers(0, 256, (count, 3072), dtype=np.uint8), b"labels": rng.integers(0, 10, count).tolist()}
        (folder / name).write_bytes(pickle.dumps(content))


def test_cifar_reads_the_published_format(tmp_path, monkeypatch):
    pictures(tmp_path)
    monkeypatch.setenv(cifar.VARIABLE, str(tmp_path))
    monkeypatch.setattr(cifar, "BATCH", 8)
    task = cifar.Cifar10()
    assert task.images.shape == (100, 3, 32, 32) and task.test_labels.shape == (20,)
    raw = pickle.loads((tmp_path / "data_batch_1").read_bytes())[b"data"][0]
    assert task.images[0, 2, 5, 7] == raw[2 * 1024 + 5 * 32 + 7]
    same_batches(task)
    monkeypatch.setattr(cifar, "PictureViT", lambda: MODEL(width=48, layers=1, heads=2))
    trained(task)


MODEL = cifar.PictureViT


def test_missing_pictures_are_named(tmp_path, monkeypatch):
    monkeypatch.delenv(cifar.VARIABLE, raising=False)
    with pytest.raises(RuntimeError, match=r"NMKERNELS_CIFAR10.*data_batch_1"):
        cifar.Cifar10()
    pictures(tmp_path)
    (tmp_path / "test_batch").unlink()
    monkeypatch.setenv(cifar.VARIABLE, str(tmp_path))
    with pytest.raises(RuntimeError, match=r"does not find test_batch there"):
        cifar.Cifar10()


def checkpoint(folder, kind):
    transformers = pytest.importorskip("transformers")
    tokenizers = pytest.importorskip("tokenizers")
    words = [*"abcdefghijklmnopqrstuvwxyz", *(f"##{c}" for c in "abcdefghijklmnopqrstuvwxyz"), "."]
    vocab = {word: i for i, word in enumerate(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *words])}
    raw = tokenizers.Tokenizer(tokenizers.models.WordPiece(vocab, unk_token="[UNK]"))
    raw.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    special = {} if kind == "gpt2" else {"mask_token": "[MASK]", "pad_token": "[PAD]", "cls_token": "[CLS]", "sep_token": "[SEP]"}
    transformers.PreTrainedTokenizerFast(tokenizer_object=raw, unk_token="[UNK]", **special).save_pretrained(folder)
    torch.manual_seed(0)
    if kind == "gpt2":
        model = transformers.GPT2LMHeadModel(
            transformers.GPT2Config(vocab_size=len(vocab), n_embd=64, n_layer=1, n_head=2, n_positions=128)
        )
    else:
        sizes = {"hidden_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 128}
        model = transformers.BertForMaskedLM(transformers.BertConfig(vocab_size=len(vocab), max_position_embeddings=128, **sizes))
    model.save_pretrained(folder)


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
    same_batches(task)
    ids, labels = task.batch(0, 0)
    guesses = labels != -100
    if task.causal:
        assert torch.equal(labels[:, :-1], ids[:, 1:]) and guesses.sum() == 2 * 127
    else:
        assert torch.equal(ids == task.mask_token, guesses) and 0.05 < guesses.double().mean() < 0.3
    model, handle, _ = trained(task)
    assert len(handle.layers) >= 4
    handle.finish()
    nm.compress_(model)
    task.evaluate(model)
