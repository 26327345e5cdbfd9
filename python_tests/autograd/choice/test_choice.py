"""Choice: what is taken, and where the answer comes from."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import nmkernels as nm
from nmkernels.autograd import choice
from nmkernels.autograd.choice import Product, choose, measure, product
from python_tests.autograd.choice.products import CPU, FPROP, ODD, clock, needs_core

pytestmark = needs_core


def _fails(*args: Any, **kwargs: Any) -> Any:
    raise AssertionError("not to be called")


# ---- where the answer comes from


def test_unknown_products_follow_the_rule() -> None:
    assert choose(FPROP._replace(tokens=1)) == "auto" and choose(FPROP._replace(tokens=1, dtype=torch.float64)) == "dense"
    assert choose(FPROP._replace(tokens=64, dtype=torch.bfloat16, n=7, m=8)) == "dense"
    assert choose(FPROP._replace(device=torch.device("meta"))) == "dense"
    assert choose(FPROP._replace(device=torch.device("cuda")), measure=False) == "dense" if torch.cuda.is_available() else True
    assert choose(FPROP._replace(forms=("rows",), dtype=torch.float64)) == "auto"
    assert choose(FPROP._replace(forms=("dense",))) == "dense"


def test_measurements_are_followed_and_found_again(cache: Path) -> None:
    path = choice.record(measure(FPROP, timer=clock(cpu_rows=0.5)))
    assert path == cache / "choice.json" and choose(FPROP) == "cpu rows"
    choice.forget()
    assert choose(FPROP) == "cpu rows" == choose(FPROP._replace(tokens=32))
    assert choose(FPROP._replace(tokens=33, n=7, m=8)) == "dense"
    (line,) = json.loads(path.read_text())["choices"].values()
    assert line == {"choice": "cpu rows", "us": {"dense": 1e6, "cpu rows": 5e5}, "refused": {}, "by": "nm.tune"}
    choice.record(measure(FPROP, timer=clock(cpu_rows=2.0)))
    assert choose(FPROP) == "dense"


def test_another_process_follows_them(cache: Path) -> None:
    choice.record(measure(ODD, timer=clock(cpu_rows=0.5)))
    code = (
        "import sys, torch; torch.set_num_threads(int(sys.argv[1]))\nfrom nmkernels.autograd.choice import *\n"
        "print(choose(Product('fprop', 31, 16, 32, 7, 8, torch.float32, torch.device('cpu'))))"
    )
    command = [sys.executable, "-c", code, str(torch.get_num_threads())]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "cpu rows"


@pytest.mark.parametrize(
    "line", [{"choice": "magic rows"}, {"choice": "reference rows"}, {"choice": "auto"}, {"choice": 3}, {}, {"choice": "cpu columns"}]
)
def test_a_line_that_names_no_candidate_is_ignored(line: dict[str, Any]) -> None:
    choice.table.store({choice.key(ODD): line})
    assert choose(ODD) == "dense"


def test_a_damaged_table_is_told(cache: Path) -> None:
    cache.mkdir()
    (cache / "choice.json").write_text("{")
    with pytest.warns(RuntimeWarning, match=r"choice\.json is damaged .*products follow the rule.*run nm\.tune again"):
        assert choose(ODD) == "dense"


def test_after_the_first_time_it_is_a_lookup(monkeypatch: pytest.MonkeyPatch) -> None:
    found = choose(FPROP)
    choice.record(measure(FPROP._replace(cols=64), timer=clock(cpu_rows=0.5)))
    assert choose(FPROP._replace(cols=64)) == "cpu rows" and choose(FPROP) == found
    monkeypatch.setattr(choice, "_find", _fails)
    assert choose(FPROP._replace(cols=64), measure=True) == "cpu rows" and choose(FPROP) == found


def test_a_candidate_is_used_for_a_while() -> None:
    with choice.using(ODD, "cpu rows"):
        assert choose(ODD) == choose(ODD, measure=False) == "cpu rows"
    assert choose(ODD) == "dense"


def test_what_is_remembered_does_not_grow_without_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(choice, "REMEMBERED", 4)
    for tokens in range(1, 20):
        choose(FPROP._replace(tokens=tokens))
    assert len(choice._known) <= 4 and len(choice._ruled) <= 4


@pytest.mark.parametrize(
    ("setting", "few", "many", "packed"),
    [("dense", "dense", "dense", "auto"), ("packed", "auto", "auto", "auto"), ("table", "auto", "dense", "auto")],
)
def test_the_environment_decides(setting: str, few: str, many: str, packed: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NMKERNELS_CHOICE", setting)
    monkeypatch.setattr(choice, "measure", _fails)
    bf16 = FPROP._replace(dtype=torch.bfloat16)
    assert choose(bf16._replace(tokens=1), measure=True) == few and choose(bf16, measure=True) == many
    assert choose(bf16._replace(forms=("rows",))) == packed
    assert choose(bf16._replace(forms=("dense",))) == "dense"


def test_an_unknown_setting_raises(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NMKERNELS_CHOICE", "fastest")
    with pytest.raises(nm.NMError, match="NMKERNELS_CHOICE='fastest' is unknown; set one of dense, packed, table, measured"):
        choose(FPROP)


def test_a_forced_backend_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NMKERNELS_BACKEND", "reference")
    assert choose(ODD) == "auto" == choose(ODD._replace(dtype=torch.float64), measure=True)
    monkeypatch.setenv("NMKERNELS_CHOICE", "dense")
    choice.forget()
    assert choose(FPROP) == "dense"


# ---- first use


@pytest.fixture
def timed(monkeypatch: pytest.MonkeyPatch) -> list[Product]:
    """Measures with a clock on which the CPU's kernel wins, and tells what was measured."""
    seen: list[Product] = []
    real = choice.measure

    def fake(p: Product, **options: Any) -> Any:
        assert options == {"budget": choice.FIRST_USE_BUDGET, "compiling": False}
        seen.append(p)
        time.sleep(0.02)  # so that others come in between
        return real(p, timer=clock(cpu_rows=0.5), compiling=False)

    monkeypatch.setattr(choice, "measure", fake)
    return seen


