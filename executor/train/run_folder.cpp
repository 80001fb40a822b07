#include "executor/train/run_folder.h"

#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <charconv>
#include <cstring>

namespace onnxddp {
namespace fs = std::filesystem;
namespace {

/// N of `STEM-N`, or -1.
std::int64_t run_number(const std::string& name, const std::string& stem) {
  if (!name.starts_with(stem + "-")) return -1;
  std::int64_t number = -1;
  const char *begin = name.data() + stem.size() + 1, *end = name.data() + name.size();
  const auto [stop, error] = std::from_chars(begin, end, number);
  return error == std::errc() && stop == end ? number : -1;
}

std::int64_t last_number(const fs::path& model) {
  std::int64_t last = 0;
  std::error_code error;
  for (fs::directory_iterator it("runs", error), end; !error && it != end; it.increment(error))
    last = std::max(last, run_number(it->path().filename().string(), model.stem().string()));
  return last;
}

[[noreturn]] void not_writable(const fs::path& folder, const std::string& why) {
  throw Error(cat("cannot write to the run's folder '", folder.string(), "': ", why))
      .hint("--out RUN_DIR chooses another");
}

void make_folders(const fs::path& folder) {
  std::error_code error;
  fs::create_directories(folder, error);
  if (error) not_writable(folder, error.message());
  if (!fs::is_directory(folder, error)) not_writable(folder, "it is not a folder");
  if (access(folder.c_str(), W_OK | X_OK) != 0) not_writable(folder, std::strerror(errno));
}

/// runs/STEM-N with the next free N; mkdir decides between runs that start together.
fs::path next_run(const fs::path& model) {
  make_folders("runs");
  for (std::int64_t number = last_number(model) + 1;; ++number) {
    fs::path folder = fs::path("runs") / cat(model.stem().string(), "-", number);
    if (mkdir(folder.c_str(), 0777) == 0) return folder;
    if (errno != EEXIST) not_writable(folder, std::strerror(errno));
  }
}

bool is_checkpoint(const fs::path& folder) { return fs::exists(folder / "manifest.json"); }

/// The run goes on from an earlier step: what it had saved after that is of another history.
void remove_newer(const fs::path& run, std::int64_t step, std::vector<std::string>& said) {
  if (!real_file_system().exists(run / "checkpoints")) return;
  for (const std::string& name : real_file_system().list(run / "checkpoints")) {
    const std::int64_t number = run_number(name, "step");
    if (number <= step) continue;
    real_file_system().remove_all(run / "checkpoints" / name);
    said.push_back("removed the newer checkpoint " + name);
  }
}

/// The checkpoint that --resume means, in the folder --out.
std::optional<Checkpoint> find_checkpoint(const Options& options, std::vector<std::string>* skipped) {
  if (is_checkpoint(options.resume)) return read_checkpoint(real_file_system(), options.resume);
  return newest_checkpoint(real_file_system(), options.out, skipped);
}

double number(const std::map<std::string, std::string>& text, const std::string& key) {
  const auto found = text.find(key);
  if (found == text.end()) throw Error(cat("the checkpoint does not say '", key, "'"));
  return std::strtod(found->second.c_str(), nullptr);
}

std::int64_t whole(const std::map<std::string, std::string>& text, const std::string& key) {
  number(text, key);
  return std::strtoll(text.at(key).c_str(), nullptr, 10);
}

}  // namespace

bool holds_run(const fs::path& folder) {
  std::error_code error;
  for (const char* name : {"run.toml", "metrics.jsonl", "checkpoints"})
    if (fs::exists(folder / name, error)) return true;
  return false;
}

std::optional<fs::path> newest_run(const fs::path& model) {
  for (std::int64_t number = last_number(model); number > 0; --number) {
    fs::path folder = fs::path("runs") / cat(model.stem().string(), "-", number);
    if (holds_run(folder)) return folder;
  }
  return std::nullopt;
}

std::optional<ResumeSource> find_resume(const Options& options) {
  fs::path run = options.out;
  if (options.resume != "auto") {
    const fs::path given = options.resume;
    if (is_checkpoint(given)) {
      const fs::path absolute = fs::absolute(given).lexically_normal();
      const fs::path folder = absolute.filename().empty() ? absolute.parent_path() : absolute;
      run = options.out.empty() ? folder.parent_path().parent_path() : fs::path(options.out);
      return ResumeSource{run, given / "run.toml"};
    }
    if (!holds_run(given))
      throw usage_error(cat("--resume: '", options.resume, "' is neither a run's folder nor a checkpoint"))
          .hint("--resume auto takes the newest checkpoint of --out, or of runs/STEM-*");
    run = given;
  } else if (run.empty()) {
    run = newest_run(options.model).value_or(fs::path());
  }
  if (run.empty() || !holds_run(run)) return std::nullopt;
  return ResumeSource{run, run / "run.toml"};
}

fs::path model_of(const fs::path& run_or_file) {
  std::error_code error;
  if (!fs::is_directory(run_or_file, error)) return run_or_file;
  for (const char* name : {"best.onnx", "last.onnx", "model.onnx"})
    if (fs::exists(run_or_file / name, error)) return run_or_file / name;
  throw usage_error(
      cat("'", run_or_file.string(), "' holds no model: there is no best.onnx, last.onnx or model.onnx"))
      .hint("give a model file, a RUN_DIR or a checkpoint's folder");
}

std::map<std::string, std::string> to_text(const Position& p) {
  return {{"step", cat(p.step)},
          {"epoch", cat(p.epoch)},
          {"batch", cat(p.batch)},
          {"samples", cat(p.samples)},
          {"epoch_loss", number_str(p.epoch_loss)},
          {"epoch_samples", cat(p.epoch_samples)},
          {"has_best", cat(p.has_best)},
          {"best_loss", number_str(p.best_loss)},
          {"best_accuracy", number_str(p.best_accuracy)},
          {"best_epoch", cat(p.best_epoch)},
          {"last_loss", number_str(p.last_loss)}};
}

Position position_from(const std::map<std::string, std::string>& text) {
  Position p;
  p.step = whole(text, "step");
  p.epoch = whole(text, "epoch");
  p.batch = whole(text, "batch");
  p.samples = whole(text, "samples");
  p.epoch_loss = number(text, "epoch_loss");
  p.epoch_samples = whole(text, "epoch_samples");
  p.has_best = whole(text, "has_best") != 0;
  p.best_loss = number(text, "best_loss");
  p.best_accuracy = number(text, "best_accuracy");
  p.best_epoch = whole(text, "best_epoch");
  p.last_loss = number(text, "last_loss");
  return p;
}

ModelSource open_model(const Options& options) {
  std::error_code error;
  std::optional<Checkpoint> checkpoint;
  if (!options.resume.empty() && !fs::exists(options.model, error))
    checkpoint = find_checkpoint(options, nullptr);
  if (!checkpoint) return {load_onnx(options.model), {}, ""};
  const auto file = checkpoint->files.find("source.onnx");
  if (file == checkpoint->files.end()) throw Error("the checkpoint has no source.onnx");
  return {load_onnx_bytes(file->second, "source.onnx"), read_states(*checkpoint).tensors,
          cat("'", options.model, "' is gone: the model is the copy in the checkpoint of step ",
              checkpoint->step)};
}

RunFolder::RunFolder(const Options& options) {
  if (options.out.empty()) {
    path_ = next_run(options.model);
  } else {
    path_ = options.out;
    if (options.resume.empty() && holds_run(path_))
      throw usage_error(cat("'", path_.string(), "' already holds a run"))
          .hint("--resume auto continues it; --out takes another folder");
    make_folders(path_);
  }
  lock_ = std::make_unique<RunLock>(path_);
}

std::optional<Checkpoint> RunFolder::resume(const Options& options, std::vector<std::string>& said) const {
  if (options.resume.empty()) return std::nullopt;
  std::vector<std::string> skipped;
  std::optional<Checkpoint> found = find_checkpoint(options, &skipped);
  for (const std::string& name : skipped) said.push_back("skipped a damaged checkpoint: " + name);
  if (!found) said.push_back(cat(path_.string(), " holds no whole checkpoint: starting from the beginning"));
  return found;
}

void RunFolder::drop_newer(const Options& options, std::int64_t step, std::vector<std::string>& said) const {
  if (is_checkpoint(options.resume)) remove_newer(path_, step, said);
}

std::map<std::string, HostTensor> model_values(const Session& session, const ImportedModel& model) {
  std::map<std::string, HostTensor> values = model.values;
  for (auto& [name, value] : values)
    if (session.has_state(name)) value = session.get_state(name);
  return values;
}

void RunFolder::save(const Session& session, const ImportedModel& model, const Position& position,
                     const std::map<std::string, std::string>& facts, const std::string& run_toml, int keep) {
  std::map<std::string, HostTensor> states = model_values(session, model);
  for (const std::string& name : session.state_names()) states[name] = session.get_state(name);
  std::map<std::string, std::string> metadata = to_text(position);
  metadata.insert(facts.begin(), facts.end());
  Checkpoint checkpoint;
  checkpoint.step = position.step;
  checkpoint.files["model.onnx"] = save_trained(*model.source, model_values(session, model));
  checkpoint.files["state.onnx"] = tensors_to_onnx(states, metadata);
  checkpoint.files["source.onnx"] = source_without_payloads(*model.source);
  checkpoint.files["run.toml"] = run_toml;
  write_checkpoint(real_file_system(), path_, checkpoint, keep);
  write("last.onnx", checkpoint.files["model.onnx"]);
}

void RunFolder::save_best(const Session& session, const ImportedModel& model) {
  write("best.onnx", save_trained(*model.source, model_values(session, model)));
}

void RunFolder::finish() { write("model.onnx", real_file_system().read_file(model_of(path_))); }

void RunFolder::write(const std::string& name, const std::string& bytes) {
  replace_file(real_file_system(), path_ / name, bytes);
}

TensorFile read_states(const Checkpoint& checkpoint) {
  const auto file = checkpoint.files.find("state.onnx");
  if (file == checkpoint.files.end()) throw Error("the checkpoint has no state.onnx");
  return tensors_from_onnx(file->second, "state.onnx");
}

void restore(Session& session, const TensorFile& states, std::int64_t step) {
  for (const std::string& name : session.state_names()) {
    const auto found = states.tensors.find(name);
    if (found == states.tensors.end())
      throw Error(cat("the checkpoint does not fit: it has no '", name, "'"))
          .hint("resume with the same model, optimizer and options");
    try {
      session.set_state(name, found->second);
    } catch (Error& error) {
      error.add_in("the checkpoint of step " + cat(step));
      error.add_hint("resume with the same model, optimizer and options");
      throw;
    }
  }
}

}  // namespace onnxddp
