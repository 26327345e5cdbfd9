#!/usr/bin/env bash
# The part of NVIDIA's CUDA toolkit that compiles nmkernels, from its pip packages: where no toolkit is installed, as in
# the images that wheels are published from.
#   bash cmake/toolkit.sh python3 /usr/local/cuda     an interpreter with venv and pip; the folder to make, for CUDA_HOME
set -euo pipefail
python=$1
folder=$2
"${python}" -m venv "${folder}/pip"
# of CUDA 13.0: every driver of the 13 series runs what it builds
"${folder}/pip/bin/python" -m pip install -q --disable-pip-version-check 'cuda-toolkit[nvcc,cudart,cccl]==13.0.*'
toolkit=$(echo "${folder}"/pip/lib/python3*/site-packages/nvidia/cu13)
# nvcc looks for libraries in lib64, CMake for one without a version in its name
ln -sfn lib "${toolkit}/lib64"
ln -sfn libcudart.so.13 "${toolkit}/lib/libcudart.so"
for part in "${toolkit}"/*; do
    ln -sfn "${part}" "${folder}/$(basename "${part}")"
done
"${folder}/bin/nvcc" --version | tail -n 1
