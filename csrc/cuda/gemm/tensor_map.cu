#if !defined(NM_EMULATED)

#include "tensor_map.h"

#include "../../core/dispatch.h"
#include "../launch.h"

namespace nm::cuda::gemm {

namespace {

using Encode = decltype(&cuTensorMapEncodeTiled);

// Null if the driver is too old.
Encode encoder() {
    static const Encode found = [] {
        void* entry = nullptr;
        return driver_function("cuTensorMapEncodeTiled", &entry) == cudaSuccess ? reinterpret_cast<Encode>(entry) : nullptr;
    }();
    return found;
}

}  // namespace

bool can_encode() { return encoder() != nullptr; }

CUtensorMap encoded(const Map& map, int dtype, const Queue&) {
    CUtensorMap result;
    const cuuint64_t sizes[2] = {cuuint64_t(map.inner), cuuint64_t(map.outer)}, strides[1] = {cuuint64_t(map.inner) * cuuint64_t(map.bytes)};
    const cuuint32_t box[2] = {cuuint32_t(map.box_inner), cuuint32_t(map.box_outer)}, steps[2] = {1, 1};
    const CUtensorMapDataType halves = dtype == kBFloat16 ? CU_TENSOR_MAP_DATA_TYPE_BFLOAT16 : CU_TENSOR_MAP_DATA_TYPE_FLOAT16;
    const CUresult status = encoder()(
        &result, map.bytes == 1 ? CU_TENSOR_MAP_DATA_TYPE_UINT8 : halves, 2,
        reinterpret_cast<void*>(uintptr_t(map.address)), sizes, strides, box, steps, CU_TENSOR_MAP_INTERLEAVE_NONE,
        map.swizzle == kSwizzle128 ? CU_TENSOR_MAP_SWIZZLE_128B : CU_TENSOR_MAP_SWIZZLE_64B, CU_TENSOR_MAP_L2_PROMOTION_L2_128B,
        CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
    check("wgmma_sp_kernel: cuTensorMapEncodeTiled", cudaError_t(status));
    return result;
}

}  // namespace nm::cuda::gemm

#endif
