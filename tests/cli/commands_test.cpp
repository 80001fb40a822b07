// Every command, on the binary.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <nlohmann/json.hpp>

#include "importer/dataset.h"
#include "tests/cli/program.h"

namespace onnxddp::testing {
namespace {

using ::testing::HasSubstr;
using ::testing::MatchesRegex;
using ::testing::Not;

TEST(Commands, HelpAndVersion) {
  EXPECT_THAT(run({"--version"}).out, MatchesRegex("onnx-ddp [0-9.]+\n"));
  const Outcome help = run({"--help"});
  EXPECT_EQ(help.code, 0);
  for (const char* name : {"train", "eval", "predict", "check", "show", "export", "bench", "ops"}) {
    EXPECT_THAT(help.out, HasSubstr(name));
    const Outcome one = run({name, "--help"});
    EXPECT_EQ(one.code, 0);
    EXPECT_THAT(one.out, HasSubstr(std::string("onnx-ddp ") + name));
  }
  EXPECT_EQ(run({}).code, 2);
  expect_error(run({"trian"}), 2, "train");
  expect_error(run({"lr-find"}), 2, "not in this version");
}

TEST(Commands, TrainsTheToyBare) {
  Folder folder;
  const Outcome outcome = run({"train", model_file("toy.onnx")}, {.folder = folder.path()});
  ASSERT_EQ(outcome.code, 0) << outcome.err;
  EXPECT_EQ(outcome.out, "");
  EXPECT_THAT(outcome.err, HasSubstr("onnx-ddp "));
  EXPECT_THAT(outcome.err, Not(HasSubstr("\r")));
  EXPECT_THAT(outcome.err, Not(HasSubstr("\x1b")));
  const auto folder_of_run = folder / "runs" / "toy-1";
  for (const char* name :
       {"model.onnx", "last.onnx", "run.toml", "metrics.jsonl", "summary.json", "checkpoints"})
    EXPECT_TRUE(std::filesystem::exists(folder_of_run / name)) << name;
  EXPECT_EQ(metric(folder_of_run, "step", "step").size(), 10U);
  EXPECT_EQ(metric(folder_of_run, "step", "samples").back(), 40);
  const nlohmann::json summary = nlohmann::json::parse(read_text(folder_of_run / "summary.json"));
  EXPECT_EQ(summary.at("completed"), true);
  EXPECT_EQ(summary.at("steps"), 10);
  const Outcome second = run({"train", model_file("toy.onnx"), "--quiet"}, {.folder = folder.path()});
  EXPECT_EQ(second.code, 0);
  EXPECT_EQ(second.err, "");
  EXPECT_TRUE(std::filesystem::exists(folder / "runs" / "toy-2" / "model.onnx"));
}

TEST(Commands, RunTomlCanBeGivenBack) {
  Folder folder;
  const RunOptions here{.folder = folder.path()};
  ASSERT_EQ(run({"train", model_file("toy.onnx"), "--seed", "5", "--optimizer", "sgd:momentum=0.5",
                 "--batch-size", "1", "--out", "a"},
                here)
                .code,
            0);
  const Outcome again = run({"train", model_file("toy.onnx"), "--config", "a/run.toml", "--out", "b"}, here);
  ASSERT_EQ(again.code, 0) << again.err;
  EXPECT_EQ(read_text(folder / "a" / "model.onnx"), read_text(folder / "b" / "model.onnx"));
  EXPECT_EQ(metric(folder / "a", "step", "loss"), metric(folder / "b", "step", "loss"));
}

TEST(Commands, RunTomlHoldsEveryEffectiveValue) {
  Folder folder;
  const RunOptions here{.folder = folder.path()};
  ASSERT_EQ(run({"train", model_file("digits_mlp.onnx"), "--data", model_file("digits.npz"), "--steps", "2",
                 "--out", "a", "--quiet"},
                here)
                .code,
            0);
  const std::string toml = read_text(folder / "a" / "run.toml");
  for (const char* line : {"target = \"y\"\n", "loss = \"cross_entropy\"\n", "device = \"cpu\"\n",
                           "\nthreads = ", "lr = 0.001\n", "batch-size = 32\n", "nproc-per-node = \"1\"\n"})
    EXPECT_THAT(toml, HasSubstr(line));
  ASSERT_EQ(run({"train", model_file("digits_mlp.onnx"), "--config", "a/run.toml", "--out", "b"}, here).code,
            0);
  std::string again = read_text(folder / "b" / "run.toml");
  again.replace(again.find("out = \"b\""), 9, "out = \"a\"");
  EXPECT_EQ(again.substr(0, again.find("quiet")), toml.substr(0, toml.find("quiet")));
}

TEST(Commands, EvaluatesARunOnItsOwnData) {
  Folder folder;
  const RunOptions here{.folder = folder.path()};
  std::vector<std::string> train = {
      "train", model_file("digits_mlp.onnx"), "--data", model_file("digits.npz"), "--steps", "2", "--quiet"};
  train.insert(train.end(), {"--out", "a"});
  ASSERT_EQ(run(train, here).code, 0);
  train.back() = "b";
  train.insert(train.end(), {"--eval-data", model_file("digits_test.npz")});
  ASSERT_EQ(run(train, here).code, 0);
  const Outcome a = run({"eval", "a"}, here), b = run({"eval", "b"}, here);
  EXPECT_THAT(a.err, HasSubstr("model    a/last.onnx\ndata     " + model_file("digits.npz") + "\n"));
  EXPECT_THAT(b.err, HasSubstr("model    b/best.onnx\ndata     " + model_file("digits_test.npz") + "\n"));
  EXPECT_THAT(b.out, HasSubstr("samples: 360\n"));
  expect_error(run({"predict", "a", "-o", "p.npz"}, here), 2, "--data");
  std::filesystem::remove(folder / "a" / "run.toml");
  const Outcome none = run({"eval", "a"}, here);
  expect_error(none, 2, "'a' names none");
  EXPECT_THAT(none.err, Not(HasSubstr("last.npz")));
}

TEST(Commands, CheckRepeatsTheOptionsForTrain) {
  const std::string model = model_file("digits_mlp.onnx"), data = model_file("digits.npz");
  const Outcome outcome = run({"check", model, "--freeze", "fc1.*|it's", "--data", data, "--sync-bn"});
  ASSERT_EQ(outcome.code, 0) << outcome.err << outcome.out;
  EXPECT_THAT(outcome.out, HasSubstr("next     onnx-ddp train " + model + " --data " + data +
                                     " --freeze 'fc1.*|it'\\''s' --sync-bn\n"));
}

TEST(Commands, CheckAndTrainCountTheSameValues) {
  Folder folder;
  const RunOptions here{.folder = folder.path()};
  write_model(folder / "m.onnx", R"(<ir_version: 8, opset_import: ["" : 17]>
      g (float[N, 4] x) => (float[N, 2] p)
      <float[4, 2] w = {1, 2, 3, 4, 5, 6, 7, 8}, int64[2] s = {-1, 2}> {
        h = MatMul(x, w)
        p = Reshape(h, s)
      })");
  write_npz(folder / "m.npz", {{"x", HostTensor(DType::f32, {3, 4})}, {"y", HostTensor(DType::f32, {3, 2})}});
  EXPECT_THAT(run({"check", "m.onnx"}, here).out, HasSubstr("8 of 8 values"));
  EXPECT_THAT(run({"train", "m.onnx", "--loss", "mse", "--steps", "1"}, here).err,
              HasSubstr("8 of 8 values"));
}

TEST(Commands, TrainsAndEvaluatesTheDigits) {
  Folder folder;
  const RunOptions here{.folder = folder.path()};
  const Outcome trained =
      run({"train", model_file("digits_mlp.onnx"), "--data", model_file("digits.npz"), "--eval-data",
           model_file("digits_test.npz"), "--epochs", "3", "--lr", "0.01", "--out", "run"},
          here);
  ASSERT_EQ(trained.code, 0) << trained.err;
  const std::vector<double> accuracy = metric(folder / "run", "eval", "accuracy");
  ASSERT_EQ(accuracy.size(), 3U);
  EXPECT_GT(accuracy.back(), 0.8);
  EXPECT_EQ(metric(folder / "run", "eval", "samples"), (std::vector<double>{360, 360, 360}));
  const Outcome one = run({"eval", "run", "--data", model_file("digits_test.npz")}, here);
  ASSERT_EQ(one.code, 0) << one.err;
  EXPECT_THAT(one.out, MatchesRegex("loss: [0-9.e-]+  accuracy: 0\\.[0-9]+  samples: 360\n"));
  const Outcome two =
      run({"eval", "run", "--data", model_file("digits_test.npz"), "--nproc-per-node", "2"}, here);
  ASSERT_EQ(two.code, 0) << two.err;
  EXPECT_EQ(two.out.substr(two.out.find("accuracy")), one.out.substr(one.out.find("accuracy")));
  const std::size_t at = one.out.find("accuracy: ") + 10;
  EXPECT_DOUBLE_EQ(std::stod(one.out.substr(at)), *std::max_element(accuracy.begin(), accuracy.end()));
}

TEST(Commands, HoldsRowsOut) {
  Folder folder;
  const Outcome outcome = run({"train", model_file("digits_mlp.onnx"), "--data", model_file("digits.npz"),
                               "--eval-fraction", "0.2", "--epochs", "1", "--out", "r"},
                              {.folder = folder.path()});
  ASSERT_EQ(outcome.code, 0) << outcome.err;
  EXPECT_EQ(metric(folder / "r", "eval", "samples"), (std::vector<double>{287}));
  EXPECT_EQ(metric(folder / "r", "step", "samples").back(), 1150);
}

TEST(Commands, ExportsAndPredicts) {
  Folder folder;
  const RunOptions here{.folder = folder.path()};
  ASSERT_EQ(run({"train", model_file("toy.onnx"), "--out", "r", "--quiet"}, here).code, 0);
  const Outcome exported = run({"export", "r", "-o", "out.onnx"}, here);
  ASSERT_EQ(exported.code, 0) << exported.err;
  EXPECT_EQ(read_text(folder / "out.onnx"), read_text(folder / "r" / "model.onnx"));
  ASSERT_EQ(run({"export", "r/checkpoints/step-00000010", "--output", "weights.npz"}, here).code, 0);
  expect_error(run({"export", "r"}, here), 2, "-o");
  expect_error(run({"export", "r", "-o", "x.safetensors"}, here), 2, "not in this version");
  const Outcome predicted =
      run({"predict", "r", "--data", model_file("toy.npz"), "-o", "y.npz", "--batch-size", "3"}, here);
  ASSERT_EQ(predicted.code, 0) << predicted.err;
  const HostTensor y = read_npz(folder / "y.npz").at("y");
  EXPECT_EQ(y.shape(), (Ints{4, 1}));
  EXPECT_NE(y.as_double(3), 0);
}

TEST(Commands, PredictRefusesOutputsWithoutABatch) {
  Folder folder;
  write_model(
      folder / "m.onnx",
      "<ir_version: 8, opset_import: [\"\" : 17]> g (float[N,1] x) => (float[1,1] y) { y = ReduceMean(x) }");
  expect_error(run({"predict", "m.onnx", "--data", model_file("toy.npz"), "-o", "y.npz", "--batch-size", "2"},
                   {.folder = folder.path()}),
               1, "no batch dimension");
}

TEST(Commands, AClosedPipeEndsNoTraining) {
  Folder folder;
  const std::string program = ONNXDDP_BINARY_DIR "/onnx-ddp";
  const std::string train = cat("cd '", folder.path().string(), "' && '", program, "' train '",
                                model_file("toy.onnx"), "' --out r 2>&1 | true; test -e r/model.onnx");
  EXPECT_EQ(std::system(train.c_str()), 0);
  EXPECT_EQ(
      std::system(cat("bash -c '\"", program, "\" ops 2>/dev/null | true; exit ${PIPESTATUS[0]}'").c_str()),
      0);
}

TEST(Commands, ChecksModels) {
  const Outcome outcome = run(
      {"check", model_file("digits_cnn.onnx"), "--data", model_file("digits.npz"), "--nproc-per-node", "2"});
  EXPECT_EQ(outcome.code, 0) << outcome.err;
  EXPECT_THAT(outcome.out, HasSubstr("cross_entropy"));
  EXPECT_THAT(outcome.out, HasSubstr("parameter"));
  EXPECT_THAT(outcome.out, HasSubstr("buffer"));
  EXPECT_THAT(outcome.out, HasSubstr("ok: trainable"));
  const Outcome bare = run({"check", model_file("digits_cnn.onnx"), "--json"});
  EXPECT_EQ(bare.code, 0);
  const nlohmann::json object = nlohmann::json::parse(bare.out);
  EXPECT_EQ(object.at("trainable"), true);
  EXPECT_GT(object.at("tensors").size(), 4U);
}

TEST(Commands, CheckNamesProblems) {
  Folder folder;
  write_text(folder / "bad.onnx", "not a model");
  const Outcome outcome = run({"check", "bad.onnx"}, {.folder = folder.path()});
  EXPECT_EQ(outcome.code, 1);
  EXPECT_THAT(outcome.out, HasSubstr("not trainable: 1 problem"));
  const Outcome json = run({"check", "bad.onnx", "--json"}, {.folder = folder.path()});
  EXPECT_EQ(json.code, 1);
  EXPECT_EQ(nlohmann::json::parse(json.out).at("trainable"), false);
}

TEST(Commands, ShowsStages) {
  const std::string model = model_file("digits_cnn.onnx");
  EXPECT_THAT(run({"show", model}).out, HasSubstr("graph "));
  const std::string whole = run({"show", model, "--stage", "optimizer", "--ranks", "2", "--sync-bn"}).out;
  for (const char* text : {"AllReduce(", "AllGather(", "MergeStats(", "update "})
    EXPECT_THAT(whole, HasSubstr(text));
  EXPECT_THAT(run({"show", model, "--stage", "optimizer"}).out, Not(HasSubstr("AllReduce")));
  EXPECT_THAT(run({"show", model, "--stage", "plan", "--ranks", "2"}).out, HasSubstr("plan "));
  EXPECT_THAT(run({"show", model, "--format", "dot"}).out, HasSubstr("digraph"));
  EXPECT_GT(run({"show", model, "--stage", "autodiff", "--format", "onnx"}).out.size(), 1000U);
  expect_error(run({"show", model, "--stage", "optimiser"}), 2, "optimizer");
}

TEST(Commands, Benchmarks) {
  for (const char* ranks : {"1", "2"}) {
    const Outcome outcome = run({"bench", model_file("toy.onnx"), "--steps", "20", "--warmup", "2",
                                 "--nproc-per-node", ranks, "--batch-size", "2"});
    ASSERT_EQ(outcome.code, 0) << outcome.err;
    const nlohmann::json object = nlohmann::json::parse(outcome.out);
    EXPECT_GT(object.at("median_s").get<double>(), 0);
    EXPECT_GT(object.at("peak_rss_mb").get<double>(), 1);
    EXPECT_EQ(object.at("ranks"), std::stoi(ranks));
    EXPECT_EQ(object.at("steps"), 20);
  }
}

TEST(Commands, ListsOps) {
  const Outcome outcome = run({"ops"});
  EXPECT_EQ(outcome.code, 0);
  for (const char* name : {"Conv", "BatchNormalization", "AllReduce", "Relu"})
    EXPECT_THAT(outcome.out, HasSubstr(name));
}

TEST(Commands, DeviceThatIsNotThere) {
  Folder folder;
  if (std::filesystem::exists("/dev/nvidiactl")) GTEST_SKIP() << "there is a GPU";
  const Outcome outcome =
      run({"train", model_file("toy.onnx"), "--device", "cuda"}, {.folder = folder.path()});
  expect_error(outcome, 2, "driver");
  EXPECT_FALSE(std::filesystem::exists(folder / "runs" / "toy-1"));
}

TEST(Commands, AccumulationGivesTheSameSteps) {
  Folder folder;
  const RunOptions here{.folder = folder.path()};
  const std::vector<std::string> same = {"train",
                                         model_file("digits_mlp.onnx"),
                                         "--data",
                                         model_file("digits.npz"),
                                         "--optimizer",
                                         "sgd",
                                         "--lr",
                                         "0.1",
                                         "--no-shuffle",
                                         "--epochs",
                                         "1",
                                         "--quiet"};
  auto whole = same, parts = same;
  whole.insert(whole.end(), {"--batch-size", "64", "--out", "a"});
  parts.insert(parts.end(), {"--batch-size", "16", "--accumulate", "4", "--out", "b"});
  ASSERT_EQ(run(whole, here).code, 0);
  const Outcome outcome = run(parts, here);
  ASSERT_EQ(outcome.code, 0) << outcome.err;
  const std::vector<double> a = metric(folder / "a", "step", "loss"),
                            b = metric(folder / "b", "step", "loss");
  ASSERT_EQ(a.size(), b.size());
  for (std::size_t i = 0; i < a.size(); ++i) EXPECT_NEAR(a[i], b[i], 1e-5 * a[i]) << i;
}

TEST(Commands, IgnoredLabelsCountNowhere) {
  Folder folder;
  const RunOptions here{.folder = folder.path()};
  std::map<std::string, HostTensor> digits = read_npz(model_file("digits.npz"));
  HostTensor& y = digits.at("y");
  for (std::int64_t i = 0; i < y.numel(); i += 3) y.mutable_data<std::int64_t>()[i] = -1;
  write_npz(folder / "d.npz", {digits.begin(), digits.end()});
  const std::vector<std::string> same = {"train",
                                         model_file("digits_mlp.onnx"),
                                         "--data",
                                         "d.npz",
                                         "--loss",
                                         "cross_entropy:ignore_index=-1",
                                         "--optimizer",
                                         "sgd",
                                         "--lr",
                                         "0.1",
                                         "--no-shuffle",
                                         "--epochs",
                                         "1",
                                         "--quiet",
                                         "--drop-last"};
  auto one = same, two = same;
  one.insert(one.end(), {"--batch-size", "64", "--out", "a", "--steps", "5"});
  two.insert(two.end(), {"--batch-size", "32", "--nproc-per-node", "2", "--out", "b", "--steps", "5"});
  std::erase(one, "--epochs");
  std::erase(one, "1");
  std::erase(two, "--epochs");
  std::erase(two, "1");
  ASSERT_EQ(run(one, here).code, 0);
  const Outcome outcome = run(two, here);
  ASSERT_EQ(outcome.code, 0) << outcome.err;
  // Rank r reads rows r, r+2, …: the union of the first batches of 32 is rows 0..63, the one rank's batch
  // of 64.
  const std::vector<double> a = metric(folder / "a", "step", "loss"),
                            b = metric(folder / "b", "step", "loss");
  ASSERT_EQ(a.size(), 5U);
  for (std::size_t i = 0; i < a.size(); ++i) EXPECT_NEAR(a[i], b[i], 1e-5 * a[i]) << i;
}

TEST(Errors, ShowControlCharactersAndDoNotObeyThem) {
  const Outcome outcome = run({"train", "a\x1b[31mb.onnx"}, {});
  EXPECT_NE(outcome.code, 0);
  EXPECT_THAT(outcome.err, HasSubstr("a\\x1b[31mb.onnx"));
  EXPECT_THAT(outcome.err, ::testing::Not(HasSubstr("\x1b")));
}

}  // namespace
}  // namespace onnxddp::testing
