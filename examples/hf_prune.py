"""Prune a pretrained Hugging Face language model to 2:4 in one shot, fine-tune it for 100 steps, save it compressed, and generate.

python examples/hf_prune.py my-llama --text book.txt --out sparse-llama    # a folder of save_pretrained
python examples/hf_prune.py --out sparse-bytes    # a small Llama over bytes, which is trained first; text from the standard library
"""

import argparse
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

import nmkernels as nm
from train_gpt.data import load_corpus

parser = argparse.ArgumentParser()
parser.add_argument("model", nargs="?", type=Path, metavar="MODEL_DIR", help="default: a small one")
parser.add_argument("--text", type=Path, help="a file or folder; default: the standard library's source")
parser.add_argument("--out", type=Path, required=True)
parser.add_argument("--pattern", default="2:4")
parser.add_argument("--method", default="admm", help="or sparsegpt, wanda, magnitude")
parser.add_argument("--samples", type=int, default=128, help="sequences to prune with")
parser.add_argument("--steps", type=int, default=100, help="of fine-tuning")
parser.add_argument("--pretraining", type=int, default=200, help="steps of the small model")
parser.add_argument("--context", type=int, default=128)
parser.add_argument("--batch", type=int, default=8)
parser.add_argument("--lr", type=float, help="default: 1e-5, or 1e-3 for the small model")
parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
args = parser.parse_args()

torch.manual_seed(0)
corpus = load_corpus(args.text)
if args.model:
    tokenizer = AutoTokenizer.from_pretrained(args.model)
    model = AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.float32)
    train, held = (torch.tensor(tokenizer(bytes(part).decode(errors="replace"))["input_ids"]) for part in (corpus.train, corpus.val))
else:
    tokenizer = None
    sizes = {"hidden_size": 128, "intermediate_size": 384, "num_hidden_layers": 2, "num_attention_heads": 4}
    ends = {"bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 0}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=256, max_position_embeddings=args.context, **sizes, **ends))
    train, held = corpus.train.long(), corpus.val.long()
model.to(args.device)


def batches(text: torch.Tensor, count: int) -> list[torch.Tensor]:
    """Random pieces of a text."""
    starts = torch.randint(len(text) - args.context, (count, args.batch, 1))
    return list(text[starts + torch.arange(args.context)])


def fit(optimizer: torch.optim.Optimizer, steps: int) -> None:
    """An ordinary training loop, with a learning rate that falls to zero."""
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.0, steps)
    model.train()
    for ids in batches(train, steps):
        ids = ids.to(args.device)
        optimizer.zero_grad()
        model(input_ids=ids, labels=ids).loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()


testing = batches(held, 8)


@torch.no_grad()
def evaluate(what: str) -> None:
    """Print the loss on held-out text."""
    model.eval()
    losses = [model(input_ids=ids, labels=ids).loss.item() for ids in (ids.to(args.device) for ids in testing)]
    print(f"{what}: loss {sum(losses) / len(losses):.3f}")


if not args.model:
    fit(torch.optim.AdamW(model.parameters(), lr=3e-3), args.pretraining)
evaluate("dense")

handle = nm.prune_(model, args.pattern, batches(train, max(1, args.samples // args.batch)), method=args.method)
print(handle.report)
evaluate("pruned")

lr = args.lr or (1e-5 if args.model else 1e-3)
fit(handle.attach(handle.recipe.optimizer(model.parameters(), lr=lr)), args.steps)  # the masks are held
evaluate("fine-tuned")

handle.finish()  # checks that the weights are N:M
nm.compress_(model).save_pretrained(args.out)
if tokenizer is not None:
    tokenizer.save_pretrained(args.out)

# any process that imports nmkernels.integrations.hf can do this
model = AutoModelForCausalLM.from_pretrained(args.out).to(args.device).eval()
evaluate("compressed, loaded again")
prompt = torch.tensor([list(b"def ")]) if tokenizer is None else tokenizer("The ", return_tensors="pt")["input_ids"]
ids = model.generate(prompt.to(args.device), max_new_tokens=40, do_sample=False)[0].cpu()
print("generated:", repr(bytes(ids.tolist()).decode(errors="replace") if tokenizer is None else tokenizer.decode(ids)))
