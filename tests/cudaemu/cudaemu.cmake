# The CUDA emulator as targets; include it wherever they are needed. Built with or without nvcc; never installed.
#   cudaemu_headers   include folders of CUDA, NCCL and cuDNN for host code
#   cudaemu           what to link in the place of cudart, cuBLAS, cuBLASLt, NCCL and (for convolutions) cuDNN
#   cudaemu_kernels(target file.cu...)   an object library of kernels, compiled by the C++ compiler
# CUDAEMU_FOUND (cache) is false where CUDA's headers are missing, or under ThreadSanitizer, which knows no fibers.
include_guard(GLOBAL)
find_path(CUDAEMU_INCLUDE cuda_runtime_api.h HINTS ENV CUDA_HOME PATHS /usr/local/cuda PATH_SUFFIXES include)
find_path(CUDAEMU_NCCL_INCLUDE nccl.h HINTS ENV CUDA_HOME PATHS /usr/local/cuda PATH_SUFFIXES include)
find_path(CUDAEMU_CUDNN_INCLUDE cudnn.h HINTS ENV CUDA_HOME PATHS /usr/local/cuda PATH_SUFFIXES include)
set(found OFF)
if(CUDAEMU_INCLUDE AND CUDAEMU_NCCL_INCLUDE AND CUDAEMU_CUDNN_INCLUDE AND NOT ONNXDDP_SANITIZE MATCHES "thread")
  set(found ON)
endif()
set(CUDAEMU_FOUND ${found} CACHE INTERNAL "The CUDA emulator is built")
if(NOT CUDAEMU_FOUND)
  message(STATUS "The CUDA emulator is not built: no headers of CUDA, NCCL and cuDNN, or ThreadSanitizer")
  return()
endif()

add_library(cudaemu_headers INTERFACE)
target_include_directories(cudaemu_headers SYSTEM INTERFACE "${CUDAEMU_INCLUDE}" "${CUDAEMU_NCCL_INCLUDE}" "${CUDAEMU_CUDNN_INCLUDE}")
target_include_directories(cudaemu_headers INTERFACE "${PROJECT_SOURCE_DIR}")
file(GLOB cudaemu_sources CONFIGURE_DEPENDS "${CMAKE_CURRENT_LIST_DIR}/*.cpp")
list(FILTER cudaemu_sources EXCLUDE REGEX "_test\\.cpp$")
add_library(cudaemu STATIC EXCLUDE_FROM_ALL ${cudaemu_sources})
target_link_libraries(cudaemu PUBLIC cudaemu_headers Threads::Threads rt)
if(NOT ONNXDDP_SANITIZE)
  target_compile_options(cudaemu PRIVATE -O2) # its loops are slow enough as it is
endif()

# A wrapper includes each file, so that the same one can go through nvcc in another target.
function(cudaemu_kernels target)
  set(wrappers)
  foreach(file ${ARGN})
    cmake_path(ABSOLUTE_PATH file BASE_DIRECTORY "${CMAKE_CURRENT_SOURCE_DIR}" NORMALIZE)
    cmake_path(GET file STEM name)
    set(wrapper "${CMAKE_CURRENT_BINARY_DIR}/${target}/${name}.cpp")
    file(CONFIGURE OUTPUT "${wrapper}" CONTENT "#include \"${file}\"\n" @ONLY)
    list(APPEND wrappers "${wrapper}")
  endforeach()
  add_library(${target} OBJECT EXCLUDE_FROM_ALL ${wrappers})
  target_compile_definitions(${target} PRIVATE ONNXDDP_CUDA_EMU)
  target_link_libraries(${target} PUBLIC cudaemu_headers)
endfunction()
