"""The choice per GEMM: every candidate is the same GEMM, only what is right is timed, and what is taken comes from where it should."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from torch import Tensor

import nmkernels as nm
from nmkernels import dispatch
from nmkernels.autograd import GemmPlan, gemms
from nmkernels.autograd.gemms import Gemm, choose, measure, operands
from nmkernels.autograd.plan import wgrad_gemm
from nmkernels.capability import compiled_core
from nmkernels.testing import assert_no_worse
from nmkernels.tuning import TABLE, Task, table

pytestmark = pytest.mark.skipif(not compiled_core().ok, reason=compiled_core().reason)

CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)
FPROP = Gemm("fprop", 20, 16, 32, 2, 4, torch.float32, CPU)
ODD = FPROP._replace(n=7, m=8)
"""By rule dense."""
FEW = FPROP._replace(tokens=1, rows=4096, cols=4096)
"""By rule the packed form, which has fewer bytes."""


@pytest.fixture(autouse=True)
def free(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing in the environment decides."""
    for name in ("NMKERNELS_CHOICE", "NMKERNELS_BACKEND"):
        monkeypatch.delenv(name, raising=False)
    gemms.forget()


@pytest.fixture
def hopper(monkeypatch: pytest.MonkeyPatch) -> Iterator[torch.device]:
    """A GPU that is not there, on which nothing keeps wgmma.sp from running."""
    gemms.forms.cache_clear()
    monkeypatch.setattr(gemms, "why_not_wgmma", lambda device: "" if device.type == "cuda" else "it is no GPU")
    yield GPU
    gemms.forms.cache_clear()


@pytest.fixture
def mine(monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[str]]:
    """A backend of nm_linear that does as it is told by a list: right, wrong, raises, declines."""
    how: list[str] = ["right"]
    before = dispatch._impls["nm_linear"]

    def fn(x: Tensor, *args: Any, out: Tensor | None = None) -> Tensor:
        assert how[0] != "declines"
        if how[0] == "raises":
            raise RuntimeError("no shared memory\nand more")
        y = nm.reference.linear(x, *args)
        if how[0] == "wrong":
            y.view(-1)[-1] *= 1 + 1e-3
        return y if out is None else out.copy_(y)

    def register(tuning: dispatch.Tuning = dispatch.UNTUNED) -> list[str]:
        entry = dispatch.Impl("nm_linear", "mine", fn, lambda *args: (how[0] != "declines", "it is mine"), 1, tuning=tuning)
        monkeypatch.setitem(dispatch._impls, "nm_linear", [*before, entry])
        return how

    return register


def clock(**seconds: float) -> Callable[[Task], float]:
    """What each candidate takes, ``dense=1.0`` or ``mine_rows=0.5``; 1 s for all others."""

    def timer(task: Task) -> float:
        task()
        return seconds.get(task.name.replace(" ", "_"), 1.0)

    return timer


never = Mock(side_effect=AssertionError("not to be called"))


# ---- what a GEMM is


def test_what_is_no_gemm_raises() -> None:
    wgrad = {"role": "wgrad"}
    for change in ({"role": "fwd"}, {"forms": ()}, {"forms": ("dense", "tiles")}, {"rule": "exact"}, wgrad, {**wgrad, "rule": "x"}):
        with pytest.raises(nm.NMError, match="choice: "):
            choose(FPROP._replace(**change))


def test_every_part_of_the_key_matters() -> None:
    changes: list[dict[str, Any]] = [
        {"role": "dgrad"}, {"tokens": 33}, {"tokens": 16}, {"rows": 17}, {"cols": 36}, {"n": 1}, {"m": 8}, {"dtype": torch.bfloat16},
        {"forms": ("rows",)}, {"forms": ("dense", "rows", "columns")}, {"changing": True}, {"role": "wgrad", "rule": "exact"},
        {"role": "wgrad", "rule": "approx"},
    ]  # fmt: skip
    keys = [gemms.key(FPROP), *(gemms.key(FPROP._replace(**change)) for change in changes)]
    assert len(set(keys)) == len(keys)
    assert gemms.key(FPROP._replace(tokens=17)) == gemms.key(FPROP._replace(tokens=32)) == gemms.key(FPROP)


