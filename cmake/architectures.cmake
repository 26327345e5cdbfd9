# Which GPU generations device code is built for.
#   80-real    : Ampere (A100, and the other GPUs of 8.x)
#   90a-real   : Hopper (H100, H200) with the architecture-specific instructions (wgmma, TMA)
#   90-virtual : PTX, which the driver compiles for every later GPU; PTX of 90a would run on Hopper only
set(NMKERNELS_CUDA_ARCHITECTURES "80-real;90a-real;90-virtual" CACHE STRING "CUDA architectures of the compiled core")
