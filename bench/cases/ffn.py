"""A feed-forward block in training, whole and in pieces: dense, S-STE (two GEMMs sparse) and FST (all three).

On a GPU also with weights in bfloat16, and a whole step captured in a CUDA graph. The block of Llama-3-8B also by kernel: as measured, and
with all GEMMs that a kernel supports done by it.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

import nmkernels as nm
from nmkernels import dispatch
from nmkernels.gemm.choose import using
from nmkernels.gemm.methods import DENSE as DENSE_GEMM
from nmkernels.gemm.methods import Method, arguments, methods, op_of
from nmkernels.gemm.problem import Problem
from nmkernels.reference.layouts import index_dtype, operand_shapes

from ..device import graphed
from ..registry import Call, Grid, Provider, Ratio, Spec, Work, family
from ..timing import Timed
from . import _ours
from ._decoder import SIZES, FeedForward
from .gemm import FFN, FFN_TOKENS
from .step import GEMM, one_gemm

PIECES = ("forward", "forward+backward", "step", "accumulate 4")
"""Each as in training: W̃ is made again in the forward pass, which dense training casts again, and no gradient is left from before."""
RECIPES: dict[str, dict[str, Any]] = {
    "srste": {},
    "sste": {"seed": 0},
    "fst": {"seed": 0, "end": None},
    "step": {"switch": "fixed", "start": 1},
}
"""Settings by recipe; STEP is after its switch."""
RENEWED = "fst, every step"
CAPTURED = {**RECIPES, "fst": {**RECIPES["fst"], "every": 1000}, RENEWED: {**RECIPES["fst"], "every": 1}}
"""Recipes whose step is captured. FST decides on the host when it renews its masks: one graph holds them, another renews them."""
DENSE = "torch dense"

GPU = Grid(("14336x4096", "4096x1024"), ("2:4",), ("bfloat16",), tokens=(4096, 16384), on="cuda")


def allowed(recipe: str, r: float) -> float:
    """The possible speed-up of forward and backward if one sparse GEMM is r times as fast as a dense one.

    Of three equal GEMMs S-STE has two sparse ones, 3/(1 + 2/r), SR-STE one, 3/(2 + 1/r), and FST all, r. This holds on tensor cores; the
    CPU kernels use packed rows for dgrad too, so shares above 1 are possible there.
    """
    sparse = {"srste": 1, "step": 1, "sste": 2, "fst": 3}[recipe]
    return 3 / (3 - sparse + sparse / r)


@family(
    "ffn",
    grids=(
        Grid(("4096x1024",), ("2:4",), tokens=(2048,)),
        GPU,
    ),
)
def ffn(spec: Spec, device: str) -> Work:
    """Two linear layers with GELU between them, fp32 weights, autocast where the case is in 16 bits; defaults, on a GPU tuned first."""
    dense, blocks = _blocks(spec, device)
    providers, ratios = [], []
    for i, piece in enumerate(PIECES):
        theirs = Provider(f"{DENSE}, {piece}", dense.piece(i))
        providers.append(theirs)
        for name, mine in blocks.items():
            ours = Provider(f"nmkernels {name}, {piece}", mine.piece(i), check=mine.check)
            providers.append(ours)
            ratios.append(Ratio("x dense", ours.name, (theirs.name,)))
            if i > 1:
                ratios.append(Ratio("time over dense", ours.name, (theirs.name,), "time"))
    gemms = one_gemm(spec.rows, spec.cols, spec.tokens, spec, device)
    providers += gemms
    ratios.append(Ratio("x dense", gemms[0].name, (gemms[1].name,)))
    return Work(providers, ratios, derive=_shares)


@family("ffn(bf16 weights)", grids=(GPU,))
def brain(spec: Spec, device: str) -> Work:
    """The same with weights in bfloat16 and no autocast: torch's AdamW has moments in bfloat16 then, MaskedAdamW in float32."""
    dense, blocks = _blocks(spec, device, torch.bfloat16)
    providers, ratios = [], []
    for i in (1, 2):
        theirs = Provider(f"{DENSE}, {PIECES[i]}", dense.piece(i))
        mine = [Provider(f"nmkernels {name}, {PIECES[i]}", block.piece(i), check=block.check) for name, block in blocks.items()]
        providers += [theirs, *mine]
        ratios += [Ratio("x dense", p.name, (theirs.name,)) for p in mine]
    return Work(providers, ratios)


@family("ffn(captured)", grids=(GPU,))
def in_a_graph(spec: Spec, device: str) -> Work:
    """A whole step in a CUDA graph, dense too, whose eager step is next to it; "every step": FST renews its masks in each."""
    dense, blocks = _blocks(spec, device, recipes=CAPTURED, capturable=True)
    theirs = Provider(f"{DENSE}, step (captured)", dense.captured(device))
    mine = [Provider(f"nmkernels {name}, step (captured)", block.captured(device), check=block.check) for name, block in blocks.items()]
    eager = Provider(f"{DENSE}, step", dense.piece(2))
    ratios = [Ratio("x dense", p.name, (theirs.name,)) for p in mine]
    return Work([theirs, *mine, eager], [*ratios, Ratio("x eager", theirs.name, (eager.name,))])