# ---- the candidates compute the same

CORES = ("dense", "rows:mma.sp", "columns:mma.sp")


@pytest.mark.parametrize(
    ("role", "n", "m", "forms"),
    [
        *(("fprop", n, m, forms) for n, m in ((2, 4), (1, 4), (2, 8), (1, 16)) for forms in (("dense", "rows"), CORES, ("rows",))),
        *(("dgrad", 2, 4, forms) for forms in (("dense", "rows", "columns"), CORES, ("rows",), ("columns",))),
    ],
)
def test_every_way_is_the_same_gemm(role: str, n: int, m: int, forms: tuple[str, ...]) -> None:
    p = Gemm(role, 20, 64, 128, n, m, torch.bfloat16, CPU, forms)
    other, operand, _ = operands(p)
    w = operand["dense"]
    bias = torch.randn(64).bfloat16() if role == "fprop" else None
    assert nm.ops.is_nm(w, f"{n}:{m}")
    exact, theirs = (other.to(d) @ (w.t() if role == "fprop" else w).to(d) for d in (torch.float64, torch.bfloat16))
    if bias is not None:
        exact, theirs = exact + bias.double(), theirs + bias
    for name in (name for name in gemms.names(p) if " " not in name or name.startswith("cpu")):
        y = gemms.call(name, p, other, operand, bias=bias)
        assert y.dtype == torch.bfloat16
        assert_no_worse(y, theirs, exact)
        out = torch.full_like(y, torch.nan)
        assert gemms.call(name, p, other, operand, bias=bias, out=out).equal(y) and out.equal(y)


def test_which_forms_there_are() -> None:
    for n, m in ((2, 4), (1, 4), (2, 8), (1, 16)):
        assert gemms.forms(64, 128, n, m, torch.bfloat16, GPU) == ("dense", "rows", "rows:mma.sp"), "sparser ones are 2:4 too"
        assert gemms.forms(64, 128, n, m, torch.bfloat16, CPU, columns=True) == ("dense", "columns")
    assert gemms.forms(64, 128, 2, 4, torch.float32, GPU, dense=False) == ("rows",) == gemms.forms(64, 96, 3, 4, torch.half, GPU, False)


def test_on_hopper_forms_are_in_the_order_of_wgmma(hopper: torch.device) -> None:
    for rows, cols, columns, cores in (
        (64, 128, False, "rows:wgmma.sp"),
        (80, 128, False, "rows:mma.sp"),  # its tiles are of 64 rows
        (128, 192, True, "columns:wgmma.sp"),
        (64, 80, True, "columns:mma.sp"),
    ):
        assert gemms.forms(rows, cols, 2, 4, torch.bfloat16, hopper, columns=columns)[2] == cores
    assert gemms.layout_on(hopper, 64, 128) == "wgmma.sp" and gemms.layout_on(hopper, 64, 80) == gemms.layout_on(CPU, 64) == "mma.sp"


def test_tracing_keeps_the_answer_which_order_it_is(hopper: torch.device) -> None:
    """What asks the driver cannot be traced."""
    torch.compiler.reset()
    asked = Mock(side_effect=gemms.why_not_wgmma)
    plan = GemmPlan(wgrad="mvue", n=2, m=4)

    @torch.compile(backend="eager", fullgraph=True)
    def step(g: Tensor) -> Tensor:
        found = wgrad_gemm(plan, g.shape[0], g.shape[1], 128, g.dtype, hopper).forms
        return g + (10 * len(found) + (found[2] == "rows:wgmma.sp") if len(found) > 2 else 0)

    with pytest.MonkeyPatch.context() as m:
        m.setattr(gemms, "why_not_wgmma", asked)
        assert step(torch.zeros(64, 64, dtype=torch.bfloat16))[0, 0] == 31 and asked.call_args.args == (hopper,)
    torch.compiler.reset()


KERNELS = {"cuda": 10, "cuda-mma.sp": 9, "cusparselt": 3}
"""Backends that multiply an operand in the order of wgmma.sp on Hopper, with their priorities."""


