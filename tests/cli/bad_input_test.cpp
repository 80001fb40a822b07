// Bad input: one clear error, the right exit code, little memory, nothing half-written.
#include <fcntl.h>
#include <gtest/gtest.h>
#include <sys/file.h>
#include <unistd.h>

#include <cmath>
#include <limits>

#include "importer/dataset.h"
#include "tests/cli/program.h"

namespace onnxddp::testing {
namespace {

namespace fs = std::filesystem;

constexpr std::size_t kMemory =
    std::size_t{2} << 30;  // address space: threads and libraries reserve much more than they use

/// Bad models and data that only Python's packages can write; made once for all tests.
class BadInput : public ::testing::Test {
 protected:
  static void SetUpTestSuite() {
    folder_ = new Folder();
    if (std::string(ONNXDDP_PYTHON).empty()) return;
    const std::string command = cat("'", ONNXDDP_PYTHON, "' '", ONNXDDP_SOURCE_DIR,
                                    "/tests/cli/make_bad_input.py' '", folder_->path().string(), "'");
    made_ = std::system(command.c_str()) == 0;
  }
  static void TearDownTestSuite() {
    delete folder_;
    folder_ = nullptr;
  }

  /// Training on this model and data ends in that error, and leaves no run behind.
  static void refuse(const std::string& model, const std::string& data, int code, const std::string& text,
                     std::vector<std::string> more = {}) {
    Folder here;
    std::vector<std::string> words = {"train", model, "--out", "run", "--epochs", "1"};
    if (!data.empty()) words.insert(words.end(), {"--data", data});
    words.insert(words.end(), more.begin(), more.end());
    expect_error(run(words, {.folder = here.path(), .seconds = 30, .memory = kMemory}), code, text);
    EXPECT_FALSE(fs::exists(here / "run" / "model.onnx"));
    EXPECT_FALSE(fs::exists(here / "run" / "checkpoints"));
  }
  static std::string file(const std::string& name) { return (*folder_ / name).string(); }
  static std::string toy() { return model_file("toy.npz"); }

