// Models from ONNX's text syntax, for the tests of importer/onnx.
#pragma once

#include <gtest/gtest.h>
#include <onnx/checker.h>
#include <onnx/onnx_pb.h>

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <string>

#include "graph/pass.h"
#include "graph/text.h"
#include "importer/importer.h"

namespace onnxddp::testing {

namespace pb = ONNX_NAMESPACE;

/// `<ir_version, opset_import ["" : opset]> g BODY`
inline std::string model_text(int opset, const std::string& body, int ir = 8) {
  return cat("<ir_version: ", ir, ", opset_import: [\"\" : ", opset, "]>\n", body);
}

inline ImportedModel import_text(const std::string& text, const ImportOptions& options = {}) {
  ImportedModel out = import_onnx(parse_onnx_text(text), options);
  verify(out.graph);
  return out;
}

/// Node lines of the imported graph, without indentation, joined by newlines.
inline std::string nodes_of(const Graph& graph) {
  std::string out;
  for (NodeId id : graph.order) out += (out.empty() ? "" : "\n") + dump_node(graph, id);
  return out;
}

inline std::string import_nodes(int opset, const std::string& body, const ImportOptions& options = {}) {
  return nodes_of(import_text(model_text(opset, body), options).graph);
}

inline pb::ModelProto parse_bytes(const std::string& bytes) {
  pb::ModelProto model;
  EXPECT_TRUE(model.ParseFromString(bytes));
  return model;
}

/// Passes ONNX's own full check.
inline void full_check(const std::string& bytes) {
  EXPECT_NO_THROW(pb::checker::check_model(parse_bytes(bytes), true));
}

inline const TensorRole& role_of(const ImportedModel& model, const std::string& name) {
  const auto found = std::find_if(model.roles.begin(), model.roles.end(),
                                  [&](const TensorRole& role) { return role.name == name; });
  if (found == model.roles.end()) throw Error("no role for " + name);
  return *found;
}

/// The error that `f` throws, as its whole report.
template <class F>
std::string report_of(F&& f) {
  try {
    f();
  } catch (const Error& e) {
    return e.report();
  }
  return "no error";
}

inline bool contains(const std::string& text, const std::string& part) {
  return text.find(part) != std::string::npos;
}
#define EXPECT_HAS(text, part) \
  EXPECT_TRUE(::onnxddp::testing::contains(text, part)) << "got: " << (text) << "\nwanted: " << (part)

/// A new folder that is removed at the end.
class TemporaryFolder {
 public:
  TemporaryFolder() {
    std::string pattern = (std::filesystem::temp_directory_path() / "onnxddp.XXXXXX").string();
    if (!mkdtemp(pattern.data())) throw Error("no temporary folder");
    path_ = pattern;
  }
  ~TemporaryFolder() {
    std::error_code ignored;
    std::filesystem::remove_all(path_, ignored);
  }
  TemporaryFolder(const TemporaryFolder&) = delete;
  TemporaryFolder& operator=(const TemporaryFolder&) = delete;
  std::filesystem::path operator/(const std::string& name) const { return path_ / name; }

 private:
  std::filesystem::path path_;
};

inline void write(const std::filesystem::path& path, const std::string& bytes) {
  std::ofstream(path, std::ios::binary) << bytes;
}

}  // namespace onnxddp::testing