@pytest.fixture
def kernels(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, str]]:
    """Those backends on the CPU, by the reference; the op and backend of each call."""
    called: list[tuple[str, str]] = []

    def stand_in(op: str, backend: str, priority: int) -> dispatch.Impl:
        right = next(i.fn for i in dispatch._impls[op] if i.backend == "reference")

        def fn(*args: Any, out: Tensor | None = None) -> Tensor:
            called.append((op, backend))
            y = right(*args)
            return y if out is None else out.copy_(y)

        return dispatch.Impl(op, backend, fn, dispatch.always, priority)

    for op in ("nm_linear", "nm_linear_wgrad"):
        others = [i for i in dispatch._impls[op] if i.backend not in KERNELS]
        monkeypatch.setitem(dispatch._impls, op, [*(stand_in(op, *kernel) for kernel in KERNELS.items()), *others])
    return called


@pytest.mark.parametrize(
    ("role", "form", "op"),
    [("fprop", "rows", "nm_linear"), ("dgrad", "columns", "nm_linear"), ("wgrad", "rows", "nm_linear_wgrad")],
)
@pytest.mark.parametrize("fastest", [*KERNELS, "dense"])
def test_the_fastest_kernel_of_that_order_is_taken(role: str, form: str, op: str, fastest: str, kernels: list[Any]) -> None:
    rule = "exact" if role == "wgrad" else ""
    p = Gemm(role, 64, 64, 128, 2, 4, torch.bfloat16, CPU, ("dense", f"{form}:wgmma.sp"), rule, changing=role != "wgrad")
    best = fastest if fastest == "dense" else f"{fastest} {form}:wgmma.sp"
    found = measure(p, timer=clock(**{best.replace(" ", "_"): 0.5}))
    assert found.best == best and set(found.seconds) == {"dense", *(f"{backend} {form}:wgmma.sp" for backend in KERNELS)}
    gemms.record(found)
    assert choose(p) == best
    other, operand, seed = operands(p)
    kernels.clear()
    gemms.call(best, p, other, operand, seed=seed)
    assert kernels == ([] if fastest == "dense" else [(op, fastest)])


@pytest.mark.parametrize(
    ("seconds", "eager", "compiled"),
    [
        ({"cusparselt": 0.5, "cuda": 2.0}, "cusparselt", "dense"),
        ({"cusparselt": 0.5, "cuda": 0.99}, "cusparselt", "dense"),  # 1 % is noise
        ({"cusparselt": 0.5, "cuda": 0.8}, "cusparselt", "cuda"),
        ({"cuda-mma.sp": 0.6, "cuda": 0.8}, "cuda-mma.sp", "cuda"),
        ({"cuda": 0.8}, "cuda", "cuda"),
        ({}, "dense", "dense"),
    ],
)
@pytest.mark.usefixtures("kernels")
def test_a_graph_takes_the_dispatchers_kernel_or_dense(seconds: dict[str, float], eager: str, compiled: str) -> None:
    """It calls the op: a kernel of lower priority that was the fastest says nothing of the one that runs there."""
    p = Gemm("fprop", 64, 64, 128, 2, 4, torch.bfloat16, CPU, ("dense", "rows:wgmma.sp"), changing=True)
    gemms.record(measure(p, timer=clock(**{f"{backend}_rows:wgmma.sp": took for backend, took in seconds.items()})))
    want = [name if name == "dense" else f"{name} rows:wgmma.sp" for name in (eager, compiled)]
    assert [choose(p), gemms._static(p.role, *tuple(p)[2:])] == want
    # where nothing is known of the others it stays
    assert gemms._in_a_graph(p._replace(cols=64), "cusparselt rows:wgmma.sp") == "cusparselt rows:wgmma.sp"


