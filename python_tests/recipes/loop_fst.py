"""FST in plain torch, from the equations of Hu et al., ICML 2024; of the package only the reference's estimator, to replay its draws."""

import functools
import itertools

import torch

from nmkernels import reference
from python_tests.recipes.loop import SPARSE, masked


@functools.lru_cache
def tile_patterns(n, m):
    """Every 0/1 matrix ``(count, m, m)`` with n ones in each row and in each column."""
    rows = [[int(i in kept) for i in range(m)] for kept in itertools.combinations(range(m), n)]
    found = [p for p in itertools.product(rows, repeat=m) if all(sum(column) == n for column in zip(*p, strict=True))]
    return torch.tensor(found, dtype=torch.float64)


def transposable(w, n, m):
    """The admissible pattern of largest kept magnitude in every m x m tile, by trying all of them."""
    rows, cols = w.shape
    tiles = w.abs().double().reshape(rows // m, m, cols // m, m).transpose(1, 2)
    patterns = tile_patterns(n, m)
    best = patterns[torch.einsum("rcij,pij->rcp", tiles, patterns).argmax(-1)]
    return best.transpose(1, 2).reshape(rows, cols).bool()


def fst(params, data, n, m, refresh, decay, stop=None, streams=None, method="exact"):
    """Held masks, renewed after every ``refresh`` steps and not applied from step ``stop`` on; 2:4 estimates from ``streams``, or none."""
    masks = {}

    def begin(t, params, *moments):
        if t == stop:
            masks.clear()
        elif t % refresh == 0 and (stop is None or t < stop):
            masks.update({k: transposable(params[k], n, m).double() for k in SPARSE})

    def estimate(k, g, x, t):
        if k in masks and streams is not None:
            g = reference.mvue(g, 2, 4, 0, torch.tensor([streams[k], t]), method)
        return g.T @ x

    def mask_of(k, w, t):
        return masks.get(k, torch.ones_like(w))

    return masked(params, data, mask_of, decay, begin=begin, estimate=estimate)
