// The graph text format, version 1: dump() and parse(); parse(dump(g)) dumps the same.
//
//   graph NAME v1
//   input  x: f32[N,784]
//   param  w: f32[10,784]            state running_mean: f32[10]
//   const  shape: i64[3] = [0, -1, 64]      (up to 16 elements; else @fnv1a:HEX, resolved by the blob table)
//   const  loss.count: f32[] = [20*N]       (dimension polynomials)
//   y: f32[N,10] = Gemm(x, w, _) {transB=1}        (_: an optional input that is not given)
//   update w <- w.next
//   output y                         output y = value   (when the names differ)
//
// Names outside [A-Za-z0-9_./:-] (or `_` itself) are JSON strings. Floats are shortest round-trip. Attributes
// equal to the default are omitted, the rest sorted. Text after # is a comment.
#pragma once

#include <map>
#include <string>
#include <string_view>

#include "graph/graph.h"
#include "graph/registry.h"

namespace ONNXDDP_API onnxddp {

/// Contents of large constants by digest.
using Blobs = std::map<std::string, HostTensor, std::less<>>;

/// The text. Large constants are added to `blobs` when given.
std::string dump(const Graph& graph, Blobs* blobs = nullptr);
/// One node's line without indentation, for messages.
std::string dump_node(const Graph& graph, NodeId id);
/// Throws Error with the line number. Verifies types against the entries.
Graph parse(std::string_view text, const Blobs& blobs = {}, const Registry& registry = default_registry());
/// Attribute text `{pads=[1,1,1,1], mode="same"}` without braces.
std::string attr_str(const Attr& attr);

/// A sample call of an op entry: "Conv(f32[2,3,5,5], f32[4,3,3,3], _) {pads=[1,1,1,1]}". Inputs may carry
/// contents `i64[2]=[0,4]` (a constant) or a range `f32[3] in (0.1, 2)`. Returns a graph with inputs x0, x1,
/// … and every output of the op as a graph output y0, y1, ….
struct Sample {
  Graph graph;
  std::map<std::string, std::pair<double, double>> ranges;  // by input name; default (-1, 1)
};
/// `dtype`: replaces f32 in the text, so that one sample serves every float type.
Sample parse_sample(std::string_view text, DType dtype = DType::f32,
                    const Registry& registry = default_registry());

}  // namespace onnxddp
