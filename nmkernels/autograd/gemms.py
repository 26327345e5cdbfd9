"""The choice per GEMM: the fastest measured way to do each GEMM of a layer, dense among them, so that sparse is never slower.

A layer names its GEMM (``Gemm``), asks ``choose`` for a candidate and hands that to ``call``. Candidates are ``"dense"``, torch's
GEMM of the dense layout; ``"expand"``, the same after decompressing, for a weight that has no dense layout; ``"auto"``, the op, whose
dispatcher takes the willing backend of highest priority; and ``"cpu rows"``, ``"cuda rows:wgmma.sp"`` and so on, one backend's kernel on
one form of the operand. All multiply the same W̃, or in wgrad the same estimate ĝ to the bit, whose making is part of every candidate.

The answer comes from, in this order:

1. ``NMKERNELS_CHOICE=dense`` or ``packed``, or a backend that ``NMKERNELS_BACKEND`` forces, which means ``"auto"``;
2. the table of what ``nm.tune`` or an earlier process measured on this device, with these versions, for this GEMM, and for as many
   tokens up to the next power of two. While torch compiles: the line with the most tokens, so that no token count is compiled anew, and
   of the kernels those that the dispatcher takes, since a graph calls the op;
3. measuring now, if the caller allows it (``measure=True``, or ``NMKERNELS_CHOICE=measured`` for all callers; ``table`` forbids it),
   nothing watches, and it is done in well under a second: of very many tokens some are timed, and what is still too much is not.
   Kernels that would compile are left to ``nm.tune``;
4. ``rule``: where a backend's heuristic says that it is faster the packed form, else dense.

``torch.use_deterministic_algorithms(True)`` takes the choice away: dense where there is a dense layout. The environment is read when a GEMM
is first seen; after a change, or after ``torch.set_num_threads``, call ``forget``.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import lru_cache, partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from .. import ops, tuning
from ..backends.cuda.linear import why_not_wgmma
from ..dispatch import REFERENCE, Impl, forced_backend, implementations
from ..dispatch import choose as dispatched
from ..ops.compress import nm_compress
from ..ops.define import plainly
from ..ops.mvue import METHODS, nm_mvue_compress
from ..ops.verify import doubtful
from ..pattern import NMError, Pattern
from ..reference.layouts import tile_of
from ..tuning import BUDGET, TABLE, Candidate, Found, Seconds, Timer, Validator, cold
from ..tuning.measure import LEAST_GAIN
from ..tuning.setting import reproducible, setting, undisturbed

ENOUGH, FIRST_USE_WORK = {"cpu": 1 << 32, "cuda": 1 << 43}, {"cpu": 1 << 34, "cuda": 1 << 43}
"""Multiplications, about 0.05 s of a dense GEMM on two cores of a CPU, 0.03 s on a GPU, above which first use takes fewer tokens, though no
fewer than ``MANY``; and those above which it measures nothing."""
MANY = 256
"""Tokens from which on the ratio of two ways hardly changes with their number."""

FIRST_USE_BUDGET = 0.02
"""Seconds of timing on first use, unless a few rounds take longer."""

CHECKED = 1 << 28
"""Multiplications up to which first use checks all of a result; of larger ones so many tokens."""

REMEMBERED = 4096
"""GEMMs whose choice is remembered; then all are forgotten and looked up again."""

TOKEN_CLASSES = tuple(1 << k for k in range(30, -1, -1))

ROLES = ("fprop", "dgrad", "wgrad")
FORMS = ("dense", "rows", "columns", "rows:mma.sp", "columns:mma.sp", "rows:wgmma.sp", "columns:wgmma.sp")
RULES = ("", "magnitude", *METHODS)
DENSE, EXPAND, AUTO = "dense", "expand", "auto"

Packed = tuple[Tensor, Tensor]
"""Values, and indices or metadata, of a compressed operand."""

log = logging.getLogger("nmkernels.choice")
log.addHandler(logging.NullHandler())


# ---- what is chosen for


@lru_cache(maxsize=1024)
def forms(
    rows: int, cols: int, n: int, m: int, dtype: torch.dtype, device: torch.device, dense: bool = True, columns: bool = False
) -> tuple[str, ...]:
    """The forms that a weight ``(rows, cols)`` can have on a device, for ``Gemm.forms``.

    ``dense``: with a dense layout at hand. ``columns``: Wᵀ packed, for a mask that is transposable; W otherwise.
    """
    name, height, width = ("columns", cols, rows) if columns else ("rows", rows, cols)
    tiles = height % 16 == 0 and width % 64 == 0 and dtype.itemsize == 2 and ops.tensor_core_pattern(Pattern(n, m))
    cores = (f"{name}:{layout_on(device, height)}",) if device.type == "cuda" and tiles else ()
    return (*(("dense",) if dense else ()), name, *cores)


def layout_on(device: torch.device, *rows: int) -> str:
    """The order of metadata in which operands of so many rows are packed for tensor cores: that of ``wgmma.sp`` where its kernel runs.

    Every kernel that reads the order of ``mma.sp`` reads that one as well.
    """
    return "wgmma.sp" if not _hinders(device) and not any(count % tile_of("wgmma.sp")[0] for count in rows) else "mma.sp"


def _hinders(device: torch.device) -> bool:
    return bool(why_not_wgmma(device))


# tracing calls it and keeps the answer
_hinders._dynamo_marked_constant = True  # type: ignore[attr-defined]


class Gemm(NamedTuple):
    """One GEMM of a layer ``y = x W̃ᵀ`` and the forms in which its sparse operand is at hand.

    role: ``"fprop"`` y = x W̃ᵀ, ``"dgrad"`` dx = g W̃, or ``"wgrad"`` dW = ĝᵀ x, with ĝ an N:M estimate of g along tokens.
    tokens: rows of x and g. rows, cols: (out, in) of the layer. n, m: the pattern of W̃, or of ĝᵀ.
    forms: ``"dense"``: W̃ in dense layout; ``"rows"``: W̃ compressed; ``"columns"``: W̃ᵀ compressed, for dgrad from a transposable mask;
    ``"rows:wgmma.sp"`` and so on: the same in the order of tensor cores (``layout_on``). Of the compressed ones the preferred first. In
    wgrad they say how ĝᵀ may be written.
    rule: of wgrad: ``"exact"`` or ``"approx"``, as ``ops.mvue`` has them, or ``"magnitude"``.
    changing: W̃ is another one at every call, as in training; masking or packing it, and what a backend makes of it beside that, is then
    part of the time.
    """

    role: str
    tokens: int
    rows: int
    cols: int
    n: int
    m: int
    dtype: torch.dtype
    device: torch.device
    forms: tuple[str, ...] = ("dense", "rows")
    rule: str = ""
    changing: bool = False

    def check(self) -> None:
        """Raise NMError for what is no GEMM."""
        if self.role not in ROLES:
            raise NMError(f"choice: role {self.role!r} is unknown; choose one of {', '.join(ROLES)}.")
        if not self.forms or any(form not in FORMS for form in self.forms):
            raise NMError(f"choice: forms {self.forms!r}; give at least one of {', '.join(FORMS)}.")
        if (self.role == "wgrad") != bool(self.rule) or self.rule not in RULES:
            raise NMError(f"choice: rule {self.rule!r} of {self.role}; wgrad, and only it, has one of {', '.join(RULES[1:])}.")

    def words(self) -> str:
        """Short, for a reader: ``fprop 4096x1024 2:4 bfloat16, 8192 tokens``."""
        return f"{self.role} {self.rows}x{self.cols} {self.n}:{self.m} {_plain(self.dtype)}, {self.tokens} tokens"


def key(gemm: Gemm) -> str:
    """Its line of the table."""
    p = gemm
    what = " ".join(part for part in (p.role, p.rule) if part)
    how = f"{'+'.join(p.forms)}{' changing' if p.changing else ''}"
    return tuning.key("gemm", p.device, f"{what}|{_plain(p.dtype)}|{p.n}:{p.m}|{p.rows}x{p.cols}|{how}", p.tokens)


def _plain(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


# ---- the candidates


def names(gemm: Gemm) -> list[str]:
    """Every candidate that might run, the baseline first; whether a backend takes the call shows when it is tried."""
    found = [DENSE] if DENSE in gemm.forms else [AUTO]
    if DENSE not in gemm.forms and any(form in ("rows", "columns") for form in gemm.forms):
        found.append(EXPAND)
    for form in gemm.forms:
        op = op_of(gemm, form)
        found += [f"{i.backend} {form}" for i in (implementations(op) if op else ()) if _promising(i)]
    return found


def _promising(entry: Impl) -> bool:
    """Not the reference, which is the definition of right and not fast, nor a test instrument, nor one that is switched off here."""
    return entry.backend != REFERENCE and entry.priority >= 0 and not doubtful(entry.op, entry.backend)


def op_of(gemm: Gemm, form: str) -> str:
    """The raw op that multiplies this form of the operand; empty if none does."""
    kind, _, layout = form.partition(":")
    if gemm.role == "fprop":
        return "nm_linear" if kind == "rows" else ""
    if gemm.role == "dgrad":
        return "nm_linear" if kind == "columns" else "nm_linear_dgrad" if kind == "rows" and not layout else ""
    return "nm_linear_wgrad" if kind == "rows" else ""


def form_of(name: str, gemm: Gemm) -> str:
    """The form of the operand that candidate ``name`` reads: the only one that ``call`` must find."""
    if name == DENSE:
        return DENSE
    if name == EXPAND:
        return next(form for form in gemm.forms if form in ("rows", "columns"))
    return name.partition(" ")[2] or next(form for form in gemm.forms if op_of(gemm, form))


def arguments(gemm: Gemm, form: str, packed: Packed, other: Tensor, bias: Tensor | None = None) -> tuple[Any, ...]:
    """Those of ``op_of(gemm, form)``; ``other`` is x in fprop and wgrad, g in dgrad."""
    values, indices = packed
    pattern = (2, 4) if ":" in form else (gemm.n, gemm.m)  # the layouts of tensor cores are always 2:4
    if gemm.role == "wgrad":
        return values, indices, *pattern, gemm.tokens, other
    if gemm.role == "dgrad":
        return other, values, indices, *pattern, gemm.rows if form.startswith("columns") else gemm.cols
    return other, values, indices, *pattern, gemm.cols, bias


def call(
    name: str, gemm: Gemm, other: Tensor, operand: Mapping[str, Tensor | Packed] | Tensor, *, bias: Tensor | None = None,
    seed: Tensor | None = None, out: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Do ``gemm`` by candidate ``name``.

    Args:
        other: x ``(..., in)`` in fprop and wgrad (there a matrix), g ``(..., out)`` in dgrad.
        operand: W̃ by its forms; in wgrad g itself, ``(tokens, out)``, which is estimated here, with ``seed``.
        out: where the result goes; of compressed candidates.
    """
    form = form_of(name, gemm)
    if name == DENSE:
        given: Any = estimate(gemm, operand, seed) if isinstance(operand, Tensor) else operand[DENSE]
        y = _dense(gemm, other, given, bias)
    else:
        packed: Any = pack_estimate(gemm, operand, seed, form) if isinstance(operand, Tensor) else operand[form]
        if name == EXPAND:
            cols = gemm.tokens if gemm.role == "wgrad" else gemm.cols if form == "rows" else gemm.rows
            w = torch.ops.nmkernels.nm_decompress(*packed, gemm.n, gemm.m, cols)
            y = _dense(gemm, other, w if form == "rows" else w.t(), bias)
        else:
            op, args = op_of(gemm, form), arguments(gemm, form, packed, other, bias)
            fn = None if name == AUTO else function(op, name.partition(" ")[0], args)
            if fn is not None:
                return plainly(fn, *args) if out is None else plainly(fn, *args, out=out)
            y = getattr(torch.ops.nmkernels, op)(*args)  # its dispatcher knows another way
    return y if out is None else out.copy_(y)


