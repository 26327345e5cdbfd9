# The CPU core as objects: cpu/*.cpp once, cpu/kernels/*.cpp once per instruction set (csrc/cpu/isa.h lists them).
#
# An inline function of a header that several sets do not inline ends up in the objects of each, and the linker keeps
# the first. The objects are therefore handed over from the smallest set to the largest: what is kept runs wherever the
# code that calls it runs. Never put these objects into an archive, which has no order.
set(every_isa portable)
if(CMAKE_SYSTEM_PROCESSOR MATCHES "^(x86_64|AMD64|amd64)$")
  list(APPEND every_isa avx2 avx512 avx512_bf16 amx)
endif()
set(NMKERNELS_ISAS "${every_isa}" CACHE STRING "instruction sets to build for: portable alone, or all")

set(v3 -mavx2 -mfma -mf16c -mbmi -mbmi2 -mlzcnt -mpopcnt)
set(v4 ${v3} -mavx512f -mavx512bw -mavx512cd -mavx512dq -mavx512vl -mprefer-vector-width=512)
# g++ 12 takes the undefined registers in its own AVX-512 headers for mistakes of ours
if(CMAKE_CXX_COMPILER_ID STREQUAL "GNU")
  list(APPEND v4 -Wno-uninitialized -Wno-maybe-uninitialized)
endif()
set(NMKERNELS_FLAGS_portable "")
set(NMKERNELS_FLAGS_avx2 ${v3})
set(NMKERNELS_FLAGS_avx512 ${v4})
set(NMKERNELS_FLAGS_avx512_bf16 ${v4} -mavx512vbmi -mavx512vbmi2 -mavx512vnni -mavx512bf16)
set(NMKERNELS_FLAGS_amx ${NMKERNELS_FLAGS_avx512_bf16} -mamx-tile -mamx-bf16)

function(nmkernels_cpu_objects result)
  file(GLOB once CONFIGURE_DEPENDS ${CMAKE_CURRENT_SOURCE_DIR}/cpu/*.cpp)
  file(GLOB kernels CONFIGURE_DEPENDS ${CMAKE_CURRENT_SOURCE_DIR}/cpu/kernels/*.cpp)
  add_library(nmkernels_cpu OBJECT ${once})
  target_link_libraries(nmkernels_cpu PRIVATE nmkernels_options)
  if(NMKERNELS_ISAS MATCHES avx2)
    target_compile_definitions(nmkernels_cpu PRIVATE NM_X86)
  endif()
  set(objects $<TARGET_OBJECTS:nmkernels_cpu>)
  foreach(isa ${NMKERNELS_ISAS})
    if(isa STREQUAL amx)  # has kernels of its own for bf16 GEMMs alone
      add_library(nmkernels_cpu_amx OBJECT ${CMAKE_CURRENT_SOURCE_DIR}/cpu/kernels/bf16_spmm.cpp ${CMAKE_CURRENT_SOURCE_DIR}/cpu/kernels/table.cpp)
      target_compile_definitions(nmkernels_cpu_amx PRIVATE NM_BASE_ISA=avx512_bf16)
    else()
      add_library(nmkernels_cpu_${isa} OBJECT ${kernels})
    endif()
    target_compile_definitions(nmkernels_cpu_${isa} PRIVATE NM_ISA=${isa})
    target_compile_options(nmkernels_cpu_${isa} PRIVATE ${NMKERNELS_FLAGS_${isa}})
    target_link_libraries(nmkernels_cpu_${isa} PRIVATE nmkernels_options)
    list(APPEND objects $<TARGET_OBJECTS:nmkernels_cpu_${isa}>)
  endforeach()
  set(${result} ${objects} PARENT_SCOPE)
endfunction()
