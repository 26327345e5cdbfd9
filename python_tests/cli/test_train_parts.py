"""The parts of a run that can be looked at alone: schedule, log, plot, summary, speeds, settings."""

from __future__ import annotations

import io
import os
import re
import warnings
from itertools import pairwise

import pytest
import torch

from nmkernels.cli import deploy
from nmkernels.cli.config import TrainConfig, resumed_config
from nmkernels.cli.log import Log, notes, plot, read_log, summary, switches
from nmkernels.cli.train import Trainer, learning_rate
from nmkernels.models import Corpus
from nmkernels.pattern import CheckpointError
from python_tests.for_each import for_each


def test_learning_rate_rises_then_falls_along_a_cosine():
    config = TrainConfig(steps=100, lr=1.0, warmup=0.1)
    rates = [learning_rate(config, step) for step in range(1, 101)]
    assert rates[:10] == pytest.approx([0.1 * i for i in range(1, 11)])
    assert rates[54] == pytest.approx(0.55)
    assert rates[-1] == pytest.approx(0.1)
    assert all(a > b for a, b in pairwise(rates[9:]))
    assert learning_rate(TrainConfig(steps=1, lr=1.0), 1) == 1.0


@pytest.mark.parametrize("terminal", [False, True])
def test_a_log_prints_a_bar_on_a_terminal_and_else_lines(tmp_path, terminal):
    stream = io.StringIO()
    stream.isatty = lambda: terminal
    row = {"loss": 1.5, "lr": 0.1, "tokens_per_s": 2000.0, "phase": 1, "flip_rate": 0.01, "density": 0.5, "decay_ratio": 0.0, "extra": 3}
    with Log(tmp_path, "a", 0, 10, stream) as log:
        log.row({"step": 2, **row})
        log.tick()
        log.row({"step": 5, "loss": 2.0, "lr": 0.1, "tokens_per_s": 1.0, "val_loss": 3.0})
    assert read_log(tmp_path / "log.csv")[0] == {"step": 2, **{k: v for k, v in row.items() if k != "extra"}}
    said = stream.getvalue()
    assert ("\r" in said) == terminal
    line = "a  step  2/10  loss 1.500  sparse phase  mask changes 1.00%  2.0k bytes/s\n"
    assert ("loss 2.000  validation 3.000" if terminal else line) in said


@for_each(
    "phase, flips, said",
    [(0, 0.0, "dense phase"), (2, 0.5, "fixed mask"), (1, float("nan"), "sparse phase"), (1, 0.0, "sparse phase  mask changes 0.00%")],
)
def test_a_log_line_describes_the_mask(tmp_path, phase, flips, said):
    stream = io.StringIO()
    with Log(tmp_path, "a", 0, 10, stream) as log:
        log.row({"step": 2, "loss": 1.5, "lr": 0.1, "tokens_per_s": 2000.0, "phase": phase, "flip_rate": flips})
    assert stream.getvalue() == f"a  step  2/10  loss 1.500  {said}  2.0k bytes/s\n"


def test_a_warning_is_a_line_of_the_log():
    stream = io.StringIO()
    with notes(stream):
        warnings.warn("the mask is odd", UserWarning, stacklevel=1)
    assert stream.getvalue() == "note: the mask is odd\n"
    with pytest.warns(UserWarning, match="as always"):
        warnings.warn("as always", UserWarning, stacklevel=1)


def rows(*steps):
    return [{"step": step, "loss": 1.5 / step, "lr": 0.1, "tokens_per_s": 2000.0, "phase": 1, "flip_rate": 0.25} for step in steps]


def written(folder, *steps, start=0):
    with Log(folder, "a", start, 10, io.StringIO()) as log:
        for row in rows(*steps):
            log.row(row)
    return (folder / "log.csv").read_bytes()


