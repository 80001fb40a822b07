// Files that are damaged, wrong or malicious: one clear error, quickly, in bounded memory.
#include <sys/stat.h>
#include <unistd.h>

#include <chrono>
#include <random>

#include "tests/importer/onnx_testing.h"

namespace onnxddp::testing {
namespace {

/// y = x * w with an initializer w: float[2].
pb::ModelProto small_model() {
  pb::ModelProto model;
  model.set_ir_version(8);
  pb::OperatorSetIdProto* opset = model.add_opset_import();
  opset->set_domain("");
  opset->set_version(17);
  pb::GraphProto& graph = *model.mutable_graph();
  graph.set_name("g");
  const auto info = [](pb::ValueInfoProto& v, const char* name) {
    v.set_name(name);
    v.mutable_type()->mutable_tensor_type()->set_elem_type(pb::TensorProto::FLOAT);
    v.mutable_type()->mutable_tensor_type()->mutable_shape()->add_dim()->set_dim_value(2);
  };
  info(*graph.add_input(), "x");
  info(*graph.add_output(), "y");
  pb::TensorProto* w = graph.add_initializer();
  w->set_name("w");
  w->set_data_type(pb::TensorProto::FLOAT);
  w->add_dims(2);
  w->set_raw_data(std::string("\0\0\0\0\0\0\x80\x3f", 8));
  pb::NodeProto* node = graph.add_node();
  node->set_op_type("Mul");
  node->set_name("scale");
  node->add_input("x");
  node->add_input("w");
  node->add_output("y");
  return model;
}

/// The report of loading (and importing) the bytes: at most 6 lines, within seconds.
std::string load_report(const std::string& bytes) {
  const auto start = std::chrono::steady_clock::now();
  const std::string report = report_of([&] { import_onnx(load_onnx_bytes(bytes, "m.onnx"), {}); });
  EXPECT_LT(std::chrono::steady_clock::now() - start, std::chrono::seconds(5));
  EXPECT_LE(std::count(report.begin(), report.end(), '\n'), 5) << report;
  return report;
}
std::string load_report(const pb::ModelProto& model) { return load_report(model.SerializeAsString()); }

std::string text_report(const std::string& text) {
  return report_of([&] { import_onnx(parse_onnx_text(text), {}); });
}

TEST(Hostile, TheSmallModelIsFine) { EXPECT_EQ(load_report(small_model()), "no error"); }

TEST(Hostile, FilesThatAreNoModels) {
  TemporaryFolder folder;
  const auto report = [&](const std::string& bytes) {
    write(folder / "m.onnx", bytes);
    return report_of([&] { load_onnx(folder / "m.onnx"); });
  };
  EXPECT_HAS(report(""), "m.onnx is empty");
  EXPECT_HAS(report("hello, I am a model\n"), "m.onnx is text, not an ONNX model");
  EXPECT_HAS(report("version https://git-lfs.github.com/spec/v1\noid sha256:0\n"), "git lfs pull");
  EXPECT_HAS(report(std::string("PK\x03\x04\x00\x00\xff", 7)), "zip archive");
  EXPECT_HAS(report_of([&] { load_onnx(folder / "other.onnx"); }), "cannot open");
  EXPECT_HAS(report_of([&] { load_onnx(folder / "."); }), "is not a file");
  std::mt19937 random(7);
  for (int k = 0; k < 20; ++k) {
    std::string noise(512, '\0');
    for (char& c : noise) c = static_cast<char>(random());
    EXPECT_HAS(report(noise), "m.onnx");
  }
}

TEST(Hostile, EveryTruncationIsAnError) {
  const std::string bytes = small_model().SerializeAsString();
  for (std::size_t n = 1; n < bytes.size(); ++n) EXPECT_NE(load_report(bytes.substr(0, n)), "no error") << n;
}

TEST(Hostile, FlippedBytesNeverCrash) {
  const std::string bytes = small_model().SerializeAsString();
  std::mt19937 random(11);
  for (int k = 0; k < 2000; ++k) {
    std::string changed = bytes;
    for (int n = 0; n <= k % 3; ++n) changed[random() % changed.size()] = static_cast<char>(random());
    load_report(changed);
  }
}

TEST(Hostile, VersionsOutOfRange) {
  pb::ModelProto model = small_model();
  model.mutable_opset_import(0)->set_version(999);
  EXPECT_HAS(load_report(model), "opset 999 is newer than");
  model.mutable_opset_import(0)->set_version(6);
  EXPECT_HAS(load_report(model), "opset 6 is older than 7");
  model.clear_opset_import();
  EXPECT_HAS(load_report(model), "opset_import");
  model = small_model();
  model.set_ir_version(99);
  EXPECT_HAS(load_report(model), "IR version 99 is not supported");
}

TEST(Hostile, UnknownOperatorsAreNamedAllAtOnce) {
  const std::string report = text_report(R"(<ir_version: 8, opset_import: ["" : 17, "ai.custom" : 2]>
g (float[2] x) => (float[2] y) { [a] h = Frobnicate(x) [b] i = ai.custom.Foo(h) [c] j = ai.custom.Foo(i) y = Relu(j) })");
  EXPECT_HAS(report,
             "2 operators are not known: ai.onnx::Frobnicate (node 'a', opset 17), ai.custom::Foo (node 'b', "
             "opset 2)");
}

TEST(Hostile, OperatorsThatOnnxKnowsButWeDoNot) {
  const auto source =
      parse_onnx_text(model_text(17, "g (float[2] x) => (float[2] y) { [u] y, i = Unique(x) }"));
  EXPECT_EQ(unknown_ops(*source), std::vector<std::string>{"ai.onnx::Unique (node 'u', opset 17)"});
  EXPECT_HAS(report_of([&] { import_onnx(source, {}); }),
             "1 operator is not supported: ai.onnx::Unique (node 'u', opset 17)");
}

TEST(Hostile, CyclesAndUndefinedInputs) {
  EXPECT_HAS(
      text_report(model_text(13, "g (float[2] x) => (float[2] y) { a = Add(x, b) b = Relu(a) y = Relu(b) }")),
      "the nodes form a cycle: node 1, Relu -> node 0, Add -> node 1, Relu");
  EXPECT_HAS(text_report(model_text(13, "g (float[2] x) => (float[2] y) { [n] y = Add(x, ghost) }")),
             "node 0 'n', Add reads 'ghost', which nothing produces");
  EXPECT_HAS(text_report(model_text(13, "g (float[2] x) => (float[2] z) { y = Relu(x) }")),
             "graph output 'z' is produced by nothing");
  EXPECT_HAS(text_report(model_text(13, "g (float[2] x) => (float[2] y) { y = Relu(x) y = Tanh(x) }")),
             "tensor 'y' is defined twice");
  EXPECT_HAS(text_report(model_text(13, "g (float[2] x) => (float[2] y) { y = Relu(h) h = Tanh(x) }")),
             "breaks the ONNX standard");
}

TEST(Hostile, DuplicateInitializersAndMetadata) {
  pb::ModelProto model = small_model();
  *model.mutable_graph()->add_initializer() = model.graph().initializer(0);
  EXPECT_HAS(load_report(model), "initializer 'w' is defined twice");
  model = small_model();
  for (int i = 0; i < 2; ++i) {
    pb::StringStringEntryProto* entry = model.add_metadata_props();
    entry->set_key("author");
  }
  EXPECT_HAS(load_report(model), "metadata key 'author' occurs twice");
}

TEST(Hostile, NamesThatWouldBreakMessages) {
  pb::ModelProto model = small_model();
  model.mutable_graph()->mutable_node(0)->set_name("a\nb\nc\nd\ne\nf\ng");
  EXPECT_HAS(load_report(model), "the name 'a b c d e f g' holds control characters");
  model.mutable_graph()->mutable_node(0)->set_name(std::string(20'000, 'a'));
  EXPECT_HAS(load_report(model), "is too long");
}

TEST(Hostile, RecursiveFunctions) {
  EXPECT_HAS(text_report(R"(<ir_version: 10, opset_import: ["" : 17, "l" : 1]>
g (float[2] x) => (float[2] y) { y = l.A(x) }
<domain: "l", opset_import: ["" : 17, "l" : 1]>
A (x) => (y) { y = l.B(x) }
<domain: "l", opset_import: ["" : 17, "l" : 1]>
B (x) => (y) { y = l.A(x) })"),
             "function 'A' is recursive: l::A -> l::B -> l::A");
  EXPECT_HAS(text_report(R"(<ir_version: 10, opset_import: ["" : 17, "l" : 1]>
g (float[2] x) => (float[2] y) { y = Relu(x) }
<domain: "l", opset_import: ["" : 17, "l" : 1]>
A (x) => (y) { y = l.A(x) })"),
             "recursive");
}

TEST(Hostile, FunctionsThatMultiply) {
  std::string text =
      "<ir_version: 10, opset_import: [\"\" : 17, \"l\" : 1]>\ng (float[2] x) => (float[2] y) { y = l.F0(x) "
      "}\n";
  for (int i = 0; i < 40; ++i)
    text += cat("<domain: \"l\", opset_import: [\"\" : 17, \"l\" : 1]>\nF", i,
                " (x) => (y) { h = ", i < 39 ? cat("l.F", i + 1) : "Relu",
                "(x) y = ", i < 39 ? cat("l.F", i + 1) : "Relu", "(h) }\n");
  EXPECT_HAS(text_report(text), "nodes when its functions are inlined");
  text =
      "<ir_version: 10, opset_import: [\"\" : 17, \"l\" : 1]>\ng (float[2] x) => (float[2] y) { y = l.F0(x) "
      "}\n";
  for (int i = 0; i < 100; ++i)
    text += cat("<domain: \"l\", opset_import: [\"\" : 17, \"l\" : 1]>\nF", i,
                " (x) => (y) { y = ", i < 99 ? cat("l.F", i + 1) : "Relu", "(x) }\n");
  EXPECT_HAS(text_report(text), "nested more than 64 deep");
}

TEST(Hostile, WrongByteCountsAndDimensions) {
  const auto with_dims = [](std::initializer_list<std::int64_t> dims) {
    pb::ModelProto model = small_model();
    model.mutable_graph()->mutable_initializer(0)->clear_dims();
    for (std::int64_t d : dims) model.mutable_graph()->mutable_initializer(0)->add_dims(d);
    return load_report(model);
  };
  EXPECT_HAS(with_dims({3}), "initializer 'w': holds 8 bytes, but float[3] needs 12");
  EXPECT_HAS(with_dims({-2}), "negative dimension in [-2]");
  EXPECT_HAS(with_dims({std::int64_t{1} << 40, std::int64_t{1} << 40}), "are too large");
  EXPECT_HAS(with_dims({std::int64_t{1} << 45}), "holds 8 bytes");
  pb::ModelProto model = small_model();
  model.mutable_graph()->mutable_initializer(0)->clear_raw_data();
  EXPECT_HAS(load_report(model), "holds 0 elements, but [2] needs 2");
  model.mutable_graph()
      ->mutable_input(0)
      ->mutable_type()
      ->mutable_tensor_type()
      ->mutable_shape()
      ->mutable_dim(0)
      ->set_dim_value(-5);
  model.mutable_graph()->mutable_initializer(0)->set_raw_data(std::string(8, '\0'));
  EXPECT_NE(load_report(model), "no error");
}

// ---- external data

class External : public ::testing::Test {
 protected:
  void SetUp() override {
    std::filesystem::create_directories(folder_ / "model");
    write(folder_ / "model" / "w.data", std::string("\0\0\x80\x3f\0\0\0\x40", 8));
    write(folder_ / "secret", std::string(64, 's'));
  }

  std::string report(const std::map<std::string, std::string>& keys) {
    pb::ModelProto model = small_model();
    pb::TensorProto* w = model.mutable_graph()->mutable_initializer(0);
    w->clear_raw_data();
    w->set_data_location(pb::TensorProto::EXTERNAL);
    for (const auto& [key, value] : keys) {
      pb::StringStringEntryProto* entry = w->add_external_data();
      entry->set_key(key);
      entry->set_value(value);
    }
    write(folder_ / "model" / "m.onnx", model.SerializeAsString());
    return report_of([&] { loaded_ = import_onnx(load_onnx(folder_ / "model" / "m.onnx"), {}); });
  }

  TemporaryFolder folder_;
  ImportedModel loaded_;
};

TEST_F(External, IsReadAndInlined) {
  EXPECT_EQ(report({{"location", "w.data"}}), "no error");
  EXPECT_EQ(loaded_.values.at("w"), HostTensor::of<float>({2}, {1, 2}));
  const pb::ModelProto saved = parse_bytes(save_trained(*loaded_.source, loaded_.values));
  EXPECT_EQ(saved.graph().initializer(0).external_data_size(), 0);
  EXPECT_EQ(saved.graph().initializer(0).raw_data().size(), 8U);
  EXPECT_EQ(report({{"location", "w.data"}, {"offset", "0"}, {"length", "8"}}), "no error");
  std::filesystem::create_directories(folder_ / "model/sub");
  write(folder_ / "model/sub/w.data", std::string(4096 + 8, '\0'));
  EXPECT_EQ(report({{"location", "./sub/w.data"}, {"offset", "4096"}}), "no error");
}

TEST_F(External, MustNotEscape) {
  EXPECT_HAS(report({{"location", "../secret"}}), "leaves the model's folder");
  EXPECT_HAS(report({{"location", "sub/../../secret"}}), "leaves the model's folder");
  EXPECT_HAS(report({{"location", (folder_ / "secret").string()}}), "is an absolute path");
  EXPECT_HAS(report({{"location", "C:\\secret"}}), "not a relative POSIX path");
  EXPECT_HAS(report({{"location", std::string("w.data\0x", 8)}}), "holds control characters");
  EXPECT_HAS(report({{"location", ""}}), "its location is empty");
  EXPECT_HAS(report({{"location", "."}}), "names no file");
}

TEST_F(External, LinksAreNotFollowed) {
  std::filesystem::create_symlink("../secret", folder_ / "model/link");
  EXPECT_HAS(report({{"location", "link"}}), "symbolic link");
  std::filesystem::create_directory_symlink("..", folder_ / "model/up");
  EXPECT_HAS(report({{"location", "up/secret"}}), "symbolic link");
  std::filesystem::create_hard_link(folder_ / "secret", folder_ / "model/hard");
  EXPECT_HAS(report({{"location", "hard"}}), "other hard links");
}

TEST_F(External, MustBeARegularFileThatIsThere) {
  EXPECT_HAS(report({{"location", "missing.data"}}),
             "initializer 'w': its file 'missing.data' cannot be opened: No such file");
  std::filesystem::create_directories(folder_ / "model/dir");
  EXPECT_HAS(report({{"location", "dir"}}), "not a regular file");
  ASSERT_EQ(mkfifo((folder_ / "model/fifo").c_str(), 0600), 0);
  EXPECT_HAS(report({{"location", "fifo"}}), "not a regular file");
}

TEST_F(External, LengthsAndOffsetsAreExact) {
  EXPECT_HAS(report({{"location", "w.data"}, {"length", "7"}}), "has 7 bytes, its type and shape need 8");
  EXPECT_HAS(report({{"location", "w.data"}, {"offset", "1"}}), "ends at byte 1+8 of 'w.data', which has 8");
  EXPECT_HAS(report({{"location", "w.data"}, {"offset", "18446744073709551615"}}), "which has 8");
  EXPECT_HAS(report({{"location", "w.data"}, {"offset", "-1"}}), "its offset '-1' is not a number of bytes");
  EXPECT_HAS(report({{"location", "w.data"}, {"length", "eight"}}), "not a number of bytes");
  EXPECT_HAS(report({{"location", "w.data"}, {"basename", "x"}}), "unknown key 'basename'");
}

TEST_F(External, NothingIsAllocatedForDataThatIsNotThere) {
  pb::ModelProto model = small_model();
  pb::TensorProto* w = model.mutable_graph()->mutable_initializer(0);
  w->clear_raw_data();
  w->set_dims(0, std::int64_t{1} << 44);
  w->set_data_location(pb::TensorProto::EXTERNAL);
  pb::StringStringEntryProto* entry = w->add_external_data();
  entry->set_key("location");
  entry->set_value("w.data");
  write(folder_ / "model" / "m.onnx", model.SerializeAsString());
  EXPECT_HAS(report_of([&] { load_onnx(folder_ / "model" / "m.onnx"); }), "which has 8");
  EXPECT_HAS(load_report(model), "this model is not a file");
}

TEST_F(External, AFileIsNotMultiplied) {
  pb::ModelProto model = small_model();
  for (int i = 0; i < 10; ++i) {
    pb::TensorProto* w =
        i == 0 ? model.mutable_graph()->mutable_initializer(0) : model.mutable_graph()->add_initializer();
    if (i > 0) *w = model.graph().initializer(0);
    if (i > 0) w->set_name(cat("w", i));
    if (i > 0) continue;
    w->clear_raw_data();
    w->set_data_location(pb::TensorProto::EXTERNAL);
    pb::StringStringEntryProto* entry = w->add_external_data();
    entry->set_key("location");
    entry->set_value("w.data");
  }
  write(folder_ / "model" / "m.onnx", model.SerializeAsString());
  EXPECT_HAS(report_of([&] { load_onnx(folder_ / "model" / "m.onnx"); }),
             "too many tensors overlap in 'w.data'");
}

}  // namespace
}  // namespace onnxddp::testing
