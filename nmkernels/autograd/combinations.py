"""Masks as a choice among the C(M, N) combinations of each group: drawn from learned logits (MaskLLM), or the best by score (LBC).

Groups are numbered row by row, combinations in lexicographic order: for 2:4 they are {0,1}, {0,2}, {0,3}, {1,2}, {1,3}, {2,3}.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor

from ..pattern import Pattern, PatternError
from ..reference import uniforms24
from .transforms import Reads, Traits, WeightTransform, masked

MAX_COMBINATIONS = 256
"""Most combinations of a group: each has a learned number of its own, so 2:4 stores 1.5 of them per weight and 4:8 already 8.75."""


def combination_count(pattern: Pattern) -> int:
    """C(M, N), the number of ways to keep N of M.

    Raises:
        PatternError: there are more than ``MAX_COMBINATIONS``.

    Example:
        >>> combination_count(Pattern("2:4")), combination_count(Pattern("1:16"))
        (6, 16)
    """
    count = math.comb(pattern.m, pattern.n)
    if count > MAX_COMBINATIONS:
        raise PatternError(
            f"pattern {pattern} has {count} combinations in each group, and every one would need a learned number; at most "
            f"{MAX_COMBINATIONS} are supported. Choose for instance 2:4, 4:8, 2:16 or 1:M."
        )
    return count


@dataclass(frozen=True)
class CombinationMask(WeightTransform):
    """Base of the transforms that choose among combinations; groups along the last dimension."""

    def table(self, like: Tensor) -> Tensor:
        """P ``(C, M)``, 0 or 1: the combinations as masks, in the dtype and on the device of ``like``."""
        members = torch.tensor(list(itertools.combinations(range(self.pattern.m), self.pattern.n)), device=like.device)
        return torch.zeros(len(members), self.pattern.m, dtype=like.dtype, device=like.device).scatter_(1, members, 1.0)

    def grouped(self, tensor: Tensor) -> Tensor:
        """``tensor`` ``(out, in)`` as ``(groups, M)``."""
        return tensor.reshape(-1, self.pattern.m)

    def best(self, scores: Tensor, weight: Tensor) -> Tensor:
        """The combination of the largest of ``scores`` ``(groups, C)`` in each group, the first of equal ones, as bool ``(out, in)``."""
        return self.table(scores).bool()[scores.argmax(1)].reshape(weight.shape)


def _wide(tensor: Tensor) -> Tensor:
    """``tensor`` detached, in at least fp32: logits times 500 leave nothing of 16 bits."""
    tensor = tensor.detach()
    return tensor.float() if tensor.dtype.itemsize < 4 else tensor


# ---- MaskLLM


@dataclass(frozen=True)
class GumbelMask(CombinationMask):
    """W̃ = W ⊙ M̃, M̃ = Σ_k ỹ_k P_k, ỹ = softmax((κ π + G) / τ) with G standard Gumbel noise (MaskLLM; Fang et al. 2024, arXiv 2409.17481).

    The logits π are ``nm_logits`` ``(groups, C)``, learned; τ and κ are the schedule's ``nm_tau`` and ``nm_kappa``. The noise is a
    function of ``nm_draw``, two held words, alone: forward, backward and a resumed run see the same. W is not trained.

    Args:
        pattern: the N:M pattern.
        hard: multiply the combination of the largest ỹ instead of the mixture; the gradient is that of the mixture.
        prior: α, how strongly the mask of the N largest magnitudes is preferred at the start, see ``preferring``.
        spread: standard deviation of the initial logits.
    """

    hard: bool = False
    prior: float = 3.0
    spread: float = 0.01

    reads: ClassVar[Reads] = {"nm_logits": "learned", "nm_draw": "held", "nm_tau": "fed", "nm_kappa": "fed", "nm_penalty": "fed"}

    def _traits(self) -> Traits:
        return replace(super()._traits(), is_nm=False)

    def start(self, weight: Tensor) -> dict[str, Tensor]:
        """``nm_logits``: normal numbers from torch's generator, with the prior of the mask by magnitude."""
        kept = torch.ops.nmkernels.nm_mask(weight, self.pattern.n, self.pattern.m)
        return {"nm_logits": self.preferring(kept, weight)}

    def preferring(self, mask: Tensor, weight: Tensor) -> Tensor:
        """Fresh logits that prefer ``mask`` M₀ ``(out, in)``: π_k + σ(π) (⟨M₀, P_k⟩ − N/2) α, with σ(π) their spread in this layer."""
        dtype = torch.promote_types(weight.dtype, torch.float32)
        shape = weight.numel() // self.pattern.m, combination_count(self.pattern)
        # in fp32 whatever the dtype is: the same seed gives the same logits
        logits = (torch.randn(shape, device=weight.device) * self.spread).to(dtype)
        overlap = self.grouped(mask).to(dtype) @ self.table(logits).t()
        return logits + logits.std(correction=0) * (overlap - self.pattern.n / 2) * self.prior

    def renew(self, weight: Tensor, extras: Sequence[Tensor | None], generator: torch.Generator) -> dict[str, Tensor]:
        """``nm_draw``, the words from which the next noise follows."""
        return {"nm_draw": torch.randint(-(2**63), 2**63 - 1, (2,), generator=generator, dtype=torch.int64)}

    def kept(self, weight: Tensor, *extras: Tensor) -> Tensor:
        """The combination of the largest logit: what would be deployed now."""
        return self.best(_wide(extras[0]), weight)

    def choices(self, *extras: Tensor) -> Tensor:
        """ỹ ``(groups, C)``."""
        logits, (_, draw, tau, kappa, _) = _wide(extras[0]), extras
        return ((logits * kappa + gumbel(draw, logits)) / tau).softmax(1).to(logits.dtype)

    def mixture(self, choices: Tensor) -> Tensor:
        """M̃ ``(groups, M)``."""
        table = self.table(choices)
        return table[choices.argmax(1)] if self.hard else choices @ table

    def __call__(self, weight: Tensor, *extras: Tensor, out: Tensor | None = None) -> Tensor:
        soft = self.mixture(self.choices(*extras)).reshape(weight.shape).to(weight.dtype)
        return weight.detach().contiguous() * soft if out is None else torch.mul(weight.detach(), soft, out=out)

    def gradient(self, g: Tensor, weight: Tensor, *extras: Tensor) -> tuple[Tensor | None, dict[str, Tensor]]:
        """∂L/∂π = (κ/τ) ỹ ⊙ (d − ⟨ỹ, d⟩) with d_k = ⟨g ⊙ W, P_k⟩ over the group; none of the weights, which are frozen."""
        return None, {"nm_logits": self._to_logits(self.choices(*extras), self.grouped(g) * self.grouped(weight), *extras)}

    def penalty(self, weight: Tensor, *extras: Tensor) -> dict[str, Tensor]:
        """The gradient of −λ ‖W ⊙ M̃‖², λ the schedule's ``nm_penalty``: it keeps large weights, and with them gradients, alive."""
        choices, w = self.choices(*extras), self.grouped(weight)
        return {"nm_logits": self._to_logits(choices, -2.0 * extras[4] * w * w * self.mixture(choices), *extras)}

    def _to_logits(self, choices: Tensor, d_mask: Tensor, *extras: Tensor) -> Tensor:
        """From the gradient of M̃ ``(groups, M)`` to that of π."""
        logits, _, tau, kappa, _ = extras
        d = d_mask.to(choices.dtype) @ self.table(choices).t()
        return (choices * (d - (choices * d).sum(1, keepdim=True)) * (kappa / tau)).to(logits.dtype)

    def watch(self, weight: Tensor, *extras: Tensor) -> dict[str, Tensor]:
        """``sharpness``, the mean of the largest ỹ of each group: 1/C says that nothing is decided, 1 that all is."""
        return {"sharpness": self.choices(*extras).amax(1).mean()}