def _blocks(
    spec: Spec, device: str, weights: torch.dtype = torch.float32, recipes: dict[str, dict[str, Any]] = RECIPES, **options: Any
) -> tuple[_Block, dict[str, _Block]]:
    """The dense block, and one for each recipe, with the same weights and input."""
    torch.manual_seed(0)
    up = nn.Linear(spec.cols, spec.rows, device=device, dtype=weights)
    block = nn.Sequential(up, nn.GELU(), nn.Linear(spec.rows, spec.cols, device=device, dtype=weights))
    x = _ours.normal(spec.tokens, spec.cols, device=device, dtype=weights, seed=1).requires_grad_()
    sparse = {name: _Block(copy.deepcopy(block), x, spec, name, settings=settings, **options) for name, settings in recipes.items()}
    return _Block(block, x, spec, None, **options), sparse


def _shares(timed: Timed) -> dict[tuple[str, str], list[float]]:
    """The measured speed-up over the possible one, by the ratio of one GEMM in the same round; above 1 if the other GEMMs gain more."""
    found = {}
    for name in RECIPES:
        whole = PIECES[1]
        mine, theirs = f"nmkernels {name}, {whole}", f"{DENSE}, {whole}"
        one, dense_one = f"nmkernels, {GEMM}", f"{DENSE}, {GEMM}"
        rounds = [r for r in timed.rounds if {mine, theirs, one, dense_one} <= r.keys()]
        found[mine, "share of what one GEMM allows"] = [
            r[theirs] / r[mine] / allowed(name, max(1.0, r[dense_one] / r[one])) for r in rounds
        ]
    return found


class _Block:
    """One block in training; ``tuned``: on a GPU it is tuned first; ``capturable``: its optimizer counts steps on the device."""

    def __init__(
        self,
        block: nn.Module,
        x: Tensor,
        spec: Spec,
        recipe: str | None,
        tuned: bool = True,
        settings: dict[str, Any] | None = None,
        capturable: bool = False,
    ) -> None:
        self.block, self.x, self.spec, self.settled = block, x, spec, False
        self.whole = self.piece(2)
        """A whole step, or its replay."""
        if recipe is None:
            self.handle = None
            self.optimizer: torch.optim.Optimizer = torch.optim.AdamW(block.parameters(), lr=1e-4, fused=True, capturable=capturable)
            return
        name = recipe.partition(",")[0]
        chosen = nm.recipes.get(f"{name}:{spec.pattern}", total_steps=1000, **(RECIPES[name] if settings is None else settings))
        self.handle = nm.sparsify_(block, chosen, filter_fn=lambda module, name: isinstance(module, nn.Linear))
        self.optimizer = self.handle.attach(chosen.optimizer(block.parameters(), lr=1e-4, capturable=capturable))
        for _ in range(2):
            self.piece(2)()  # behind the switch of STEP
        if x.is_cuda and tuned:
            with self._cast():
                nm.tune(block, tokens=spec.tokens)

    def captured(self, device: str) -> Call:
        """A whole step in a CUDA graph, which the check replays too."""
        self.whole = graphed(self.piece(2), device)
        return self.whole

    def problems(self) -> list[tuple[Problem, ...]]:
        """The GEMMs that its layers leave to be chosen; those of a tuple together."""
        assert self.handle is not None
        with self._cast():
            return [some for layer in self.handle.layers.values() for some in layer.problems(self.spec.tokens)]

    def _cast(self) -> AbstractContextManager[object]:
        mixed = self.spec.torch_dtype != self.x.dtype
        return torch.autocast(self.x.device.type, self.spec.torch_dtype) if mixed else nullcontext()

    def piece(self, pieces: int) -> Callable[[], object]:
        """A call of ``PIECES[pieces]``."""

        def call() -> object:
            if self.handle is not None:
                for layer in self.handle.layers.values():
                    layer.drop()
            for _ in range(4 if pieces == 3 else 1):
                with self._cast():
                    y = self.block(self.x)
                if pieces:
                    y.backward(y.detach())
            if pieces > 1:
                self.optimizer.step()
            self.optimizer.zero_grad()
            self.x.grad = None
            return y

        return call

    def check(self) -> None:
        """Check that after some steps the output equals that of a dense block with the effective weights."""
        assert self.handle is not None
        if not self.settled:
            self.settled, weight = True, next(self.block.parameters())
            before = weight.detach().clone()
            self.whole()
            assert not torch.equal(weight, before), "a step changes no weight"
        baseline = _ours.as_dense(self.block, self.handle)
        with torch.no_grad(), self._cast():
            _ours.close(self.block(self.x), baseline(self.x), self.spec.torch_dtype)