@pytest.mark.parametrize("tokens", [20, 21, 64])
@pytest.mark.parametrize("rule", ["exact", "approx", "magnitude"])
def test_every_way_of_wgrad_multiplies_the_same_estimate(rule: str, tokens: int) -> None:
    cores = tokens == 64
    forms = ("dense", "rows:mma.sp") if cores else ("dense", "rows")
    p = Gemm("wgrad", tokens, 32, 48, 2, 4, torch.bfloat16 if cores else torch.float32, CPU, forms, rule)
    x, g, seed = operands(p)
    dense, packed = gemms.estimate(p, g, seed), gemms.pack_estimate(p, g, seed)
    assert dense.shape == (32, tokens)
    assert torch.equal(dense, torch.ops.nmkernels.nm_decompress(*packed, 2, 4, tokens))
    if rule != "magnitude":
        assert torch.equal(dense, nm.ops.mvue(g, "2:4", dim=0, seed=seed, method=rule).t())
    else:
        assert torch.equal(dense[:, :20], nm.ops.prune(g[:20].t().contiguous(), "2:4"))
    if cores:
        assert gemms.pack_estimate(p, g, seed, "rows:mma.sp")[1].dtype == torch.int32
    for name in ("dense", "auto", *(("expand", "cpu rows") if not cores else ())):
        got = gemms.call(name, p, x, g, seed=seed)
        torch.testing.assert_close(got, dense @ x, **({"atol": 0.1, "rtol": 0.02} if cores else {}))


def test_a_backend_that_declines_now_is_replaced(mine: Callable[..., list[str]]) -> None:
    other, operand, _ = operands(FPROP)
    mine()[0] = "declines"
    for name in ("mine rows", "nobody rows"):
        torch.testing.assert_close(gemms.call(name, FPROP, other, operand), other @ operand["dense"].t())


def test_who_takes_part() -> None:
    names = gemms.names(FPROP)
    assert names[0] == "dense" and {"cpu rows", "triton rows", "cuda rows"} <= set(names)
    assert not any(name.startswith(("reference", "cuda-emulated", "expand", "auto")) for name in names)
    assert gemms.names(FPROP._replace(forms=("rows",)))[:2] == ["auto", "expand"]
    columns = gemms.names(FPROP._replace(role="dgrad", forms=("dense", "columns")))
    assert "cpu columns" in columns and not any(name.endswith("rows") for name in columns)


# ---- measuring them


def test_the_fastest_is_best() -> None:
    found = measure(FPROP, timer=clock(cpu_rows=0.25))
    assert (found.best, found.baseline, found.gain) == ("cpu rows", "dense", 4.0)
    assert found.seconds == {"dense": 1.0, "cpu rows": 0.25} and not found.refused
    assert "triton rows" in found.declined and "cuda rows" in found.declined
    assert "triton rows" not in measure(FPROP, timer=clock(), compiling=False).declined
    for seconds, best in ((4.0, "dense"), (0.99, "dense"), (0.97, "cpu rows")):  # 1 % is noise
        assert measure(FPROP, timer=clock(cpu_rows=seconds)).best == best


@pytest.mark.parametrize(
    ("how", "said"),
    [
        ("right", ""),
        ("wrong", "against float64"),
        ("raises", "RuntimeError: no shared memory"),
        ("declines", "it is mine"),
    ],
)
def test_only_what_is_right_is_timed(how: str, said: str, mine: Callable[..., list[str]]) -> None:
    mine()[0] = how
    found = measure(FPROP, timer=clock(mine_rows=0.01))
    assert found.best == ("mine rows" if how == "right" else "dense")
    told = (found.declined if how == "declines" else found.refused).get("mine rows", "")
    assert said in told and "more" not in told and bool(found.refused) == (how in ("wrong", "raises"))


def test_without_a_dense_layout_the_dispatcher_is_the_baseline(mine: Callable[..., list[str]]) -> None:
    packed, how = FPROP._replace(forms=("rows",)), mine()
    found = measure(packed, timer=clock(mine_rows=0.5, expand=0.75))
    assert (found.baseline, found.best, found.gain) == ("auto", "mine rows", 2.0)
    assert found.declined["cpu rows"] == "it is what auto takes"
    how[0] = "declines"
    assert measure(packed, timer=clock(expand=0.75)).best == "expand"
    assert measure(packed, timer=clock()).best == "auto"


def test_forms_that_cannot_be_made_are_told() -> None:
    odd = Gemm("fprop", 20, 20, 32, 2, 4, torch.bfloat16, CPU, ("dense", "rows:mma.sp"))
    assert "16" in measure(odd, timer=clock()).declined["cuda rows:mma.sp"]


