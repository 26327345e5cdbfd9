"""train_gpt at the smallest size: the files, the table and the log are true, every recipe gets there, and a stop changes no bit."""

from __future__ import annotations

import csv
import json
import re
import shutil
from pathlib import Path

import pytest
import torch

import nmkernels as nm
from examples.train_gpt.data import Corpus, load_corpus
from nmkernels.recipes.compose import deployed
from python_tests.examples.program import model as models
from python_tests.examples.program import parallel, report, run, text_of, train
from python_tests.for_each import for_each

MODEL = models.GPTConfig(width=32, layers=1, heads=2, context=16)


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return text_of(tmp_path_factory.mktemp("text"))


@pytest.fixture
def no_plot(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(report, "plot", lambda *_: None)


@pytest.fixture(scope="module")
def finished(text: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("runs") / "out"
    run(text, out, "--baseline", "--recipe", "step:2:4")
    return out


def result_of(out: Path) -> dict:
    return json.loads((out / "result.json").read_text())


def rows_of(out: Path) -> list[dict[str, str]]:
    """The log without the speed."""
    rows = list(csv.DictReader((out / "log.csv").open(newline="")))
    assert all(float(row.pop("tokens_per_s")) > 0 for row in rows)
    return rows


def test_the_result_is_true(finished, text):
    result = result_of(finished)
    assert {p.name for p in finished.iterdir()} == {*result["files"], "checkpoints", "baseline", "run.json"}
    assert list(report.FILES) == result["files"] and (finished / "curves.png").read_bytes().startswith(b"\x89PNG")
    for folder in (finished, finished / "baseline"):
        assert sorted(p.name for p in (folder / "checkpoints").iterdir()) == ["step-00000008", "step-00000012"]
    sparse, weights = result["sparse"], 12 * 32 * 32
    assert sparse["max_difference_to_dense"] == pytest.approx(0, abs=1e-5)
    assert sparse["bytes"] == {
        "layers_dense": 4 * weights,
        "layers_compressed": 4 * weights // 2 + weights // 8,
        "file_dense": (finished / "model-dense.safetensors").stat().st_size,
        "file_compressed": (finished / "model.safetensors").stat().st_size,
    }
    steps = 2 * (3 + 1 + 4 + 1) * 32  # one per row, whose 32 or 128 inputs are one group
    assert {values: one["layers"] for values, one in sparse["rounded"].items()} == {
        "int8": weights // 2 + weights // 8 + steps,
        "int4": weights // 4 + weights // 8 + steps,
    }
    assert sparse["layers"] == 4 and 1 <= sparse["switch_step"] < 12 and sparse["remark"] == ""
    assert result["val_loss_ratio"] == sparse["val_loss"] / result["baseline"]["val_loss"]
    assert min(*sparse["tokens_per_s"].values(), sparse["train_tokens_per_s"]) > 0
    # 4 layers of 12·32² weights and a head of 256·32, 12 steps of 32 bytes; scores of 2·16·32 a layer, half of the two GEMMs
    dense, switch = 2 * (weights + 256 * 32) + 2 * 16 * 32, sparse["switch_step"]
    assert sparse["flops"] == {
        "training": 32 * (12 * 3 * dense - (12 - switch) * weights),
        "dense_training": 32 * 12 * 3 * dense,
        "inference": dense - weights,
        "dense_inference": dense,
    }
    # the validation loss is the one of the file that was written
    corpus = load_corpus(text)
    for values, one in (("float", sparse), *sparse["rounded"].items()):
        model = nm.load_compressed(models.GPT(MODEL), finished / "model.safetensors")
        if values != "float":
            nm.compress_(model, values=values)
        with torch.no_grad():
            losses = [(model.loss(x, y).item(), len(x)) for x, y in corpus.val_batches(16, 2, 256)]
        assert sum(v * n for v, n in losses) / sum(n for _, n in losses) == pytest.approx(one["val_loss"], rel=1e-5)
    assert len({one["val_loss"] for one in (sparse, *sparse["rounded"].values())}) == 3


def test_the_log_follows_the_phases(finished):
    rows, dense = rows_of(finished), rows_of(finished / "baseline")
    steps = [int(row["step"]) for row in rows]
    assert steps[-1] == 12 and steps == sorted(set(steps))
    switch = result_of(finished)["sparse"]["switch_step"]
    for row, step in zip(rows, steps, strict=True):
        assert row["phase"] == "1" or step <= switch
        assert float(row["density"]) == (0.5 if step > switch else 1.0)
    assert any(row["val_loss"] for row in rows) and float(rows[-1]["loss"]) < float(rows[0]["loss"]) - 0.5
    assert all(not row["phase"] and float(row["loss"]) > 0 for row in dense)


def test_the_demo(text, tmp_path, no_plot, capsys):
    run(text, tmp_path / "out", "--demo")
    out, err = capsys.readouterr()
    lines, sparse = out.splitlines(), result_of(tmp_path / "out")["sparse"]
    assert "note:" not in out and not err and not sparse["remark"]
    assert re.fullmatch(rf"Training a GPT of [\d,]+ parameters on {text}, byte by byte: 12 steps of 32 .* with SRSTE 2:4, .*", lines[0])
    assert re.search(r"^SRSTE 2:4  step 12/12  loss \d.\d+  .*sparse phase  mask changes \d.\d+%  \d+.\dk bytes/s$", out, re.MULTILINE)
    # every row of the table is full, and a row for each form follows it
    table = lines[lines.index("", lines.index("") + 1) + 2 :]
    assert all(len(re.split("  +", line)) == 4 for line in table[: table.index("")]) and table.index("") == 7
    assert [line.split("  ")[0] for line in table[8:11]] == ["the same weights", "dense layout", "compressed, float32"]
    assert f"Files in {tmp_path / 'out'}/\n  model.safetensors   " in out and "curves.png" not in out
    # --demo gives defaults, which --recipe and the other options replace
    args = train.arguments(["--demo", "--recipe", "step:1:4", "--steps", "7"])
    assert (args.recipe, args.steps, args.width, args.baseline, str(args.out)) == ("step:1:4", 7, 256, True, "demo_out")


QUICK = ("step", "maskllm", "slope", "sste")


@pytest.mark.parametrize("name", [pytest.param(n, marks=() if n in QUICK else pytest.mark.slow) for n in nm.recipes.names()])
def test_every_recipe_trains_to_a_checked_file(name, text, tmp_path, no_plot, monkeypatch):
    """At 1:8 where it can, else at its own pattern. Stopped after a checkpoint, it continues to the same bits."""
    try:
        recipe = nm.recipes.get(f"{name}:1:8", total_steps=12)
    except nm.NMError:
        recipe = nm.recipes.get(name, total_steps=12)
    words = ["--recipe", f"{name}:{recipe.pattern}"]
    if name == "step":
        words[1] += "(switch=fixed, start=7)"  # between the checkpoint and the stop
    run(text, tmp_path / "out", *words)
    result = result_of(tmp_path / "out")
    assert 0 < result["sparse"]["val_loss"] < 6 and result["sparse"]["sample"] and result["sparse"]["layers"] == 4
    file, dense = (tmp_path / "out" / name for name in ("model.safetensors", "model-dense.safetensors"))
    assert dense.exists() and file.exists() == (recipe.final != "dense")
    if recipe.final != "dense":
        model = nm.load_compressed(models.GPT(MODEL), file)
        for layer in (m for m in model.modules() if isinstance(m, nm.CompressedLinear)):
            weight = layer.weight.dense()
            assert weight.count_nonzero() <= deployed(recipe).fprop * weight.numel()
            assert (layer.adapter is not None) == (recipe.final == "nm+adapter")
    with monkeypatch.context() as patch:
        stop_at(patch, 11 if name == "step" else 6)
        with pytest.raises(InterruptedError):
            run(text, tmp_path / "parts", *words)
    torch.randn(7)  # another state of the global generator must not matter
    run(text, tmp_path / "parts", *words)
    for path in (file, dense) if file.exists() else (dense,):
        assert path.read_bytes() == (tmp_path / "parts" / path.name).read_bytes()
    assert rows_of(tmp_path / "out") == rows_of(tmp_path / "parts")


def stop_at(patch: pytest.MonkeyPatch, number: int, dense: bool = False) -> None:
    """End the run as it begins the step ``number``, of the baseline if ``dense``."""
    real = train.Trainer.step

    def step(self, n):
        if n == number and (self.handle is None) is dense:
            raise InterruptedError
        return real(self, n)

    patch.setattr(train.Trainer, "step", step)


def test_a_stop_in_the_baseline_resumes_the_baseline(text, tmp_path, finished, no_plot, monkeypatch, capsys):
    out, words = tmp_path / "out", ("--baseline", "--recipe", "step:2:4")
    with monkeypatch.context() as patch:
        stop_at(patch, 6, dense=True)
        with pytest.raises(InterruptedError):
            run(text, out, *words)
    (out / "checkpoints/.step-00000009").mkdir()  # a checkpoint that was being written
    capsys.readouterr()
    run(text, out, *words)
    said = capsys.readouterr().out
    assert "STEP 2:4: resumed after step 12 of 12\ndense baseline: resumed after step 4 of 12\n" in said
    assert rows_of(out) == rows_of(finished) and rows_of(out / "baseline") == rows_of(finished / "baseline")
    for part in ("sparse", "baseline"):
        assert result_of(out)[part]["val_loss"] == result_of(finished)[part]["val_loss"]
    assert sorted(p.name for p in (out / "checkpoints").iterdir()) == ["step-00000008", "step-00000012"]


def test_another_run_in_the_folder(finished, text, tmp_path, no_plot):
    out = Path(shutil.copytree(finished, tmp_path / "out"))
    other = tmp_path / "b.txt"
    other.write_bytes(text.read_bytes() + b"more")
    for source, words, message in (
        (text, [], r"recipe is step:2:4 there and srste:2:4\(decay=2.0\) here"),
        (text, ["--recipe", "step:2:4", "--width", "64", "--seed", "1"], "width is 32 there and 64 here; seed is 0 there and 1 here"),
        (other, ["--recipe", "step:2:4"], "text is 3564-.* there and 3568-.* here"),
    ):
        with pytest.raises(SystemExit, match=f"^train.py: error: {out} holds another run: {message}. Use another --out, or --overwrite"):
            run(source, out, *words)
    assert (out / "result.json").read_bytes() == (finished / "result.json").read_bytes()
    (out / "mine").touch()
    run(text, out, "--overwrite")
    assert {p.name for p in out.iterdir()} == {*report.FILES, "checkpoints", "run.json", "mine"} - {"curves.png"}
    assert result_of(out)["baseline"] is None
    shutil.rmtree(out / "checkpoints")
    (out / "run.json").unlink()
    with pytest.raises(SystemExit, match=r"holds files of something else \(log.csv, mine, model-dense.safetensors\)"):
        run(text, out, "--overwrite")


def test_the_dense_recipe_equals_the_baseline(text, tmp_path, no_plot):
    """The baseline is plain PyTorch; the dense recipe is this package's optimizer on the same batches."""
    run(text, tmp_path / "out", "--recipe", "dense", "--baseline")
    result = result_of(tmp_path / "out")
    assert result["val_loss_ratio"] == pytest.approx(1, abs=1e-4) and "bytes" not in result["sparse"]


@pytest.mark.slow
def test_the_activation_is_one_that_the_recipe_can_work_on(text, tmp_path, no_plot):
    for words, want in (((), "relu2"), (("--activation", "relu2:1:4"), "relu2:1:4")):
        run(text, tmp_path / "out", "--overwrite", "--recipe", "act24:2:4", *words)
        assert result_of(tmp_path / "out")["config"]["activation"] == want


def fails(message: str, text: Path, out: Path, *words: str) -> None:
    with pytest.raises(SystemExit, match=rf"^train.py: error: .*{message}"):
        run(text, out, *words)
    assert not (out / "result.json").exists()


@for_each(
    "words, message",
    [
        (["--recipe", "step:4:2"], "pattern 4:2 is not usable"),
        (["--recipe", "nope"], "no recipe is called 'nope'"),
        (["--width", "31"], "width 31 is not a multiple of heads=2"),
        (["--context", "400"], "too little text for a context of 400"),
        (["--recipe", "step:2:200"], "no layer of the model can be made 2:200 sparse"),
    ],
)
def test_wrong_options(text, tmp_path, words, message):
    fails(message, text, tmp_path / "out", *words)
    assert not (tmp_path / "out").exists()


def test_without_torchrun_there_is_nothing_to_share(text, tmp_path, monkeypatch, capsys):
    for words in (["--parallel", "fsdp"], []):
        with pytest.raises(SystemExit):
            run(text, tmp_path / "out", *words)
        assert "goes with torchrun" in capsys.readouterr().err
        monkeypatch.setenv("RANK", "0")


def test_a_file_that_does_not_reproduce_the_logits_fails(text, tmp_path, no_plot, monkeypatch):
    def wrong(model, path):
        nm.load_compressed(model, path)
        model.lm_head.weight.data[0, 0] += 1e-3
        return model

    monkeypatch.setattr(train, "nm", type("nm", (), {**vars(nm), "load_compressed": staticmethod(wrong)}))
    fails("other logits than the saved one", text, tmp_path / "out")


def test_a_loss_that_is_not_finite_stops_the_run(text, tmp_path, monkeypatch):
    real = models.GPT.loss
    monkeypatch.setattr(models.GPT, "loss", lambda self, x, y: real(self, x, y) * float("nan"))
    fails("the loss is nan at step 1: training has diverged. Lower --lr", text, tmp_path / "out")


# ---- parts


def test_learning_rate_rises_then_falls_along_a_cosine():
    args = train.arguments(["--steps", "200", "--lr", "1"])
    rates = [train.learning_rate(args, step) for step in range(1, 201)]
    assert rates[:10] == pytest.approx([0.1 * i for i in range(1, 11)])
    assert rates[104] == pytest.approx(0.55) and rates[-1] == pytest.approx(0.1)
    assert rates[9:] == sorted(rates[9:], reverse=True)


def trainer_of(recipe: str, *words: str) -> train.Trainer:
    args = train.arguments(
        ["--recipe", recipe, "--steps", "10", "--batch", "4", "--context", "16", "--width", "32", "--layers", "1", *words]
    )
    text = torch.randint(256, (3000,), dtype=torch.uint8)
    return train.Trainer(args, Corpus(text[:2000], text[2000:], "a test", 1, ""), train.recipe_of(args), parallel.Ranks())


def test_validation_uses_the_deployed_weights():
    trainer = trainer_of("step:1:8", "--lr", "0.03")
    trainer.step(1)
    assert trainer.handle.metrics()["phase"] == 0
    x, y = trainer.corpus.batch(0, 2, 4, 16)
    before, loss = trainer.model.loss(x, y).item(), trainer.validate()
    assert trainer.model.training and trainer.model.loss(x, y).item() == before, "training continues with the dense weights"
    with pytest.warns(UserWarning, match="still in its dense phase"):
        trainer.handle.finish()
    trainer.handle = None
    assert trainer.validate() == pytest.approx(loss, rel=1e-5) and trainer.model.loss(x, y).item() != pytest.approx(before, rel=1e-5)


def test_learned_parameters_have_their_own_rate():
    trainer = trainer_of("maskllm:2:4")
    trainer.step(5)
    by_id = {id(p): group["lr"] for group in trainer.optimizer.param_groups for p in group["params"]}
    rates = {name: by_id[id(p)] for name, p in trainer.model.named_parameters()}
    want = train.learning_rate(trainer.args, 5)
    logits = [rate for name, rate in rates.items() if name.endswith("nm_logits")]
    assert rates["lm_head.weight"] == want and logits and all(rate == pytest.approx(10 * want) for rate in logits)


def test_speeds_alternate_and_leave_the_warm_up_out(monkeypatch):
    order, clock = [], [0.0]

    def generate(model, prompt, count, *, temperature):
        order.append(model)
        clock[0] += {"slow": 4.0, "fast": 1.0}[model] * (100 if len(order) <= 2 else 1)

    monkeypatch.setattr(train, "generate", generate)
    monkeypatch.setattr(train.time, "perf_counter", lambda: clock[0])
    assert train.speeds({"slow": "slow", "fast": "fast"}) == {"slow": train.SPEED_TOKENS / 4, "fast": train.SPEED_TOKENS}
    assert order == ["slow", "fast"] * (train.SPEED_ROUNDS + 1)


@for_each(
    "phase, flips, said",
    [(0, 0.0, "dense phase"), (2, 0.5, "fixed mask"), (1, float("nan"), "sparse phase"), (1, 0.0, "sparse phase  mask changes 0.00%")],
)
def test_a_log_line_describes_the_mask(phase, flips, said):
    row = {"step": 2, "loss": 1.5, "lr": 0.1, "tokens_per_s": 2000.0, "phase": phase, "flip_rate": flips}
    assert report.line(row) == f"loss 1.500  {said}  2.0k bytes/s"


def test_the_plot_marks_phase_changes(tmp_path):
    pytest.importorskip("matplotlib")
    rows = [{"step": s, "loss": 1.0, "phase": float(s > 3), "flip_rate": 0.1} for s in range(1, 6)]
    report.plot(tmp_path / "a.png", rows, rows[:2], "a title", 0)
    report.plot(tmp_path / "b.png", rows[3:], rows[:2], "a title", 0)
    assert min((tmp_path / name).stat().st_size for name in ("a.png", "b.png")) > 10_000
    assert (tmp_path / "a.png").read_bytes() != (tmp_path / "b.png").read_bytes()


def test_what_is_said_of_slow_forms():
    sparse = {
        "val_loss": 1.01,
        "bytes": {"layers_dense": 1000, "layers_compressed": 531, "file_dense": 2000, "file_compressed": 1531},
        "tokens_per_s": {"dense": 100.0, "compressed": 50.0, "int8": 99.0, "int4": 160.0},
        "rounded": {"int8": {"layers": 281, "val_loss": 1.02}, "int4": {"layers": 172, "val_loss": 1.13}},
    }
    assert report.forms(sparse).splitlines()[2].endswith("  1.0100  0.50 times as fast as dense: saves memory here, not time")
    sparse["tokens_per_s"]["compressed"] = 150.0
    assert [re.split("  +", line) for line in report.forms(sparse).splitlines()[1:]] == [
        ["dense layout", "1,000", "100", "1.0100"],
        ["compressed, float32", "531", "150", "1.0100"],
        ["compressed, int8", "281", "99", "1.0200", "0.66 times as fast as float32: saves memory here, not time"],
        ["compressed, int4", "172", "160", "1.1300"],
    ]
    assert "Add --baseline" in report.remarks(sparse, None) and "--baseline" not in report.remarks(sparse, {"val_loss": 1.0})
    assert report.sample("def a(\x1b[31m)\n\tpass" + 200 * " " + ".").endswith("  | def a(?[31m)\n  |     pass")