def test_first_use_measures_where_it_is_allowed(timed: list[Product], monkeypatch: pytest.MonkeyPatch) -> None:
    odd = ODD
    assert choose(odd) == "dense" and not timed
    assert choose(odd, measure=True) == "cpu rows" and timed == [odd]
    assert choose(odd) == choose(odd, measure=True) == "cpu rows" and len(timed) == 1
    (line,) = choice.table.lines().values()
    assert line["by"] == "first use"
    monkeypatch.setenv("NMKERNELS_CHOICE", "measured")
    assert choose(odd._replace(cols=64)) == "cpu rows" and len(timed) == 2


def test_first_use_leaves_out_what_compiles() -> None:
    assert "triton rows" not in measure(FPROP, timer=clock(), compiling=False).declined
    assert "triton rows" in measure(FPROP, timer=clock()).declined


@pytest.mark.parametrize(
    "what", ["capture", "compiling", "dispatch mode", "function mode", "transform", "profile", "too much", "nothing", "meta"]
)
def test_first_use_never_measures_then(what: str, timed: list[Product], monkeypatch: pytest.MonkeyPatch) -> None:
    p = ODD
    if what == "capture":
        p = p._replace(device=torch.device("cuda", 0))
        monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
        monkeypatch.setattr(product, "device_name", lambda device: "a GPU")
    elif what == "compiling":
        monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    elif what == "dispatch mode":
        monkeypatch.setattr(torch._C, "_len_torch_dispatch_stack", lambda: 1)
    elif what == "function mode":
        monkeypatch.setattr(torch._C, "_len_torch_function_stack", lambda: 1)
    elif what == "transform":
        monkeypatch.setattr(torch._C, "_are_functorch_transforms_active", lambda: True)
    elif what == "profile":
        monkeypatch.setattr(torch.autograd.profiler, "_is_profiler_enabled", True)
    p = {
        "too much": p._replace(tokens=1 << 20, cols=1 << 10),
        "nothing": p._replace(tokens=0),
        "meta": p._replace(device=torch.device("meta")),
    }.get(what, p)
    assert choose(p, measure=True) == ("auto" if what == "nothing" else "dense") and not timed


