"""Meta-attention: one launch that attends for prefill, decode and verify units of a Task-Table."""
