#include "distributed/launch.h"

#include <fcntl.h>
#include <poll.h>
#include <sys/prctl.h>
#include <sys/signalfd.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <csignal>
#include <cstring>
#include <filesystem>

#include "distributed/heartbeat.h"
#include "distributed/rank_output.h"

extern char** environ;  // NOLINT: POSIX

namespace onnxddp {
namespace {

using Clock = std::chrono::steady_clock;

// Signals of the launcher are read from a descriptor while this lives.
class SignalQueue {
 public:
  SignalQueue() {
    sigset_t set;
    sigemptyset(&set);
    for (const int signal : {SIGINT, SIGTERM, SIGUSR1, SIGTSTP, SIGCHLD, SIGPIPE}) sigaddset(&set, signal);
    struct sigaction hangup {};
    ::sigaction(SIGHUP, nullptr, &hangup);
    if (hangup.sa_handler != SIG_IGN) sigaddset(&set, SIGHUP);  // nohup
    struct sigaction standard {};
    standard.sa_handler = SIG_DFL;
    ::sigaction(SIGCHLD, &standard, &child_);  // where it is ignored no exit status comes
    pthread_sigmask(SIG_BLOCK, &set, &mask_);
    fd_ = ::signalfd(-1, &set, SFD_CLOEXEC | SFD_NONBLOCK);
    CHECK(fd_ >= 0, "signalfd: ", std::strerror(errno));
  }
  ~SignalQueue() {
    while (next() != 0) {
    }
    ::close(fd_);
    pthread_sigmask(SIG_SETMASK, &mask_, nullptr);
    ::sigaction(SIGCHLD, &child_, nullptr);
  }
  SignalQueue(const SignalQueue&) = delete;
  SignalQueue& operator=(const SignalQueue&) = delete;

  int fd() const { return fd_; }
  const sigset_t& mask_before() const { return mask_; }
  /// The next signal, 0 when there is none.
  int next() const {
    signalfd_siginfo info;
    return ::read(fd_, &info, sizeof(info)) == sizeof(info) ? static_cast<int>(info.ssi_signo) : 0;
  }

 private:
  int fd_ = -1;
  sigset_t mask_;
  struct sigaction child_ {};
};

struct Pipe {
  Pipe() {
    int fds[2];
    if (::pipe2(fds, O_CLOEXEC) != 0) throw Error(cat("cannot start a rank: ", std::strerror(errno)));
    read = fds[0];
    write = fds[1];
  }
  int read, write;
};

struct Rank {
  pid_t pid = -1;
  int lifeline = -1;
  bool running = true;
  int status = 0;  // of waitpid
  int order = 0;   // of ending, from 1
  bool ended_by_us = false;

  bool signaled() const { return WIFSIGNALED(status); }
  int code() const { return WIFEXITED(status) ? WEXITSTATUS(status) : -1; }
  std::string how() const {
    if (!signaled()) return cat("exited with code ", code());
    const char* name = ::sigabbrev_np(WTERMSIG(status));
    return cat("was killed by ", name != nullptr ? cat("SIG", name) : cat("signal ", WTERMSIG(status)));
  }
  bool failed() const {
    return !running && !ended_by_us && code() != kExitDone && code() != kExitInterrupted;
  }
  // Ended because another one did.
  bool victim() const { return code() == kExitPeer; }
};

// Everything that the child needs between fork and exec, where nothing may be allocated.
struct Start {
  std::vector<std::string> text;
  std::vector<char*> argv, env;
  int out = -1, err = -1, lifeline = -1;  // -1: as the launcher's
  pid_t launcher = 0;
  const sigset_t* mask = nullptr;
};

[[noreturn]] void become_rank(const Start& start) {
  ::setpgid(0, 0);  // Ctrl-C goes to the launcher alone, which passes it on once
  ::prctl(PR_SET_PDEATHSIG, SIGKILL);
  if (::getppid() != start.launcher) ::_exit(kExitPeer);
  if (const int null = ::open("/dev/null", O_RDONLY); null >= 0) ::dup2(null, STDIN_FILENO);
  if (start.out >= 0) ::dup2(start.out, STDOUT_FILENO);
  if (start.err >= 0) ::dup2(start.err, STDERR_FILENO);
  ::fcntl(start.lifeline, F_SETFD, 0);
  ::sigprocmask(SIG_SETMASK, start.mask, nullptr);
  ::execve(start.argv[0], start.argv.data(), start.env.data());
  constexpr char kMessage[] = "onnx-ddp: error: cannot start the program of a rank\n";
  [[maybe_unused]] const ssize_t n = ::write(STDERR_FILENO, kMessage, sizeof(kMessage) - 1);
  ::_exit(kExitInternal);
}

class Launcher {
 public:
  explicit Launcher(const LaunchOptions& options) : options_(options), server_("127.0.0.1", 0, secret_) {}
  ~Launcher() {
    for (auto& rank : ranks_) {
      if (rank.running) ::kill(rank.pid, SIGKILL);
    }
    for (auto& rank : ranks_) {
      if (rank.running) ::waitpid(rank.pid, nullptr, 0);
      ::close(rank.lifeline);
    }
  }
  Launcher(const Launcher&) = delete;
  Launcher& operator=(const Launcher&) = delete;

