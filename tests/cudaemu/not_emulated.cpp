// Functions outside of the emulated subset that CUDA code is likely to reach for: they say so. Defined
// without their headers: only the names matter, nobody returns.
#include <cstdio>
#include <cstdlib>

#define NOT_EMULATED(name)                                      \
  extern "C" void name();                                       \
  void name() {                                                 \
    std::fflush(nullptr);                                       \
    std::fprintf(stderr, "cudaemu: not emulated: " #name "\n"); \
    std::abort();                                               \
  }

NOT_EMULATED(cudaStreamCreate)
NOT_EMULATED(cudaEventCreate)
NOT_EMULATED(cudaMallocAsync)
NOT_EMULATED(cudaFreeAsync)
NOT_EMULATED(cudaMallocManaged)
NOT_EMULATED(cudaMallocPitch)
NOT_EMULATED(cudaMemcpy2D)
NOT_EMULATED(cudaMemcpyPeerAsync)
NOT_EMULATED(cudaMemPrefetchAsync)
NOT_EMULATED(cudaDeviceReset)
NOT_EMULATED(cudaHostGetDevicePointer)
NOT_EMULATED(cudaIpcGetMemHandle)
NOT_EMULATED(cudaIpcOpenMemHandle)
NOT_EMULATED(cudaLaunchKernel)
NOT_EMULATED(cudaLaunchCooperativeKernel)
NOT_EMULATED(cudaOccupancyMaxActiveBlocksPerMultiprocessor)
NOT_EMULATED(cudaGraphExecUpdate)
NOT_EMULATED(cudaGraphUpload)
NOT_EMULATED(cudaGraphAddKernelNode)
NOT_EMULATED(cudaStreamAttachMemAsync)
NOT_EMULATED(cudaStreamUpdateCaptureDependencies)
NOT_EMULATED(cublasSgemm_v2)
NOT_EMULATED(cublasSetPointerMode_v2)
NOT_EMULATED(cublasGemmBatchedEx)
NOT_EMULATED(cublasLtMatrixTransform)
NOT_EMULATED(ncclReduce)
NOT_EMULATED(ncclBcast)
NOT_EMULATED(ncclSend)
NOT_EMULATED(ncclRecv)
NOT_EMULATED(ncclCommInitAll)
NOT_EMULATED(ncclCommInitRankScalable)
NOT_EMULATED(ncclCommRevoke)
NOT_EMULATED(ncclCommWindowRegister)
NOT_EMULATED(ncclCommWindowDeregister)
