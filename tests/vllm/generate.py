"""Generates tokens with vLLM's CPU engine and a random model of two layers; prints JSON.

    python generate.py FOLDER [--speculate N] [--dtype bfloat16]

Run in a process of its own: the environment decides which attention back end vLLM takes.
"""

from __future__ import annotations

import argparse
import json
import random
from pathlib import Path

CONFIG = {
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "vocab_size": 512,
    "max_position_embeddings": 1024,
    "rms_norm_eps": 1e-5,
    "torch_dtype": "float32",
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


def save_model(folder: Path) -> None:
    """Write a model of random weights, large enough that attention decides tokens."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**CONFIG, initializer_range=0.15))
    model.save_pretrained(folder)


def main() -> None:
    from nostall.attach.vllm.counts import counts
    from vllm import LLM, SamplingParams

    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("--speculate", type=int, default=0)
    parser.add_argument("--dtype", default="float32")
    options = parser.parse_args()
    save_model(options.folder)
    speculation = {
        "method": "ngram",
        "num_speculative_tokens": options.speculate,
        "prompt_lookup_max": 3,
        "prompt_lookup_min": 1,
    }
    engine = LLM(
        model=str(options.folder),
        skip_tokenizer_init=True,
        dtype=options.dtype,
        seed=0,
        max_model_len=768,
        max_num_batched_tokens=96,
        max_num_seqs=8,
        enable_chunked_prefill=True,
        enforce_eager=True,
        kv_cache_memory_bytes=1 << 28,
        speculative_config=speculation if options.speculate else None,
    )
    draw = random.Random(0)
    words = [draw.randrange(512) for _ in range(24)]  # repeated, so that n-grams are found
    prompts = [
        {"prompt_token_ids": [draw.choice(words) for _ in range(length)]}
        for length in (1, 3, 31, 32, 33, 64, 150, 400)
    ]
    sampling = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True, detokenize=False)
    results = engine.generate(prompts, sampling, use_tqdm=False)
    tokens = [list(result.outputs[0].token_ids) for result in results]
    print("RESULT", json.dumps({"tokens": tokens, **counts()}))


if __name__ == "__main__":
    main()
