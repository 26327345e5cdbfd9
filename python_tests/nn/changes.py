"""Ways to give a layer ``Linear(32, 16)`` another weight behind its back."""

import torch
from torch import nn


def change_in_place(layer):
    with torch.no_grad():
        layer.weight.copy_(torch.randn(16, 32))


def change_storage(layer):
    layer.weight.data = torch.randn(16, 32)


def change_parameter(layer):
    layer.weight = nn.Parameter(torch.randn(16, 32))


def load(layer):
    layer.load_state_dict({"weight": torch.randn(16, 32), "bias": torch.zeros(16)})


def load_assign(layer):
    layer.load_state_dict({"weight": torch.randn(16, 32), "bias": torch.zeros(16)}, assign=True)


def load_by_hook(layer):
    # a hook that fills the weight by itself, unseen by the version counter
    layer.register_load_state_dict_pre_hook(lambda module, sd, *rest: module.weight.data.copy_(sd.pop("weight")))
    layer.load_state_dict({"weight": torch.randn(16, 32), "bias": torch.zeros(16)}, strict=False)


def there_and_back(layer):
    # the second cast may well land at the address that the weight had at first
    layer.to(torch.bfloat16).to(torch.float32)


CHANGES = [change_in_place, change_storage, change_parameter, load, load_assign, load_by_hook, there_and_back]
