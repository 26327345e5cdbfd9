"""Generate text from the compressed file of examples/own_loop.py, and compare with the same weights stored dense.

python examples/inference.py runs/loop/model.safetensors --prompt "def "
"""

import argparse
import time
from pathlib import Path

import torch

import nmkernels as nm
from train_gpt.model import GPT, GPTConfig, generate

parser = argparse.ArgumentParser()
parser.add_argument("file", type=Path)
parser.add_argument("--prompt", default="def ")
parser.add_argument("--count", type=int, default=60, help="bytes to generate")
parser.add_argument("--tune", action="store_true", help="time each layer first and use the fastest kernels")
args = parser.parse_args()


def fresh() -> GPT:
    """A dense model to load the file into."""
    return GPT(GPTConfig(width=64, layers=2, heads=2, context=64))


model = nm.load_compressed(fresh(), args.file).eval()  # checks indices and shapes
dense = nm.densify_(nm.load_compressed(fresh(), args.file)).eval()  # the same weights with their zeros

if args.tune:
    print(nm.tune(model, tokens=1))


def size(module: torch.nn.Module) -> int:
    """Bytes of parameters and buffers."""
    return sum(t.numel() * t.element_size() for t in (*module.parameters(), *module.buffers()))


prompt = args.prompt.encode()
with torch.no_grad():
    ids = torch.tensor([list(prompt)])
    difference = (model(ids) - dense(ids)).abs().max().item()
print(f"largest difference of a logit: {difference:.1e}")
for name, module in (("compressed", model), ("dense", dense)):
    generate(module, prompt, 4)  # the first call chooses kernels
    begin = time.perf_counter()
    text = generate(module, prompt, args.count)
    print(f"{name}: {size(module):,} bytes, {args.count / (time.perf_counter() - begin):.0f} bytes of text a second")
print(text.decode(errors="replace"))
