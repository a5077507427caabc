"""A program that generates with vLLM's CPU engine, as people write one; prompts share pages.

    python offline.py FOLDER [--calls N]

``FOLDER`` has the model of ``generate.py``.  Prefix caching is off, so that `nostall optimize` has
something to find.
"""

from __future__ import annotations

import argparse
import random


def main() -> None:
    from vllm import LLM, SamplingParams

    parser = argparse.ArgumentParser()
    parser.add_argument("folder")
    parser.add_argument("--calls", type=int, default=4)
    options = parser.parse_args()
    llm = LLM(
        model=options.folder, skip_tokenizer_init=True, dtype="float32", max_model_len=1024,
        max_num_seqs=64, max_num_batched_tokens=8192, enforce_eager=True,
        enable_prefix_caching=False, kv_cache_memory_bytes=1 << 29,
    )  # fmt: skip
    draw = random.Random(0)
    shared = [draw.randrange(3, 512) for _ in range(960)]
    prompts = [
        {"prompt_token_ids": shared + [draw.randrange(3, 512) for _ in range(8)]} for _ in range(32)
    ]
    sampling = SamplingParams(temperature=0, max_tokens=2, ignore_eos=True, detokenize=False)
    for _ in range(options.calls):
        outputs = llm.generate(prompts, sampling, use_tqdm=False)
        print(sum(len(output.outputs[0].token_ids) for output in outputs), "tokens", flush=True)


if __name__ == "__main__":
    main()
