// The checkpoint protocol under cuts, full disks, lost power and damaged bytes. MemoryFileSystem knows which
// directory entries have been synced, so that every state a power cut may leave can be loaded.
#include "importer/checkpoint.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include <fstream>
#include <functional>
#include <random>

namespace onnxddp {
namespace {

namespace fs = std::filesystem;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;

struct Cut {};  // the process is gone

class MemoryFileSystem : public FileSystem {
 public:
  enum class Fault { none, cut, error };
  struct Node {
    bool folder = false;
    std::string bytes;
    std::map<std::string, std::shared_ptr<Node>> now, durable;
  };

  /// The `call`-th call (from 1) is cut or fails; `part` of its effect happens first: 0 nothing, 1 half, 2
  /// all.
  void arm(Fault fault, int call, int part = 1, bool writes_only = false) {
    fault_ = fault, at_ = call, part_ = part, writes_only_ = writes_only, calls_ = 0, dead_ = false;
  }
  bool fired() const { return calls_ >= at_; }

  void write_file(const fs::path& path, const std::string& bytes) override {
    const auto node = std::make_shared<Node>();
    step(true, [&](int part) {
      if (part == 0) return;
      node->bytes = part == 1 ? bytes.substr(0, bytes.size() / 2) : bytes;
      folder(path.parent_path()).now[path.filename()] = node;
    });
  }
  std::string read_file(const fs::path& path) const override { return at(path)->bytes; }
  std::uint64_t file_size(const fs::path& path) const override { return at(path)->bytes.size(); }
  bool exists(const fs::path& path) const override { return find(path) != nullptr; }
  std::vector<std::string> list(const fs::path& path) const override {
    std::vector<std::string> out;
    for (const auto& [name, node] : at(path)->now) out.push_back(name);
    return out;
  }
  void create_directories(const fs::path& path) override {
    step(false, [&](int part) {
      if (part < 2) return;
      Node* node = root_.get();
      for (const fs::path& name : path) {
        auto& next = node->now[name];
        if (!next) next = std::make_shared<Node>(), next->folder = true;
        node = next.get();
      }
    });
  }
  void rename(const fs::path& from, const fs::path& to) override {
    step(false, [&](int part) {
      if (part < 2) return;
      const auto node = at(from);
      folder(from.parent_path()).now.erase(from.filename());
      folder(to.parent_path()).now[to.filename()] = node;
    });
  }
  void rename_new(const fs::path& from, const fs::path& to) override {
    if (exists(to)) throw Error("exists");
    rename(from, to);
  }
  void sync_directory(const fs::path& path) override {
    step(false, [&](int part) {
      if (part == 2) folder(path).durable = folder(path).now;
    });
  }
  void remove_all(const fs::path& path) override {
    step(false, [&](int part) {
      const auto node = find(path);
      if (!node || part == 0) return;
      if (part == 1 && node->folder && !node->now.empty()) node->now.erase(node->now.begin());
      if (part == 2) folder(path.parent_path()).now.erase(path.filename());
    });
  }

  /// What a power cut may leave: of each directory entry that was not synced, the old or the new state. All
  /// combinations, or 256 random ones if there are more.
  void for_each_crash(const std::function<void(MemoryFileSystem&)>& visit) const {
    const std::size_t open = count_open(*root_);
    std::mt19937_64 random(7);
    const std::uint64_t states = open <= 8 ? 1ULL << open : 256;
    for (std::uint64_t i = 0; i < states; ++i) {
      std::uint64_t choice = open <= 8 ? i : random();
      MemoryFileSystem state;
      state.root_ = crashed(*root_, choice);
      visit(state);
    }
  }
  void sync_everything() { root_ = copy(*root_); }
  Node& file(const fs::path& path) { return *at(path); }
  Node& folder(const fs::path& path) { return *at(path); }

