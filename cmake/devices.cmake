# Whether a GPU of NVIDIA's is visible, by the device files in `folder`: a container has those of the GPUs that it may use, which need not
# include the first one; WSL has one file for all.
function(nmkernels_gpu_visible result folder)
  file(GLOB found ${folder}/nvidia[0-9]* ${folder}/dxg)
  if(found)
    set(${result} TRUE PARENT_SCOPE)
  else()
    set(${result} FALSE PARENT_SCOPE)
  endif()
endfunction()
