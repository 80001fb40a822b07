# libonnx_ddp_cuda.so: kernels by nvcc, the rest by the C++ compiler, everything resolved at link time (-z defs).
# The host objects are a target of their own: the emulated module is made of the very same ones.
if(NOT CMAKE_CUDA_COMPILER AND NOT DEFINED ENV{CUDACXX})
  set(CMAKE_CUDA_COMPILER "${NVCC}")
endif()
if(NOT CMAKE_CUDA_ARCHITECTURES)
  set(CMAKE_CUDA_ARCHITECTURES 90-real)
endif()
enable_language(CUDA)
if(NOT CMAKE_CUDA20_STANDARD_COMPILE_OPTION) # CMake 3.25 knows CUDA C++17 at most
  set(CMAKE_CUDA20_STANDARD_COMPILE_OPTION -std=c++20)
  set(CMAKE_CUDA20_EXTENSION_COMPILE_OPTION -std=c++20)
endif()
find_package(CUDAToolkit REQUIRED)
foreach(name cudnn nccl)
  find_path(${name}_INCLUDE_DIR ${name}.h HINTS ${CUDAToolkit_INCLUDE_DIRS} REQUIRED)
  find_library(${name}_LIBRARY ${name} HINTS ${CUDAToolkit_LIBRARY_DIR} REQUIRED)
endforeach()

file(GLOB cuda_host_sources CONFIGURE_DEPENDS "${PROJECT_SOURCE_DIR}/executor/cuda/*.cpp")
list(REMOVE_ITEM cuda_host_sources "${PROJECT_SOURCE_DIR}/executor/cuda/loader.cpp")
file(GLOB cuda_kernel_sources CONFIGURE_DEPENDS "${PROJECT_SOURCE_DIR}/executor/cuda/*.cu")
if(cuda_host_sources)
  add_library(onnx_ddp_cuda_host OBJECT ${cuda_host_sources})
  target_include_directories(onnx_ddp_cuda_host SYSTEM PUBLIC ${CUDAToolkit_INCLUDE_DIRS} ${cudnn_INCLUDE_DIR} ${nccl_INCLUDE_DIR})
  target_compile_definitions(onnx_ddp_cuda_host PUBLIC ONNXDDP_VERSION="${PROJECT_VERSION}")
  target_link_libraries(onnx_ddp_cuda_host PUBLIC onnxddp)

  # The kernels are objects, so that their tests link the very same ones.
  add_library(onnx_ddp_cuda_kernels OBJECT ${cuda_kernel_sources})
  target_include_directories(onnx_ddp_cuda_kernels PRIVATE "${PROJECT_SOURCE_DIR}")
  target_compile_options(onnx_ddp_cuda_kernels PRIVATE
    "$<$<COMPILE_LANGUAGE:CUDA>:-Xcompiler=-Wall,-Wextra,-ffp-contract=off>"
    "$<$<AND:$<COMPILE_LANGUAGE:CUDA>,$<BOOL:${ONNXDDP_WERROR}>>:SHELL:-Werror all-warnings>")
  add_library(onnx_ddp_cuda MODULE $<TARGET_OBJECTS:onnx_ddp_cuda_host> $<TARGET_OBJECTS:onnx_ddp_cuda_kernels>)
  set_target_properties(onnx_ddp_cuda PROPERTIES LINKER_LANGUAGE CXX INSTALL_RPATH "$ORIGIN" INSTALL_RPATH_USE_LINK_PATH ON)
  target_link_libraries(onnx_ddp_cuda PRIVATE onnxddp CUDA::cudart CUDA::cublas CUDA::cublasLt ${cudnn_LIBRARY} ${nccl_LIBRARY})
  target_link_options(onnx_ddp_cuda PRIVATE -Wl,-z,defs)
  install(TARGETS onnx_ddp_cuda LIBRARY DESTINATION ${CMAKE_INSTALL_LIBDIR})
endif()
