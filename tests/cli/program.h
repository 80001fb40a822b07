// Runs the program as its users do: as a process, with a watchdog.
#pragma once

#include <filesystem>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include "graph/tensor.h"

namespace onnxddp::testing {

struct Outcome {
  int code = -1;  // exit code; 128 + signal when killed
  std::string out, err;
  bool late = false;  // ended by the watchdog
};

struct RunOptions {
  std::filesystem::path folder = {};  // working directory; empty: the test's
  int seconds = 60;                   // of the watchdog
  std::size_t memory = 0;             // bytes of address space; 0: no limit
  std::map<std::string, std::string> environment = {};
};

/// A started program; killed with its group when the object goes.
class Child {
 public:
  Child(const std::vector<std::string>& arguments, const RunOptions& options);
  ~Child();
  Child(const Child&) = delete;
  Child& operator=(const Child&) = delete;
  int pid() const { return pid_; }
  void signal(int number) const;
  bool running();
  Outcome wait();
  std::string errors() const;  // stderr so far

 private:
  int pid_ = -1, seconds_;
  int status_ = 0;
  bool ended_ = false;
  std::filesystem::path out_, err_;
};

/// `onnx-ddp arguments…`, to its end.
Outcome run(const std::vector<std::string>& arguments, const RunOptions& options = {});

/// A folder of its own for the running test, removed when the object goes.
class Folder {
 public:
  Folder();
  ~Folder();
  Folder(const Folder&) = delete;
  Folder& operator=(const Folder&) = delete;
  std::filesystem::path operator/(const std::string& name) const { return path_ / name; }
  const std::filesystem::path& path() const { return path_; }

 private:
  std::filesystem::path path_;
};

std::string read_text(const std::filesystem::path& file);
void write_text(const std::filesystem::path& file, const std::string& text);
/// A file of models/.
std::string model_file(const std::string& name);
/// Writes a model in ONNX's text syntax as a file.
void write_model(const std::filesystem::path& file, const std::string& text);
/// All arrays of an .npz.
std::map<std::string, HostTensor> read_npz(const std::filesystem::path& file);
/// All arrays of an .npz of any shapes (weights), stored or deflated; f32 and i64.
std::map<std::string, HostTensor> read_tensors(const std::filesystem::path& file);
/// The field of every line of metrics.jsonl whose event is that.
std::vector<double> metric(const std::filesystem::path& run, const std::string& event,
                           const std::string& field);
/// Pids of processes whose command line holds the text.
std::vector<int> processes_with(const std::string& text);
/// Waits until the condition holds; false after `seconds`.
template <class Condition>
bool eventually(Condition&& condition, double seconds = 20) {
  for (int i = 0; i < static_cast<int>(seconds * 100); ++i) {
    if (condition()) return true;
    struct timespec pause = {0, 10'000'000};
    nanosleep(&pause, nullptr);
  }
  return condition();
}

/// Expects one clear error: that exit code, at most 6 lines on stderr that begin with "onnx-ddp: error:",
/// holding the text.
void expect_error(const Outcome& outcome, int code, const std::string& text);

}  // namespace onnxddp::testing
