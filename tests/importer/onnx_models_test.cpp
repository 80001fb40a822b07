// The files of real exporters: parameter counts, symbolic batch, and what their writers lose.
#include <cstdlib>
#include <numeric>

#include "tests/importer/onnx_testing.h"

namespace onnxddp::testing {
namespace {

std::filesystem::path models() {
  const char* folder = std::getenv("ONNXDDP_SHARED");
  return std::filesystem::path(folder ? folder : ONNXDDP_SOURCE_DIR "/../shared") / "models";
}

struct Expected {
  const char* file;
  std::int64_t parameters;  // elements
  int tensors;
  int buffers;
};

class RealModel : public ::testing::TestWithParam<Expected> {};

TEST_P(RealModel, ImportsWithItsParameters) {
  const std::filesystem::path file = models() / GetParam().file;
  if (!std::filesystem::exists(file)) GTEST_SKIP() << file << " is not there";
  const ImportedModel model = import_onnx(load_onnx(file), {});
  verify(model.graph);
  std::int64_t elements = 0;
  int tensors = 0, buffers = 0;
  for (const TensorRole& role : model.roles) {
    if (role.role == Role::parameter) ++tensors, elements += numel(static_shape(role.type.shape));
    buffers += role.role == Role::buffer;
    if (role.role == Role::parameter || role.role == Role::buffer) {
      EXPECT_TRUE(model.values.count(role.name)) << role.name;
    }
  }
  EXPECT_EQ(elements, GetParam().parameters);
  EXPECT_EQ(tensors, GetParam().tensors);
  EXPECT_EQ(buffers, GetParam().buffers);
  EXPECT_EQ(model.batch_symbol, "N");
  EXPECT_EQ(model.graph.value(model.graph.outputs[0].value).type.shape[0], Dim::symbol("N"));
  EXPECT_EQ(static_cast<int>(model.graph.updates.size()), GetParam().buffers);
  full_check(save_trained(*model.source, model.values));
}

INSTANTIATE_TEST_SUITE_P(Zoo, RealModel,
                         ::testing::Values(Expected{"toy.onnx", 2, 2, 0},
                                           Expected{"toy.legacy.onnx", 2, 2, 0},
                                           Expected{"mlp.onnx", 671754, 10, 4},
                                           Expected{"mlp.legacy.onnx", 671754, 10, 4},
                                           Expected{"resnet20.onnx", 272474, 65, 42},
                                           Expected{"resnet20.legacy.onnx", 272474, 65, 42},
                                           Expected{"resnet20.eval.onnx", 270906, 23, 0}),
                         [](const auto& c) {
                           std::string name = c.param.file;
                           std::replace(name.begin(), name.end(), '.', '_');
                           return name;
                         });

TEST(RealModels, ATrainedFileKeepsItsFormButNotItsTrainingMode) {
  const std::filesystem::path file = models() / "resnet20.legacy.onnx";
  if (!std::filesystem::exists(file)) GTEST_SKIP() << file << " is not there";
  const auto source = load_onnx(file);
  const ImportedModel model = import_onnx(source, {});
  const pb::ModelProto saved = parse_bytes(save_trained(*source, model.values));
  EXPECT_EQ(saved.ir_version(), 8);
  EXPECT_EQ(saved.opset_import(0).version(), 17);
  for (const pb::NodeProto& node : saved.graph().node()) {
    if (node.op_type() != "BatchNormalization") continue;
    EXPECT_EQ(node.output_size(), 1);
    for (const pb::AttributeProto& a : node.attribute()) {
      if (a.name() == "training_mode") {
        EXPECT_EQ(a.i(), 0);
      }
    }
  }
}

TEST(RealModels, SaysThatBatchNormsWereFolded) {
  const std::filesystem::path file = models() / "resnet20.eval.onnx";
  if (!std::filesystem::exists(file)) GTEST_SKIP() << file << " is not there";
  const auto source = load_onnx(file);
  const ImportedModel model = import_onnx(source, {});
  ASSERT_EQ(model.warnings.size(), 1U);
  EXPECT_HAS(model.warnings[0], "batch norms were folded");
  std::string all;
  for (const std::string& line : training_form_losses(*source)) all += line + "\n";
  EXPECT_HAS(all, "FuseBatchNormIntoConv");
  EXPECT_HAS(all, "dropout that an exporter removed cannot be seen in a file");
  EXPECT_HAS(all,
             "torch.onnx.export(model.train(), (x,), f, dynamo=True, optimize=False, external_data=False, "
             "dynamic_shapes=({0: torch.export.Dim(\"N\")},))");
}

TEST(RealModels, TheOthersImportOrNameWhatIsMissing) {
  for (const char* name : {"gpt.onnx", "gpt.legacy.onnx", "lstm.onnx", "lstm.legacy.onnx"}) {
    const std::filesystem::path file = models() / name;
    if (!std::filesystem::exists(file)) GTEST_SKIP() << file << " is not there";
    const auto source = load_onnx(file);
    const std::vector<std::string> unknown = unknown_ops(*source);
    const std::string report = report_of([&] { import_onnx(source, {}); });
    if (report == "no error") continue;
    ASSERT_FALSE(unknown.empty()) << name << ": " << report;
    EXPECT_HAS(report, unknown[0]);
  }
}

}  // namespace
}  // namespace onnxddp::testing
