// Progress display with a scripted clock and screen; metrics.jsonl across errors and resumes.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <sys/resource.h>
#include <unistd.h>

#include <cmath>
#include <cstdlib>
#include <fstream>
#include <limits>
#include <nlohmann/json.hpp>
#include <thread>

#include "executor/report/memory.h"
#include "executor/report/metrics.h"
#include "executor/report/progress.h"

namespace onnxddp {
namespace {

namespace fs = std::filesystem;
using ::testing::ElementsAre;
using ::testing::EndsWith;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::Not;

struct Screen {
  std::string text;
  double time = 0;
  int columns = 80;

  ProgressOptions options(bool terminal, bool quiet = false) {
    ProgressOptions out;
    out.terminal = terminal;
    out.quiet = quiet;
    out.width = [this] { return columns; };
    out.write = [this](std::string_view part) { text += part; };
    out.now = [this] { return time; };
    return out;
  }
  std::string take() { return std::exchange(text, ""); }
};

ProgressStep at_step(std::int64_t step) {
  return {.epoch = 4,
          .epochs = 20,
          .step = step,
          .steps = 460,
          .loss = 0.3101,
          .lr = 0.0951,
          .samples_per_s = 44100,
          .eta_s = 2};
}

TEST(Progress, RewritesOneLineOnATerminal) {
  Screen screen;
  Progress progress(screen.options(true));
  progress.begin({"onnx-ddp 0.1  model.onnx", "data     digits.npz"});
  EXPECT_EQ(screen.take(), "onnx-ddp 0.1  model.onnx\ndata     digits.npz\n");
  progress.step(at_step(87));
  EXPECT_EQ(screen.take(),
            "\r\x1b[K  4/20 [===>                 ] 87/460  0.3101  lr 0.0951  44.1k/s  eta 0:02");
  screen.time = 0.05;
  progress.step(at_step(88));  // too soon
  EXPECT_EQ(screen.take(), "");
  screen.time = 0.11;
  progress.step(at_step(89));
  EXPECT_THAT(screen.take(), HasSubstr("89/460"));
  progress.step(at_step(460));  // the last one is always shown
  EXPECT_THAT(screen.take(), HasSubstr("[=====================] 460/460"));
}

TEST(Progress, LinesThatStayReplaceTheLiveLine) {
  Screen screen;
  {
    Progress progress(screen.options(true));
    progress.step(at_step(1));
    screen.take();
    progress.note("saved    step 1");
    EXPECT_EQ(screen.take(), "\r\x1b[Ksaved    step 1\n");
    progress.note("again");
    EXPECT_EQ(screen.take(), "again\n");
    progress.step(at_step(2));  // drawn at once: there is no live line
    EXPECT_THAT(screen.take(), HasSubstr("2/460"));
    progress.end({"done     460 steps", "best     best.onnx"});
    EXPECT_EQ(screen.take(), "\r\x1b[Kdone     460 steps\nbest     best.onnx\n");
    progress.step(at_step(3));
    screen.take();
  }
  EXPECT_EQ(screen.take(), "\r\x1b[K");  // an exception leaves no half line
}

TEST(Progress, FitsTheWidth) {
  Screen screen;
  Progress progress(screen.options(true));
  for (screen.columns = 1; screen.columns < 200; ++screen.columns) {
    screen.time += 1;
    progress.step(at_step(87));
    const std::string line = screen.take().substr(4);
    EXPECT_LE(static_cast<int>(line.size()), std::max(screen.columns - 1, 1));
    EXPECT_EQ(line.find('[') != std::string::npos, screen.columns >= 60) << screen.columns << line;
  }
}

TEST(Progress, PlainOutputIsRareAndWithoutEscapes) {
  Screen screen;
  ProgressOptions options = screen.options(false);
  options.color = true;
  Progress progress(options);
  progress.begin({"banner"});
  for (int step = 1; step <= 350; ++step) {
    screen.time += 0.1;
    progress.step(at_step(step));
  }
  progress.note("saved");
  progress.end({"done"});
  EXPECT_THAT(screen.text, Not(HasSubstr("\r")));
  EXPECT_THAT(screen.text, Not(HasSubstr("\x1b")));
  EXPECT_THAT(screen.text, HasSubstr(" epoch=4 loss=0.3101 lr=0.0951 samples_per_s=44100 eta_s=2\n"));
  EXPECT_EQ(std::count(screen.text.begin(), screen.text.end(), '\n'), 6)
      << screen.text;  // three of them steps
}

TEST(Progress, QuietPrintsNothing) {
  Screen screen;
  {
    Progress progress(screen.options(true, true));
    progress.begin({"banner"});
    progress.step(at_step(460));
    progress.epoch({});
    progress.note("note");
    progress.end({"done"});
  }
  EXPECT_EQ(screen.text, "");
}

TEST(Progress, EpochsAreRowsUnderOneHead) {
  Screen screen;
  ProgressOptions options = screen.options(true);
  options.color = true;
  Progress progress(options);
  progress.epoch({.epoch = 1,
                  .train_loss = 1.412,
                  .eval_loss = 0.8034,
                  .accuracy = 0.7889,
                  .lr = 0.1,
                  .grad_norm = 2.31,
                  .samples_per_s = 41200,
                  .seconds = 0.12,
                  .best = true});
  progress.epoch({.epoch = 2,
                  .train_loss = 0.5,
                  .eval_loss = {},
                  .accuracy = {},
                  .lr = 1e-5,
                  .grad_norm = 1,
                  .samples_per_s = 950,
                  .seconds = 61});
  EXPECT_EQ(screen.text,
            "\nepoch  train loss   eval loss    accuracy          lr      |grad|  samples/s      time\n"
            "    1      1.4120      0.8034      0.7889      0.1000      2.3100      41.2k     0.1 s  "
            "\x1b[32mbest\x1b[0m\n"
            "    2      0.5000                           1.000e-05      1.0000        950    61.0 s\n");
}

TEST(Progress, ColumnsThatStayEmptyAreLeftOut) {
  Screen screen;
  Progress progress(screen.options(false));
  progress.epoch({.epoch = 1,
                  .train_loss = 0.5,
                  .eval_loss = {},
                  .accuracy = {},
                  .lr = 1,
                  .grad_norm = 1,
                  .samples_per_s = 950,
                  .seconds = 61});
  EXPECT_EQ(screen.text,
            "\nepoch  train loss          lr      |grad|  samples/s      time\n"
            "    1      0.5000      1.0000      1.0000        950    61.0 s\n");
}

TEST(Memory, PeakIsThisProcess) {
  const double before = peak_rss_mb();
  EXPECT_GT(before, 1);
  std::vector<char> block(64 << 20);
  volatile char* pages = block.data();  // a compiler may drop memory that nobody touches
  for (std::size_t i = 0; i < block.size(); i += 4096) pages[i] = 1;
  EXPECT_GE(peak_rss_mb(), std::min(before, 64.0) + 1);
}

TEST(Progress, ThreadsDoNotTearLines) {
  Screen screen;
  Progress progress(screen.options(false));
  std::vector<std::thread> threads;
  for (int t = 0; t < 4; ++t) {
    threads.emplace_back([&] {
      for (int i = 0; i < 100; ++i) progress.note("one whole line");
    });
  }
  for (auto& t : threads) t.join();
  EXPECT_EQ(screen.text.size(), 400 * std::string("one whole line\n").size());
}

TEST(Progress, StderrOfATestIsNoTerminal) {
  int pipes[2];
  ASSERT_EQ(::pipe(pipes), 0);
  const int saved = ::dup(2);
  ::dup2(pipes[1], 2);
  const ProgressOptions options = stderr_progress(false, false, false);
  {
    Progress progress(options);
    progress.note("to standard error");
  }
  ::dup2(saved, 2);
  char text[64] = {};
  EXPECT_EQ(::read(pipes[0], text, sizeof text - 1), 18);
  EXPECT_STREQ(text, "to standard error\n");
  EXPECT_FALSE(options.terminal);
  EXPECT_FALSE(options.color);
  EXPECT_EQ(options.width(), stderr_progress(true, true, true).width());
  for (const int fd : {saved, pipes[0], pipes[1]}) ::close(fd);
}

TEST(Progress, Numbers) {
  EXPECT_EQ(short_number(0), "0.0000");
  EXPECT_EQ(short_number(-0.00012345), "-1.234e-04");
  EXPECT_EQ(short_number(12345.678), "12345.6780");
  EXPECT_EQ(short_number(NAN), "nan");
  EXPECT_EQ(short_number(-INFINITY), "-inf");
  EXPECT_EQ(short_count(999.4), "999");
  EXPECT_EQ(short_count(999.6), "1.0k");
  EXPECT_EQ(short_count(1.25e6), "1.2M");
  EXPECT_EQ(short_count(INFINITY), "?");
  EXPECT_EQ(clock_str(2), "0:02");
  EXPECT_EQ(clock_str(725.4), "12:05");
  EXPECT_EQ(clock_str(3723), "1:02:03");
  EXPECT_EQ(clock_str(INFINITY), "?");
}

class Metrics : public ::testing::Test {
 protected:
  Metrics() {
    char name[] = "/tmp/onnxddp-metrics-XXXXXX";
    folder_ = ::mkdtemp(name);
    file_ = folder_ / "metrics.jsonl";
  }
  ~Metrics() override { fs::remove_all(folder_); }

