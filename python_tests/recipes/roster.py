"""The list of recipes that the conformance suite runs; a new recipe joins by one entry.

``loop(params, data, streams)`` trains the same float64 problem by independent code and returns the parameters, those that the recipe has
added (``"0.nm_logits"``) included; ``streams`` are the keys of the layers' random streams where the recipe has some.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from nmkernels.recipes import (
    ASP,
    AST,
    FST,
    LBC,
    SRSTE,
    SSTE,
    STE,
    STEP,
    VNM,
    Activation24,
    BiMask,
    Complementary,
    Dense,
    LayerWise,
    MaskLLM,
    MaxQ,
    MdGf,
    ProxSparse,
    Recipe,
    SdGf,
    SLoPe,
)
from python_tests.recipes import loop_dgrad
from python_tests.recipes import loop_effective as effective
from python_tests.recipes import loop_layerwise as layerwise
from python_tests.recipes import loop_learned as learned
from python_tests.recipes.loop import SPARSE, Adam, Step, train
from python_tests.recipes.loop_effective import act24, asp, ast, fst, maxq, vnm
from python_tests.recipes.loop_prox import proxsparse

STEPS = 20
SWITCH = Step(t_min=2, t_max=7, threshold=1e-30, clamp=2.0)


@dataclass(frozen=True)
class Entry:
    """One recipe of ``STEPS`` steps, the loop that it must equal, and where it is interrupted.

    ``tied``: it ranks numbers that are equal but for rounding (all scores begin equal, and Adam's first step is ±lr), so that fp32 and
    float64 choose differently.
    """

    recipe: Recipe
    loop: Callable[[dict[str, Any], list[Any], dict[str, int] | None], dict[str, Any]]
    cuts: tuple[int, ...] = (7,)
    tied: bool = False

    @property
    def any_optimizer(self) -> bool:
        """Whether plain AdamW will do; where not, the recipe's own optimizer is used throughout."""
        return self.recipe.setup.optimizer is None

    @property
    def draws(self) -> bool:
        """Whether the gradients are random, so that other microbatches or skipped steps give another run."""
        return getattr(self.recipe, "mvue", None) is not None

    @property
    def spaced(self) -> bool:
        """Whether the groups are not adjacent, so that a finished weight is N:M only in another order of its columns."""
        return isinstance(self.recipe, Complementary)

    @property
    def still(self) -> bool:
        """Whether the swapped weights are not trained at all."""
        return isinstance(self.recipe, MaskLLM)


def hard(decay: float = 0.0, step: Step | None = None, n: int = 2) -> Any:
    return lambda params, data, streams: train(params, data, n, 4, decay, Adam(), step)[0]


def by(recipe: Recipe, loop: Any, *args: Any, cuts: tuple[int, ...] = (7,), tied: bool = False) -> Entry:
    """A loop that reads the recipe's plain settings."""
    return Entry(recipe, lambda p, d, s: loop(p, d, recipe, *args), cuts, tied)


def mdgf(recipe: MdGf, dense: int, fine_tune: int) -> Entry:
    n, m, chain = recipe.pattern.n, recipe.pattern.m, recipe.gradient == "chain"
    args = n, m, recipe.schedule, dense, fine_tune, STEPS, recipe.residual, chain, recipe.levels
    return Entry(recipe, lambda p, d, s: effective.mdgf(p, d, *args), (2, 4, 9, 17))


def sdgf(recipe: SdGf, frames: list[tuple[int, int]], starts: list[int]) -> Entry:
    return Entry(recipe, lambda p, d, s: effective.sdgf(p, d, frames, starts, recipe.gradient == "chain"), (2, 4, 9, 17))


AT = 6


def stepped(pattern: str, inner: str, loop: Any) -> Entry:
    recipe = STEP(pattern, STEPS, switch="fixed", start=AT, inner=inner)
    return Entry(recipe, lambda p, d, s: loop(p, d, step=Step("fixed", start=AT, clamp=2.0)), (4, AT, 8, 12, 17))


def maskllm(pattern: str = "2:4", **options: Any) -> Entry:
    # a low temperature makes of a rounding another mask, so most runs here stop where the masks are still mixtures
    return by(MaskLLM(pattern, STEPS, lr_multiplier=1.0, seed=3, **options), learned.maskllm)


def lbc(pattern: str = "2:4", **options: Any) -> Entry:
    recipe = LBC(pattern, STEPS, start=2, end=14, **options)
    return by(recipe, learned.lbc, 2, 14, cuts=(3, 7, 17), tied=recipe.forward == "top_n")


ROSTER = {
    "dense": Entry(Dense(), hard(n=4)),
    "ste": Entry(STE("2:4"), hard()),
    "srste": Entry(SRSTE("2:4", decay=0.1), hard(0.1)),
    "step": Entry(STEP("2:4", t_min=2, t_max=7, threshold=1e-30), hard(0.0, SWITCH), (5, 8, 12)),
    "step_srste": Entry(STEP("2:4", t_min=2, t_max=7, threshold=1e-30, inner=SRSTE(decay=0.1)), hard(0.1, SWITCH), (5, 8, 12)),
    "step_mdgf": stepped("1:8", "mdgf(end=10)", lambda p, d, step: effective.mdgf(p, d, 1, 8, "exponential", 0, 4, 14, 2.5e-3, step=step)),
    "step_sdgf": stepped(
        "1:4", "sdgf(gradient=ste)", lambda p, d, step: effective.sdgf(p, d, [(3, 4), (2, 4), (1, 4)], [0, 3, 7], step=step)
    ),
    "step_sste": stepped("2:4", "sste(mvue=None)", lambda p, d, step: effective.sste(p, d, 2, 4, step=step)),
    "step_layerwise": stepped(
        "2:8",
        "layerwise(inner=ste, rule=magnitude)",
        lambda p, d, step: layerwise.srste(p, d, layerwise.magnitude, (1, 2, 4), 8, 0.25, 0.0, step=step),
    ),
    "vnm": Entry(VNM("2:8", v=8, decay=0.1, every=1), lambda p, d, s: vnm(p, d, 2, 8, 8, 0.1, 1)),
    "vnm_greedy": Entry(VNM("2:16", decay=0, every=6), lambda p, d, s: vnm(p, d, 2, 16, 32, 0, 6), (6, 9)),
    "vnm_sums": Entry(VNM("1:8", v=16, decay=0.1, every=0, objective="sums"), lambda p, d, s: vnm(p, d, 1, 8, 16, 0.1, 0, "sums")),
    "layerwise": Entry(
        LayerWise("4:16", inner=SRSTE("4:16", decay=0.1), choices="all"),
        lambda p, d, s: layerwise.srste(p, d, layerwise.erk, range(1, 16), 16, 0.25, 0.1),
    ),
    "layerwise_magnitude": Entry(
        LayerWise("2:8", inner="srste(decay=0.1)", rule="magnitude", choices="all"),
        lambda p, d, s: layerwise.srste(p, d, layerwise.magnitude, range(1, 8), 8, 0.25, 0.1),
    ),
    "layerwise_sdgf": Entry(
        LayerWise("2:8", STEPS, inner="sdgf(gradient=ste, end=1.0)", rule="magnitude", choices="all"),
        lambda p, d, s: effective.sdgf(
            p, d, [(7, 8), (4, 8), (2, 8)], [0, 7, 13], last=layerwise.magnitude({k: p[k] for k in SPARSE}, range(1, 8), 8, 0.25)
        ),
        (3, 9, 15),
    ),
    "step_asp": stepped("2:4", "asp(permute=True, escapes=0)", lambda p, d, step: asp(p, d, permute=True, step=step)),
    "asp": Entry(ASP("2:4"), lambda p, d, s: asp(p, d)),
    "asp_permute": Entry(ASP("2:4", permute=True, escapes=0), lambda p, d, s: asp(p, d, permute=True)),
    "asp_permute_late": Entry(ASP("2:4", permute=True, escapes=0, start=6), lambda p, d, s: asp(p, d, 6, permute=True), (3, 6, 9)),
    "sste_dense_wgrad": Entry(SSTE("2:4", mvue=None), lambda p, d, s: effective.sste(p, d, 2, 4)),
    "sste": Entry(SSTE("2:4", seed=1), lambda p, d, s: effective.sste(p, d, 2, 4, s)),
    "sste_approx": Entry(SSTE("1:4", mvue="approx", seed=1), lambda p, d, s: effective.sste(p, d, 1, 4, s, "approx")),
    "sste_biased": Entry(SSTE("2:4", mvue="magnitude", seed=1), lambda p, d, s: effective.sste(p, d, 2, 4, s, "magnitude")),
    "mdgf": mdgf(MdGf("1:8", STEPS), 0, 5),
    "mdgf_late": mdgf(MdGf("1:4", STEPS, start=4, end=0.8), 4, 4),
    "mdgf_ste": mdgf(MdGf("1:8", STEPS, end=1.0, gradient="ste"), 0, 0),
    "mdgf_linear": mdgf(MdGf("2:4", STEPS, schedule="linear", start=0.1, end=1.0), 2, 0),
    "mdgf_levels": mdgf(MdGf("1:4", STEPS, schedule="linear", start=2, end=18, levels=4), 2, 2),
    "sdgf": sdgf(SdGf("1:8", STEPS), [(7, 8), (4, 8), (2, 8), (1, 8)], [0, 4, 8, 11]),
    "sdgf_ste": sdgf(SdGf("1:8", STEPS, gradient="ste", end=1.0), [(7, 8), (4, 8), (2, 8), (1, 8)], [0, 5, 10, 15]),
    "sdgf_late": sdgf(SdGf("1:4", STEPS, start=4, end=16), [(3, 4), (2, 4), (1, 4)], [4, 8, 12]),
    "sdgf_geometric": sdgf(SdGf("1:2", STEPS, schedule="geometric"), [(8, 16), (4, 8), (2, 4), (1, 2)], [0, 4, 8, 11]),
    "bimask": by(BiMask("2:4", decay=0.1, draws=20, every=7, seed=1), loop_dgrad.bimask, cuts=(6, 7, 9)),
    "bimask_count": by(BiMask("1:8", draws=5, every=3, criterion="count", seed=2), loop_dgrad.bimask, cuts=(6, 7, 9)),
    "bimask_once": by(BiMask("1:4", draws=0, every=0, seed=0), loop_dgrad.bimask, cuts=(6, 7, 9)),
    "slope": by(SLoPe("2:4", STEPS, rank=2, start=0.7, every=6, seed=1), loop_dgrad.slope, 14, cuts=(6, 13, 14, 17)),
    "slope_adapters": by(SLoPe("1:4", STEPS, rank=3, start=0.0, every=0, seed=2), loop_dgrad.slope, 0),
    "slope_plain": by(SLoPe("1:8", rank=0, every=1), loop_dgrad.slope),
    "maskllm": maskllm(tau_end=1.0),
    "maskllm_others": maskllm("1:4", others="trained", tau_end=1.0, decay=1e-3, decay_schedule="linear"),
    "maskllm_hard": maskllm("1:8", hard=True, tau_end=2.0, prior_strength=0.0, others="trained"),
    "lbc": lbc(),
    "lbc_top_n": lbc("1:4", forward="top_n", gradient="ste", exponent=4),
    "sdgf_densify": sdgf(SdGf("1:2", STEPS, schedule="densify", start=0.2, end=1.0), [(1, 16), (1, 8), (1, 4), (1, 2)], [4, 8, 12, 16]),
    "ast": Entry(AST("2:4", STEPS, decay=0.5, every=4), lambda p, d, s: ast(p, d, 2, 4, 0.5, 5, 4), (3, 7, 12)),
    "ast_gradient": Entry(
        AST("1:8", decay=0.2, end=0, every=7, second_moment="gradient"), lambda p, d, s: ast(p, d, 1, 8, 0.2, 0, 7, total=False)
    ),
    "complementary": Entry(Complementary("1:4"), lambda p, d, s: effective.complementary(p, d, 1, 4)),
    "complementary_decay": Entry(Complementary("2:4", decay=0.1), lambda p, d, s: effective.complementary(p, d, 2, 4, decay=0.1)),
    "complementary_blocks": Entry(
        Complementary("2:8", spacing=2, gradient="chain"), lambda p, d, s: effective.complementary(p, d, 2, 8, 2, chain=True)
    ),
    "maxq": by(MaxQ("2:4", STEPS, end=15, decay=0.1), maxq, 0, 15, cuts=(7, 15)),
    "maxq_cubic": by(MaxQ("1:4", STEPS, schedule="cubic", start=4, end=0.8, tau=0.1, kernel=True), maxq, 4, 16, cuts=(2, 9)),
    "maxq_cos": by(MaxQ("1:8", STEPS, schedule="cos", end=16, levels=3, gradient="chain"), maxq, 0, 16, cuts=(9,)),
    "maxq_exp": by(MaxQ("2:8", STEPS, schedule="exp", start=2, end=1.0), maxq, 2, 20, cuts=(7,)),
    "proxsparse": Entry(ProxSparse(decay=0.8), lambda p, d, s: proxsparse(p, d, 0.8)),
    "proxsparse_anchor": Entry(
        ProxSparse(decay=60.0, scale_by_lr=True, anchor=0.5, final_values="trained"), lambda p, d, s: proxsparse(p, d, 0.6, 0.5)
    ),
    "fst": Entry(FST("2:4", STEPS, every=3, decay=0.1, end=0.75, seed=1), lambda p, d, s: fst(p, d, 2, 4, 3, 0.1, 15, s), (3, 7, 15)),
    "fst_nm": Entry(FST("1:4", every=4, decay=0.1, end=None, mvue=None), lambda p, d, s: fst(p, d, 1, 4, 4, 0.1), (4, 7)),
    "fst_packed": Entry(
        FST("2:4", every=7, decay=0.1, end=None, mvue="approx", packed=True, seed=1),
        lambda p, d, s: fst(p, d, 2, 4, 7, 0.1, None, s, "approx"),
    ),
    "tsrste": Entry(FST("2:4", mvue=None, end=None, every=1, decay=0.1), lambda p, d, s: fst(p, d, 2, 4, 1, 0.1)),
    "srste_packed": Entry(SRSTE("2:4", decay=0.1, packed=True), hard(0.1)),
    "sste_packed": Entry(SSTE("2:4", seed=1, packed=True), lambda p, d, s: effective.sste(p, d, 2, 4, s)),
    "act24": Entry(Activation24("2:4", STEPS, start=0.25), lambda p, d, s: act24(p, d, 2, 4, 5), (3, 5, 9)),
    "act24_ste": Entry(Activation24("1:4", STEPS, start=0, gradient="ste"), lambda p, d, s: act24(p, d, 1, 4, 0, "ste")),
}