def test_a_log_cut_off_at_any_byte_keeps_its_whole_rows(tmp_path):
    whole = written(tmp_path, 2, 4)
    for length in range(0, len(whole) + 1, 3):
        (tmp_path / "log.csv").write_bytes(whole[:length])
        have = max(whole[:length].count(b"\r") - 1, 0)  # the figures before it are whole
        assert read_log(tmp_path / "log.csv") == rows(2, 4)[:have]
        assert written(tmp_path, *(2, 4)[have:], start=4) == whole
    for start, have in ((6, 2), (3, 1), (0, 0)):
        (tmp_path / "log.csv").write_bytes(whole + b"\0" * 70 + b"\n8,not,a,row\r\nx")
        assert written(tmp_path, start=start) == b"".join(whole.splitlines(keepends=True)[: 1 + have])
    assert [p.name for p in tmp_path.iterdir()] == ["log.csv"]


def test_a_damaged_log_is_replaced(tmp_path):
    written(tmp_path, 2, 4)
    before = (tmp_path / "log.csv").stat().st_ino
    with (tmp_path / "log.csv").open() as keep:  # or the number could be given to the next file
        written(tmp_path, 6, start=4)
        assert (tmp_path / "log.csv").stat().st_ino == before
        written(tmp_path, 6, start=4)
        assert (tmp_path / "log.csv").stat().st_ino != before
        assert keep.read().count("\n") == 4  # who reads the old one is not disturbed
    (tmp_path / "log.csv").unlink()
    os.mkfifo(tmp_path / "log.csv")
    with pytest.raises(CheckpointError, match="log.csv is not a regular file"):
        written(tmp_path)


def test_the_plot_marks_phase_changes(tmp_path):
    rows = [{"step": s, "loss": 1.0, "phase": float(s > 3), "flip_rate": 0.1} for s in range(1, 6)]
    assert switches(rows) == [4]
    assert plot(tmp_path / "a.png", rows, rows[:2], "a title")
    assert (tmp_path / "a.png").stat().st_size > 10_000


def test_speeds_take_turns_and_leave_the_warm_up_out(monkeypatch):
    order, clock = [], [0.0]
    cost = {"slow": 4.0, "fast": 1.0}

    def generate(model, prompt, count, *, temperature):
        order.append(model)
        clock[0] += cost[model] * (100 if len(order) <= 2 else 1)

    monkeypatch.setattr(deploy, "generate", generate)
    speeds = deploy.speeds({"slow": "slow", "fast": "fast"}, lambda: clock[0])
    assert speeds == {"slow": deploy.SPEED_TOKENS / 4, "fast": deploy.SPEED_TOKENS}
    assert order == ["slow", "fast"] * (deploy.SPEED_ROUNDS + 1)


