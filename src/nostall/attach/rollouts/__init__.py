"""Rollouts of shared prompts in vLLM: engines in processes of their own, measured in turns."""
