#include "tests/cli/program.h"

#include <fcntl.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>
#include <zlib.h>

#include <algorithm>
#include <cstring>
#include <fstream>
#include <nlohmann/json.hpp>
#include <numeric>
#include <sstream>

#include "importer/dataset.h"
#include "importer/importer.h"

namespace onnxddp::testing {
namespace fs = std::filesystem;
namespace {

// Sanitizers reserve terabytes of address space.
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
constexpr bool kSanitized = true;
#elif defined(__has_feature)
#if __has_feature(address_sanitizer) || __has_feature(thread_sanitizer)
constexpr bool kSanitized = true;
#else
constexpr bool kSanitized = false;
#endif
#else
constexpr bool kSanitized = false;
#endif

fs::path fresh_path(const std::string& kind) {
  static int count = 0;
  return fs::temp_directory_path() / cat("onnx-ddp-", kind, "-", getpid(), "-", ++count);
}

[[noreturn]] void become(const std::vector<std::string>& words, const RunOptions& options,
                         const fs::path& out, const fs::path& err) {
  setpgid(0, 0);
  if (!options.folder.empty() && chdir(options.folder.c_str()) != 0) _exit(99);
  dup2(open("/dev/null", O_RDONLY), 0);
  dup2(open(out.c_str(), O_WRONLY | O_CREAT | O_TRUNC, 0600), 1);
  dup2(open(err.c_str(), O_WRONLY | O_CREAT | O_TRUNC, 0600), 2);
  if (options.memory > 0 && !kSanitized) {
    const rlimit limit = {options.memory, options.memory};
    setrlimit(RLIMIT_AS, &limit);
  }
  const rlimit no_core = {0, 0};
  setrlimit(RLIMIT_CORE, &no_core);
  for (const auto& [name, value] : options.environment) setenv(name.c_str(), value.c_str(), 1);
  std::vector<char*> argv;
  for (const std::string& word : words) argv.push_back(const_cast<char*>(word.c_str()));
  argv.push_back(nullptr);
  execv(argv[0], argv.data());
  _exit(98);
}

}  // namespace

Child::Child(const std::vector<std::string>& arguments, const RunOptions& options)
    : seconds_(options.seconds), out_(fresh_path("out")), err_(fresh_path("err")) {
  std::vector<std::string> words = {ONNXDDP_BINARY_DIR "/onnx-ddp"};
  words.insert(words.end(), arguments.begin(), arguments.end());
  pid_ = fork();
  if (pid_ == 0) become(words, options, out_, err_);
}

Child::~Child() {
  if (!ended_) {
    ::kill(-pid_, SIGKILL);
    ::kill(pid_, SIGKILL);
    waitpid(pid_, nullptr, 0);
  }
  fs::remove(out_);
  fs::remove(err_);
}

void Child::signal(int number) const { ::kill(pid_, number); }

bool Child::running() {
  if (!ended_ && waitpid(pid_, &status_, WNOHANG) == pid_) ended_ = true;
  return !ended_;
}

Outcome Child::wait() {
  Outcome outcome;
  outcome.late = !eventually([&] { return !running(); }, seconds_);
  if (outcome.late) {
    ::kill(-pid_, SIGKILL);
    ::kill(pid_, SIGKILL);
    waitpid(pid_, &status_, 0);
    ended_ = true;
  }
  outcome.code = WIFEXITED(status_) ? WEXITSTATUS(status_) : 128 + WTERMSIG(status_);
  outcome.out = read_text(out_);
  outcome.err = read_text(err_);
  return outcome;
}

std::string Child::errors() const { return read_text(err_); }

Outcome run(const std::vector<std::string>& arguments, const RunOptions& options) {
  Child child(arguments, options);
  Outcome outcome = child.wait();
  EXPECT_FALSE(outcome.late) << "the program did not end in time; stderr:\n" << outcome.err;
  return outcome;
}

Folder::Folder() : path_(fresh_path("test")) { fs::create_directories(path_); }
Folder::~Folder() {
  std::error_code error;
  fs::remove_all(path_, error);
}

std::string read_text(const fs::path& file) {
  std::ifstream in(file, std::ios::binary);
  std::ostringstream text;
  text << in.rdbuf();
  return text.str();
}

void write_text(const fs::path& file, const std::string& text) {
  std::ofstream(file, std::ios::binary) << text;
}

std::string model_file(const std::string& name) { return std::string(ONNXDDP_SOURCE_DIR "/models/") + name; }

void write_model(const fs::path& file, const std::string& text) {
  write_text(file, save_trained(*parse_onnx_text(text), {}));
}

std::map<std::string, HostTensor> read_npz(const fs::path& file) {
  const std::unique_ptr<Dataset> data = open_dataset({file});
  std::vector<std::int64_t> rows(static_cast<std::size_t>(data->size()));
  std::iota(rows.begin(), rows.end(), std::int64_t{0});
  std::map<std::string, HostTensor> out;
  for (std::size_t i = 0; i < data->arrays().size(); ++i) out[data->arrays()[i].name] = data->read(i, rows);
  return out;
}

namespace {

std::uint64_t number_at(const std::string& bytes, std::size_t at, int size) {
  std::uint64_t value = 0;
  for (int i = size - 1; i >= 0; --i)
    value = value << 8 | static_cast<unsigned char>(bytes.at(at + static_cast<std::size_t>(i)));
  return value;
}

std::string inflated(const std::string& packed, std::size_t size) {
  std::string out(size, '\0');
  z_stream stream{};
  stream.next_in = reinterpret_cast<Bytef*>(const_cast<char*>(packed.data()));
  stream.avail_in = static_cast<uInt>(packed.size());
  stream.next_out = reinterpret_cast<Bytef*>(out.data());
  stream.avail_out = static_cast<uInt>(size);
  EXPECT_EQ(inflateInit2(&stream, -MAX_WBITS), Z_OK);
  EXPECT_EQ(inflate(&stream, Z_FINISH), Z_STREAM_END);
  inflateEnd(&stream);
  return out;
}

HostTensor parse_npy(const std::string& bytes) {
  const std::size_t length = number_at(bytes, 8, 2);
  const std::string header = bytes.substr(10, length);
  Ints shape;
  std::istringstream numbers(header.substr(header.find("'shape': (") + 10));
  for (std::int64_t d; numbers >> d; numbers.ignore(1)) shape.push_back(d);
  HostTensor tensor(header.find("<f4") != std::string::npos ? DType::f32 : DType::i64, shape);
  EXPECT_EQ(bytes.size() - 10 - length, tensor.bytes()) << header;
  std::memcpy(tensor.mutable_raw(), bytes.data() + 10 + length, tensor.bytes());
  return tensor;
}

}  // namespace

std::map<std::string, HostTensor> read_tensors(const fs::path& file) {
  const std::string zip = read_text(file);
  std::map<std::string, HostTensor> out;
  const std::size_t end = zip.rfind("PK\5\6");
  std::size_t entry = number_at(zip, end + 16, 4);
  for (std::uint64_t i = number_at(zip, end + 10, 2); i > 0; --i) {
    const std::size_t packed = number_at(zip, entry + 20, 4), size = number_at(zip, entry + 24, 4),
                      name = number_at(zip, entry + 28, 2), local = number_at(zip, entry + 42, 4);
    const std::size_t begin = local + 30 + number_at(zip, local + 26, 2) + number_at(zip, local + 28, 2);
    const std::string content = zip.substr(begin, packed);
    const std::string key = zip.substr(entry + 46, name - 4);  // without .npy
    out[key] = parse_npy(number_at(zip, entry + 10, 2) == 0 ? content : inflated(content, size));
    entry += 46 + name + number_at(zip, entry + 30, 2) + number_at(zip, entry + 32, 2);
  }
  return out;
}

std::vector<double> metric(const fs::path& run, const std::string& event, const std::string& field) {
  std::vector<double> out;
  std::istringstream lines(read_text(run / "metrics.jsonl"));
  for (std::string line; std::getline(lines, line);) {
    const nlohmann::json object = nlohmann::json::parse(line);
    if (object.at("event") == event) out.push_back(object.at(field).get<double>());
  }
  return out;
}

std::vector<int> processes_with(const std::string& text) {
  std::vector<int> out;
  for (const auto& entry : fs::directory_iterator("/proc")) {
    const std::string name = entry.path().filename().string();
    if (name.find_first_not_of("0123456789") != std::string::npos) continue;
    std::string command = read_text(entry.path() / "cmdline");
    std::replace(command.begin(), command.end(), '\0', ' ');
    if (command.find(text) != std::string::npos) out.push_back(std::stoi(name));
  }
  return out;
}

void expect_error(const Outcome& outcome, int code, const std::string& text) {
  EXPECT_EQ(outcome.code, code) << outcome.err;
  const std::size_t begin = outcome.err.find("onnx-ddp: error:");
  ASSERT_NE(begin, std::string::npos) << outcome.err;
  const std::string report = outcome.err.substr(begin);
  EXPECT_LE(std::count(report.begin(), report.end(), '\n'), 6) << report;
  EXPECT_EQ(report.find("onnx-ddp: error:", 1), std::string::npos) << "more than one error:\n" << report;
  EXPECT_NE(report.find(text), std::string::npos) << "expected '" << text << "' in:\n" << report;
}

}  // namespace onnxddp::testing
