// onnx-ddp bench
#include <algorithm>
#include <chrono>
#include <cstdio>
#include <nlohmann/json.hpp>
#include <numeric>

#include "executor/cli/commands.h"
#include "executor/cli/run_command.h"
#include "executor/cuda/loader.h"
#include "executor/report/memory.h"
#include "executor/train/stepper.h"
#include "executor/train/trainer.h"

namespace onnxddp {
namespace {

/// Seconds of each of `steps` training steps, after `warmup` that are not counted; whole steps, with data and
/// learning rate.
std::vector<double> time_steps(TrainSetup& setup, Stepper& stepper, std::int64_t steps, std::int64_t warmup) {
  const Options& o = setup.options;
  const Spec spec = parse_spec("--schedule", o.schedule);
  const ScheduleSpec schedule{spec.name, spec.options};
  BatchStream stream(*setup.data, *setup.sampler, 0, 0);
  std::vector<double> seconds(static_cast<std::size_t>(steps));
  std::vector<Batch> group;
  for (std::int64_t step = 0; step < warmup + steps; ++step) {
    const auto begin = std::chrono::steady_clock::now();
    group.clear();
    for (std::int64_t k = 0; k < o.accumulate; ++k) group.push_back(stream.next());
    stepper.run(group, step,
                schedule_lr(schedule, *o.lr, step, setup.steps_per_epoch, warmup + steps, o.warmup_steps));
    if (step >= warmup)
      seconds[static_cast<std::size_t>(step - warmup)] =
          std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
  }
  return seconds;
}

double median(std::vector<double> values) {
  std::sort(values.begin(), values.end());
  const std::size_t half = values.size() / 2;
  return values.size() % 2 == 1 ? values[half] : (values[half - 1] + values[half]) / 2;
}

/// The largest resident memory that any rank has had.
double peak_mb(Communicator& communicator) {
  const double mine = peak_rss_mb();
  std::vector<double> all(static_cast<std::size_t>(communicator.size()), mine);
  if (communicator.size() > 1) communicator.all_gather(&mine, sizeof mine, all.data());
  return *std::max_element(all.begin(), all.end());
}

}  // namespace

int run_bench(CommandLine& line) {
  const Options& options = line.options;
  return run_in_ranks(line, options, [&](RankGroup& ranks) {
    Options defaults = options;
    if (!defaults.steps) defaults.steps = 100;
    TrainSetup setup = prepare_training(defaults, ranks.rank(), ranks.size());
    const Options& o = setup.options;
    Communicator& communicator = ranks.communicator();
    const std::unique_ptr<Device> device = make_device(o.device, thread_count(o, ranks.size()));
    check_ranks_agree(setup, communicator, semantic_text(o, kBench));
    Session session(*device, communicator);
    Stepper stepper(setup, session, communicator);
    const std::vector<double> seconds = time_steps(setup, stepper, *o.steps, o.warmup);
    const double middle = median(seconds), rss = peak_mb(communicator);
    if (ranks.rank() != 0) return static_cast<int>(kExitDone);
    const std::int64_t samples = *o.batch_size * ranks.size() * o.accumulate;
    const nlohmann::ordered_json result = {
        {"model", o.model},
        {"median_s", middle},
        {"min_s", *std::min_element(seconds.begin(), seconds.end())},
        {"mean_s",
         std::accumulate(seconds.begin(), seconds.end(), 0.0) / static_cast<double>(seconds.size())},
        {"samples_per_s", static_cast<double>(samples) / middle},
        {"peak_rss_mb", rss},
        {"ranks", ranks.size()},
        {"threads", device->threads()},
        {"batch", *o.batch_size},
        {"accumulate", o.accumulate},
        {"device", device->kind()},
        {"steps", *o.steps},
        {"warmup", o.warmup},
        {"memory_mb", static_cast<double>(session.memory_bytes()) / (1 << 20)},
        {"version", ONNXDDP_VERSION}};
    std::printf("%s\n", result.dump().c_str());
    std::fflush(stdout);
    return static_cast<int>(kExitDone);
  });
}

}  // namespace onnxddp
