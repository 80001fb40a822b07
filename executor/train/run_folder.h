// RUN_DIR: choosing it, resuming from it, saving into it. Only rank 0 writes.
#pragma once

#include <filesystem>
#include <map>
#include <memory>
#include <optional>
#include <string>

#include "executor/plan/session.h"
#include "executor/train/options.h"
#include "importer/checkpoint.h"
#include "importer/importer.h"

namespace ONNXDDP_API onnxddp {

/// Whether the folder holds a run.
bool holds_run(const std::filesystem::path& folder);
/// The newest runs/STEM-N of this model, or nothing.
std::optional<std::filesystem::path> newest_run(const std::filesystem::path& model);
/// What --resume means: the run's folder, and the file of its options. Nothing: there is no run, so start
/// one.
struct ResumeSource {
  std::filesystem::path run, options_file;
};
std::optional<ResumeSource> find_resume(const Options& options);
/// The model file that RUN, a checkpoint's folder or a file stands for: best, else last; throws a usage
/// Error.
std::filesystem::path model_of(const std::filesystem::path& run_or_file);

/// Where training stands.
struct Position {
  std::int64_t step = 0;              // optimizer steps done
  std::int64_t epoch = 0, batch = 0;  // the next micro-batch
  std::int64_t samples = 0;           // global, since the start
  double epoch_loss = 0;              // sum of the losses of this epoch's steps, times their samples
  std::int64_t epoch_samples = 0;
  bool has_best = false;
  double best_loss = 0, best_accuracy = 0;
  std::int64_t best_epoch = 0;
  double last_loss = 0;
};
std::map<std::string, std::string> to_text(const Position& position);
Position position_from(const std::map<std::string, std::string>& text);

/// The model to train: MODEL; where a run goes on and MODEL is gone, the checkpoint's own copy, whose
/// payloads are `values` and of which `note` tells.
struct ModelSource {
  std::shared_ptr<const OnnxModel> file;
  std::map<std::string, HostTensor> values;
  std::string note;
};
ModelSource open_model(const Options& options);

class RunFolder {
 public:
  /// Opens the options' RUN_DIR (or the next free runs/STEM-N), creates and locks it. Throws Error when it
  /// cannot be written or is in use, a usage Error when it holds a run and nothing says to resume.
  explicit RunFolder(const Options& options);
  const std::filesystem::path& path() const { return path_; }

  /// The checkpoint that options.resume names: the newest whole one of this run, or the given one; nothing:
  /// start from the beginning. `said`: lines for the user.
  std::optional<Checkpoint> resume(const Options& options, std::vector<std::string>& said) const;

  /// Going on from a checkpoint that options.resume names by itself: its successors in this run go.
  void drop_newer(const Options& options, std::int64_t step, std::vector<std::string>& said) const;

  /// A checkpoint, and last.onnx. `facts` go into state.onnx beside the position.
  void save(const Session& session, const ImportedModel& model, const Position& position,
            const std::map<std::string, std::string>& facts, const std::string& run_toml, int keep);
  /// best.onnx from the session's present state.
  void save_best(const Session& session, const ImportedModel& model);
  /// model.onnx: best.onnx if there is one, else last.onnx.
  void finish();
  void write(const std::string& name, const std::string& bytes);

 private:
  std::filesystem::path path_;
  std::unique_ptr<RunLock> lock_;
};

/// Values of the model as the session holds them now.
std::map<std::string, HostTensor> model_values(const Session& session, const ImportedModel& model);
/// The states of a checkpoint, with its metadata.
TensorFile read_states(const Checkpoint& checkpoint);
/// Sets all states of the session; throws Error if they do not fit.
void restore(Session& session, const TensorFile& states, std::int64_t step);

}  // namespace onnxddp
