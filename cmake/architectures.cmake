# Which GPUs device code is built for, by their compute capability without the point:
#   80  : Ampere (A100), and the others of 8.x; on 8.9 and later, rounding to FP8 is an instruction (the one file that does it has code for 89)
#   90  : Hopper (H100, H200); files of its own instructions (wgmma, TMA) are built for 90a, which runs nowhere else
#   100 : Blackwell (B200, and 10.3)
#   120 : RTX 50 (and 12.1)
#   ptx : PTX, which the driver compiles for every later GPU
set(NMKERNELS_CUDA_ARCHITECTURES "80;90;100;120;ptx" CACHE STRING "GPUs that the compiled core has code for")