  std::string text() const {
    std::ifstream in(file_, std::ios::binary);
    return {std::istreambuf_iterator<char>(in), {}};
  }
  std::vector<std::int64_t> steps() const {
    std::vector<std::int64_t> out;
    std::ifstream in(file_);
    for (std::string line; std::getline(in, line);) out.push_back(nlohmann::json::parse(line).at("step"));
    return out;
  }
  void write_steps(std::int64_t from, std::int64_t to) {
    MetricsWriter writer(file_, from - 1);
    for (std::int64_t s = from; s <= to; ++s)
      writer.write(StepMetrics{.epoch = 1, .step = s, .samples = 8 * s});
  }

  fs::path folder_, file_;
};

TEST_F(Metrics, LinesAreAsDesigned) {
  {
    MetricsWriter writer(file_, 0);
    writer.write(StepMetrics{
        .epoch = 1, .step = 1, .loss = 0.1, .lr = 0.001, .grad_norm = 2.5, .samples = 64, .time_s = 0.25});
    writer.write(EvalMetrics{.epoch = 1, .step = 1, .loss = 0.5, .accuracy = 0.75, .samples = 360});
    writer.write(EvalMetrics{.epoch = 1, .step = 1, .loss = 0.5, .accuracy = {}, .samples = 360});
  }
  EXPECT_EQ(text(),
            "{\"event\":\"step\",\"epoch\":1,\"step\":1,\"loss\":0.1,\"lr\":0.001,\"grad_norm\":2.5,"
            "\"samples\":64,\"time_s\":0.25}\n"
            "{\"event\":\"eval\",\"epoch\":1,\"step\":1,\"loss\":0.5,\"accuracy\":0.75,\"samples\":360}\n"
            "{\"event\":\"eval\",\"epoch\":1,\"step\":1,\"loss\":0.5,\"samples\":360}\n");
}

TEST_F(Metrics, NumbersRoundTripAndSpecialOnesAreNull) {
  const std::vector<double> losses = {1.0 / 3, 0.1F, 5e-324, 1.7976931348623157e308, 2.3025850929940455};
  {
    MetricsWriter writer(file_, 0);
    for (const double loss : losses)
      writer.write(StepMetrics{.loss = loss, .grad_norm = std::numeric_limits<double>::infinity()});
    writer.write(StepMetrics{.loss = NAN});
  }
  std::ifstream in(file_);
  std::string line;
  for (const double loss : losses) {
    std::getline(in, line);
    EXPECT_EQ(nlohmann::json::parse(line).at("loss").get<double>(), loss);
    EXPECT_TRUE(nlohmann::json::parse(line).at("grad_norm").is_null());
  }
  std::getline(in, line);
  EXPECT_TRUE(nlohmann::json::parse(line).at("loss").is_null());
}

TEST_F(Metrics, ResumeCutsBackToTheCheckpoint) {
  write_steps(1, 5000);
  write_steps(4, 6);
  EXPECT_THAT(steps(), ElementsAre(1, 2, 3, 4, 5, 6));
  { const MetricsWriter writer(file_, 6); }
  EXPECT_EQ(steps().size(), 6U);
  std::ofstream(file_, std::ios::app) << "{\"event\":\"step\",\"st";  // killed within a line
  write_steps(7, 7);
  EXPECT_THAT(steps(), ElementsAre(1, 2, 3, 4, 5, 6, 7));
  std::ofstream(file_, std::ios::app)
      << "{\"event\":\"step\",\"step\":7}";  // whole, but its newline is not there
  { const MetricsWriter writer(file_, 7); }
  EXPECT_THAT(text(), EndsWith("}\n"));
  EXPECT_EQ(steps().size(), 7U);
  { const MetricsWriter writer(file_, 0); }
  EXPECT_THAT(text(), IsEmpty());
}

TEST_F(Metrics, LinesLongerThanABlockAreCutToo) {
  write_steps(1, 2);
  std::ofstream(file_, std::ios::app) << std::string(200000, 'x') << '\n' << std::string(70000, '\n');
  { const MetricsWriter writer(file_, 2); }
  EXPECT_THAT(steps(), ElementsAre(1, 2));
}

TEST_F(Metrics, FullDiskIsAnErrorAndLeavesWholeLines) {
  EXPECT_THROW(MetricsWriter(folder_ / "none/metrics.jsonl", 0), Error);
  const auto old_handler = ::signal(SIGXFSZ, SIG_IGN);
  rlimit old{};
  ::getrlimit(RLIMIT_FSIZE, &old);
  rlimit small = old;
  small.rlim_cur = 1000;
  std::string message;
  {
    MetricsWriter writer(file_, 0);
    ::setrlimit(RLIMIT_FSIZE, &small);
    try {
      for (int s = 1; s < 100; ++s) writer.write(StepMetrics{.step = s});
    } catch (const Error& error) {
      message = error.what();
    }
    ::setrlimit(RLIMIT_FSIZE, &old);
  }
  ::signal(SIGXFSZ, old_handler);
  EXPECT_THAT(message, HasSubstr("cannot write " + file_.string()));
  EXPECT_THAT(text(), EndsWith("}\n"));
  EXPECT_GT(steps().size(), 5U);
}

}  // namespace
}  // namespace onnxddp
