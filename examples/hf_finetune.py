"""Fine-tune a Hugging Face language model to 2:4 sparse weights on a text file, and save it compressed.

python examples/hf_finetune.py --model my-llama --text book.txt --out sparse-llama    # a folder of save_pretrained, or a name on the hub
python examples/hf_finetune.py --text book.txt --out sparse-bytes                     # a small Llama over bytes, from scratch

Any other process loads it:

    import nmkernels.integrations.hf
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained("sparse-llama")
"""

import argparse
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

import nmkernels as nm

parser = argparse.ArgumentParser()
parser.add_argument("--text", type=Path, required=True)
parser.add_argument("--out", type=Path, required=True)
parser.add_argument("--model", help="default: a small one from scratch")
parser.add_argument("--recipe", default="srste:2:4", help="python -m nmkernels recipes lists them")
parser.add_argument("--steps", type=int, default=200)
parser.add_argument("--context", type=int, default=128)
args = parser.parse_args()

torch.manual_seed(0)
if args.model:
    tokenizer = AutoTokenizer.from_pretrained(args.model)
    model = AutoModelForCausalLM.from_pretrained(args.model)
    tokens = torch.tensor(tokenizer(args.text.read_text(encoding="utf-8"))["input_ids"])
else:
    tokenizer = None
    sizes = {"hidden_size": 128, "intermediate_size": 384, "num_hidden_layers": 2, "num_attention_heads": 4}
    ends = {"bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 0}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=256, max_position_embeddings=args.context, **sizes, **ends))
    tokens = torch.tensor(list(args.text.read_bytes()))

pieces = [{"input_ids": piece, "labels": piece} for piece in tokens.split(args.context) if len(piece) == args.context]
training = TrainingArguments(
    str(args.out / "checkpoints"),
    max_steps=args.steps,
    learning_rate=2e-5 if args.model else 2e-3,
    per_device_train_batch_size=8,
    logging_steps=20,
    report_to=[],
)
trainer = Trainer(model, training, train_dataset=pieces, processing_class=tokenizer)
handle = nm.integrations.hf.prepare(trainer, args.recipe)
print(handle.report)
trainer.train()  # at the end all layers that the report calls sparse are 2:4

nm.compress_(model).save_pretrained(args.out)
if tokenizer is not None:
    tokenizer.save_pretrained(args.out)
