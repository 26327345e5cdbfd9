"""Train a small ResNet with N:M sparse convolutions on scikit-learn's handwritten digits, and deploy it compressed.

python examples/resnet_digits.py --recipe step:1:4 --out digits.safetensors     # or srste:2:4, asp:2:4(start=0.5), dense
"""

import argparse
from pathlib import Path

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import Tensor, nn

import nmkernels as nm


class Block(nn.Module):
    """Two 3×3 convolutions beside a shortcut (He et al., 2016)."""

    def __init__(self, channels: int, out: int, stride: int = 1) -> None:
        super().__init__()
        self.conv1, self.norm1 = nn.Conv2d(channels, out, 3, stride, 1, bias=False), nn.BatchNorm2d(out)
        self.conv2, self.norm2 = nn.Conv2d(out, out, 3, 1, 1, bias=False), nn.BatchNorm2d(out)
        same = channels == out and stride == 1
        self.shortcut = nn.Identity() if same else nn.Sequential(nn.Conv2d(channels, out, 1, stride, bias=False), nn.BatchNorm2d(out))

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm2(self.conv2(F.relu(self.norm1(self.conv1(x)))))
        return F.relu(y + self.shortcut(x))


def resnet(width: int) -> nn.Sequential:
    first = nn.Conv2d(1, width, 3, padding=1, bias=False), nn.BatchNorm2d(width), nn.ReLU()
    blocks = Block(width, width), Block(width, 2 * width, stride=2), Block(2 * width, 2 * width)
    return nn.Sequential(*first, *blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(2 * width, 10))


def digits(seed: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Images and labels of 1,437 digits to train on, and of 360 to test with."""
    found = load_digits()
    images, labels = torch.tensor(found.images, dtype=torch.float32)[:, None] / 8 - 1, torch.tensor(found.target)
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(seed))
    train, test = order[:1437], order[1437:]
    return images[train], labels[train], images[test], labels[test]


@torch.no_grad()
def accuracy(model: nn.Module, images: Tensor, labels: Tensor) -> float:
    model.eval()
    return (model(images).argmax(1) == labels).float().mean().item()


parser = argparse.ArgumentParser()
parser.add_argument("--recipe", default="step:2:4", help='"dense" for the baseline')
parser.add_argument("--epochs", type=int, default=20)
parser.add_argument("--width", type=int, default=32, help="channels of the first block")
parser.add_argument("--seed", type=int, default=0)
parser.add_argument("--out", type=Path, help="the compressed file")
args = parser.parse_args()

torch.manual_seed(args.seed)
images, labels, test_images, test_labels = digits(seed=0)
steps = args.epochs * (len(labels) // 64)
model = resnet(args.width)

recipe = nm.recipes.get(args.recipe if ":" in args.recipe else f"{args.recipe}:2:4", total_steps=steps)
handle = nm.sparsify_(model, recipe)
print(handle.report)
optimizer = handle.attach(recipe.optimizer(model.parameters(), lr=2e-3, weight_decay=0.01))
schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=2e-3, total_steps=steps)

for step in range(steps):
    model.train()
    chosen = torch.randint(len(labels), (64,))
    loss = F.cross_entropy(model(images[chosen]), labels[chosen])
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    schedule.step()
    if (step + 1) % (steps // 4) == 0:
        metrics = {name: value.item() for name, value in handle.metrics().items()}
        with handle.deployable():
            right = accuracy(model, test_images, test_labels)
        print(f"step {step + 1}  loss {loss.item():.3f}  phase {metrics['phase']}  density {metrics['density']:.2f}  accuracy {right:.4f}")

handle.finish()
print(f"{recipe.name} {recipe.pattern}, seed {args.seed}: {accuracy(model, test_images, test_labels):.4f} of the test images")
if args.out is not None:
    nm.save_compressed(nm.compress_(model), args.out)
    deployed = nm.load_compressed(resnet(args.width), args.out)
    print(f"deployed: {accuracy(deployed, test_images, test_labels):.4f}, {args.out.stat().st_size:,} bytes")
