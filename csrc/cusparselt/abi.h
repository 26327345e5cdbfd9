// The part of cuSPARSELt's binary interface that we call, in our own words, so that the package builds where the library
// is not installed. As of version 0.8, which is the oldest that is opened; 0.10 has the same values and calls.
// bench/cusparselt_abi.py compares this file with the library's header; csrc/tests/cusparselt/abi.csv has the findings.
#pragma once

#include <cstddef>
#include <cstdint>

namespace nm::cusparselt {

// Versions as this code counts them: major * 1000000 + minor * 100 + patch. 0.10.0 calls itself 1000, which in the
// counting of 0.8 would be 1.0.0, so the three parts are asked for one by one.
constexpr int kOldest = 800;

// X(our name, the library's name, value)
#define NM_CUSPARSELT_CONSTANTS(X)                                            \
    X(kMajor, MAJOR_VERSION, 0)                                               \
    X(kMinor, MINOR_VERSION, 1)                                               \
    X(kPatch, PATCH_LEVEL, 2)                                                 \
    X(kSuccess, CUSPARSE_STATUS_SUCCESS, 0)                                   \
    X(kNotSupported, CUSPARSE_STATUS_NOT_SUPPORTED, 10)                       \
    X(kPlain, CUSPARSE_OPERATION_NON_TRANSPOSE, 0)                            \
    X(kTransposed, CUSPARSE_OPERATION_TRANSPOSE, 1)                           \
    X(kByColumn, CUSPARSE_ORDER_COL, 1)                                       \
    X(kByRow, CUSPARSE_ORDER_ROW, 2)                                          \
    X(kFloat32, CUDA_R_32F, 0)                                                \
    X(kFloat16, CUDA_R_16F, 2)                                                \
    X(kInt8, CUDA_R_8I, 3)                                                    \
    X(kInt32, CUDA_R_32I, 10)                                                 \
    X(kBfloat16, CUDA_R_16BF, 14)                                             \
    X(kE4m3, CUDA_R_8F_E4M3, 28)                                              \
    X(kE5m2, CUDA_R_8F_E5M2, 29)                                              \
    X(kHalf, CUSPARSELT_SPARSITY_50_PERCENT, 0)                               \
    X(kInInt32, CUSPARSE_COMPUTE_32I, 0)                                      \
    X(kInFloat32, CUSPARSE_COMPUTE_32F, 2)                                    \
    X(kRelu, CUSPARSELT_MATMUL_ACTIVATION_RELU, 0)                            \
    X(kGelu, CUSPARSELT_MATMUL_ACTIVATION_GELU, 3)                            \
    X(kBiasPointer, CUSPARSELT_MATMUL_BIAS_POINTER, 8)                        \
    X(kDefaultAlgorithm, CUSPARSELT_MATMUL_ALG_DEFAULT, 0)                    \
    X(kAlgorithmId, CUSPARSELT_MATMUL_ALG_CONFIG_ID, 0)                       \
    X(kAlgorithmLimit, CUSPARSELT_MATMUL_ALG_CONFIG_MAX_ID, 1)                \
    X(kSplitK, CUSPARSELT_MATMUL_SPLIT_K, 3)                                  \
    X(kSplitKMode, CUSPARSELT_MATMUL_SPLIT_K_MODE, 4)                         \
    X(kOneKernel, CUSPARSELT_SPLIT_K_MODE_ONE_KERNEL, 1)                      \
    X(kTwoKernels, CUSPARSELT_SPLIT_K_MODE_TWO_KERNELS, 2)                    \
    X(kStreamK, CUSPARSELT_STREAMK, 6)

#define NM_CUSPARSELT_CONSTANT(ours, theirs, value) constexpr int ours = value;
NM_CUSPARSELT_CONSTANTS(NM_CUSPARSELT_CONSTANT)
#undef NM_CUSPARSELT_CONSTANT

// What the library keeps in the caller's memory. Its structs point into each other: none is ever moved.
struct alignas(16) Handle { std::uint8_t data[512]; };
struct alignas(16) Matrix { std::uint8_t data[512]; };
struct alignas(16) Matmul { std::uint8_t data[512]; };
struct alignas(16) Selection { std::uint8_t data[512]; };
struct alignas(16) Plan { std::uint8_t data[512]; };

// X(our name, the library's name)
#define NM_CUSPARSELT_STRUCTS(X)                   \
    X(Handle, cusparseLtHandle_t)                  \
    X(Matrix, cusparseLtMatDescriptor_t)           \
    X(Matmul, cusparseLtMatmulDescriptor_t)        \
    X(Selection, cusparseLtMatmulAlgSelection_t)   \
    X(Plan, cusparseLtMatmulPlan_t)

using Status = int;
using Stream = void*;

// X(name without cusparseLt, result, parameters); its enums are ints here.
#define NM_CUSPARSELT_ENTRIES(X)                                                                                        \
    X(GetProperty, Status, (int part, int* value))                                                                      \
    X(GetErrorName, const char*, (Status))                                                                              \
    X(GetErrorString, const char*, (Status))                                                                            \
    X(Init, Status, (Handle*))                                                                                          \
    X(Destroy, Status, (const Handle*))                                                                                 \
    X(DenseDescriptorInit, Status,                                                                                      \
      (const Handle*, Matrix*, int64_t rows, int64_t cols, int64_t ld, uint32_t alignment, int dtype, int order))       \
    X(StructuredDescriptorInit, Status,                                                                                 \
      (const Handle*, Matrix*, int64_t rows, int64_t cols, int64_t ld, uint32_t alignment, int dtype, int order,        \
       int sparsity))                                                                                                   \
    X(MatDescriptorDestroy, Status, (const Matrix*))                                                                    \
    X(MatmulDescriptorInit, Status,                                                                                     \
      (const Handle*, Matmul*, int op_a, int op_b, const Matrix* a, const Matrix* b, const Matrix* c, const Matrix* d,  \
       int compute))                                                                                                    \
    X(MatmulDescSetAttribute, Status, (const Handle*, Matmul*, int attribute, const void* data, size_t size))           \
    X(MatmulAlgSelectionInit, Status, (const Handle*, Selection*, const Matmul*, int algorithm))                        \
    X(MatmulAlgSelectionDestroy, Status, (const Selection*))                                                            \
    X(MatmulAlgSetAttribute, Status, (const Handle*, Selection*, int attribute, const void* data, size_t size))         \
    X(MatmulAlgGetAttribute, Status, (const Handle*, const Selection*, int attribute, void* data, size_t size))         \
    X(MatmulPlanInit, Status, (const Handle*, Plan*, const Matmul*, const Selection*))                                  \
    X(MatmulPlanDestroy, Status, (const Plan*))                                                                         \
    X(MatmulGetWorkspace, Status, (const Handle*, const Plan*, size_t* size))                                           \
    X(Matmul, Status,                                                                                                   \
      (const Handle*, const Plan*, const void* alpha, const void* a, const void* b, const void* beta, const void* c,    \
       void* d, void* workspace, Stream* streams, int32_t count))                                                       \
    X(SpMMACompressedSize2, Status, (const Handle*, const Matrix*, size_t* size, size_t* buffer))                       \
    X(SpMMACompress2, Status,                                                                                           \
      (const Handle*, const Matrix*, int sparse_a, int op, const void* dense, void* compressed, void* buffer, Stream))

}  // namespace nm::cusparselt
