# Which GPU generations device code is built for.
#   80  : Ampere (A100); its code also runs on every later GPU through PTX
#   90a : Hopper (H100, H200) with the architecture-specific instructions (wgmma, TMA)
set(NMKERNELS_CUDA_ARCHITECTURES "80;90a" CACHE STRING "CUDA architectures of the compiled core")
