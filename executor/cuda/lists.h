// Kernels over lists of tensors: a block finds its chunk in a device table.
#pragma once

#include "executor/cuda/device.h"
#include "executor/cuda/kernels.h"

namespace onnxddp::cuda {

/// The entry and the elements of this block's chunk.
template <class Entry>
struct ChunkView {
  Entry entry;
  std::int64_t begin, end;
  __device__ ChunkView(const Entry* tensors, const Chunk* chunks) {
    const Chunk chunk = chunks[blockIdx.x];
    entry = tensors[chunk.tensor];
    begin = std::int64_t{chunk.part} * kChunk;
    end = begin + kChunk < entry.n ? begin + kChunk : entry.n;
  }
};

/// The tables themselves as ranges of a launch.
template <class Entry>
std::vector<Range> table_ranges(const DeviceList<Entry>& list) {
  return {reads(list.device_tensors, static_cast<std::int64_t>(list.tensors.size())),
          reads(list.device_chunks, static_cast<std::int64_t>(list.chunks.size()))};
}
template <class Entry>
dim3 list_grid(const DeviceList<Entry>& list) {
  return dim3(static_cast<unsigned>(list.chunks.size()));
}

}  // namespace onnxddp::cuda
