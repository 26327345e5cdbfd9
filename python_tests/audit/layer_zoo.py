"""A model with a layer of each kind, and made-up seconds for the pieces of a step."""

from torch import nn


class Own(nn.Linear):
    """A subclass of nn.Linear, which may do anything."""


class Conv1D(nn.Module):
    """Stands for transformers' class, which is recognised by its name."""

    def __init__(self, nf: int, nx: int) -> None:
        super().__init__()
        self.nf, self.weight, self.bias = nf, nn.Linear(nf, nx).weight, None


Conv1D.__module__ = "transformers.pytorch_utils"


class Zoo(nn.Module):
    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.taken = nn.Linear(width, 2 * width)
        self.conv = Conv1D(3 * width, width)
        self.odd = nn.Linear(width + 2, width)
        self.small = nn.Linear(width, 8)
        self.attention = nn.MultiheadAttention(width, 2)
        self.embedding = nn.Embedding(4 * width, width)
        self.tied = nn.Linear(width, 4 * width, bias=False)
        self.tied.weight = self.embedding.weight
        self.experts = nn.Module()
        self.experts.up = nn.Parameter(self.odd.weight.detach().repeat(4, 1, 1)[..., 2:])
        self.own = Own(width, width)
        self.lm_head = nn.Linear(width, 2 * width)


COSTS = {
    "fprop dense": 10.0,
    "dgrad dense": 11.0,
    "wgrad dense": 12.0,
    "fprop sparse": 6.0,
    "dgrad sparse": 7.0,
    "wgrad sparse": 8.0,
    "estimate": 1.0,
    "expand": 2.0,
    "weight dense": 0.5,
    "weight rows": 0.75,
    "weight rows+dense": 1.25,
    "weight both": 2.0,
}