  static Folder* folder_;
  static bool made_;
};
Folder* BadInput::folder_ = nullptr;
bool BadInput::made_ = false;

TEST_F(BadInput, FilesThatAreNoModels) {
  const std::string whole = read_text(model_file("digits_cnn.onnx"));
  write_text(file("truncated.onnx"), whole.substr(0, whole.size() / 2));
  write_text(file("empty.onnx"), "");
  write_text(file("text.onnx"), "import torch\nprint('hello')\n");
  std::string noise;
  for (unsigned i = 0, x = 12345; i < 5000; ++i)
    noise += static_cast<char>((x = x * 1664525 + 1013904223) >> 24);
  write_text(file("random.onnx"), noise);
  refuse(file("truncated.onnx"), toy(), 1, "truncated.onnx");
  refuse(file("empty.onnx"), toy(), 1, "empty");
  refuse(file("text.onnx"), toy(), 1, "text.onnx");
  refuse(file("random.onnx"), toy(), 1, "random.onnx");
  refuse(file("absent.onnx"), toy(), 1, "absent.onnx");
  refuse(folder_->path().string(), toy(), 1, "file");
}

TEST_F(BadInput, TheModelIsMissedBeforeTheData) {
  for (const char* command : {"train", "eval", "bench"})
    expect_error(run({command, file("absent.onnx")}), 1, "cannot open");
}

// The program finds values of its own by name in the finished graph.
TEST_F(BadInput, NamesOfTheProgramsOwn) {
  const std::string head = "<ir_version: 8, opset_import: [\"\" : 17]> g (float[N,1] x) => (float[N,1] y)\n";
  Folder here;
  write_model(here / "m.onnx", head + R"(<float[1,1] w = {1}> { "loss.denominator" = MatMul(x, w)
      "stop.request" = Relu("loss.denominator")
      y, rng = Dropout("stop.request") })");
  EXPECT_EQ(run({"train", "m.onnx", "--data", toy(), "--epochs", "1"}, {.folder = here.path()}).code, 0);
  EXPECT_EQ(run({"train", "m.onnx", "--data", toy(), "--epochs", "1", "--nproc-per-node", "2"},
                {.folder = here.path()})
                .code,
            0);
  write_model(file("own.onnx"),
              head + R"(<float[1,1] "loss.denominator" = {1}> { y = MatMul(x, "loss.denominator") })");
  refuse(file("own.onnx"), toy(), 1, "rename it");
}

struct Case {
  const char *name, *text;
};
class BadModel : public BadInput, public ::testing::WithParamInterface<Case> {};
TEST_P(BadModel, IsRefused) {
  if (!made_) GTEST_SKIP() << "needs Python with onnx";
  refuse(file(std::string(GetParam().name) + ".onnx"), toy(), 1, GetParam().text);
}
INSTANTIATE_TEST_SUITE_P(
    All, BadModel,
    ::testing::Values(Case{"unknown_op", "Frobnicate"}, Case{"unknown_domain", "com.example"},
                      Case{"cycle", ""}, Case{"undefined_input", "nowhere"},
                      Case{"external_missing", "gone.bin"}, Case{"external_escape", ".."},
                      Case{"external_absolute", ""}, Case{"external_link", ""}, Case{"external_short", ""},
                      Case{"wrong_bytes", ""}, Case{"huge_dimension", ""}, Case{"negative_dimension", ""},
                      Case{"recursive_function", ""}, Case{"negative_result", "[-7,1]"},
                      Case{"nan_weight", "'w' holds NaN"}, Case{"half_weight", "'w' cannot train as f16"},
                      Case{"sparse_weight", "sparse"}, Case{"output_twice", "listed twice"},
                      Case{"high_bytes", "not an ONNX model, or"}),
    [](const auto& value) { return std::string(value.param.name); });

class BadData : public BadInput, public ::testing::WithParamInterface<Case> {};
TEST_P(BadData, IsRefused) {
  if (!made_) GTEST_SKIP() << "needs Python with numpy";
  refuse(model_file("toy.onnx"), file(std::string(GetParam().name) + ".npz"), 1, GetParam().text);
}
INSTANTIATE_TEST_SUITE_P(All, BadData,
                         ::testing::Values(Case{"objects", ""}, Case{"strings", ""}, Case{"truncated", ""},
                                           Case{"bomb", ""}, Case{"lying", ""}, Case{"empty_archive", ""}),
                         [](const auto& value) { return std::string(value.param.name); });

void write_toy(const fs::path& file, const HostTensor& x, const HostTensor& y) {
  write_npz(file, {{"x", x}, {"y", y}});
}

TEST_F(BadInput, ArraysThatDoNotFit) {
  const HostTensor column = HostTensor::of<float>({4, 1}, {1, 2, 3, 4}),
                   wide = HostTensor::full(DType::f32, {4, 7}, 0.5);
  write_toy(file("wide.npz"), wide, column);
  refuse(model_file("toy.onnx"), file("wide.npz"), 1, "'x'");
  write_toy(file("target.npz"), column, wide);
  refuse(model_file("toy.onnx"), file("target.npz"), 1, "shape");
  write_npz(file("name.npz"), {{"X", column}, {"y", column}});
  refuse(model_file("toy.onnx"), file("name.npz"), 1, "did you mean 'X'");
  write_npz(file("alone.npz"), {{"x", column}});
  refuse(model_file("toy.onnx"), file("alone.npz"), 1, "target");
  write_npz(file("many.npz"), {{"x", column}, {"a", column}, {"b", column}});
  refuse(model_file("toy.onnx"), file("many.npz"), 2, "a, b");
  refuse(model_file("toy.onnx"), file("many.npz"), 2, "there is no array", {"--target", "c"});
  write_npz(file("counts.npz"), {{"x", column}, {"y", HostTensor(DType::f32, {5, 1})}});
  refuse(model_file("toy.onnx"), file("counts.npz"), 1, "rows");
  write_npz(file("rows.npz"), {{"x", HostTensor(DType::f32, {0, 1})}, {"y", HostTensor(DType::f32, {0, 1})}});
  refuse(model_file("toy.onnx"), file("rows.npz"), 1, "row");
  refuse(model_file("toy.onnx"), file("absent.npz"), 1, "absent.npz");
  write_text(file("table.csv"), "x,y\n1,2\n");
  refuse(model_file("toy.onnx"), file("table.csv"), 1, "csv");
  refuse(model_file("digits_mlp.onnx"), "", 2, "--data");
}

TEST_F(BadInput, ValuesThatCannotBe) {
  const HostTensor column = HostTensor::of<float>({4, 1}, {1, 2, 3, 4});
  for (const float bad : {std::numeric_limits<float>::quiet_NaN(), std::numeric_limits<float>::infinity()}) {
    write_toy(file("nan.npz"), HostTensor::of<float>({4, 1}, {1, 2, bad, 4}), column);
    refuse(model_file("toy.onnx"), file("nan.npz"), 1, "row 2");
  }
  for (const std::int64_t bad :
       {std::int64_t{10}, std::int64_t{-1}, std::numeric_limits<std::int64_t>::max()}) {
    std::map<std::string, HostTensor> digits = read_npz(model_file("digits_test.npz"));
    digits.at("y").mutable_data<std::int64_t>()[7] = bad;
    write_npz(file("labels.npz"), {digits.begin(), digits.end()});
    refuse(model_file("digits_mlp.onnx"), file("labels.npz"), 1, "row 7");
  }
  std::map<std::string, HostTensor> digits = read_npz(model_file("digits_test.npz"));
  digits.at("y") = digits.at("y").cast(DType::f32);
  write_npz(file("floats.npz"), {digits.begin(), digits.end()});
  refuse(model_file("digits_mlp.onnx"), file("floats.npz"), 1, "i64", {"--loss", "cross_entropy"});
}

TEST_F(BadInput, OptionsThatCannotBe) {
  refuse(model_file("toy.onnx"), "", 2, "larger than a rank's share", {"--batch-size", "5"});
  refuse(model_file("toy.onnx"), "", 2, "unknown option", {"--bach-size", "5"});
  refuse(model_file("toy.onnx"), "", 1, "no tensor", {"--loss-input", "nothing"});
  refuse(model_file("toy.onnx"), "", 1, "nothing to train", {"--freeze", ".*"});
  refuse(model_file("toy.onnx"), "", 2, "device", {"--device", "gpu"});
  refuse(model_file("toy.onnx"), "", 2, "eval-fraction", {"--eval-fraction", "0.01"});
}

TEST_F(BadInput, ErrorsOfAllRanksAreSaidOnce) {
  Folder here;
  write_toy(here / "wide.npz", HostTensor(DType::f32, {4, 7}), HostTensor(DType::f32, {4, 1}));
  const Outcome outcome =
      run({"train", model_file("toy.onnx"), "--data", "wide.npz", "--nproc-per-node", "2", "--out", "r"},
          {.folder = here.path()});
  EXPECT_EQ(outcome.code, 1) << outcome.err;
  std::size_t count = 0;
  for (std::size_t at = 0; (at = outcome.err.find("'x'", at)) != std::string::npos; ++at) ++count;
  EXPECT_GE(count, 1U) << outcome.err;
  EXPECT_EQ(outcome.err.find("[rank 1]"), std::string::npos) << outcome.err;
  EXPECT_FALSE(fs::exists(here / "r" / "model.onnx"));
}

TEST_F(BadInput, RunFolders) {
  Folder here;
  const RunOptions options{.folder = here.path()};
  write_text(here / "file", "x");
  expect_error(run({"train", model_file("toy.onnx"), "--out", "file"}, options), 1, "file");
  expect_error(run({"train", model_file("toy.onnx"), "--out", "file/run"}, options), 1, "file/run");
  expect_error(run({"train", model_file("toy.onnx"), "--out", "/proc/onnx-ddp"}, options), 1,
               "/proc/onnx-ddp");
  ASSERT_EQ(run({"train", model_file("toy.onnx"), "--out", "r", "--quiet"}, options).code, 0);
  const Outcome again = run({"train", model_file("toy.onnx"), "--out", "r"}, options);
  expect_error(again, 2, "--resume auto");
  EXPECT_NE(again.err.find("--out"), std::string::npos);
  // In use: somebody else holds the lock.
  fs::create_directories(here / "used");
  Child other({"train", model_file("toy.onnx"), "--out", "used", "--steps", "100000000", "--quiet",
               "--save-every", "100000000"},
              options);
  ASSERT_TRUE(eventually([&] { return fs::exists(here / "used" / "metrics.jsonl"); }));
  expect_error(run({"train", model_file("toy.onnx"), "--out", "used", "--resume", "auto"}, options), 2,
               "in use");
}

TEST_F(BadInput, DivergenceStopsTheRun) {
  Folder here;
  const Outcome outcome = run({"train", model_file("toy.onnx"), "--out", "r", "--optimizer", "sgd", "--lr",
                               "1e30", "--save-every", "1000", "--steps", "50"},
                              {.folder = here.path()});
  expect_error(outcome, 4, "diverged");
  EXPECT_NE(outcome.err.find("at step "), std::string::npos);
  EXPECT_FALSE(fs::exists(here / "r" / "model.onnx"));
  const std::string summary = read_text(here / "r" / "summary.json");
  EXPECT_NE(summary.find("\"completed\": false"), std::string::npos) << summary;
  EXPECT_NE(summary.find("\"reason\": \"diverged\""), std::string::npos) << summary;
  const Outcome ignored = run({"train", model_file("toy.onnx"), "--out", "s", "--optimizer", "sgd", "--lr",
                               "1e30", "--steps", "50", "--on-nan", "ignore", "--quiet"},
                              {.folder = here.path()});
  EXPECT_EQ(ignored.code, 0) << ignored.err;
}

}  // namespace
}  // namespace onnxddp::testing