@pytest.mark.parametrize("role", ["fprop", "dgrad", "wgrad"])
def test_a_real_clock_times_what_there_is_and_touches_nothing_of_the_caller(role: str) -> None:
    before = torch.get_rng_state()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = measure(FPROP._replace(role=role, rule="exact" if role == "wgrad" else ""), budget=0.001)
    assert set(found.seconds) == {"dense", "cpu rows"} and all(t > 0 for t in found.seconds.values()) and not found.refused
    assert torch.equal(before, torch.get_rng_state()) and torch.is_grad_enabled()


def test_what_a_backend_keeps_of_a_changing_weight_is_made_anew(mine: Callable[..., list[str]], monkeypatch: pytest.MonkeyPatch) -> None:
    mine(dispatch.Tuning(keeps=True))
    seen: list[int] = []
    before = gemms.call

    def call(name: str, gemm: Gemm, other: Tensor, operand: Any, **more: Any) -> Tensor:
        if name == "mine columns" and "out" not in more:
            seen.append(operand["columns"][0]._version)
        return before(name, gemm, other, operand, **more)

    monkeypatch.setattr(gemms, "call", call)

    def thrice(task: Task) -> float:
        return float(sum(task() is None for _ in range(3)))

    dgrad = FPROP._replace(role="dgrad", forms=("dense", "columns"))
    measure(dgrad, timer=thrice)
    measure(dgrad._replace(changing=True), timer=thrice)
    with torch.inference_mode():
        measure(dgrad._replace(changing=True), timer=thrice)
    assert seen == [0, 0, 0, 1, 2, 3, 1, 2, 3]


def test_a_backend_may_prepare_before_it_is_timed(mine: Callable[..., list[str]]) -> None:
    prepared: list[str] = []
    how = mine(dispatch.Tuning(prepare=lambda op, *args, timer: prepared.append(f"{op} {args[3]}:{args[4]}")))
    assert measure(FPROP, timer=clock(mine_rows=0.5)).best == "mine rows" and prepared == ["nm_linear 2:4"]
    measure(FPROP, timer=clock(), compiling=False)
    how[0] = "declines"
    measure(FPROP, timer=clock())
    assert len(prepared) == 1
    mine(dispatch.Tuning(prepare=lambda *args, timer: [][0]))[0] = "right"
    assert "IndexError" in measure(FPROP, timer=clock(mine_rows=0.5)).refused["mine rows"]


# ---- where the answer comes from


def test_unknown_gemms_follow_the_rule(mine: Callable[..., list[str]], monkeypatch: pytest.MonkeyPatch) -> None:
    meta = torch.device("meta")
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: {"amx_tile": True}, raising=False)
    for change, want in [
        ({}, "auto"),
        ({"rows": 16, "cols": 32}, "dense"),  # nothing gains so much as another call takes
        ({"dtype": torch.float64}, "dense"),
        ({"tokens": 2048, "dtype": torch.bfloat16, "n": 7, "m": 8}, "dense"),
        ({"device": meta}, "dense"),
        ({"forms": ("rows",), "dtype": torch.float64}, "auto"),
        ({"forms": ("dense",)}, "dense"),
    ]:
        assert choose(FEW._replace(**change)) == want, change
    mine(dispatch.Tuning(heuristic=lambda role, dtype, tokens, rows, cols, n, m, device: (n, rows, device.type) == (7, 16, "meta")))
    assert choose(ODD._replace(device=meta)) == "auto" and choose(ODD) == "dense"


def test_measurements_are_followed_and_found_again(cache: Path) -> None:
    found = measure(FPROP, timer=clock(cpu_rows=0.5))
    gemms.record(found)
    path = cache / "tuning.json"
    assert found.path == str(path) and choose(FPROP) == "cpu rows"
    gemms.forget()
    assert choose(FPROP) == "cpu rows" == choose(FPROP._replace(tokens=32))
    (line,) = json.loads(path.read_text())["lines"].values()
    assert line == {"choice": "cpu rows", "us": {"dense": 1e6, "cpu rows": 5e5}, "refused": {}, "by": "nm.tune"}
    gemms.record(measure(FPROP, timer=clock(cpu_rows=2.0)))
    assert choose(FPROP) == "dense"