def function(op: str, backend: str, args: tuple[Any, ...]) -> Callable[..., Tensor] | None:
    """The backend's kernel for ``op(*args)``; None if it has none or declines, or in a graph or where tensors are not what they seem."""
    if torch.compiler.is_compiling() or torch._C._are_functorch_transforms_active() or torch._C._len_torch_dispatch_stack():
        return None
    return next((i.tuning.kernel or i.fn for i in implementations(op) if i.backend == backend and i.supports(*args)[0]), None)


def _dense(gemm: Gemm, other: Tensor, operand: Any, bias: Tensor | None) -> Tensor:
    if gemm.role == "fprop":
        return F.linear(other, operand, bias)
    return other.matmul(operand) if gemm.role == "dgrad" else operand.matmul(other)


def estimate(gemm: Gemm, g: Tensor, seed: Tensor | None) -> Tensor:
    """ĝᵀ ``(out, tokens)`` of wgrad, in dense layout."""
    raw = torch.ops.nmkernels
    if gemm.rule in METHODS:
        return raw.nm_mvue(g, gemm.n, gemm.m, 0, seed, gemm.rule).t()
    return raw.nm_prune(_padded(gemm, g), gemm.n, gemm.m)[:, : gemm.tokens]


def pack_estimate(gemm: Gemm, g: Tensor, seed: Tensor | None, form: str = "rows") -> Packed:
    """ĝᵀ ``(out, tokens)`` compressed along tokens, its positions in the order of ``form``."""
    if gemm.rule in METHODS:
        values, indices = nm_mvue_compress(g, gemm.n, gemm.m, 0, seed, gemm.rule)
    else:
        values, indices = nm_compress(_padded(gemm, g), gemm.n, gemm.m, None)
    layout = form.partition(":")[2]
    return (values, torch.ops.nmkernels.nm_metadata(indices, gemm.tokens, layout)) if layout else (values, indices)