 private:
  void step(bool write, const std::function<void(int)>& effect) {
    if (dead_) throw Cut();
    if (fault_ == Fault::none || (writes_only_ && !write) || ++calls_ != at_) return effect(2);
    effect(part_);
    if (fault_ == Fault::error) throw Error("cannot write: No space left on device");
    dead_ = true;
    throw Cut();
  }
  std::shared_ptr<Node> find(const fs::path& path) const {
    std::shared_ptr<Node> node = root_;
    for (const fs::path& name : path) {
      const auto next = node->now.find(name);
      if (next == node->now.end()) return nullptr;
      node = next->second;
    }
    return node;
  }
  std::shared_ptr<Node> at(const fs::path& path) const {
    if (auto node = find(path)) return node;
    throw Error(cat("no such file: ", path.string()));
  }
  static std::vector<std::string> open_names(const Node& node) {
    std::vector<std::string> out;
    for (const auto& [name, child] : node.now) {
      const auto old = node.durable.find(name);
      if (old == node.durable.end() || old->second != child) out.push_back(name);
    }
    for (const auto& [name, child] : node.durable) {
      if (!node.now.count(name)) out.push_back(name);
    }
    return out;
  }
  static std::size_t count_open(const Node& node) {
    std::size_t out = open_names(node).size();
    for (const auto& [name, child] : node.now) out += count_open(*child);
    return out;
  }
  static std::shared_ptr<Node> crashed(const Node& node, std::uint64_t& choice) {
    auto entries = node.durable;
    for (const std::string& name : open_names(node)) {
      if (choice & 1) {
        entries.erase(name);
        if (const auto it = node.now.find(name); it != node.now.end()) entries[name] = it->second;
      }
      choice >>= 1;
    }
    auto out = std::make_shared<Node>();
    out->folder = node.folder, out->bytes = node.bytes;
    for (const auto& [name, child] : entries) out->now[name] = crashed(*child, choice);
    out->durable = out->now;
    return out;
  }
  static std::shared_ptr<Node> copy(const Node& node) {
    auto out = std::make_shared<Node>();
    out->folder = node.folder, out->bytes = node.bytes;
    for (const auto& [name, child] : node.now) out->now[name] = copy(*child);
    out->durable = out->now;
    return out;
  }

