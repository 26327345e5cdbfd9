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
  if(CMAKE_SYSTEM_NAME STREQUAL "Linux")
    set(exports ${CMAKE_CURRENT_FUNCTION_LIST_DIR}/exports.map)
    target_link_options(${target} PRIVATE LINKER:--version-script=${exports})
    set_property(TARGET ${target} APPEND PROPERTY LINK_DEPENDS ${exports})
  endif()
  # libstdc++ stays the system's, which torch has loaded anyway: exceptions and pybind11's types cross modules, and two
  # copies of it do not know each other's. Nor would a copy of our own make the wheel run on older systems: that of
  # g++ 12 on Debian 12 asks for glibc 2.36, the rest of the module for 2.34 (2026-11). What makes it run there is the
  # manylinux image that releases are built in (pyproject.toml), whose g++ adds what older systems lack by itself.
endfunction()
