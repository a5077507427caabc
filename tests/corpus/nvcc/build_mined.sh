#!/bin/sh
# Compile the CUDA part of the corpus with other versions of ptxas, and pack the results as a wheel
# that `python -m tools.mining read` takes.
#
#   [SOURCES="NAME ..."] sh build_mined.sh FOLDER PTXAS ...
#
# SOURCES: only these; register_operands is for sm_90a, all others are for all other architectures.
# The wheels nvidia-cuda-nvcc-cu11 11.8.89, nvidia-cuda-nvcc-cu12 12.1.105 and 12.9.86, and
# nvidia-cuda-nvcc 13.4.92 have ptxas.  nvcc 13.0 makes the PTX.  A version of ptxas that does not
# know an architecture or the PTX of a source leaves it out.
set -eu
here=$(cd "$(dirname "$0")" && pwd)
out=$1
shift
mkdir -p "$out/ptx" "$out/cubins"
all="algorithms arithmetic atomics calls carry_chains conversions division half_predicates
    matrix_chains memory memory_order pressure rare_distances register_operands shared_order tensor
    warps wide_conversions"
for source in ${SOURCES:-$all}; do
    case $source in register_operands) archs=90a ;; *) archs="75 80 86 89 90 100 120" ;; esac
    for arch in $archs; do
        ptx="$out/ptx/$source.$arch"
        nvcc -w -ptx -O3 -arch="compute_$arch" -o "$ptx" "$here/$source.cu" 2> /dev/null || continue
        for ptxas in "$@"; do
            version=$("$ptxas" --version | sed -n 's/.*release \([0-9.]*\),.*/\1/p')
            case $version in 11.8) isa=7.8 ;; 12.1) isa=8.1 ;; 12.9) isa=8.8 ;; *) isa=9.0 ;; esac
            sed "s/^\.version .*/.version $isa/" "$ptx" > "$ptx.ptx"
            for options in "" "-maxrregcount=40" "-maxrregcount=24"; do
                name="$source.sm_$arch.$version${options#-maxrregcount=}.cubin"
                "$ptxas" -O3 $options -arch="sm_$arch" -o "$out/cubins/$name" "$ptx.ptx" \
                    2> /dev/null || rm -f "$out/cubins/$name"
            done
        done
    done
done
(cd "$out/cubins" && python3 -m zipfile -c "../nostall_corpus-5-py3-none-any.whl" ./*.cubin)