  int run() {
    for (int rank = 0; rank < options_.nproc; ++rank) spawn(rank);
    while (std::any_of(ranks_.begin(), ranks_.end(), [](const Rank& r) { return r.running; })) {
      wait_for_news();
      for (int signal; (signal = signals_.next()) != 0;) handle(signal);
      reap();
      escalate();
    }
    for (auto& output : outputs_) {
      output.pump();
      output.flush();
    }
    return conclude();
  }

 private:
  void spawn(int rank) {
    Start start;
    start.launcher = ::getpid();
    start.mask = &signals_.mask_before();
    Pipe lifeline;
    ::fcntl(lifeline.write, F_SETFL, O_NONBLOCK);
    CHECK(::write(lifeline.write, secret_.data(), secret_.size()) == static_cast<ssize_t>(secret_.size()));
    start.lifeline = lifeline.read;
    if (rank != 0 || !options_.log_dir.empty()) {
      start.out = add_output(rank, STDOUT_FILENO, "out");
      start.err = add_output(rank, STDERR_FILENO, "err");
    }
    fill_texts(start, rank);
    const pid_t pid = ::fork();
    if (pid == 0) become_rank(start);
    const int error = errno;
    for (const int fd : {start.out, start.err, start.lifeline}) {
      if (fd >= 0) ::close(fd);
    }
    if (pid < 0) {
      ::close(lifeline.write);
      throw Error(cat("cannot start rank ", rank, ": ", std::strerror(error)));
    }
    ranks_.emplace_back();
    ranks_.back().pid = pid;
    ranks_.back().lifeline = lifeline.write;
  }

  // The end of a pipe that the rank writes to.
  int add_output(int rank, int target, const char* kind) {
    const Pipe pipe;
    ::fcntl(pipe.read, F_SETFL, O_NONBLOCK);
    const std::string log = options_.log_dir.empty() ? "" : cat(options_.log_dir, "/rank-", rank, ".", kind);
    outputs_.emplace_back(pipe.read, target, rank == 0 ? "" : cat("[rank ", rank, "] "), log);
    return pipe.write;
  }

  void fill_texts(Start& start, int rank) const {
    const std::vector<std::pair<std::string, std::string>> own = {{"RANK", cat(rank)},
                                                                  {"WORLD_SIZE", cat(options_.nproc)},
                                                                  {"LOCAL_RANK", cat(rank)},
                                                                  {"LOCAL_WORLD_SIZE", cat(options_.nproc)},
                                                                  {"MASTER_ADDR", "127.0.0.1"},
                                                                  {"MASTER_PORT", cat(server_.port())},
                                                                  {"ONNX_DDP_LIFELINE", cat(start.lifeline)}};
    start.text = options_.command;
    for (char** entry = environ; *entry != nullptr; ++entry) {
      const std::string_view text = *entry;
      const auto name = text.substr(0, text.find('='));
      if (std::none_of(own.begin(), own.end(), [&](const auto& pair) { return pair.first == name; }))
        start.text.emplace_back(text);
    }
    for (const auto& [name, value] : own) start.text.push_back(name + "=" + value);
    for (std::size_t i = 0; i < start.text.size(); ++i) {
      (i < options_.command.size() ? start.argv : start.env).push_back(start.text[i].data());
    }
    start.argv.push_back(nullptr);
    start.env.push_back(nullptr);
  }

