"""Ways in which training code writes weights, most of them unseen by version counters: ``write(model, values, optimizer)``."""

import importlib.util

import torch
from torch import nn


def copy_in_no_grad(model, values, optimizer):
    with torch.no_grad():
        for p, v in zip(model.parameters(), values, strict=True):
            p.copy_(v)


def copy_in_inference_mode(model, values, optimizer):
    with torch.inference_mode():
        for p, v in zip(model.parameters(), values, strict=True):
            p.copy_(v.clone())


def copy_to_data(model, values, optimizer):
    # diffusers' EMAModel.copy_to and restore
    for p, v in zip(model.parameters(), values, strict=True):
        p.data.copy_(v.to(p.device).data)


def foreach_copy_to_data(model, values, optimizer):
    # the same with foreach=True
    torch._foreach_copy_([p.data for p in model.parameters()], [v.data for v in values])


def arithmetic_on_data(model, values, optimizer):
    for p, v in zip(model.parameters(), values, strict=True):
        p.data.mul_(0.0).add_(v).clamp_(-100.0, 100.0)


def other_data(model, values, optimizer):
    for p, v in zip(model.parameters(), values, strict=True):
        p.data = v.clone()


def inference_tensors_as_data(model, values, optimizer):
    with torch.inference_mode():
        for p, v in zip(model.parameters(), values, strict=True):
            p.data.copy_(v + 0.0)


def views_of_one_vector(model, values, optimizer):
    nn.utils.vector_to_parameters(torch.cat([v.flatten() for v in values]), model.parameters())


def numpy(model, values, optimizer):
    for p, v in zip(model.parameters(), values, strict=True):
        p.detach().numpy()[...] = v.numpy()


def storage(model, values, optimizer):
    for p, v in zip(model.parameters(), values, strict=True):
        p.untyped_storage().copy_(v.contiguous().untyped_storage())


def other_parameters(model, values, optimizer):
    for (name, p), v in zip(list(model.named_parameters()), values, strict=True):
        owner, _, leaf = name.rpartition(".")
        setattr(model.get_submodule(owner), leaf, nn.Parameter(v.clone(), p.requires_grad))


def load_state_dict(model, values, optimizer, assign=False):
    names = (name for name, _ in model.named_parameters())
    model.load_state_dict({**model.state_dict(), **{name: v.clone() for name, v in zip(names, values, strict=True)}}, assign=assign)


def load_state_dict_assign(model, values, optimizer):
    load_state_dict(model, values, optimizer, assign=True)


def load_by_a_hook(model, values, optimizer):
    # the hook fills the weights by itself
    hook = model.register_load_state_dict_pre_hook(lambda *_: copy_to_data(model, values, optimizer))
    model.load_state_dict({}, strict=False)
    hook.remove()


def cast_there_and_back(model, values, optimizer):
    # the second cast may well land at the address that the weights had at first
    copy_to_data(model, values, optimizer)
    model.to(torch.bfloat16).to(torch.float32)


def stochastic_weight_average(model, values, optimizer):
    copy_to_data(model, values, optimizer)
    averaged = torch.optim.swa_utils.AveragedModel(nn.ParameterList([nn.Parameter(v) for v in values]))
    averaged.update_parameters(nn.ParameterList([nn.Parameter(v * 0.5) for v in values]))
    for p, a in zip(model.parameters(), averaged.parameters(), strict=True):
        p.detach().copy_(a)


def _averaging(model, values):
    import torch_ema as ema

    # it averages what is trained
    trained = [(p, v) for p, v in zip(model.parameters(), values, strict=True) if p.requires_grad]
    average = ema.ExponentialMovingAverage([p for p, _ in trained], decay=0.9)
    average.shadow_params = [v.clone() for _, v in trained]
    return average, [p for p, _ in trained]


def torch_ema(model, values, optimizer):
    average, trained = _averaging(model, values)
    average.copy_to(trained)


def torch_ema_there_and_back(model, values, optimizer):
    average, trained = _averaging(model, values)
    with average.average_parameters(trained), torch.no_grad():
        model(torch.randn(3, 32))


def _stepped(optimizer, parameters):
    parameters = [p for p in parameters if p.requires_grad]
    before = [p.grad for p in parameters]
    for p in parameters:
        p.grad = torch.randn_like(p)
    optimizer.step()
    for p, g in zip(parameters, before, strict=True):
        p.grad = g


def another_optimizer(model, values, optimizer):
    _stepped(torch.optim.SGD(model.parameters(), lr=0.5), model.parameters())


def another_fused_optimizer(model, values, optimizer):
    _stepped(torch.optim.AdamW(model.parameters(), lr=0.5, fused=True), model.parameters())


def the_attached_optimizer(model, values, optimizer):
    _stepped(optimizer, model.parameters())


WRITERS = [
    copy_in_no_grad,
    copy_in_inference_mode,
    copy_to_data,
    foreach_copy_to_data,
    arithmetic_on_data,
    other_data,
    inference_tensors_as_data,
    views_of_one_vector,
    numpy,
    storage,
    other_parameters,
    load_state_dict,
    load_state_dict_assign,
    load_by_a_hook,
    cast_there_and_back,
    stochastic_weight_average,
    torch_ema,
    torch_ema_there_and_back,
    another_optimizer,
    another_fused_optimizer,
    the_attached_optimizer,
]
if importlib.util.find_spec("torch_ema") is None:
    WRITERS = [write for write in WRITERS if write not in (torch_ema, torch_ema_there_and_back)]
UNSEEN = {
    copy_to_data,
    foreach_copy_to_data,
    arithmetic_on_data,
    inference_tensors_as_data,
    numpy,
    storage,
    torch_ema,
    torch_ema_there_and_back,
}
"""Those that leave no trace but the contents."""
