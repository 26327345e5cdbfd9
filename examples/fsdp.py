"""Train a 2:4 sparse GPT with FSDP2 and sharded checkpoints, and save it compressed.

torchrun --nproc-per-node 2 examples/fsdp.py --out runs/fsdp     # run again, on any number of processes, to continue
"""

import argparse
import os
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard

import nmkernels as nm
from train_gpt.data import load_corpus
from train_gpt.model import GPT, GPTConfig

parser = argparse.ArgumentParser()
parser.add_argument("--out", type=Path, required=True)
parser.add_argument("--data", help="a text file or a folder of them; default: the Python standard library")
parser.add_argument("--steps", type=int, default=200)
parser.add_argument("--save-every", type=int, default=50)
args = parser.parse_args()

cuda = torch.cuda.is_available()
device = torch.device(f"cuda:{os.environ['LOCAL_RANK']}" if cuda else "cpu")
if cuda:
    torch.cuda.set_device(device)
dist.init_process_group("nccl" if cuda else "gloo")
rank, ranks = dist.get_rank(), dist.get_world_size()

torch.manual_seed(0)  # every rank starts from the same weights
model = GPT(GPTConfig(width=64, layers=2, heads=2, context=64)).to(device)
recipe = nm.recipes.get("step:2:4", total_steps=args.steps)
handle = nm.sparsify_(model, recipe)
for block in model.blocks:
    fully_shard(block)
fully_shard(model)
optimizer = handle.attach(recipe.optimizer(model.parameters(), lr=2e-3))  # after fully_shard

start = 0
if saved := sorted(args.out.glob("step-*/.metadata")):  # .metadata is written last
    weights, moments = get_state_dict(model, optimizer)
    state = {"model": weights, "optimizer": moments, "step": 0}
    dcp.load(state, checkpoint_id=saved[-1].parent)
    set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
    start = state["step"]

corpus = load_corpus(args.data)
for step in range(start + 1, args.steps + 1):
    x, y = (part.to(device).chunk(ranks)[rank] for part in corpus.batch(seed=0, step=step, size=16, context=64))  # 16 for all ranks
    loss = model.loss(x, y)
    optimizer.zero_grad()
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    if rank == 0 and step % 10 == 0:  # metrics() does not communicate
        print(f"step {step}  loss {loss.item():.3f}  phase {handle.metrics()['phase'].item():.0f}", flush=True)
    if step % args.save_every == 0 or step == args.steps:
        weights, moments = get_state_dict(model, optimizer)
        dcp.save({"model": weights, "optimizer": moments, "step": step}, checkpoint_id=args.out / f"step-{step:06}")

handle.finish()  # checks that this rank's shards are 2:4
nm.save_compressed(model, args.out / "model.safetensors")  # every rank compresses its shards, rank 0 writes
dist.destroy_process_group()