def gumbel(draw: Tensor, like: Tensor) -> Tensor:
    """Standard Gumbel noise −log(−log u) of the shape and dtype of ``like``, a function of ``draw`` alone (int64 ``(2,)``).

    u = (k + ½) / 2²⁴, k the 24-bit numbers of Philox in row-major order; computed in fp64, where u never rounds to 1.

    Example:
        >>> draw = torch.tensor([1, 2])
        >>> bool((gumbel(draw, torch.zeros(3, 4)) == gumbel(draw, torch.zeros(3, 4))).all())
        True
    """
    u = (uniforms24(draw, like.numel()).double() + 0.5) / 2**24
    return -(-u.log()).log().to(like.dtype).reshape(like.shape)


@dataclass(frozen=True)
class LikeliestMask(CombinationMask):
    """W̃ = W ⊙ P_k with k the largest logit of each group: what MaskLLM deploys."""

    reads: ClassVar[Reads] = {"nm_logits": "frozen"}

    def kept(self, weight: Tensor, *extras: Tensor) -> Tensor:
        return self.best(_wide(extras[0]), weight)

    def __call__(self, weight: Tensor, *extras: Tensor, out: Tensor | None = None) -> Tensor:
        return masked(weight, self.kept(weight, *extras), out)


# ---- LBC


