// What an exporter took away from the training form of a model.
#include "tests/importer/onnx_testing.h"

namespace onnxddp::testing {
namespace {

std::string losses(const std::string& body) {
  std::string all;
  for (const std::string& line : training_form_losses(*parse_onnx_text(model_text(17, body))))
    all += line + "\n";
  return all;
}

TEST(TrainingForm, NothingIsSaidOfAWholeModel) {
  EXPECT_EQ(
      losses(
          R"(g (float[N,1,4,4] x) => (float[N,1,4,4] y) <float[1,1,1,1] w = {2}, float[1] b = {0}, float[1] s = {1}, float[1] o = {0}, float[1] m = {0}, float[1] v = {1}> {
    h = Conv(x, w, b)
    i, a, c = BatchNormalization<training_mode = 1>(h, s, o, m, v)
    y = Dropout(i)
  })"),
      "");
}

TEST(TrainingForm, EveryLossIsNamedWithTheRemedy) {
  const std::string text = losses(
      R"(g (float[1,1,4,4] x) => (float[1,1,4,4] y) <float[1,1,1,1] w = {2}, float[1] b = {0}, float[1,1,1,1] w2 = {2}, float[1] s = {1}, float[1] o = {0}, float[1] m = {0}, float[1] v = {1}, float[4,4] "onnx::MatMul_7" = {1,2,3,4,5,6,7,8,9,10,11,12,13,14,15,16}> {
    h = Conv(x, w, b)
    i = Conv(h, w2)
    j = BatchNormalization(i, s, o, m, v)
    y = MatMul(j, "onnx::MatMul_7")
  })");
  EXPECT_HAS(text, "the exporter fixed the batch dimension at 1\n");
  EXPECT_HAS(text, "1 Conv with a bias and no batch norm behind it");
  EXPECT_HAS(text, "1 weight was computed by the exporter (onnx::MatMul_7)");
  EXPECT_HAS(text, "1 batch norm is in inference form: `--bn train`, the default, trains them");
  EXPECT_HAS(text, "dropout that an exporter removed cannot be seen in a file");
  EXPECT_HAS(text,
             "torch.onnx.export(model.train(), (x,), f, dynamo=True, optimize=False, external_data=False, "
             "dynamic_shapes=({0: torch.export.Dim(\"N\")},))");
}

}  // namespace
}  // namespace onnxddp::testing