  // Until a signal, output or the next deadline.
  void wait_for_news() {
    std::vector<pollfd> fds = {{signals_.fd(), POLLIN, 0}};
    for (const auto& output : outputs_) fds.push_back({output.source(), POLLIN, 0});
    auto left = std::chrono::milliseconds(1'000);
    if (deadline_)
      left = std::clamp(std::chrono::ceil<std::chrono::milliseconds>(*deadline_ - Clock::now()),
                        std::chrono::milliseconds(0), left);
    if (::poll(fds.data(), fds.size(), static_cast<int>(left.count())) <= 0) return;
    for (std::size_t i = fds.size() - 1; i > 0; --i) {
      const auto output = outputs_.begin() + static_cast<std::ptrdiff_t>(i) - 1;
      if (fds[i].revents == 0 || output->pump()) continue;
      output->flush();
      close_output(i - 1);
    }
  }

  void close_output(std::size_t index) {
    std::vector<RankOutput> rest;
    for (std::size_t i = 0; i < outputs_.size(); ++i) {
      if (i != index) rest.push_back(std::move(outputs_[i]));
    }
    outputs_.swap(rest);
  }

  void handle(int signal) {
    if (signal == SIGCHLD || signal == SIGPIPE) return;
    if (signal == SIGTSTP) {  // Ctrl-Z stops the job, not only its launcher
      send(SIGSTOP);
      ::raise(SIGSTOP);
      return send(SIGCONT);
    }
    if (signal == SIGINT && ++interrupts_ > 1) return end_all(SIGKILL);
    forwarded_ = signal == SIGHUP ? SIGTERM : signal;  // a terminal that closes: save and end
    send(forwarded_);
  }

  void send(int signal) const {
    for (const auto& rank : ranks_) {
      if (rank.running) ::kill(rank.pid, signal);
    }
  }
  void end_all(int signal) {
    for (auto& rank : ranks_) rank.ended_by_us |= rank.running;
    send(signal);
  }

  void reap() {
    for (std::size_t i = 0; i < ranks_.size(); ++i) {
      auto& rank = ranks_[i];
      if (!rank.running || ::waitpid(rank.pid, &rank.status, WNOHANG) != rank.pid) continue;
      rank.running = false;
      rank.order = ++ended_;
      if (rank.signaled() && WTERMSIG(rank.status) == forwarded_) rank.ended_by_us = true;
      publish_death(server_.local(), static_cast<int>(i), rank.how());
      if (rank.failed() && !deadline_) deadline_ = Clock::now() + options_.notice;
    }
  }

  // After a failure: the others get time to notice, then a request, then no choice.
  void escalate() {
    if (!deadline_ || Clock::now() < *deadline_) return;
    end_all(terminating_ ? SIGKILL : SIGTERM);
    terminating_ = true;
    deadline_ = Clock::now() + options_.grace;
  }

  // The epilogue and the exit code. The first to fail is the cause, unless it only followed another.
  int conclude() const {
    const Rank* cause = nullptr;
    bool interrupted = false;
    for (const auto& rank : ranks_) {
      interrupted |= rank.code() == kExitInterrupted || rank.ended_by_us;
      if (!rank.failed()) continue;
      if (cause == nullptr || std::pair(rank.victim(), rank.order) < std::pair(cause->victim(), cause->order))
        cause = &rank;
    }
    if (cause == nullptr) return interrupted ? kExitInterrupted : kExitDone;
    write_all(STDERR_FILENO,
              cat("onnx-ddp: rank ", cause - ranks_.data(), " (pid ", cause->pid, ") ", cause->how(), "\n"));
    if (cause->signaled()) return kExitPeer;
    const int code = cause->code();
    const bool listed =
        code == kExitUserError || code == kExitUsage || code == kExitPeer || code == kExitDiverged;
    return listed ? code : kExitInternal;
  }

  const LaunchOptions& options_;
  const std::string secret_ = random_secret();
  SignalQueue signals_;  // before the server's thread starts
  StoreServer server_;
  std::vector<Rank> ranks_;
  std::vector<RankOutput> outputs_;
  std::optional<Clock::time_point> deadline_;
  bool terminating_ = false;
  int interrupts_ = 0, forwarded_ = 0, ended_ = 0;
};

}  // namespace

int launch(const LaunchOptions& options) {
  CHECK(options.nproc >= 1 && !options.command.empty());
  if (::access(options.command[0].c_str(), X_OK) != 0) {
    throw Error(cat("cannot start '", options.command[0], "': ", std::strerror(errno)));
  }
  if (!options.log_dir.empty()) {
    std::error_code error;
    std::filesystem::create_directories(options.log_dir, error);
    if (error) throw Error(cat("cannot make the folder ", options.log_dir, ": ", error.message()));
  }
  return Launcher(options).run();
}

}  // namespace onnxddp
