#!/bin/sh
# Compile the CUDA examples; the committed cubins were made by nvcc 13.0 (V13.0.88).
set -eu
cd "$(dirname "$0")"
for kernel in transpose dot_product; do
    for arch in sm_80 sm_90; do
        nvcc -cubin -O3 -arch=$arch -o "$kernel.$arch.cubin" "$kernel.cu"
    done
done
