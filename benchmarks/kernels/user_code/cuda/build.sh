#!/bin/sh
# Compile the CUDA kernels to PTX; the committed files were made by nvcc 13.0 (V13.0.88).
set -eu
cd "$(dirname "$0")"
for kernel in sgemm row_softmax stencil; do
    nvcc -ptx -O3 -arch=sm_90 -o "$kernel.ptx" "$kernel.cu"
done
