"""A corpus of compiled kernels: what compilers emit is the field that nostall works on."""
