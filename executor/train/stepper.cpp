#include "executor/train/stepper.h"

#include <algorithm>
#include <numeric>

namespace onnxddp {
namespace {

const std::string kHyper = "optimizer.group0", kRandom = "rng", kStop = "stop.request";
/// Requests of ranks are summed: any interrupt outweighs all stops.
constexpr double kInterruptWeight = 65536;

std::size_t column(const std::vector<std::string>& columns, const std::string& name) {
  const auto found = std::find(columns.begin(), columns.end(), name);
  CHECK(found != columns.end(), name);
  return static_cast<std::size_t>(found - columns.begin());
}

bool has_output(const Graph& graph, const std::string& name) {
  return std::any_of(graph.outputs.begin(), graph.outputs.end(),
                     [&](const Output& o) { return o.name == name; });
}

}  // namespace

void set_values(Session& session, const std::map<std::string, HostTensor>& values) {
  for (const auto& [name, value] : values)
    if (session.has_state(name)) session.set_state(name, value);
}

Stepper::Stepper(const TrainSetup& setup, Session& session, Communicator& communicator)
    : setup_(setup), session_(session), communicator_(communicator) {
  session.add_program("step", setup.programs.step);
  if (setup.programs.micro) session.add_program("micro", *setup.programs.micro);
  if (setup.eval_data) session.add_program("evaluate", setup.programs.evaluate);
  if (!setup.programs.loss.static_count) add_count_program();
  set_values(session, setup.model.values);
  const OptimizerSpec& optimizer = setup.program_options.optimizer;
  const std::vector<std::string> columns = hyper_columns(optimizer);
  const std::vector<double> defaults = hyper_defaults(optimizer);
  hyper_ = HostTensor(DType::f64, {static_cast<std::int64_t>(columns.size())});
  for (std::size_t i = 0; i < defaults.size(); ++i)
    hyper_.mutable_data<double>()[columns.size() - defaults.size() + i] = defaults[i];
  lr_column_ = column(columns, "lr");
  step_column_ = column(columns, "step");
  has_random_ = session.has_state(kRandom);
  if (has_random_) random_ = HostTensor(DType::i64, {5});
  has_stop_ = has_output(setup.programs.step, "stop");
  has_norm_ = has_output(setup.programs.step, "grad_norm");
  fetch_ = {"loss"};
  if (has_norm_) fetch_.emplace_back("grad_norm");
  if (has_stop_) fetch_.emplace_back("stop");
}

/// The count of kept targets alone, from the targets alone.
void Stepper::add_count_program() {
  Graph graph = setup_.programs.evaluate;
  graph.name = "denominators";
  graph.updates.clear();
  std::erase_if(graph.outputs, [](const Output& output) { return output.name != "loss.count"; });
  remove_dead(graph);
  std::erase_if(graph.inputs,
                [&](ValueId id) { return graph.value(id).name != setup_.programs.loss.target; });
  session_.add_program("denominators", graph);
}

double Stepper::denominator(std::span<const Batch> micro_batches) {
  const LossInfo& loss = setup_.programs.loss;
  if (!loss.static_count) {
    double sum = 0;
    for (const Batch& batch : micro_batches) {
      Feeds feeds;
      feeds.emplace(loss.target, batch.feeds.find(loss.target)->second);
      sum += session_.run("denominators", feeds, {"loss.count"}).begin()->second.as_double(0);
    }
    if (communicator_.size() > 1) communicator_.all_reduce(&sum, 1, DType::f64);
    return sum;
  }
  const auto same = [&](std::size_t i) { return sizes_[i] == micro_batches[i].rows; };
  bool known = denominator_ >= 0 && sizes_.size() == micro_batches.size();
  for (std::size_t i = 0; known && i < sizes_.size(); ++i) known = same(i);
  if (known) return denominator_;
  sizes_.clear();
  double sum = 0;
  for (const Batch& batch : micro_batches) {
    sizes_.push_back(batch.rows);
    sum += static_count(loss, setup_.model.batch_symbol, setup_.dims, batch.rows);
  }
  return sum * communicator_.size();  // every rank has batches of the same sizes
}

void Stepper::set_random(std::int64_t step, std::int64_t micro) {
  if (!has_random_) return;
  const std::int64_t state[5] = {setup_.options.seed, step, micro, communicator_.rank(),
                                 communicator_.size()};
  std::copy(state, state + 5, random_.mutable_data<std::int64_t>());
  session_.set_state(kRandom, random_);
}

StepResult Stepper::run(std::span<const Batch> micro_batches, std::int64_t step, double lr, StopRequest ask) {
  communicator_.note_step(step + 1);
  if (const double d = denominator(micro_batches); d != denominator_) {
    // All targets ignored: nothing to learn from, and no division by zero.
    session_.set_scalar("loss.denominator", d > 0 ? d : 1);
    denominator_ = d;
  }
  hyper_.mutable_data<double>()[lr_column_] = lr;
  hyper_.mutable_data<double>()[step_column_] = static_cast<double>(step + 1);
  session_.set_state(kHyper, hyper_);
  if (has_stop_ && ask != asked_) {
    session_.set_scalar(kStop, ask == StopRequest::interrupt ? kInterruptWeight
                               : ask == StopRequest::stop    ? 1
                                                             : 0);
    asked_ = ask;
  }
  for (std::size_t i = 0; i + 1 < micro_batches.size(); ++i) {
    set_random(step, static_cast<std::int64_t>(i));
    session_.run("micro", micro_batches[i].feeds, {"loss"});
  }
  set_random(step, static_cast<std::int64_t>(micro_batches.size()) - 1);
  const Feeds out = session_.run("step", micro_batches.back().feeds, fetch_);
  StepResult result;
  result.loss = out.find("loss")->second.as_double(0);
  if (has_norm_) result.grad_norm = out.find("grad_norm")->second.as_double(0);
  result.stop = ask;
  if (has_stop_) {
    const double sum = out.find("stop")->second.as_double(0);
    result.stop = sum >= kInterruptWeight ? StopRequest::interrupt
                  : sum > 0               ? StopRequest::stop
                                          : StopRequest::none;
  }
  return result;
}

EvalResult evaluate(Session& session, Communicator& communicator, const BatchSource& data,
                    std::int64_t batch_size, const LossInfo& loss, const std::string& batch_symbol,
                    const DimBindings& dims) {
  const Graph& graph = session.program("evaluate");
  const bool correct = has_output(graph, "correct");
  std::vector<std::string> fetch = {"loss.sum"};
  if (!loss.static_count) fetch.emplace_back("loss.count");
  if (correct) fetch.emplace_back("correct");
  const std::int64_t rank = communicator.rank(), ranks = communicator.size();
  const std::int64_t end = data.size() * (rank + 1) / ranks;
  double sums[3] = {};  // loss, count, correct
  std::vector<std::int64_t> rows;
  for (std::int64_t begin = data.size() * rank / ranks; begin < end; begin += batch_size) {
    rows.resize(static_cast<std::size_t>(std::min(batch_size, end - begin)));
    std::iota(rows.begin(), rows.end(), begin);
    const Feeds out = session.run("evaluate", data.batch(rows), fetch);
    sums[0] += out.find("loss.sum")->second.as_double(0);
    sums[1] += loss.static_count
                   ? static_count(loss, batch_symbol, dims, static_cast<std::int64_t>(rows.size()))
                   : out.find("loss.count")->second.as_double(0);
    if (correct) sums[2] += out.find("correct")->second.as_double(0);
  }
  if (ranks > 1) communicator.all_reduce(sums, 3, DType::f64);
  EvalResult result;
  result.samples = data.size();
  result.loss = sums[1] > 0 ? sums[0] / sums[1] : 0;
  result.has_accuracy = correct;
  if (correct) result.accuracy = sums[1] > 0 ? sums[2] / sums[1] : 0;
  return result;
}

void broadcast_states(Session& session, Communicator& communicator, const std::vector<std::string>& names) {
  if (communicator.size() == 1) return;
  for (const std::string& name : names) {
    HostTensor value = session.get_state(name);
    if (value.bytes() == 0) continue;
    communicator.broadcast(value.mutable_raw(), value.bytes(), 0);
    if (communicator.rank() != 0) session.set_state(name, value);
  }
}

}  // namespace onnxddp
