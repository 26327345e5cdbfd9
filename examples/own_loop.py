"""Train a small GPT to 2:4 in your own loop, with checkpoints, evaluation of the deployed weights, and a compressed file.

python examples/own_loop.py --out runs/loop --steps 400     # run again to continue from the last checkpoint
"""

import argparse
from pathlib import Path

import torch

import nmkernels as nm
from train_gpt.data import load_corpus
from train_gpt.model import GPT, GPTConfig

parser = argparse.ArgumentParser()
parser.add_argument("--out", type=Path, required=True)
parser.add_argument("--data", help="a text file or a folder of them; default: the Python standard library")
parser.add_argument("--recipe", default="srste:2:4", help="python -m nmkernels recipes lists them")
parser.add_argument("--steps", type=int, default=400)
parser.add_argument("--every", type=int, default=100, help="steps between evaluations and checkpoints")
args = parser.parse_args()

torch.manual_seed(0)
device = "cuda" if torch.cuda.is_available() else "cpu"
corpus = load_corpus(args.data)
model = GPT(GPTConfig(width=64, layers=2, heads=2, context=64)).to(device)

recipe = nm.recipes.get(args.recipe, total_steps=args.steps)
handle = nm.sparsify_(model, recipe)  # swaps layers in place, keeps every Parameter
print(handle.report)
optimizer = handle.attach(recipe.optimizer(model.parameters(), lr=2e-3))
schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, args.steps)

start, checkpoint = 0, args.out / "checkpoint.pt"
args.out.mkdir(parents=True, exist_ok=True)
if checkpoint.exists():  # the recipe's phase, switch step and counters are in the optimizer's state dict
    saved = torch.load(checkpoint, map_location=device)
    model.load_state_dict(saved["model"])
    optimizer.load_state_dict(saved["optimizer"])
    schedule.load_state_dict(saved["schedule"])
    start = saved["step"]


@torch.no_grad()
def validate() -> float:
    losses = [model.loss(x.to(device), y.to(device)).item() for x, y in corpus.val_batches(context=64, size=16, most=8)]
    return sum(losses) / len(losses)


for step in range(start + 1, args.steps + 1):
    x, y = (part.to(device) for part in corpus.batch(seed=0, step=step, size=16, context=64))
    loss = model.loss(x, y)
    optimizer.zero_grad()
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    schedule.step()
    if step % args.every == 0 or step == args.steps:
        metrics = {name: round(value.item(), 4) for name, value in handle.metrics().items()}
        with handle.deployable():  # the weights that finish() would leave
            print(f"step {step}  training loss {loss.item():.3f}  deployed {validate():.3f}  {metrics}", flush=True)
        parts = {"model": model, "optimizer": optimizer, "schedule": schedule}
        torch.save({"step": step, **{name: part.state_dict() for name, part in parts.items()}}, checkpoint)

handle.finish()  # raises unless all sparse layers are 2:4
nm.save_compressed(nm.compress_(model), args.out / "model.safetensors")
print(f"compressed: {validate():.3f}, {(args.out / 'model.safetensors').stat().st_size:,} bytes")
