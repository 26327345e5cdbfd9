// Instruction sets: which the build has, which this processor runs, and the kernels of the one in use.
//
//   portable      what every processor of the platform has (SSE2 on x86-64)
//   avx2          x86-64-v3: AVX2, FMA, F16C, BMI2
//   avx512        x86-64-v4: AVX-512 F, BW, CD, DQ, VL
//   avx512_bf16   and VBMI, VBMI2, VNNI, BF16 (Zen 4, Sapphire Rapids and later)
//   amx           and AMX-TILE, AMX-BF16, AMX-INT8 (Sapphire Rapids and later), if the
//                 system grants their state; other kernels are avx512_bf16's
//
// Kernels that are exact give the same bits under all of them.
#pragma once

#include <string>
#include <vector>

#include "kernels.h"

namespace nm {

// Those in this build that this processor can run, the best last.
std::vector<std::string> isas();

// The one in use: the best, or the one that NMKERNELS_ISA names at the first call of a kernel.
std::string isa();

// Use another from now on. Throws std::invalid_argument, in words, for one that is unknown or cannot run here.
void use_isa(const std::string& name);

// The kernels of the one in use. Throws like use_isa if NMKERNELS_ISA cannot be followed.
const Kernels& kernels();

}  // namespace nm
