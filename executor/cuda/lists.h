// Kernels over lists of tensors: a block finds its chunk in a device table, or has the only tensor as an
// argument.
#pragma once

#include "executor/cuda/device.h"
#include "executor/cuda/kernels.h"

namespace onnxddp::cuda {

/// A list as a kernel's argument.
template <class Entry>
struct ListView {
  const Entry* tensors;  // device tables, or null:
  const Chunk* chunks;
  Entry only;
};
template <class Entry>
ListView<Entry> view_of(const DeviceList<Entry>& list) {
  if (list.device_tensors != nullptr || list.tensors.empty())
    return {list.device_tensors, list.device_chunks, {}};
  CHECK(list.tensors.size() == 1, "a list of ", list.tensors.size(), " tensors without its device table");
  return {nullptr, nullptr, list.tensors[0]};
}

/// The entry and the elements of this block's chunk.
template <class Entry>
struct ChunkView {
  Entry entry;
  std::int64_t begin, end;
  __device__ explicit ChunkView(const ListView<Entry>& list) {
    std::int64_t part = blockIdx.x;
    if (list.tensors == nullptr) {
      entry = list.only;
    } else {
      const Chunk chunk = list.chunks[blockIdx.x];
      entry = list.tensors[chunk.tensor];
      part = chunk.part;
    }
    begin = part * kChunk;
    end = begin + kChunk < entry.n ? begin + kChunk : entry.n;
  }
};

/// The tables themselves as ranges of a launch.
template <class Entry>
std::vector<Range> table_ranges(const DeviceList<Entry>& list) {
  return {maybe_reads(list.device_tensors, static_cast<std::int64_t>(list.tensors.size())),
          maybe_reads(list.device_chunks, static_cast<std::int64_t>(list.chunks.size()))};
}
template <class Entry>
dim3 list_grid(const DeviceList<Entry>& list) {
  return dim3(static_cast<unsigned>(list.chunks.size()));
}

}  // namespace onnxddp::cuda
