"""What newer compilers make slower: surveys, times, and kernels of public reports."""
