# Headers of pybind11: from the pip package where setup.py found it, else the copy inside the installed torch,
# so that a machine without network can build. Only headers are used; the module target is written out below.
set(NMKERNELS_PYBIND11_INCLUDE "" CACHE PATH "folder that holds pybind11/pybind11.h")

function(nmkernels_python_module target)
  find_package(Python REQUIRED COMPONENTS Interpreter Development.Module)
  # looked up afresh each time: a build environment of pip, which an earlier answer may lie in, does not last
  unset(NMKERNELS_PYBIND11 CACHE)
  find_path(NMKERNELS_PYBIND11 pybind11/pybind11.h HINTS ${NMKERNELS_PYBIND11_INCLUDE})
  if(NOT NMKERNELS_PYBIND11)
    message(FATAL_ERROR "pybind11/pybind11.h was not found; pip install pybind11 (torch's own include folder is looked in too).")
  endif()
  Python_add_library(${target} MODULE WITH_SOABI ${ARGN})
  target_include_directories(${target} SYSTEM PRIVATE ${NMKERNELS_PYBIND11})
endfunction()