def test_summary():
    sparse = {
        "seconds": 3.0,
        "switch_step": 4,
        "val_loss": 1.01,
        "train_tokens_per_s": 90.0,
        "sample": "def a(\x1b[31m)\n\tpass" + 200 * " " + ".",
    }
    sparse["reload"] = {"identical": True, "max_difference_to_dense": 1e-6}
    sparse["bytes"] = {"layers_dense": 1000, "layers_compressed": 531, "file_dense": 2000, "file_compressed": 1531}
    sparse["tokens_per_s"] = {"dense": 100.0, "compressed": 50.0}
    config, baseline = {"recipe": "step:2:4", "steps": 10, "batch": 2, "context": 16}, {"val_loss": 1.0, "train_tokens_per_s": 100.0}
    result = {"config": config, "corpus": {"source": "a test"}, "parameters": 1234, "sparse": sparse, "baseline": baseline}
    result.update(out="out", files=["log.csv"])
    text = summary(result)
    assert text.startswith("STEP 2:4 on a test: 1,234 parameters") and all(words in text for words in ("until step 4", "1.010", "0.531"))
    gained = text.partition("Against the dense model:\n")[2].partition("\n\n")[0].splitlines()
    assert gained == [
        "  size   the file has 0.00 MB instead of 0.00, 23% less",
        "  speed  text is generated 0.50 times as fast: at this size, on this machine, the compressed form saves memory and not time",
        "  loss   1.0% higher on validation text",
    ]
    assert "  | def a(?[31m)\n  |     pass\n" in text and "validation loss is" not in text
    assert "\x1b" not in text
    sparse["remark"] = "STEP: the switch came at T_max"
    assert "sparse from there.\n\nSTEP: the switch came at T_max\n" in summary(result)
    sparse["tokens_per_s"]["compressed"] = 150.0
    baseline["val_loss"] = 1.02
    text = summary(result)
    assert "1.50 times as fast\n" in text and "saves memory" not in text and "  loss   1.0% lower on" in text
    assert "int8" not in text
    sparse["tokens_per_s"] |= {"int8": 99.0, "int4": 160.0}
    sparse["rounded"] = {"int8": {"layers": 281, "val_loss": 1.02}, "int4": {"layers": 172, "val_loss": 1.13}}
    forms = summary(result).partition("the same weights")[2].partition("\n\n")[0].splitlines()
    assert [re.split("  +", line) for line in forms[1:]] == [
        ["dense layout", "1,000", "100", "1.0100"],
        ["compressed, float32", "531", "150", "1.0100"],
        ["compressed, int8", "281", "99", "1.0200", "0.66 times as fast as float32: saves memory here, not time"],
        ["compressed, int4", "172", "160", "1.1300"],
    ]
    del sparse["rounded"]
    # alone there is no row that is half empty
    result["baseline"] = None
    text = summary(result)
    assert "The validation loss is 1.0100 nats per byte." in text and "--baseline" in text and "  loss " not in text
    table = text.partition("ratio\n")[2].partition("\n\n")[0].splitlines()
    assert table and all(len(re.split("  +", line)) == 4 for line in table)
    # nor is anything said of a dense file
    del sparse["bytes"], sparse["reload"], sparse["tokens_per_s"]
    sparse["flops"] = dict.fromkeys(("training", "dense_training", "inference", "dense_inference"), 1e9)
    assert "Against" not in summary(result) and "GFLOPs" in summary(result)


def test_settings_of_another_version_are_refused():
    with pytest.raises(CheckpointError, match="saved by another version"):
        resumed_config({}, {"colour": "red"}, "a.pt")
    assert resumed_config({}, {"steps": 7}, "a.pt").steps == 7


@pytest.fixture
def corpus():
    text = torch.randint(256, (3000,), dtype=torch.uint8)
    return Corpus(text[:2000], text[2000:], "a test", 1, "")


def test_validation_uses_the_deployed_weights(corpus):
    config = TrainConfig(recipe="step:1:8", steps=10, batch=4, context=16, width=32, layers=1, heads=2, lr=0.03)
    trainer = Trainer(config, corpus, config.build_recipe())
    trainer.step(1)
    assert trainer.metrics()["phase"] == 0
    x, y = corpus.batch(0, 2, 4, 16)
    before, found = trainer.model.loss(x, y).item(), trainer.validate()
    assert trainer.model.training and trainer.model.loss(x, y).item() == before, "training goes on with the dense weights"
    with pytest.warns(UserWarning, match="still in its dense phase"):
        trainer.handle.finish()
    trainer.handle = None
    assert trainer.validate() == pytest.approx(found, rel=1e-5) and trainer.model.loss(x, y).item() != pytest.approx(before, rel=1e-5)


def test_learned_parameters_have_their_own_rate(corpus):
    size = {"steps": 20, "batch": 2, "context": 16, "width": 32, "layers": 1, "heads": 2, "lr": 1e-2}
    config = TrainConfig(recipe="maskllm:2:4", **size)
    trainer = Trainer(config, corpus, config.build_recipe())
    dense = Trainer(TrainConfig(recipe="dense:2:4", **size), corpus, None)
    assert trainer.parameters == dense.parameters == sum(p.numel() for p in dense.model.parameters())
    trainer.step(5)
    by_id = {id(p): group["lr"] for group in trainer.optimizer.param_groups for p in group["params"]}
    rates = {name: by_id[id(p)] for name, p in trainer.model.named_parameters()}
    assert rates["lm_head.weight"] == learning_rate(config, 5)
    logits = [rate for name, rate in rates.items() if name.endswith("nm_logits")]
    assert logits and all(rate == pytest.approx(10 * learning_rate(config, 5)) for rate in logits)