def test_a_line_that_names_no_candidate_is_ignored() -> None:
    for choice in ("magic rows", "reference rows", "auto", 3, None, "cpu columns", {"id": 1}):
        TABLE.store({gemms.key(ODD): {"choice": choice}})
        gemms.forget()
        assert choose(ODD) == "dense", choice


def test_after_the_first_time_it_is_a_lookup_that_does_not_grow_without_end(monkeypatch: pytest.MonkeyPatch) -> None:
    other = FPROP._replace(cols=64)
    found = choose(FPROP)
    gemms.record(measure(other, timer=clock(cpu_rows=0.5)))
    assert choose(other) == "cpu rows" and choose(FPROP) == found
    with monkeypatch.context() as m:
        m.setattr(gemms, "_find", never)
        assert choose(other, measure=True) == "cpu rows" and choose(FPROP) == found
    with gemms.using(ODD, "cpu rows"):
        assert choose(ODD) == choose(ODD, measure=False) == "cpu rows"
    assert choose(ODD) == "dense"
    monkeypatch.setattr(gemms, "REMEMBERED", 4)
    for tokens in range(1, 20):
        choose(FPROP._replace(tokens=tokens))
    assert len(gemms._known) <= 4 and len(gemms._ruled) <= 4


def test_the_environment_decides(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gemms, "measure", never)
    for setting, few, many, packed in [("dense", "dense", "dense", "auto"), ("packed", *["auto"] * 3), ("table", "auto", "dense", "auto")]:
        monkeypatch.setenv("NMKERNELS_CHOICE", setting)
        gemms.forget()
        assert choose(FEW, measure=True) == few and choose(ODD, measure=True) == many
        assert choose(ODD._replace(forms=("rows",))) == packed and choose(FEW._replace(forms=("dense",))) == "dense"
    monkeypatch.setenv("NMKERNELS_BACKEND", "reference")
    gemms.forget()
    assert choose(ODD) == "auto" == choose(ODD._replace(dtype=torch.float64), measure=True)
    monkeypatch.setenv("NMKERNELS_CHOICE", "dense")
    gemms.forget()
    assert choose(FPROP) == "dense"
    monkeypatch.setenv("NMKERNELS_CHOICE", "fastest")
    gemms.forget()
    with pytest.raises(nm.NMError, match="NMKERNELS_CHOICE='fastest' is unknown; set one of dense, packed, table, measured"):
        choose(FPROP)


# ---- first use


@pytest.fixture
def timed(monkeypatch: pytest.MonkeyPatch) -> list[Gemm]:
    """Measures with a clock on which the CPU's kernel wins, and tells what was measured."""
    seen: list[Gemm] = []
    real = gemms.measure

    def fake(p: Gemm, **options: Any) -> Any:
        assert options == {"budget": gemms.FIRST_USE_BUDGET, "compiling": False}
        seen.append(p)
        time.sleep(0.02)  # so that others come in between
        return real(p, timer=clock(cpu_rows=0.5), compiling=False)

    monkeypatch.setattr(gemms, "measure", fake)
    return seen


def test_first_use_measures_where_it_is_allowed(timed: list[Gemm], monkeypatch: pytest.MonkeyPatch) -> None:
    assert choose(ODD) == "dense" and not timed
    assert choose(ODD, measure=True) == "cpu rows" and timed == [ODD]
    assert choose(ODD) == choose(ODD, measure=True) == "cpu rows" and len(timed) == 1
    (line,) = TABLE.lines().values()
    assert line["by"] == "first use"
    monkeypatch.setenv("NMKERNELS_CHOICE", "measured")
    assert choose(ODD._replace(cols=64)) == "cpu rows" and len(timed) == 2


def test_masking_and_packing_are_part_of_the_time_of_a_weight_that_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    raw = torch.ops.nmkernels
    spies = {op: Mock(side_effect=getattr(raw, op)) for op in ("nm_prune", "nm_compress")}

    def thrice(task: Task) -> float:
        for op, spy in spies.items():
            monkeypatch.setattr(raw, op, spy, raising=False)
        return float(sum(task() is None for _ in range(3)))

    for changing, want in ((False, 0), (True, 3)):
        for spy in spies.values():
            spy.reset_mock()
        measure(FPROP._replace(changing=changing), timer=thrice)
        assert spies["nm_prune"].call_count == spies["nm_compress"].call_count == want


