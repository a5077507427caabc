"""Transcribe audio with a Whisper model of transformers, batch after batch."""

import argparse

import torch
from transformers import CompileConfig, WhisperConfig, WhisperForConditionalGeneration

parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=100_000)
parser.add_argument(
    "--best", choices=["default", "graphs"], help="static cache and a compiled forward pass"
)
parser.add_argument("--tiny", action="store_true")
options = parser.parse_args()

torch.manual_seed(0)
device = "cuda" if torch.cuda.is_available() else "cpu"
hidden, layers, new, batch, frames = (64, 2, 6, 2, 40) if options.tiny else (768, 6, 24, 8, 3000)
config = WhisperConfig(
    vocab_size=512 if options.tiny else 51865, d_model=hidden, encoder_layers=layers,
    decoder_layers=layers, encoder_attention_heads=max(2, hidden // 64),
    decoder_attention_heads=max(2, hidden // 64), encoder_ffn_dim=4 * hidden,
    decoder_ffn_dim=4 * hidden,
    max_source_positions=frames // 2, max_target_positions=64, num_mel_bins=80,
    eos_token_id=None, pad_token_id=0, decoder_start_token_id=1, bos_token_id=2,
    suppress_tokens=None, begin_suppress_tokens=None,
)  # fmt: skip
dtype = torch.float32 if options.tiny else torch.bfloat16
model = WhisperForConditionalGeneration(config).to(device, dtype).eval()
model.generation_config.update(eos_token_id=None, pad_token_id=0, decoder_start_token_id=1)
if options.best:
    model.generation_config.cache_implementation = "static"
    mode = "reduce-overhead" if options.best == "graphs" else "default"
    model.generation_config.compile_config = CompileConfig(mode=mode)
    model.forward = torch.compile(model.forward, mode=mode)

for step in range(options.steps):
    audio = torch.randn(batch, 80, frames, device=device, dtype=dtype)
    with torch.inference_mode():
        text = model.generate(audio, min_new_tokens=new, max_new_tokens=new, do_sample=False)
    print(f"step {step + 1} tokens {text.numel()}", flush=True)
