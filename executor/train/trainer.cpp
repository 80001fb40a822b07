#include "executor/train/trainer.h"

#include <chrono>
#include <cmath>
#include <nlohmann/json.hpp>
#include <thread>

#include "distributed/agreement.h"
#include "executor/cuda/loader.h"
#include "executor/report/memory.h"
#include "executor/report/metrics.h"
#include "executor/report/progress.h"
#include "executor/train/run_folder.h"
#include "executor/train/stepper.h"
#include "graph/text.h"

namespace onnxddp {
namespace {

using Clock = std::chrono::steady_clock;

double seconds_since(Clock::time_point begin) {
  return std::chrono::duration<double>(Clock::now() - begin).count();
}

/// What must be equal for a run to continue as if it had never stopped.
std::map<std::string, std::string> resume_facts(const TrainSetup& setup, int ranks) {
  const Options& o = setup.options;
  return {{"nproc-per-node", cat(ranks)},
          {"batch-size", cat(*o.batch_size)},
          {"accumulate", cat(o.accumulate)},
          {"seed", cat(o.seed)},
          {"no-shuffle", o.no_shuffle ? "true" : "false"},
          {"drop-last", o.drop_last ? "true" : "false"},
          {"drop-short-batch", o.drop_short_batch ? "true" : "false"},
          {"rows", cat(setup.data->size())}};
}

void check_facts(const std::map<std::string, std::string>& now,
                 const std::map<std::string, std::string>& then) {
  for (const auto& [key, value] : now) {
    const auto found = then.find(key);
    if (found == then.end() || found->second == value) continue;
    if (key == "rows")
      throw Error(cat("the run to resume had ", found->second, " rows of data, now there are ", value));
    throw usage_error(cat("the run to resume had ", key, " ", found->second, ", now it is ", value))
        .hint(cat("this version continues a run only with the same ", key, ": --", key, " ", found->second));
  }
}

std::string count_text(std::int64_t count) {
  if (count < 10'000) return cat(count);
  char text[32];
  std::snprintf(text, sizeof text, count < 10'000'000 ? "%.1f k" : "%.1f M",
                static_cast<double>(count) / (count < 10'000'000 ? 1e3 : 1e6));
  return text;
}

/// "72.6 KiB", "10.1 MiB".
std::string bytes_text(std::size_t bytes) {
  char text[32];
  const bool small = bytes < (std::size_t{1} << 20);
  std::snprintf(text, sizeof text, small ? "%.1f KiB" : "%.1f MiB",
                static_cast<double>(bytes) / (small ? 1 << 10 : 1 << 20));
  return text;
}

/// The schedule as given, with the unit that it counts in.
std::string schedule_text(const ScheduleSpec& schedule) {
  if (schedule.name == "constant") return schedule.name;
  std::string out = schedule.name;
  for (const auto& [key, value] : schedule.options)
    if (key != "unit") out += cat(" ", key, "=", value);
  const auto unit = schedule.options.find("unit");
  return cat(out, " (counted in ",
             unit != schedule.options.end() && unit->second == "epoch" ? "epochs" : "optimizer steps", ")");
}

/// One run on this rank.
class TrainingRun {
 public:
  TrainingRun(TrainSetup& setup, RankGroup& ranks, const TrainContext& context)
      : setup_(setup),
        o_(setup.options),
        ranks_(ranks),
        context_(context),
        first_(ranks.rank() == 0),
        signals_(ranks.launched()) {}

  int run();

 private:
  void open();
  bool resume();
  void share_position();
  void start_reports();
  void report_finished();
  std::vector<std::string> banner();
  void loop();
  void optimizer_step(BatchStream& stream, std::int64_t batches);
  void record(const StepResult& result, double lr, std::int64_t samples);
  void check_finite(const StepResult& result) const;
  void report_epoch();
  void run_evaluation();
  void save();
  void finish(bool completed, const std::string& reason);
  void finish_failed(const std::string& reason) noexcept;
  std::int64_t epochs() const;
  bool done() const { return stop_ != StopRequest::none || position_.step >= setup_.total_steps; }

  TrainSetup& setup_;
  Options& o_;
  RankGroup& ranks_;
  const TrainContext& context_;
  const bool first_;
  SignalWatch signals_;
  std::unique_ptr<Device> device_;
  std::unique_ptr<Session> session_;
  std::unique_ptr<Stepper> stepper_;
  std::unique_ptr<RunFolder> folder_;
  std::unique_ptr<MetricsWriter> metrics_;
  std::unique_ptr<Progress> progress_;
  std::vector<std::string> said_;
  ScheduleSpec schedule_;
  SaveEvery save_every_;
  Position position_;
  std::int64_t saved_step_ = -1;
  std::vector<Batch> group_;
  StopRequest stop_ = StopRequest::none;
  EvalResult evaluated_;
  bool has_evaluated_ = false, resumed_ = false;
  Clock::time_point begin_ = Clock::now(), loop_begin_, epoch_begin_, step_begin_;
  std::int64_t steps_here_ = 0,
               epoch_samples_before_ = 0;  // since this process began; of the epoch, before it
  double last_lr_ = 0, last_norm_ = 0;
};

void TrainingRun::open() {
  const std::string out = ranks_.on_rank_zero("folder", [&] {
    folder_ = std::make_unique<RunFolder>(o_);
    return folder_->path().string();
  });
  o_.out = out;
  Communicator& communicator = ranks_.communicator();
  o_.threads = thread_count(o_, ranks_.size());
  device_ = make_device(o_.device, static_cast<int>(*o_.threads));
  o_.device = device_->kind();
  o_.nproc_per_node = cat(ranks_.size());
  check_ranks_agree(setup_, communicator, context_.semantic(o_));
  session_ = std::make_unique<Session>(*device_, communicator);
  stepper_ = std::make_unique<Stepper>(setup_, *session_, communicator);
  const Spec schedule = parse_spec("--schedule", o_.schedule);
  schedule_ = {schedule.name, schedule.options};
  save_every_ = parse_save_every(o_.save_every);
}

/// Restores rank 0; tells all ranks where it stands. Returns whether there is something left to do.
bool TrainingRun::resume() {
  const std::string text = ranks_.on_rank_zero("resume", [&]() -> std::string {
    const std::optional<Checkpoint> checkpoint = folder_->resume(o_, said_);
    if (!checkpoint) return "";
    const TensorFile states = read_states(*checkpoint);
    check_facts(resume_facts(setup_, ranks_.size()), states.metadata);
    if (checkpoint->step >= setup_.total_steps)
      return nlohmann::json(states.metadata).dump();  // finished: nothing changes
    folder_->drop_newer(o_, checkpoint->step, said_);
    for (const std::string& line : context_.changes()) said_.push_back(line);
    restore(*session_, states, checkpoint->step);
    return nlohmann::json(states.metadata).dump();
  });
  broadcast_states(*session_, ranks_.communicator(), session_->state_names());
  if (text.empty()) return true;
  position_ = position_from(nlohmann::json::parse(text).get<std::map<std::string, std::string>>());
  saved_step_ = position_.step;
  resumed_ = true;
  if (position_.step >= setup_.total_steps) {
    said_.push_back(
        cat("the run in ", o_.out, " is finished: ", position_.step, " steps of ", setup_.total_steps));
    return false;
  }
  said_.push_back(cat("resumed at epoch ", position_.epoch + 1, ", step ", position_.step + 1, " of ",
                      setup_.total_steps, ", after ", position_.samples, " samples"));
  return true;
}

std::vector<std::string> TrainingRun::banner() {
  const std::int64_t batch = *o_.batch_size;
  const auto [trained, all] = count_values(setup_.model, setup_.programs.unused);
  DimBindings dims = setup_.dims;
  if (!fixed_batch(setup_.model)) dims[setup_.model.batch_symbol] = batch;
  const Plan& plan = session_->plan("step", dims);
  std::vector<std::string> lines;
  lines.push_back(cat("onnx-ddp ", context_.version, "  ", o_.model, " -> ", o_.out));
  lines.push_back("data     " + setup_.data_text);
  lines.push_back(cat("batch    ", ranks_.size(), ranks_.size() == 1 ? " rank x " : " ranks x ", batch,
                      o_.accumulate > 1 ? cat(" x ", o_.accumulate, " accumulated") : "", " = ",
                      batch * ranks_.size() * o_.accumulate, "; ", setup_.steps_per_epoch,
                      " steps an epoch, ", setup_.total_steps, " in all"));
  lines.push_back(
      cat("train    ", count_text(trained), " of ", count_text(all), " values; ", setup_.program_options.loss,
          "; ", o_.optimizer, ", lr ", number_str(*o_.lr), " ", schedule_text(schedule_),
          o_.warmup_steps > 0 ? cat(", warm-up ", o_.warmup_steps, " steps") : "", ", seed ", o_.seed));
  lines.push_back(cat("device   ", device_->name(), ranks_.size() == 1 ? "" : " a rank", ", ", o_.precision));
  lines.push_back(cat("plan     ", plan.steps.size(), " steps, ", plan.collectives,
                      plan.collectives == 1 ? " collective, " : " collectives, ",
                      bytes_text(session_->memory_bytes()), " a rank"));
  for (const std::string& name : setup_.programs.unused)
    lines.push_back(cat("unused   ", name, ": the loss does not depend on it"));
  for (const std::string& note : setup_.notes) lines.push_back("note     " + note);
  for (const std::string& warning : setup_.warnings) lines.push_back("warning  " + warning);
  for (const std::string& line : said_) lines.push_back("resume   " + line);
  return lines;
}

void TrainingRun::start_reports() {
  if (!first_) return;
  folder_->write("run.toml", context_.run_toml(o_));
  metrics_ =
      std::make_unique<MetricsWriter>(folder_->path() / "metrics.jsonl", resumed_ ? position_.step : 0);
  progress_ =
      std::make_unique<Progress>(stderr_progress(o_.quiet, context_.no_color, context_.dumb_terminal));
  progress_->begin(banner());
}

void TrainingRun::check_finite(const StepResult& result) const {
  if (o_.on_nan == "ignore" || (std::isfinite(result.loss) && std::isfinite(result.grad_norm))) return;
  const bool loss = !std::isfinite(result.loss);
  throw Error(cat("the ", loss ? "loss" : "gradients' norm", " is ",
                  number_str(loss ? result.loss : result.grad_norm), " at step ", position_.step, " (epoch ",
                  position_.epoch + 1, "): training has diverged"),
              kExitDiverged)
      .hint(cat("a smaller --lr (now ", number_str(*o_.lr),
                "), --warmup-steps, or --clip-norm 1; --on-nan ignore goes on"));
}

void TrainingRun::record(const StepResult& result, double lr, std::int64_t samples) {
  position_.samples += samples;
  position_.epoch_loss += result.loss * static_cast<double>(samples);
  position_.epoch_samples += samples;
  position_.last_loss = result.loss;
  if (!first_) return;
  const double seconds = seconds_since(step_begin_);
  if (position_.step % o_.log_every == 0 || position_.step == setup_.total_steps)
    metrics_->write(StepMetrics{position_.epoch + 1, position_.step, result.loss, lr, result.grad_norm,
                                position_.samples, seconds});
  last_lr_ = lr;
  last_norm_ = result.grad_norm;
  const double mean = seconds_since(loop_begin_) / static_cast<double>(++steps_here_);
  progress_->step({position_.epoch + 1, epochs(), position_.step, setup_.total_steps, result.loss, lr,
                   static_cast<double>(samples) / mean,
                   mean * static_cast<double>(setup_.total_steps - position_.step)});
}

std::int64_t TrainingRun::epochs() const {
  return (setup_.total_steps + setup_.steps_per_epoch - 1) / setup_.steps_per_epoch;
}

/// Takes the micro-batches of one step off the stream. `batches`: micro-batches an epoch.
void TrainingRun::optimizer_step(BatchStream& stream, std::int64_t batches) {
  step_begin_ = Clock::now();
  group_.clear();
  std::int64_t samples = 0;
  while (static_cast<std::int64_t>(group_.size()) < o_.accumulate && position_.batch < batches) {
    group_.push_back(stream.next());
    CHECK(group_.back().epoch == position_.epoch && group_.back().index == position_.batch);
    samples += group_.back().rows * ranks_.size();
    ++position_.batch;
  }
  const double lr = schedule_lr(schedule_, *o_.lr, position_.step, setup_.steps_per_epoch, setup_.total_steps,
                                o_.warmup_steps);
  const StepResult result = stepper_->run(group_, position_.step, lr, SignalWatch::request());
  ++position_.step;
  stop_ = result.stop;
  record(result, lr, samples);
  check_finite(result);
}

void TrainingRun::run_evaluation() {
  if (!setup_.eval_data) return;
  std::vector<std::string> buffers;  // with local statistics, rank 0's are the result
  for (const TensorRole& role : setup_.model.roles)
    if (role.role == Role::buffer && session_->has_state(role.name) && !o_.sync_bn)
      buffers.push_back(role.name);
  broadcast_states(*session_, ranks_.communicator(), buffers);
  evaluated_ = evaluate(*session_, ranks_.communicator(), *setup_.eval_data, *o_.batch_size,
                        setup_.programs.loss, setup_.model.batch_symbol, setup_.dims);
  has_evaluated_ = true;
  Position& p = position_;
  const bool better =
      !p.has_best || (evaluated_.has_accuracy && evaluated_.accuracy > p.best_accuracy) ||
      ((!evaluated_.has_accuracy || evaluated_.accuracy == p.best_accuracy) && evaluated_.loss < p.best_loss);
  if (better) {
    p.has_best = true;
    p.best_loss = evaluated_.loss;
    p.best_accuracy = evaluated_.accuracy;
    p.best_epoch = p.epoch + 1;
  }
  if (!first_) return;
  if (better) folder_->save_best(*session_, setup_.model);
  EvalMetrics metrics{p.epoch + 1, p.step, evaluated_.loss, std::nullopt, evaluated_.samples};
  if (evaluated_.has_accuracy) metrics.accuracy = evaluated_.accuracy;
  metrics_->write(metrics);
}

/// At the end of an epoch, or of a run that ends within one.
void TrainingRun::report_epoch() {
  run_evaluation();
  if (!first_) return;
  ProgressEpoch row;
  row.epoch = position_.epoch + 1;
  row.train_loss =
      position_.epoch_samples > 0 ? position_.epoch_loss / static_cast<double>(position_.epoch_samples) : 0;
  if (has_evaluated_) row.eval_loss = evaluated_.loss;
  if (has_evaluated_ && evaluated_.has_accuracy) row.accuracy = evaluated_.accuracy;
  row.best = has_evaluated_ && position_.best_epoch == row.epoch;
  row.lr = last_lr_;
  row.grad_norm = last_norm_;
  row.seconds = seconds_since(epoch_begin_);
  row.samples_per_s =
      static_cast<double>(position_.epoch_samples - epoch_samples_before_) / std::max(row.seconds, 1e-9);
  progress_->epoch(row);
}

void TrainingRun::save() {
  if (saved_step_ == position_.step) return;
  saved_step_ = position_.step;
  if (!first_) return;
  folder_->save(*session_, setup_.model, position_, resume_facts(setup_, ranks_.size()),
                context_.run_toml(o_), static_cast<int>(o_.keep));
}

void TrainingRun::loop() {
  const std::int64_t batches = setup_.sampler->batches_per_epoch();
  epoch_samples_before_ = position_.epoch_samples;
  loop_begin_ = epoch_begin_ = Clock::now();
  BatchStream stream(*setup_.data, *setup_.sampler, position_.epoch, position_.batch);
  while (!done()) {
    optimizer_step(stream, batches);
    const bool epoch_ends = position_.batch >= batches;
    if (epoch_ends || position_.step == setup_.total_steps) report_epoch();
    if (epoch_ends) {
      ++position_.epoch;
      position_.batch = 0;
      position_.epoch_loss = 0;
      position_.epoch_samples = 0;
      epoch_samples_before_ = 0;
      epoch_begin_ = Clock::now();
    }
    const bool by_steps = save_every_.steps > 0 && position_.step % save_every_.steps == 0;
    const bool by_epochs = save_every_.epochs > 0 && epoch_ends && position_.epoch % save_every_.epochs == 0;
    if (by_steps || by_epochs) save();
  }
}

void TrainingRun::finish(bool completed, const std::string& reason) {
  if (!first_) return;
  if (completed) folder_->finish();
  nlohmann::ordered_json summary = {{"completed", completed},
                                    {"reason", reason},
                                    {"model", o_.model},
                                    {"epochs", position_.epoch},
                                    {"steps", position_.step},
                                    {"total_steps", setup_.total_steps},
                                    {"samples", position_.samples},
                                    {"loss", position_.last_loss},
                                    {"ranks", ranks_.size()},
                                    {"seconds", seconds_since(begin_)},
                                    {"peak_rss_mb", peak_rss_mb()}};
  if (position_.has_best) {
    summary["best"] = {{"epoch", position_.best_epoch}, {"loss", position_.best_loss}};
    if (evaluated_.has_accuracy) summary["best"]["accuracy"] = position_.best_accuracy;
  }
  folder_->write("summary.json", summary.dump(2) + "\n");
}

/// The run to resume has all its steps: says so and changes nothing, but for a model that it did not come to
/// write.
void TrainingRun::report_finished() {
  if (!first_) return;
  std::error_code error;
  if (!std::filesystem::exists(folder_->path() / "model.onnx", error)) folder_->finish();
  if (o_.quiet) return;
  for (const std::string& line : said_) std::fprintf(stderr, "resume   %s\n", line.c_str());
}

/// The summary of a run that an error ends; the error matters more than a disk that is full besides.
void TrainingRun::finish_failed(const std::string& reason) noexcept {
  try {
    finish(false, reason);
  } catch (const std::exception&) {
  }
}

int TrainingRun::run() {
  open();
  if (!resume()) {
    report_finished();
    return kExitDone;
  }
  start_reports();
  try {
    loop();
  } catch (const Error& error) {
    finish_failed(error.exit_code() == kExitDiverged ? "diverged"
                  : error.exit_code() == kExitPeer   ? "a peer failed"
                                                     : "failed");
    throw;
  }
  save();
  const bool completed = position_.step >= setup_.total_steps;
  finish(completed, completed ? "done" : stop_ == StopRequest::interrupt ? "interrupted" : "asked to stop");
  if (first_) {
    std::vector<std::string> lines;
    lines.push_back(cat(completed ? "done     " : "stopped  ", position_.step, " of ", setup_.total_steps,
                        " steps; the model is ", o_.out, completed ? "/model.onnx" : "/last.onnx"));
    if (!completed) lines.push_back(cat("next     onnx-ddp train ", o_.model, " --resume ", o_.out));
    progress_->end(lines);
  }
  ranks_.communicator().barrier();  // nobody leaves while rank 0 still writes: its failure is everybody's
  return completed || stop_ != StopRequest::interrupt ? kExitDone : kExitInterrupted;
}

}  // namespace

int thread_count(const Options& options, int ranks) {
  if (options.threads) return static_cast<int>(*options.threads);
  return std::max(1, static_cast<int>(std::thread::hardware_concurrency()) / ranks);
}

void check_ranks_agree(const TrainSetup& setup, Communicator& communicator, const std::string& semantic) {
  if (communicator.size() == 1) return;
  std::vector<std::pair<std::string, std::string>> items = {{"graph", dump(setup.programs.step)},
                                                            {"options", semantic},
                                                            {"data", setup.data->data().fingerprint()}};
  if (setup.eval_data) items.emplace_back("evaluation data", setup.eval_data->data().fingerprint());
  check_agreement(communicator, items);
}

int train(TrainSetup& setup, RankGroup& ranks, const TrainContext& context) {
  return TrainingRun(setup, ranks, context).run();
}

}  // namespace onnxddp