def test_first_use_times_some_of_many_tokens(timed: list[Gemm], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gemms, "ENOUGH", {"cpu": 1 << 20})
    large = ODD._replace(tokens=1 << 10, rows=32, cols=64)
    assert choose(large, measure=True) == "cpu rows" and timed == [large._replace(tokens=1 << 9)]
    assert list(TABLE.lines()) == [gemms.key(large)]
    assert gemms._fewer(large._replace(rows=1 << 14, cols=1 << 13)).tokens == gemms.MANY


def test_deterministic_algorithms_are_not_chosen_by_the_clock(timed: list[Gemm]) -> None:
    assert choose(ODD, measure=True) == "cpu rows"
    torch.use_deterministic_algorithms(True)
    try:
        assert choose(ODD, measure=True) == "dense" and choose(ODD._replace(forms=("rows",)), measure=True) == "auto"
    finally:
        torch.use_deterministic_algorithms(False)
    assert choose(ODD) == "cpu rows" and len(timed) == 1


@pytest.mark.parametrize(
    ("change", "where", "name", "value"),
    [
        ({}, torch.compiler, "is_compiling", lambda: True),
        ({}, torch._C, "_len_torch_dispatch_stack", lambda: 1),
        ({}, torch._C, "_len_torch_function_stack", lambda: 1),
        ({}, torch._C, "_are_functorch_transforms_active", lambda: True),
        ({}, torch.autograd.profiler, "_is_profiler_enabled", True),
        ({"device": torch.device("cuda", 0)}, torch.cuda, "is_current_stream_capturing", lambda: True),
        ({"device": torch.device("meta")}, table, "device_name", lambda device: "none"),
        ({"tokens": 1 << 20, "rows": 1 << 14, "cols": 1 << 14}, table, "device_name", lambda device: "too much"),
        ({"tokens": 0}, table, "device_name", lambda device: "nothing"),
    ],
)
def test_first_use_never_measures_then(
    change: dict[str, Any], where: Any, name: str, value: Any, timed: list[Gemm], monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as m:
        m.setattr(table, "device_name", lambda device: "a GPU")
        m.setattr(where, name, value)
        assert choose(ODD._replace(**change), measure=True) == "dense" and not timed
    if not change:
        assert choose(ODD, measure=True) == "cpu rows", "but afterwards it does"


def test_no_memory_is_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gemms, "measure", Mock(side_effect=torch.OutOfMemoryError))
    assert choose(ODD, measure=True) == "dense"


def test_threads_measure_once(timed: list[Gemm]) -> None:
    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(lambda _: choose(ODD, measure=True), range(8)))
    assert found == ["cpu rows"] * 8 and len(timed) == 1


# ---- while torch compiles


def test_compiled_it_is_one_answer_for_all_tokens() -> None:
    gemms.record(measure(FPROP._replace(tokens=64), timer=clock()))
    gemms.record(measure(FPROP._replace(tokens=4096), timer=clock(cpu_rows=0.5)))
    seen, weight = [], torch.nn.Parameter(torch.zeros(16, 32))

    @torch.compile(backend="eager", fullgraph=True, dynamic=True)
    def f(x: Tensor) -> Tensor:
        taken = choose(Gemm("fprop", x.shape[0], weight.shape[0], weight.shape[1], 2, 4, torch.float32, CPU), measure=True)
        return x + 1 if taken == "cpu rows" else x

    torch._dynamo.utils.counters.clear()
    for tokens in (64, 20, 4000, 100):
        seen.append(float(f(torch.zeros(tokens, 32)).mean()))
    assert seen == [1.0] * 4  # as measured with the most tokens
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1


def test_compiled_without_measurements_it_is_the_rule_for_many(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    assert choose(FEW) == "dense" and gemms.rule(FEW) == "auto"
    monkeypatch.setenv("NMKERNELS_CHOICE", "packed")
    assert choose(FEW) == "auto"
