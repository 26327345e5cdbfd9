"""Sparse squared-ReLU activations in plain torch, from the equations of Haziza et al., arXiv 2503.16672; nothing from the package."""

import torch

from python_tests.recipes.loop import optimize


def largest(y, n, m):
    """True at the n largest values of each m consecutive elements of the last dimension; ties keep the lower index."""
    groups = y.detach().reshape(-1, m)
    best = groups.argsort(dim=1, descending=True, stable=True)[:, :n]
    return torch.zeros_like(groups, dtype=torch.bool).scatter(1, best, True).reshape(y.shape)


def activation(y, n, m, grad="chain"):
    """relu²(sp(y)), differentiated as it stands, or as if sp were not there."""
    sparse = (y * largest(y, n, m)).relu() ** 2
    return sparse if grad == "chain" else y.relu() ** 2 + (sparse - y.relu() ** 2).detach()


def act24(params, data, n, m, dense, gradient="chain"):
    """The usual net with squared ReLU, dense for ``dense`` steps, then with sparse activations."""
    return optimize(params, data, act=lambda y, t: activation(y, n, m, gradient) if t >= dense else y.relu() ** 2)
