"""Sparse squared-ReLU activations in plain torch, from the equations of Haziza et al., arXiv 2503.16672; nothing from the package."""

import torch
import torch.nn.functional as F

from python_tests.recipes.loop import Adam


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
    leaves = {k: v.clone().requires_grad_() for k, v in params.items()}
    optimizer = torch.optim.AdamW(leaves.values(), **Adam().keywords)
    for t, (x, target) in enumerate(data):
        h = x
        for i in (0, 2, 4):
            h = F.linear(h, leaves[f"{i}.weight"], leaves[f"{i}.bias"])
            if i < 4:
                h = activation(h, n, m, gradient) if t >= dense else h.relu() ** 2
        optimizer.zero_grad()
        F.mse_loss(h, target).backward()
        optimizer.step()
    return {k: p.detach() for k, p in leaves.items()}
