"""Fine-tuning of a BERT of transformers on random sentences of two classes, in eager mode.

The model is made from a configuration, so that nothing is downloaded; dropout is on, as published.

Usage: ``python bert_finetune.py [--steps N] [--layers N] [--width N] [--batch N] [--length N]``.
"""

import argparse
from collections.abc import Iterator

import torch
from torch.utils.data import DataLoader, Dataset
from transformers import BertConfig, BertForSequenceClassification, get_scheduler


class Sentences(Dataset[dict[str, torch.Tensor]]):
    """Random sentences; the class is the parity of their first token."""

    def __init__(self, count: int, length: int, vocabulary: int) -> None:
        generator = torch.Generator().manual_seed(0)
        self.tokens = torch.randint(vocabulary, (count, length), generator=generator)

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        tokens = self.tokens[index]
        return {
            "input_ids": tokens,
            "attention_mask": torch.ones_like(tokens),
            "labels": tokens[0] % 2,
        }


def batches(loader: DataLoader[dict[str, torch.Tensor]]) -> Iterator[dict[str, torch.Tensor]]:
    """Batches of epoch after epoch."""
    while True:
        yield from loader


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=20_000)
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--width", type=int, default=768)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--length", type=int, default=128)
    parser.add_argument(
        "--best", choices=["default", "graphs"], help="torch.compile, fused optimiser, workers"
    )
    parser.add_argument("--tiny", action="store_true")
    args = parser.parse_args()
    if args.tiny:
        args.layers, args.width, args.batch, args.length = 2, 64, 4, 16
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.manual_seed(0)
    config = BertConfig(
        hidden_size=args.width, num_hidden_layers=args.layers, num_attention_heads=args.width // 64,
        intermediate_size=4 * args.width, num_labels=2,
    )  # fmt: skip
    model = BertForSequenceClassification(config).to(device)
    model.train()
    workers = {"num_workers": 2, "pin_memory": True, "persistent_workers": True}
    loader = DataLoader(
        Sentences(4096, args.length, config.vocab_size), args.batch, shuffle=True, drop_last=True,
        **(workers if args.best else {}),
    )  # fmt: skip
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-5, fused=True if args.best else None)
    schedule = get_scheduler(
        "linear", optimizer, num_warmup_steps=100, num_training_steps=args.steps
    )
    if args.best:
        model.compile(mode="reduce-overhead" if args.best == "graphs" else "default")
    every = 5 if args.tiny else 20
    for step, batch in zip(range(args.steps), batches(loader), strict=False):
        moved = {name: x.to(device, non_blocking=bool(args.best)) for name, x in batch.items()}
        outputs = model(**moved)
        outputs.loss.backward()
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        if step % every == every - 1:
            print(f"step {step + 1} loss {outputs.loss.item():.4f}", flush=True)


if __name__ == "__main__":
    main()