def test_what_was_ruled_during_a_capture_is_measured_later(timed: list[Product], monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as m:
        m.setattr(torch._C, "_len_torch_dispatch_stack", lambda: 1)
        assert choose(ODD, measure=True) == "dense"
    assert choose(ODD, measure=True) == "cpu rows"


def test_no_memory_is_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*args: Any, **kwargs: Any) -> Any:
        raise torch.OutOfMemoryError("full")

    monkeypatch.setattr(choice, "measure", fails)
    assert choose(ODD, measure=True) == "dense"


def test_a_table_that_cannot_be_written_is_no_error(timed: list[Product], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("NMKERNELS_CACHE", str(tmp_path / "file" / "below"))
    with pytest.warns(RuntimeWarning, match="cannot be read"):
        assert choose(ODD, measure=True) == "cpu rows"
    assert choose(ODD) == "cpu rows" and len(timed) == 1


def test_threads_measure_once(timed: list[Product]) -> None:
    found: list[str] = []
    threads = [threading.Thread(target=lambda: found.append(choose(ODD, measure=True))) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == ["cpu rows"] * 8 and len(timed) == 1


# ---- while torch compiles


def test_compiled_it_is_one_answer_for_all_tokens() -> None:
    choice.record(measure(FPROP._replace(tokens=64), timer=clock()))
    choice.record(measure(FPROP._replace(tokens=4096), timer=clock(cpu_rows=0.5)))
    seen, weight = [], torch.nn.Parameter(torch.zeros(16, 32))

    @torch.compile(backend="eager", fullgraph=True, dynamic=True)
    def f(x: Tensor) -> Tensor:
        taken = choose(FPROP._replace(tokens=x.shape[0], rows=weight.shape[0], cols=weight.shape[1]), measure=True)
        return x + 1 if taken == "cpu rows" else x

    torch._dynamo.utils.counters.clear()
    for tokens in (64, 20, 4000, 100):
        seen.append(float(f(torch.zeros(tokens, 32)).mean()))
    assert seen == [1.0] * 4  # as measured with the most tokens
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1


def test_compiled_without_measurements_it_is_the_rule_for_many(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    few = FPROP._replace(tokens=1, dtype=torch.bfloat16)
    assert choose(few) == "dense" and choice.rule(few) == "auto"
    monkeypatch.setenv("NMKERNELS_CHOICE", "packed")
    assert choose(few) == "auto"


# ---- told


def test_what_is_told(mine: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    assert choice.explain(ODD).splitlines() == [
        "fprop 16x32 7:8 float32, 20 tokens: dense", "  by rule, nothing was measured: nm.tune(model, tokens=...)"
    ]  # fmt: skip
    mine[0] = "raises"
    choice.record(measure(FPROP, timer=clock(cpu_rows=0.5)))
    lines = choice.explain(FPROP).splitlines()
    assert lines[0].endswith(": cpu rows") and lines[1] == f"  measured by nm.tune on {product.device_name(CPU)}"
    assert [line.split() for line in lines[2:4]] == [["dense", "1000000.0", "us"], ["cpu", "rows", "500000.0", "us"]]
    assert lines[4].split() == ["mine", "rows", "refused:", "RuntimeError:", "no", "shared", "memory"]
    monkeypatch.setenv("NMKERNELS_CHOICE", "dense")
    choice.forget()
    assert "by NMKERNELS_CHOICE or NMKERNELS_BACKEND" in choice.explain(FPROP)