def _padded(gemm: Gemm, g: Tensor) -> Tensor:
    """gᵀ, its last group filled up with zeros."""
    return F.pad(g.t(), (0, -gemm.tokens % gemm.m)).contiguous()


# ---- measuring them

BLOCK = 1 << 18
"""Random numbers are drawn so many at a time and repeated: making them must not take longer than the GEMMs."""

Operands = tuple[Tensor, Any, "Tensor | None"]
"""x or g, what ``call`` takes as the sparse operand, and the seed."""


def measure(gemm: Gemm, *, timer: Seconds | None = None, budget: float = BUDGET, compiling: bool = True) -> Found:
    """Check every candidate of ``gemm`` on random numbers, and time it for ``budget`` seconds in turns with the others.

    Torch's generators are left alone. It synchronises with the device: not for graph capture. ``compiling``: with the backends that compile
    at their first call, and those prepared that have to search.
    """
    gemm.check()
    with torch.inference_mode(False), torch.no_grad(), torch._C._DisableAutocast():
        given = operands(gemm)
        checked = gemm if compiling else gemm._replace(tokens=max(1, min(gemm.tokens, CHECKED // (gemm.rows * gemm.cols))))
        part = _part(checked, given)
        other, operand, seed = part
        if gemm.role == "fprop":
            pair = other, operand[DENSE].t()
        else:
            pair = (other, operand[DENSE]) if gemm.role == "dgrad" else (estimate(checked, operand, seed), other)
        sets: list[Operands] = []  # made when all are checked, and for all that are right
        by = [(name, _entry(name, gemm)) for name in names(gemm)]
        some = [
            _candidate(name, i, (gemm, given), (checked, part), sets, compiling, timer)
            for name, i in by
            if compiling or i is None or not i.tuning.compiles
        ]
        return tuning.measure(key(gemm), some, Validator.of_gemm(*pair), Timer(gemm.device, timer), budget)


def _part(gemm: Gemm, given: Operands) -> Operands:
    """The first tokens of the operands, as many as ``gemm`` has."""
    other, operand, seed = given
    return other[: gemm.tokens], operand[: gemm.tokens] if isinstance(operand, Tensor) else operand, seed


def _entry(name: str, gemm: Gemm) -> Impl | None:
    """The implementation that candidate ``name`` is, if it is one."""
    backend, _, form = name.partition(" ")
    return next((i for i in implementations(op_of(gemm, form)) if i.backend == backend), None) if form else None


def _candidate(
    name: str, entry: Impl | None, timed: tuple[Gemm, Operands], checked: tuple[Gemm, Operands], sets: list[Operands], compiling: bool,
    timer: Seconds | None,
) -> Candidate:  # fmt: skip
    gemm, given = timed
    other, operand, seed = given
    form = name.partition(" ")[2]
    kept = entry is not None and entry.tuning.keeps and gemm.changing
    # in training the first call of a step makes what it reads; on a GPU an optimizer's pass does
    made = gemm.changing and gemm.role == "fprop" and gemm.device.type == "cpu"

    def declines() -> str:
        if entry is None:
            return ""
        packed = operand[form] if isinstance(operand, dict) else pack_estimate(gemm, operand, seed, form)
        if isinstance(packed, str):
            return packed
        args = arguments(gemm, form, packed, other)
        can, reason = entry.supports(*args)
        if not can:
            return reason
        taken = DENSE not in gemm.forms and dispatched(entry.op, *args) is entry
        if compiling and entry.tuning.prepare is not None and not entry.tuning.compiles and (taken or entry.tuning.kernel is None):
            entry.tuning.prepare(entry.op, *args, timer=timer)
        return "it is what auto takes" if taken else ""

    def run(x: Tensor, w: Any, words: Tensor | None) -> Tensor:
        if made:
            raw, pattern = torch.ops.nmkernels, (gemm.n, gemm.m)
            w = {DENSE: raw.nm_prune(w[DENSE], *pattern)} if name == DENSE else {form: raw.nm_compress(w[DENSE], *pattern, None)}
        elif kept and isinstance(w, dict):
            torch.autograd.graph.increment_version(w[form][0])
        return call(name, gemm, x, w, seed=words)

    def check(out: Tensor) -> Tensor:
        small, (x, w, words) = checked
        return call(name, small, x, w, seed=words, out=out)

    def prepared(x: Tensor, w: Any, words: Tensor | None) -> Callable[[], Tensor]:
        if entry is not None and gemm.role == "fprop" and not gemm.changing:  # a frozen layer looks for its kernel once
            args = arguments(gemm, form, w[form], x)
            fn = function(entry.op, entry.backend, args)
            if fn is not None:
                return partial(plainly, fn, *args)
        return partial(run, x, w, words)

    def calls() -> list[Callable[[], Tensor]]:
        if not sets:
            sets.extend(cold(given))
        return [prepared(*some) for some in sets]

    return Candidate(name, check, calls, declines)


def operands(gemm: Gemm) -> Operands:
    """Random numbers, from a generator of their own; the weight is N:M, both ways where its columns are wanted."""
    p, rows, cols = gemm, gemm.rows, gemm.cols
    draw = partial(_random, p.dtype, p.device)
    if p.role == "wgrad":
        return draw(p.tokens, cols), draw(p.tokens, rows), torch.tensor([1, 2], device=p.device)
    return draw(p.tokens, cols if p.role == "fprop" else rows), _weight(p, draw(rows, cols)), None


def _weight(gemm: Gemm, w: Tensor) -> dict[str, Any]:
    """W̃ in the forms of the GEMM; for one that cannot be made the reason."""
    pattern = Pattern(gemm.n, gemm.m)
    transposable = any(form.startswith("columns") for form in gemm.forms)
    mask = ops.transposable_mask(w, pattern) if transposable else ops.mask(w, pattern)
    w = w * mask
    made: dict[str, Any] = {DENSE: w}
    for form in gemm.forms:
        kind, _, layout = form.partition(":")
        if kind == DENSE:
            continue
        c = ops.compress(w, pattern, mask) if kind == "rows" else ops.compress(w.t().contiguous(), pattern, mask.t().contiguous())
        try:
            d = ops.relayout(c, layout) if layout else None
            made[form] = (c.values, c.indices) if d is None else (d.values, d.meta)
        except NMError as error:
            made[form] = str(error)
    return made


def _random(dtype: torch.dtype, device: torch.device, rows: int, cols: int) -> Tensor:
    generator = torch.Generator(device=device).manual_seed(rows * 31 + cols)
    count = rows * cols
    block = torch.randn(min(count, BLOCK - 1), dtype=torch.float32, generator=generator, device=device).to(dtype)
    return block.repeat(-(-count // max(block.numel(), 1)))[:count].view(rows, cols)


# ---- the choice

_known: dict[Gemm, str] = {}
_ruled: dict[Gemm, str] = {}
_measuring = threading.Lock()


def choose(gemm: Gemm, measure: bool = False) -> str:
    """The candidate that does ``gemm``: ``"dense"``, ``"auto"``, or the like of ``"cpu rows"``; give it to ``call``.

    Called again with an equal GEMM, it is a lookup in a dict. ``measure``: whether an unknown GEMM may be measured now.
    """
    if torch.compiler.is_compiling() or type(gemm.tokens) is not int:
        return _static(gemm.role, *tuple(gemm)[2:])  # torch 2.8 cannot trace a slice of a NamedTuple
    if torch._C._get_deterministic_algorithms():
        return DENSE if DENSE in gemm.forms else AUTO
    found = _known.get(gemm)
    if found is None and not measure:
        found = _ruled.get(gemm)
    return _find(gemm, measure) if found is None else found


def _static(role: str, *rest: Any) -> str:
    """The choice for a graph that serves any number of tokens: that of the most tokens in the table, else the rule for many."""
    gemm = Gemm(role, TOKEN_CLASSES[0], *rest)
    gemm.check()
    found = _given(gemm)
    if found is not None:
        return found
    known = ((g, _from_table(g)) for g in (gemm._replace(tokens=t) for t in TOKEN_CLASSES))
    return next((_in_a_graph(g, name) for g, name in known if name is not None), None) or rule(gemm)


def _in_a_graph(gemm: Gemm, found: str) -> str:
    """``found``, or what comes nearest: a graph calls the op, and of each form the dispatcher takes the kernel of highest priority."""
    took: dict[str, float] = (TABLE.get(key(gemm)) or {}).get("us") or {}
    can = [name for name in (DENSE, EXPAND, AUTO) if name in took]
    for form in filter(partial(op_of, gemm), gemm.forms):
        by_priority = (f"{entry.backend} {form}" for entry in implementations(op_of(gemm, form)))
        can += [name for name in by_priority if name in took][:1]
    if found in can or not can:
        return found
    best = min(can, key=took.__getitem__)
    return DENSE if DENSE in can and took[DENSE] < LEAST_GAIN * took[best] else best


# what torch.compiler.assume_constant_result does, whose import of torch._dynamo takes a second: tracing calls it, and keeps the answer
_static._dynamo_marked_constant = True  # type: ignore[attr-defined]


def _find(gemm: Gemm, allowed: bool) -> str:
    gemm.check()
    for memo in (_known, _ruled):
        if len(memo) >= REMEMBERED:
            memo.clear()
    found = _given(gemm) or _from_table(gemm)
    if found is None and _may_measure(gemm, allowed):
        with _measuring:
            found = _from_table(gemm) or _measure_now(gemm)  # another thread may have come first
    if found is None:
        found = _ruled[gemm] = rule(gemm)
    else:
        _known[gemm] = found
    return found


def _given(gemm: Gemm) -> str | None:
    """The candidate that the environment forces."""
    how = setting()
    if gemm.forms == (DENSE,) or (DENSE in gemm.forms and (how == "dense" or reproducible())):
        return DENSE
    return AUTO if forced_backend() or how == "packed" else None


def _from_table(gemm: Gemm) -> str | None:
    if gemm.device.type not in FIRST_USE_WORK:
        return None
    line = TABLE.get(key(gemm))
    found = None if line is None else line.get("choice")
    return found if found in names(gemm) else None


def _may_measure(gemm: Gemm, allowed: bool) -> bool:
    how = setting()
    if how == "table" or not (allowed or how == "measured"):
        return False
    work = _fewer(gemm).tokens * gemm.rows * gemm.cols
    return 0 < work <= FIRST_USE_WORK.get(gemm.device.type, 0) and undisturbed(gemm.device)


def _fewer(gemm: Gemm) -> Gemm:
    """``gemm`` with as many of its tokens as first use measures."""
    most = ENOUGH.get(gemm.device.type, 0) // max(1, gemm.rows * gemm.cols)
    return gemm._replace(tokens=min(gemm.tokens, max(MANY, 1 << max(0, most.bit_length() - 1))))


def _measure_now(gemm: Gemm) -> str | None:
    try:
        found = measure(_fewer(gemm), budget=FIRST_USE_BUDGET, compiling=False)
        found.problem = key(gemm)
    except (RuntimeError, MemoryError) as error:  # out of memory, mostly: then it is no time for measuring
        log.warning("%s: not measured: %s", gemm.words(), error)
        return None
    record(found, "first use")
    if found.note:
        log.warning("%s: the choice %s", gemm.words(), found.note)
    log.info("%s: %s", gemm.words(), found.best)
    return found.best


def record(found: Found, by: str = "nm.tune") -> None:
    """Follow these measurements from now on, in this process and, where the table can be written, in later ones."""
    found.store({found.problem: found.line(found.best, by)})
    _known.clear()
    _ruled.clear()


def rule(gemm: Gemm) -> str:
    """What is done where nothing was measured: dense where there is a dense layout, unless a backend's heuristic says that it is faster."""
    p = gemm
    if DENSE not in p.forms:
        return AUTO
    for op in (op_of(p, form) for form in p.forms):
        for entry in implementations(op) if op else ():
            heuristic = entry.tuning.heuristic
            if heuristic is not None and _promising(entry) and heuristic(p.role, p.dtype, p.tokens, p.rows, p.cols, p.n, p.m, p.device):
                return AUTO
    return DENSE


@contextmanager
def using(gemm: Gemm, name: str) -> Iterator[None]:
    """Inside, ``gemm`` is done by candidate ``name``; afterwards it is chosen anew."""
    _known[gemm] = name
    try:
        yield
    finally:
        _known.pop(gemm, None)


def forget() -> None:
    """Read the table and the environment anew."""
    TABLE.forget()
    _known.clear()
    _ruled.clear()
