#!/usr/bin/env bash
# Checks for 64-bit ARM without an ARM machine: runs the C++ tests under qemu and compiles the CUDA sources. Skips, with the
# reason, what needs a missing tool. Run by make arm, with cmake and ninja on PATH.
set -euo pipefail
cd "${BASH_SOURCE[0]%/*}/.."
jobs=${JOBS:-2}
advice='on Debian and Ubuntu: apt-get install g++-aarch64-linux-gnu qemu-user'
compiler=$(type -P aarch64-linux-gnu-g++ || true)
qemu=$(type -P qemu-aarch64 || type -P qemu-aarch64-static || true)
nvcc=$(type -P nvcc || type -P "${CUDA_HOME:-/usr/local/cuda}/bin/nvcc" || true)

if [ -z "${compiler}" ]; then
    echo "C++ tests for ARM skipped: no aarch64-linux-gnu-g++; ${advice}"
elif [ -z "${qemu}" ]; then
    echo "C++ tests for ARM skipped: neither qemu-aarch64 nor qemu-aarch64-static; ${advice}"
else
    echo '== C++ tests for ARM under qemu'
    mkdir -p build
    # without the address sanitizer: it finds the same on x86 (make sanitize), and its leak check needs ptrace, which qemu lacks
    { cmake -S csrc -B build/arm -G Ninja -DCMAKE_SYSTEM_NAME=Linux -DCMAKE_SYSTEM_PROCESSOR=aarch64 \
        -DCMAKE_CXX_COMPILER="${compiler}" -DNMKERNELS_SANITIZE=undefined -DNMKERNELS_CUDA=off \
        && cmake --build build/arm --parallel "${jobs}"; } >build/arm.log 2>&1 || { cat build/arm.log; exit 1; }
    "${qemu}" -L /usr/aarch64-linux-gnu build/arm/core_tests
fi

if [ -z "${compiler}" ]; then
    echo 'CUDA sources for ARM skipped: no aarch64-linux-gnu-g++'
elif [ -z "${nvcc}" ]; then
    echo 'CUDA sources for ARM skipped: no nvcc in PATH, CUDA_HOME or /usr/local/cuda'
else
    echo '== CUDA sources for ARM'
    sources=(csrc/cuda/*.cu csrc/cuda/gemm/*.cu)
    mkdir -p build/arm-cuda
    # CUDA's headers are the same for ARM, but nvcc only looks in targets/sbsa-linux, which toolkits for x86 lack. Only PTX is
    # made: code for a GPU does not depend on the host. NM_SM90A also compiles what the host does for wgmma.
    include=$("${nvcc}" --dryrun -c csrc/cuda/probe.cu 2>&1 | sed -n 's/^#\$ TOP=//p')/include
    printf '%s\n' "${sources[@]}" | xargs -P "${jobs}" -n 1 "${nvcc}" -ccbin "${compiler}" -std=c++17 -O3 \
        -gencode arch=compute_90a,code=compute_90a -DNM_SM90A -I"${include}" -isystem "${include}/cccl" -odir build/arm-cuda -c
    echo "${#sources[@]} compiled"
fi
