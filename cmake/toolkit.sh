#!/usr/bin/env bash
# The CUDA tool chain of the published wheels, from NVIDIA's pip packages: CUDA 13.0 as far as PTX, and CUDA 12.9 from there on, so that every
# driver from 525 on (CUDA 12.0) runs what it builds. No earlier assembler than 12.9's will do: it has wgmma wait for each other.
#   bash cmake/toolkit.sh python3 /usr/local/cuda     an interpreter with venv and pip; the folder to make, for CUDA_HOME
set -euo pipefail
python=$1
folder=$2
rm -rf "${folder}"
mkdir -p "${folder}"
folder=$(cd "${folder}" && pwd)
"${python}" -m venv "${folder}/pip"
pip=("${folder}/pip/bin/python" -m pip install -q --disable-pip-version-check)
"${pip[@]}" 'cuda-toolkit[nvcc,cudart,cccl]==13.0.*'
"${pip[@]}" --no-deps nvidia-cuda-nvcc-cu12==12.9.86 nvidia-cuda-runtime-cu12==12.9.79
packages=$(echo "${folder}"/pip/lib/python3*/site-packages/nvidia)

for part in bin include nvvm; do
    cp -as "${packages}/cu13/${part}" "${folder}/${part}"
done
# nvcc looks for everything else beside its own file
rm "${folder}/bin/nvcc"
cp "${packages}/cu13/bin/nvcc" "${folder}/bin/nvcc"
ln -sfn "${packages}/cuda_nvcc/bin/ptxas" "${folder}/bin/ptxas"
# the runtime and what CMake asks for: one library without a version in its name
cp -as "${packages}/cuda_runtime/lib" "${folder}/lib"
ln -sf libcudart.so.12 "${folder}/lib/libcudart.so"
ln -s lib "${folder}/lib64"

# cicc of 13.0 writes PTX 9.0, which no driver of CUDA 12 reads. No kernel needs more than 8.5 (CUDA 12.5), and ptxas checks it.
mv "${folder}/nvvm/bin/cicc" "${folder}/nvvm/bin/cicc-13.0"
cat >"${folder}/nvvm/bin/cicc" <<'CICC'
#!/bin/sh
"${0%/*}/cicc-13.0" "$@" || exit
while [ "$#" -gt 1 ]; do
    if [ "$1" = -o ]; then sed -i 's/^\.version 9\.0$/.version 8.5/' "$2"; fi
    shift
done
CICC
chmod +x "${folder}/nvvm/bin/cicc"
"${folder}/bin/nvcc" --version | tail -n 1
"${folder}/bin/ptxas" --version | tail -n 1
