"""Fine-tune a Llama with the Trainer of transformers, as its example scripts do."""

import argparse
import tempfile

import torch
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    PrinterCallback,
    Trainer,
    TrainingArguments,
    default_data_collator,
)


class Blocks(torch.utils.data.Dataset):
    """Blocks of random tokens."""

    def __init__(self, length, vocabulary):
        self.length, self.vocabulary = length, vocabulary

    def __len__(self):
        return 1 << 20

    def __getitem__(self, index):
        generator = torch.Generator().manual_seed(index)
        tokens = torch.randint(0, self.vocabulary, (self.length,), generator=generator)
        return {"input_ids": tokens, "labels": tokens}


parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=100_000)
parser.add_argument("--best", choices=["default", "graphs"], help="torch.compile")
parser.add_argument("--tiny", action="store_true")
parser.add_argument("--out", default=None)
options = parser.parse_args()

torch.manual_seed(0)
hidden, layers, length, batch = (64, 2, 32, 2) if options.tiny else (1024, 12, 512, 8)
config = LlamaConfig(
    vocab_size=512 if options.tiny else 32000, hidden_size=hidden, num_hidden_layers=layers,
    intermediate_size=hidden * 11 // 4, num_attention_heads=max(2, hidden // 64),
    num_key_value_heads=2,
    max_position_embeddings=1024, use_cache=False,
)  # fmt: skip
model = LlamaForCausalLM(config)
arguments = TrainingArguments(
    output_dir=options.out or tempfile.mkdtemp(prefix="llama-"),
    per_device_train_batch_size=batch,
    max_steps=options.steps,
    learning_rate=3e-4,
    bf16=not options.tiny,
    logging_steps=5,
    save_strategy="no",
    report_to=[],
    disable_tqdm=True,
    torch_compile=options.best is not None,
    torch_compile_mode="reduce-overhead" if options.best == "graphs" else None,
)
trainer = Trainer(
    model=model,
    args=arguments,
    train_dataset=Blocks(length, config.vocab_size),
    data_collator=default_data_collator,
)
trainer.remove_callback(PrinterCallback)


class Lines(PrinterCallback):
    """Print the step with the loss."""

    def on_log(self, args, state, control, logs=None, **others):
        if logs and "loss" in logs:
            print(f"step {state.global_step} loss {float(logs['loss']):.4f}", flush=True)


trainer.add_callback(Lines)
trainer.train()