  std::shared_ptr<Node> root_ = [] {
    auto node = std::make_shared<Node>();
    node->folder = true;
    return node;
  }();
  Fault fault_ = Fault::none;
  int at_ = 0, part_ = 0, calls_ = 0;
  bool writes_only_ = false, dead_ = false;
};

using Fault = MemoryFileSystem::Fault;

Checkpoint sample(std::int64_t step) {
  return {step,
          {{"model.onnx", cat("weights of ", step)},
           {"state.onnx", std::string("\0moments", 8) + cat(step)},
           {"source.onnx", "graph"},
           {"run.toml", "lr = 0.1\n"}}};
}

/// A run with checkpoints 1 and 2, all on the disk.
MemoryFileSystem start() {
  MemoryFileSystem out;
  out.create_directories("run");
  write_checkpoint(out, "run", sample(1), 2);
  write_checkpoint(out, "run", sample(2), 2);
  out.sync_everything();
  return out;
}

/// The newest checkpoint is a whole one that was once written; returns its step.
std::int64_t expect_whole(const FileSystem& files) {
  const auto found = newest_checkpoint(files, "run");
  if (!found) return ADD_FAILURE() << "no checkpoint loads", -1;
  EXPECT_EQ(found->files, sample(found->step).files);
  return found->step;
}

TEST(Checkpoint, ComesBackAsItWasWritten) {
  MemoryFileSystem files = start();
  EXPECT_EQ(read_checkpoint(files, "run/checkpoints/step-00000001").files, sample(1).files);
  EXPECT_EQ(read_checkpoint(files, "run/checkpoints/step-00000002/").step, 2);
  EXPECT_EQ(expect_whole(files), 2);
}

TEST(Checkpoint, OfNoRunIsNothing) {
  MemoryFileSystem files;
  EXPECT_FALSE(newest_checkpoint(files, "run"));
  EXPECT_THROW(read_checkpoint(files, "run/checkpoints/step-00000001"), Error);
}

TEST(Checkpoint, OrderIsByNumberAlsoBeyondEightDigits) {
  MemoryFileSystem files = start();
  write_checkpoint(files, "run", sample(99999999), 5);
  write_checkpoint(files, "run", sample(100000000), 5);
  EXPECT_EQ(expect_whole(files), 100000000);
}

TEST(Checkpoint, KeepsAsManyAsAskedAndNeverNone) {
  MemoryFileSystem files = start();
  EXPECT_THAT(write_checkpoint(files, "run", sample(3), 2), IsEmpty());
  EXPECT_THAT(files.list("run/checkpoints"), ElementsAre("step-00000002", "step-00000003"));
  write_checkpoint(files, "run", sample(4), 0);
  EXPECT_THAT(files.list("run/checkpoints"), ElementsAre("step-00000004"));
}

TEST(Checkpoint, LeavesFoldersWithForeignFiles) {
  MemoryFileSystem files = start();
  files.write_file("run/checkpoints/step-00000001/notes.txt", "mine");
  const auto warnings = write_checkpoint(files, "run", sample(3), 2);
  ASSERT_EQ(warnings.size(), 1U);
  EXPECT_THAT(warnings[0], HasSubstr("step-00000001 is kept"));
  EXPECT_TRUE(files.exists("run/checkpoints/step-00000001/notes.txt"));
}

TEST(Checkpoint, OfTheSameStepIsWrittenOnce) {
  MemoryFileSystem files = start();
  EXPECT_THAT(write_checkpoint(files, "run", sample(2), 2), IsEmpty());
  Checkpoint other = sample(2);
  other.files["model.onnx"] = "another run";
  EXPECT_THROW(write_checkpoint(files, "run", other, 2), Error);
  EXPECT_EQ(expect_whole(files), 2);
  files.file("run/checkpoints/step-00000002/model.onnx").bytes = "torn";
  write_checkpoint(files, "run", other, 2);
  EXPECT_EQ(newest_checkpoint(files, "run")->files, other.files);
}

// Every call of a save cut, before, within and after its effect, and every state that a power cut then may
// leave.
TEST(Checkpoint, SurvivesACutAtEveryCall) {
  int cuts = 0, states = 0, old_ones = 0, new_ones = 0;
  for (int call = 1;; ++call) {
    bool fired = false;
    for (int part = 0; part <= 2; ++part) {
      MemoryFileSystem files = start();
      files.arm(Fault::cut, call, part);
      try {
        write_checkpoint(files, "run", sample(3), 2);
      } catch (const Cut&) {
        fired = true;
        ++cuts;
      }
      files.for_each_crash([&](MemoryFileSystem& state) {
        ++states;
        const std::int64_t newest = expect_whole(state);
        (newest == 3 ? new_ones : old_ones) += 1;
        EXPECT_GE(newest, fired ? 2 : 3);  // an ended save is there whatever happens then
        write_checkpoint(state, "run", sample(4), 2);
        EXPECT_THAT(state.list("run/checkpoints"),
                    ElementsAre(newest == 3 ? "step-00000003" : "step-00000002", "step-00000004"));
        EXPECT_EQ(expect_whole(state), 4);
      });
      if (::testing::Test::HasFailure()) FAIL() << "call " << call << ", part " << part;
    }
    if (!fired) break;
  }
  EXPECT_GT(cuts, 30);
  EXPECT_GT(states, 100);
  EXPECT_GT(old_ones, 0);
  EXPECT_GT(new_ones, 0);
}

TEST(Checkpoint, FirstSaveMayBeCutAnywhereToo) {
  for (int call = 1;; ++call) {
    MemoryFileSystem files;
    files.create_directories("run");
    files.sync_everything();
    files.arm(Fault::cut, call, 1);
    try {
      write_checkpoint(files, "run", sample(1), 2);
    } catch (const Cut&) {
    }
    files.for_each_crash([&](MemoryFileSystem& state) {
      const auto found = newest_checkpoint(state, "run");
      EXPECT_TRUE(found || files.fired());
      EXPECT_TRUE(!found || found->files == sample(1).files);
    });
    if (!files.fired()) break;
    ASSERT_FALSE(HasFailure()) << "call " << call;
  }
}

TEST(Checkpoint, FullDiskLeavesNothingBehind) {
  int failures = 0;
  for (int write = 1;; ++write) {
    MemoryFileSystem files = start();
    files.arm(Fault::error, write, 1, true);
    try {
      write_checkpoint(files, "run", sample(3), 2);
      break;
    } catch (const Error& error) {
      ++failures;
      EXPECT_THAT(error.what(), HasSubstr("No space left"));
      EXPECT_THAT(files.list("run/checkpoints"), ElementsAre("step-00000001", "step-00000002"));
      EXPECT_EQ(expect_whole(files), 2);
    }
  }
  EXPECT_EQ(failures, 5);  // four files and the manifest
}

TEST(Checkpoint, AnyFailingCallLeavesAWholeOne) {
  for (int call = 1;; ++call) {
    MemoryFileSystem files = start();
    files.arm(Fault::error, call, 1);
    try {
      write_checkpoint(files, "run", sample(3), 2);
      if (!files.fired()) break;
    } catch (const Error&) {
    }
    EXPECT_GE(expect_whole(files), 2);
    EXPECT_GE(files.list("run/checkpoints").size(), 2U);
    write_checkpoint(files, "run", sample(4), 1);
    EXPECT_THAT(files.list("run/checkpoints"), ElementsAre("step-00000004"));
    ASSERT_FALSE(HasFailure()) << "call " << call;
  }
}

TEST(Checkpoint, EveryFlippedBitIsFound) {
  MemoryFileSystem files = start();
  const fs::path folder = "run/checkpoints/step-00000002";
  for (const std::string& name : files.list(folder)) {
    std::string& bytes = files.file(folder / name).bytes;
    for (std::size_t bit = 0; bit < bytes.size() * 8; ++bit) {
      const char mask = static_cast<char>(1 << bit % 8);
      bytes[bit / 8] ^= mask;
      EXPECT_THROW(read_checkpoint(files, folder), Error) << name << " bit " << bit;
      bytes[bit / 8] ^= mask;
    }
    for (std::size_t size = 0; size < bytes.size(); ++size) {
      const std::string whole = std::exchange(bytes, bytes.substr(0, size));
      EXPECT_THROW(read_checkpoint(files, folder), Error) << name << " cut to " << size;
      bytes = whole;
    }
  }
  EXPECT_EQ(read_checkpoint(files, folder).step, 2);
}

TEST(Checkpoint, TornOnesAreSkippedAndNamed) {
  MemoryFileSystem files = start();
  write_checkpoint(files, "run", sample(3), 3);
  files.file("run/checkpoints/step-00000003/model.onnx").bytes.clear();
  files.folder("run/checkpoints/step-00000002").now.erase("state.onnx");
  std::vector<std::string> skipped;
  EXPECT_EQ(newest_checkpoint(files, "run", &skipped)->step, 1);
  ASSERT_EQ(skipped.size(), 2U);
  EXPECT_THAT(skipped[0], HasSubstr("step-00000003: model.onnx has 0 bytes"));
  EXPECT_THAT(skipped[1], HasSubstr("step-00000002: state.onnx is missing"));
}

TEST(Checkpoint, ForeignFoldersAreNoCheckpoints) {
  MemoryFileSystem files = start();
  auto& parent = files.folder("run/checkpoints");
  for (const char* name :
       {"step-3", "step-0000000x", "step-00000007", ".tmp-00000009-0123456789abcdef", "step--0000001"}) {
    parent.now[name] =
        parent.now["step-00000002"];  // step-00000007: the right form, but another step's manifest
  }
  std::vector<std::string> skipped;
  EXPECT_EQ(newest_checkpoint(files, "run", &skipped)->step, 2);
  ASSERT_EQ(skipped.size(), 1U);
  EXPECT_THAT(skipped[0], HasSubstr("under another name"));
}

TEST(ReplaceFile, HoldsTheOldOrTheNewBytesAfterACutAtEveryCall) {
  for (int call = 1;; ++call) {
    MemoryFileSystem files;
    files.create_directories("run");
    replace_file(files, "run/best.onnx", "old");
    files.sync_everything();
    files.arm(Fault::cut, call, 1);
    try {
      replace_file(files, "run/best.onnx", "new bytes");
    } catch (const Cut&) {
    }
    files.for_each_crash([&](MemoryFileSystem& state) {
      const std::string bytes = state.read_file("run/best.onnx");
      EXPECT_TRUE(bytes == "new bytes" || (files.fired() && bytes == "old")) << bytes;
      replace_file(state, "run/best.onnx", "newer");
      EXPECT_THAT(state.list("run"), ElementsAre("best.onnx"));
    });
    if (!files.fired()) break;
  }
}

// --- the real file system

class RealFiles : public ::testing::Test {
 protected:
  RealFiles() {
    char name[] = "/tmp/onnxddp-checkpoint-XXXXXX";
    run_ = ::mkdtemp(name);
  }
  ~RealFiles() override { fs::remove_all(run_); }
  static std::string error_of(const std::function<void()>& action) {
    try {
      action();
    } catch (const Error& error) {
      return error.report();
    }
    return "no error";
  }
  fs::path run_;
  FileSystem& files_ = real_file_system();
};

TEST_F(RealFiles, SaveLoadAndKeep) {
  Checkpoint large = sample(1);
  large.files["model.onnx"].assign(20 << 20, 'w');
  write_checkpoint(files_, run_, large, 2);
  for (int step = 2; step <= 4; ++step) write_checkpoint(files_, run_, sample(step), 3);
  EXPECT_THAT(files_.list(run_ / "checkpoints"),
              ElementsAre("step-00000002", "step-00000003", "step-00000004"));
  EXPECT_EQ(newest_checkpoint(files_, run_)->files, sample(4).files);
  EXPECT_EQ(read_checkpoint(files_, run_ / "checkpoints/step-00000003").files, sample(3).files);
}

TEST_F(RealFiles, LinksAreNeitherReadNorFollowedWhenDeleting) {
  write_checkpoint(files_, run_, sample(1), 3);
  fs::create_directory(run_ / "elsewhere");
  std::ofstream(run_ / "elsewhere/precious") << "data";
  fs::create_directory_symlink(run_ / "elsewhere", run_ / "checkpoints/.tmp-planted");
  fs::create_directory_symlink("step-00000001", run_ / "checkpoints/step-00000009");
  std::vector<std::string> skipped;
  EXPECT_EQ(newest_checkpoint(files_, run_, &skipped)->step, 1);
  EXPECT_EQ(skipped.size(), 1U);
  write_checkpoint(files_, run_, sample(2), 1);
  EXPECT_TRUE(fs::exists(run_ / "elsewhere/precious"));
  EXPECT_FALSE(fs::exists(fs::symlink_status(run_ / "checkpoints/.tmp-planted")));
  fs::remove(run_ / "checkpoints/step-00000002/model.onnx");
  fs::create_symlink(run_ / "elsewhere/precious", run_ / "checkpoints/step-00000002/model.onnx");
  EXPECT_THAT(error_of([&] { read_checkpoint(files_, run_ / "checkpoints/step-00000002"); }),
              HasSubstr("no regular file"));
}

TEST_F(RealFiles, RenameNewDoesNotReplaceEvenAnEmptyFolder) {
  fs::create_directory(run_ / "a");
  fs::create_directory(run_ / "b");
  EXPECT_THAT(error_of([&] { files_.rename_new(run_ / "a", run_ / "b"); }), HasSubstr("File exists"));
  files_.rename_new(run_ / "a", run_ / "c");
  EXPECT_THAT(files_.list(run_), ElementsAre("b", "c"));
}

TEST_F(RealFiles, WriteErrorsNameThePathAndLeaveNoFolder) {
  write_checkpoint(files_, run_, sample(1), 3);
  Checkpoint large = sample(2);
  large.files["state.onnx"].assign(1 << 20, 's');
  const auto old_handler = ::signal(SIGXFSZ, SIG_IGN);
  rlimit old{};
  ::getrlimit(RLIMIT_FSIZE, &old);
  rlimit small = old;
  small.rlim_cur = 100 << 10;
  ::setrlimit(RLIMIT_FSIZE, &small);
  const std::string report = error_of([&] { write_checkpoint(files_, run_, large, 3); });
  ::setrlimit(RLIMIT_FSIZE, &old);
  ::signal(SIGXFSZ, old_handler);
  EXPECT_THAT(report, HasSubstr("state.onnx: File too large"));
  EXPECT_THAT(files_.list(run_ / "checkpoints"), ElementsAre("step-00000001"));
}

TEST_F(RealFiles, ReplaceFileReplaces) {
  replace_file(files_, run_ / "summary.json", "{}");
  replace_file(files_, run_ / "summary.json", "{\"a\":1}");
  EXPECT_EQ(files_.read_file(run_ / "summary.json"), "{\"a\":1}");
  EXPECT_THAT(files_.list(run_), ElementsAre("summary.json"));
  EXPECT_THAT(error_of([&] { replace_file(files_, run_ / "none/x", ""); }), HasSubstr("No such file"));
}

TEST_F(RealFiles, LockIsExclusiveAndEndsWithItsHolder) {
  {
    const RunLock lock(run_);
    const std::string report = error_of([&] { const RunLock second(run_); });
    EXPECT_THAT(report, HasSubstr(cat("is in use by process ", ::getpid())));
    EXPECT_THAT(report, HasSubstr("--out"));
  }
  int ready[2];
  ASSERT_EQ(::pipe(ready), 0);
  const pid_t child = ::fork();
  if (child == 0) {
    ::alarm(30);
    const RunLock lock(run_);
    [[maybe_unused]] const ssize_t said = ::write(ready[1], "x", 1);
    for (;;) ::pause();
  }
  char byte;
  ASSERT_EQ(::read(ready[0], &byte, 1), 1);
  EXPECT_THAT(error_of([&] { const RunLock second(run_); }), HasSubstr(cat("process ", child)));
  ::kill(child, SIGKILL);
  ::waitpid(child, nullptr, 0);
  EXPECT_EQ(error_of([&] { const RunLock again(run_); }), "no error");
  EXPECT_THAT(error_of([&] { const RunLock none(run_ / "none"); }), HasSubstr("cannot write into"));
  ::close(ready[0]);
  ::close(ready[1]);
}

}  // namespace
}  // namespace onnxddp
