"""Generate text with a Llama of transformers for one prompt after the other."""

import argparse

import torch
from transformers import CompileConfig, LlamaConfig, LlamaForCausalLM

parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=100_000)
parser.add_argument(
    "--best", choices=["default", "graphs"], help="static cache, which compiles the model"
)
parser.add_argument("--tiny", action="store_true")
options = parser.parse_args()

torch.manual_seed(0)
device = "cuda" if torch.cuda.is_available() else "cpu"
hidden, layers, new, batch = (64, 2, 8, 2) if options.tiny else (1024, 8, 24, 8)
config = LlamaConfig(
    vocab_size=512 if options.tiny else 32000, hidden_size=hidden, num_hidden_layers=layers,
    intermediate_size=hidden * 11 // 4, num_attention_heads=max(2, hidden // 64),
    num_key_value_heads=2,
    max_position_embeddings=1024, eos_token_id=None, pad_token_id=0,
)  # fmt: skip
dtype = torch.float32 if options.tiny else torch.bfloat16
model = LlamaForCausalLM(config).to(device, dtype).eval()
if options.best:
    model.generation_config.cache_implementation = "static"
    mode = "reduce-overhead" if options.best == "graphs" else "default"
    model.generation_config.compile_config = CompileConfig(mode=mode)

for step in range(options.steps):
    prompt = torch.randint(1, config.vocab_size, (batch, 64), device=device)
    text = model.generate(prompt, min_new_tokens=new, max_new_tokens=new, do_sample=False)
    print(f"step {step + 1} tokens {text.numel()}", flush=True)