# ---- Llama's, by each kernel

TRITON = "triton"


@family("llama_ffn", grids=(Grid(FFN[:1], ("2:4",), ("bfloat16",), tokens=FFN_TOKENS, on="cuda"),))
def llama_ffn(spec: Spec, device: str) -> Work:
    """A training step of Llama-3-8B's FFN: dense; S-STE and FST as measured; FST, all of whose GEMMs are sparse, by each kernel.

    A GEMM that a kernel does not support is dense; "GEMMs by it" counts the others, of nine: the gradient of the input is computed too.
    Triton does everything, including the optimizer's step.
    """
    torch.manual_seed(0)
    with torch.device(device):
        block = FeedForward(replace(SIZES["Llama-3-8B x4"], hidden=spec.rows, width=spec.cols))
    x = _ours.normal(spec.tokens, spec.cols, device=device, dtype=torch.float32, seed=1).requires_grad_()
    theirs = Provider(f"{DENSE}, step", _Block(block, x, spec, None).piece(2))
    providers, facts = [theirs], dict[tuple[str, str], float]()
    for name in ("sste", "fst"):
        mine = _Block(copy.deepcopy(block), x, spec, name)
        providers.append(Provider(f"nmkernels {name}, as measured", mine.piece(2), check=mine.check))
    by_kernel = partial(_Block, x=x, spec=spec, recipe="fst", tuned=False)
    for backend in kernels():
        mine = by_kernel(copy.deepcopy(block))
        plan = [tuple(by_backend(backend, p) for p in some) for some in mine.problems()]
        done = sum(method != DENSE_GEMM for some in plan for method in some)
        if done:
            p = Provider(f"nmkernels fst, {backend}", mine.piece(2), check=mine.check)
            p.under = partial(chosen, list(zip(mine.problems(), plan, strict=True)))
            providers.append(p)
            facts[p.name, "GEMMs by it"] = done
    if triton_runs(x):
        mine = by_kernel(copy.deepcopy(block))
        providers.append(Provider(f"nmkernels fst, {TRITON}", mine.piece(2), check=mine.check, under=partial(_ours.forced, TRITON)))
    return Work(providers, [Ratio("x dense", p.name, (theirs.name,)) for p in providers[1:]], facts)


def kernels() -> list[str]:
    """The backends whose kernels read packed weights; Triton's reads another form, so it cannot be mixed with them."""
    return [i.backend for i in dispatch.implementations("nm_linear") if i.priority >= 0 and i.backend not in (dispatch.REFERENCE, TRITON)]


def by_backend(backend: str, p: Problem) -> Method:
    """The method of a backend for ``p``, with the tensor-core layout if there is one; dense if it cannot."""
    own = [m for m in methods(p) if m.backend == backend]
    return own[-1] if own and not declines(own[-1], p) else DENSE_GEMM


def declines(method: Method, gemm: Problem) -> str:
    """Why the method cannot do ``gemm``; empty if it can."""
    form = method.form
    entry = next(i for i in dispatch.implementations(op_of(gemm, form)) if i.backend == method.backend)
    layout = form.partition(":")[2]
    pattern = nm.Pattern("2:4") if layout else nm.Pattern(gemm.n, gemm.m)
    rows, cols = (gemm.rows, gemm.tokens) if gemm.role == "wgrad" else (gemm.rows, gemm.cols)
    rows, cols = (cols, rows) if form.startswith("columns") else (rows, cols)
    values, indices = operand_shapes(pattern, rows, cols, layout or "canonical")
    new = partial(torch.empty, device=gemm.device)
    packed = new(values, dtype=gemm.dtype), new(indices, dtype=index_dtype(layout or "canonical"))
    other = new((gemm.tokens, gemm.rows if gemm.role == "dgrad" else gemm.cols), dtype=gemm.dtype)
    can, reason = entry.supports(*arguments(gemm, form, packed, other))
    return "" if can else reason


def triton_runs(x: Tensor) -> bool:
    """Whether Triton's GEMM can run here."""
    values, indices = (t.to(x.device) for t in nm.reference.compress(torch.ones(16, 64, dtype=torch.bfloat16), 2, 4))
    sample = torch.ones(1, 64, dtype=torch.bfloat16, device=x.device), values, indices, 2, 4, 64
    return any(i.backend == TRITON and i.supports(*sample)[0] for i in dispatch.implementations("nm_linear"))


@contextmanager
def chosen(plan: Sequence[tuple[tuple[Problem, ...], tuple[Method, ...]]]) -> Iterator[None]:
    """Inside, each GEMM uses the method named for it."""
    with ExitStack() as stack:
        for problems, chosen_methods in plan:
            stack.enter_context(using(*zip(problems, chosen_methods, strict=True)))
        yield