@dataclass(frozen=True)
class CandidateMask(CombinationMask):
    """W̃ = W ⊙ B, B what the remaining candidate combinations of each group still have (LBC; Zhang et al. 2022, arXiv 2206.06662).

    The scores α are ``nm_scores`` ``(groups, C)``, learned; which combinations remain is ``nm_alive``, bool of the same shape, held. The
    soft mask is S = Σ_k α_k P_k over the remaining k; B is binary, and its gradient is passed straight to S.

    Args:
        pattern: the N:M pattern.
        forward: ``"union"``, B is 1 where any remaining combination has the weight; ``"top_n"``, at the N largest S.
        chain: the weight's gradient is g ⊙ B, instead of g.
        learning: the scores are trained.
    """

    forward: str = "union"
    chain: bool = True

    reads: ClassVar[Reads] = {"nm_scores": "learned", "nm_alive": "held", "nm_remaining": "fed"}

    def _traits(self) -> Traits:
        return replace(super()._traits(), is_nm=False)

    def start(self, weight: Tensor) -> dict[str, Tensor]:
        """``nm_scores``, 1 / C(M−1, N−1) each, so that S is 1 everywhere."""
        shape = weight.numel() // self.pattern.m, combination_count(self.pattern)
        first = 1.0 / math.comb(self.pattern.m - 1, self.pattern.n - 1)
        dtype = torch.promote_types(weight.dtype, torch.float32)
        return {"nm_scores": torch.full(shape, first, dtype=dtype, device=weight.device)}

    def renew(self, weight: Tensor, extras: Sequence[Tensor | None], generator: torch.Generator) -> dict[str, Tensor]:
        """``nm_alive``: of what remained, the ``nm_remaining`` largest scores of each group; of equal ones the first stay."""
        scores, alive, remaining = extras
        assert scores is not None
        if alive is None or remaining is None:
            return {"nm_alive": torch.ones_like(scores, dtype=torch.bool)}
        order = scores.detach().masked_fill(~alive, -math.inf).argsort(dim=1, descending=True, stable=True)
        return {"nm_alive": alive & (order.argsort(dim=1) < remaining)}

    def kept(self, weight: Tensor, *extras: Tensor) -> Tensor:
        scores, alive, _ = extras
        if self.forward == "union":
            return (alive.to(torch.float32) @ self.table(torch.ones((), device=alive.device)) > 0).reshape(weight.shape)
        wide = _wide(scores) * alive
        soft = wide @ self.table(wide)
        # the op ranks magnitudes; scores are ranked with their sign
        raised = soft - soft.amin(1, keepdim=True)
        return torch.ops.nmkernels.nm_mask(raised, self.pattern.n, self.pattern.m).reshape(weight.shape)

    def __call__(self, weight: Tensor, *extras: Tensor, out: Tensor | None = None) -> Tensor:
        return masked(weight, self.kept(weight, *extras), out)

    def gradient(self, g: Tensor, weight: Tensor, *extras: Tensor) -> tuple[Tensor | None, dict[str, Tensor]]:
        """g ⊙ B, or without ``chain`` g; ∂L/∂α_k = ⟨g ⊙ W, P_k⟩ over the group where combination k remains, 0 where it does not."""
        dw = masked(g, self.kept(weight, *extras)) if self.chain else g
        if self.reads["nm_scores"] != "learned":
            return dw, {}
        scores, alive, _ = extras
        d = (self.grouped(g) * self.grouped(weight)).to(scores.dtype)
        return dw, {"nm_scores": (d @ self.table(scores).t()).masked_fill(~alive, 0.0)}


@dataclass(frozen=True)
class BestCandidate(CandidateMask):
    """W̃ = W ⊙ P_k with k the largest score among the remaining candidates: what LBC deploys, and trains once only one remains."""

    reads: ClassVar[Reads] = {**CandidateMask.reads, "nm_scores": "frozen"}

    def _traits(self) -> Traits:
        return replace(super()._traits(), is_nm=True)

    def start(self, weight: Tensor) -> dict[str, Tensor]:
        """Nothing: the scores are there already."""
        return {}

    def kept(self, weight: Tensor, *extras: Tensor) -> Tensor:
        scores, alive, _ = extras
        return self.best(_wide(scores).masked_fill(~alive, -math.inf), weight)
