// Checkpoint folders written by a crash-safe protocol (reliability.md section 4) over a small file-system
// interface.
#pragma once

#include <cstdint>
#include <filesystem>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "graph/tensor.h"

namespace ONNXDDP_API onnxddp {

/// The calls the protocol makes, so that tests can fail or cut each of them.
class FileSystem {
 public:
  virtual ~FileSystem() = default;
  /// Writes a whole new file and fsyncs it. Throws Error with errno's text and the path.
  virtual void write_file(const std::filesystem::path& path, const std::string& bytes) = 0;
  virtual std::string read_file(const std::filesystem::path& path) const = 0;
  /// Bytes of a regular file; throws Error for anything else (links too).
  virtual std::uint64_t file_size(const std::filesystem::path& path) const = 0;
  virtual bool exists(const std::filesystem::path& path) const = 0;
  /// Names in a folder, sorted; throws Error for anything else (links too).
  virtual std::vector<std::string> list(const std::filesystem::path& folder) const = 0;
  /// Makes the folder and its parents; no error if it is there.
  virtual void create_directories(const std::filesystem::path& folder) = 0;
  /// Replaces a file `to`.
  virtual void rename(const std::filesystem::path& from, const std::filesystem::path& to) = 0;
  /// Throws Error if `to` exists.
  virtual void rename_new(const std::filesystem::path& from, const std::filesystem::path& to) = 0;
  virtual void sync_directory(const std::filesystem::path& folder) = 0;
  /// A file, or a folder with the files in it; no error if it is not there. Never follows links, and refuses
  /// a folder that holds folders: checkpoints have none.
  virtual void remove_all(const std::filesystem::path& path) = 0;
};
FileSystem& real_file_system();

/// The files of one checkpoint by name: model.onnx, state.onnx, source.onnx, run.toml. manifest.json is ours.
struct Checkpoint {
  std::int64_t step = 0;
  std::map<std::string, std::string> files;
};

/// Writes RUN/checkpoints/step-XXXXXXXX atomically (temporary folder, fsync, manifest with sizes and XXH3
/// checksums and format version, rename), then removes old ones beyond `keep` (never the newest whole one). A
/// failure leaves the earlier checkpoints untouched and removes what was half written. If the step's
/// checkpoint exists with the same contents nothing is written; a torn one is replaced; a whole but different
/// one is an Error. Returns warnings: old folders that could not be removed. The caller holds the RunLock.
std::vector<std::string> write_checkpoint(FileSystem& fs, const std::filesystem::path& run,
                                          const Checkpoint& checkpoint, int keep);
/// RUN/checkpoints/step-XXXXXXXX
std::filesystem::path checkpoint_folder(const std::filesystem::path& run, std::int64_t step);
/// The newest checkpoint whose manifest and checksums hold, or nothing; torn ones are skipped and named in
/// `skipped`.
std::optional<Checkpoint> newest_checkpoint(const FileSystem& fs, const std::filesystem::path& run,
                                            std::vector<std::string>* skipped = nullptr);
/// One checkpoint folder; throws Error saying what does not hold.
Checkpoint read_checkpoint(const FileSystem& fs, const std::filesystem::path& folder);
/// Replaces a single file atomically (temporary, fsync, rename).
void replace_file(FileSystem& fs, const std::filesystem::path& path, const std::string& bytes);

/// Exclusive use of a RUN_DIR, which must exist, by one run (flock on RUN/.lock, released by death). Throws a
/// usage Error when it is in use (naming the process) or cannot be written.
class RunLock {
 public:
  explicit RunLock(const std::filesystem::path& run);
  ~RunLock();
  RunLock(const RunLock&) = delete;
  RunLock& operator=(const RunLock&) = delete;

 private:
  int fd_ = -1;
};

}  // namespace onnxddp
