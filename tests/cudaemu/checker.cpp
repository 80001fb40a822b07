// The happens-before checker. Operations are checked when they are queued, by vector clocks and the ranges
// that they touch, so what it finds does not depend on the schedule.
#include <algorithm>

#include "tests/cudaemu/core.h"

namespace cudaemu {
namespace {

struct Touch {
  const char *from, *to;
  bool write;
  int stream;
  uint64_t time;
  std::string name;
};

std::vector<Touch>& all_touches() {
  static auto* list = new std::vector<Touch>;
  return *list;
}

const char* verb(bool write) { return write ? " writes " : " reads "; }

void check_memory(const Op& op, const Access& a) {
  char* base = nullptr;
  Block* block = find_block(a.data, &base);
  if (block == nullptr) {
    report(op.name + ": out of bounds, the address is in no buffer");
    return;
  }
  const size_t from = static_cast<size_t>(static_cast<const char*>(a.data) - base), to = from + a.bytes;
  if (block->freed)
    report(op.name + ": use after free of " + describe_address(a.data));
  else if (to > block->bytes)
    report(op.name + ": out of bounds, touches " + std::to_string(a.bytes) + " bytes from " +
           describe_address(a.data));
  else if (a.read && !block->written.covers(from, to))
    report(op.name + ": uninitialised read of " + std::to_string(a.bytes) + " bytes from " +
           describe_address(a.data));
  if (a.write || a.read) block->written.add(from, std::min(to, block->bytes));  // a bad read is reported once
}

void check_races(CUstream_st* s, const Op& op, const Access& a) {
  const auto* from = static_cast<const char*>(a.data);
  const char* to = from + a.bytes;
  auto& touches = all_touches();
  for (const Touch& t : touches) {
    if (!(t.write || a.write) || t.stream == s->id || t.from >= to || from >= t.to) continue;
    if (!covers(s->clock, t.stream, t.time))
      report("race: " + op.name + verb(a.write) + "what " + t.name + verb(t.write) +
             "on another stream, not ordered; " + describe_address(std::max(from, t.from)));
  }
  touches.erase(std::remove_if(touches.begin(), touches.end(),
                               [&](const Touch& t) {
                                 const bool inside = t.from >= from && t.to <= to;
                                 return inside && (a.write || (!t.write && t.stream == s->id));
                               }),
                touches.end());
  touches.push_back({from, to, a.write, s->id, s->clock[s->id], op.name});
}

}  // namespace

bool covers(const Clock& clock, int stream, uint64_t time) {
  const auto it = clock.find(stream);
  return it != clock.end() && it->second >= time;
}

void check_op(CUstream_st* s, const Op& op) {
  for (const Access& a : op.touched) {
    if (a.bytes == 0) continue;
    if (is_device(a.data)) check_memory(op, a);
    if (is_device(a.data) || is_mapped(a.data)) check_races(s, op, a);
  }
}

void forget_touches(const Clock& host) {
  auto& touches = all_touches();
  touches.erase(std::remove_if(touches.begin(), touches.end(),
                               [&](const Touch& t) { return covers(host, t.stream, t.time); }),
                touches.end());
}

}  // namespace cudaemu
