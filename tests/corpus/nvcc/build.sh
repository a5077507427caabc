#!/bin/sh
# Compile the CUDA part of the corpus with nvcc 13.0 (V13.0.88).  The results are committed, so that
# the tests need no CUDA compiler.  Each line: source, name of the result, further options, targets.
set -eu
cd "$(dirname "$0")"

build() {
    source=$1 name=$2 options=$3
    shift 3
    for arch in "$@"; do
        echo "nvcc -cubin -O3 $options -arch=sm_$arch -o $name.sm_$arch.cubin $source.cu"
        nvcc -cubin -O3 $options -arch=sm_$arch -o "$name.sm_$arch.cubin" "$source.cu"
    done
}

rm -f ./*.fatbin
find . -name "*.cubin" ! -name "*.ptxas13.*" -delete
build calls calls "" 75 80 89 90 100 120
build atomics atomics "" 75 80 89 90 100 120
build warps warps "" 75 80 86 90 120
# Line information records the folder: one that is the same everywhere.
mkdir -p /tmp/nostall && cp warps.cu /tmp/nostall/
here=$PWD
(cd /tmp/nostall && nvcc -cubin -O3 -lineinfo -arch=sm_90 -o "$here/warps.lines.sm_90.cubin" warps.cu)
rm -r /tmp/nostall
build warps warps.o1 "-Xptxas -O1" 80
build memory memory "" 75 80 86 90 120
build memory_order memory_order "" 80 90
build shared_order shared_order "" 80 90 120
build shared_atomics shared_atomics "" 80 90 120
build barrier_wait barrier_wait "-w" 120
build work_queue work_queue "" 80
build heap heap "" 75
build transposed transposed "" 75 80 90 120
build arithmetic arithmetic "" 75 80 90
build arithmetic arithmetic.fast "-use_fast_math" 89
build pressure pressure "" 75 80 90 120
build pressure pressure.spills "-maxrregcount 48" 75 86 90
build algorithms algorithms "" 75 80 86 90
build tensor tensor "" 75 80 86 89 90 120
build clusters clusters "" 90 100 120
build hopper hopper "" 90a
build warpgroup warpgroup "" 90a
build blackwell blackwell "" 100a
build wide_conversions wide_conversions "" 75 86 90 120
build tensor_ring tensor_ring "" 100a
build block_scaled block_scaled "" 120a
build bulk_stores bulk_stores "" 90a 100a 120a
build unit_order unit_order "-DFEW" 80 90 120
# PTX for sm_80: nvcc makes other reductions for sm_100.
nvcc -cubin -O3 -DFEW -gencode arch=compute_80,code=sm_100 -o unit_order.sm_100.cubin unit_order.cu
build generic_atomics generic_atomics "" 90 120
build rare_distances rare_distances "-w -DFEW" 75 120
build register_operands register_operands "-w -DFEW" 90a
build carry_chains carry_chains "-w -DFEW" 75

# Two files, linked: each has a local function of the same name.
parts=$(mktemp -d)
for part in first second; do
    nvcc -cubin -O3 -rdc=true -arch=sm_80 -o "$parts/$part.cubin" "linked_$part.cu"
done
nvlink -arch=sm_80 -o linked.sm_80.cubin "$parts/first.cubin" "$parts/second.cubin"
rm -r "$parts"

# Two images in one file, compressed (the compiler's default) and not.
two="-gencode arch=compute_80,code=sm_80 -gencode arch=compute_90,code=sm_90"
nvcc -fatbin -O3 $two -o atomics.fatbin atomics.cu
nvcc -fatbin -O3 --no-compress $two -o atomics.plain.fatbin atomics.cu

# Architectures that nostall does not know: these have to be refused.
build block_sum refused "" 103 121
