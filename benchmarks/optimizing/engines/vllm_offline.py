"""Generate offline with vLLM: samples of shared prompts, or prompts with speculation.

Usage: ``python vllm_offline.py MODEL [--workload shared|speculation|eager] [--calls N]``.
"""

import argparse
import random
import time

from vllm import LLM, SamplingParams


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("model", help="folder with a model; no tokenizer is needed")
    parser.add_argument("--workload", choices=["shared", "speculation", "eager"], default="shared")
    parser.add_argument("--calls", type=int, default=2)
    parser.add_argument("--new", type=int, default=128)
    args = parser.parse_args()
    options = {}
    if args.workload == "speculation":
        options["speculative_config"] = {
            "method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_max": 4,
            "prompt_lookup_min": 1,
        }  # fmt: skip
    if args.workload == "eager":
        options["enforce_eager"] = True
    llm = LLM(model=args.model, skip_tokenizer_init=True, max_model_len=8192, seed=0, **options)
    draw = random.Random(0)
    prompts, length, samples = {
        "shared": (16, 4096, 16), "speculation": (64, 1024, 1), "eager": (64, 1024, 1),
    }[args.workload]  # fmt: skip
    words = [draw.randrange(3, 30_000) for _ in range(200)]  # repeated, so that n-grams are found
    given = [
        {"prompt_token_ids": [draw.choice(words) for _ in range(length)]} for _ in range(prompts)
    ]
    sampling = SamplingParams(
        n=samples, temperature=0.8 if samples > 1 else 0.0, max_tokens=args.new, ignore_eos=True,
        detokenize=False,
    )  # fmt: skip
    for call in range(args.calls):
        begin = time.perf_counter()
        outputs = llm.generate(given, sampling, use_tqdm=False)
        seconds = time.perf_counter() - begin
        tokens = sum(len(sample.token_ids) for output in outputs for sample in output.outputs)
        print(f"call {call + 1}: {tokens} tokens in {seconds:.3f} s", flush=True)


if __name__ == "__main__":
    main()
