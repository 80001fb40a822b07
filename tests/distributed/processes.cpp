#include "tests/distributed/processes.h"

#include <fcntl.h>
#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <functional>
#include <iterator>
#include <map>
#include <sstream>
#include <thread>

#include "distributed/agreement.h"
#include "distributed/communicator.h"
#include "distributed/launch.h"

namespace onnxddp {
namespace {

using Clock = std::chrono::steady_clock;
using std::chrono::milliseconds;

std::string self() { return std::filesystem::read_symlink("/proc/self/exe"); }

std::string read_file(const std::string& path) {
  std::ifstream in(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(in), {}};
}

bool poll_until(milliseconds limit, const std::function<bool()>& done) {
  for (const auto end = Clock::now() + limit; Clock::now() < end;
       std::this_thread::sleep_for(milliseconds(5))) {
    if (done()) return true;
  }
  return done();
}

// ---- what ranks do

volatile std::sig_atomic_t g_stop = 0;
void note_stop(int) { g_stop = 1; }

void say(const std::string& text) {
  std::fputs(text.c_str(), stdout);
  std::fflush(stdout);
}

// Steps of one small all-reduce each; `act` may misbehave.
void train(Communicator& c, int steps, milliseconds pause, const std::function<void(int)>& act) {
  for (int step = 1; step <= steps; ++step) {
    c.note_step(step);
    act(step);
    std::vector<float> data(100, static_cast<float>(c.rank()));
    c.all_reduce(data.data(), data.size(), DType::f32);
    if (c.rank() == 0) say(cat("step ", step, "\n"));
    std::this_thread::sleep_for(pause);
  }
}

using Scenario = std::function<void(Communicator&, const RankInfo&)>;
const std::map<std::string, Scenario>& scenarios() {
  static const std::map<std::string, Scenario> all = {
      {"hello",
       [](Communicator& c, const RankInfo& info) {
         say(cat("hello from ", c.rank(), " of ", c.size(), ", local ", info.local_rank, "\nsecond line\n"));
         std::fputs("no newline", stderr);
         if (std::getenv("ONNX_DDP_LIFELINE") != nullptr) say("the launcher's variable is still set\n");
       }},
      {"sum",
       [](Communicator& c, const RankInfo&) {
         std::vector<double> data(50'000, c.rank() + 1);
         c.all_reduce(data.data(), data.size(), DType::f64);
         check_agreement(c, {{"graph", "same"}});
         say(cat("sum ", data.back(), "\n"));
       }},
      {"long",
       [](Communicator& c, const RankInfo&) {
         say(cat("rank ", c.rank(), " pid ", ::getpid(), "\n"));
         train(c, 1000, milliseconds(20), [](int) {});
       }},
      {"one-fails",
       [](Communicator& c, const RankInfo&) {
         train(c, 1000, milliseconds(1), [&](int step) {
           if (c.rank() == 1 && step == 5) throw Error("row 7 is not a number");
         });
       }},
      {"one-diverges",
       [](Communicator& c, const RankInfo&) {
         train(c, 1000, milliseconds(1), [&](int step) {
           if (c.rank() == 0 && step == 5) throw Error("the loss is not a number", kExitDiverged);
         });
       }},
      {"one-exits-9",
       [](Communicator& c, const RankInfo&) {
         train(c, 1000, milliseconds(1), [&](int step) {
           if (c.rank() == 1 && step == 5) ::_exit(9);
         });
       }},
      {"one-hangs",
       [](Communicator& c, const RankInfo&) {
         train(c, 1000, milliseconds(1), [&](int step) {
           if (c.rank() == 1 && step == 5) std::this_thread::sleep_for(std::chrono::seconds(20));
         });
       }},
      {"one-stops",
       [](Communicator& c, const RankInfo&) {
         train(c, 1000, milliseconds(1), [&](int step) {
           if (c.rank() == 1 && step == 5) ::raise(SIGSTOP);
         });
       }},
      {"saves-on-sigterm",
       [](Communicator& c, const RankInfo&) {
         std::signal(SIGTERM, note_stop);
         say(cat("rank ", c.rank(), " ready\n"));
         while (g_stop == 0) std::this_thread::sleep_for(milliseconds(5));
         c.barrier();
         say("saved\n");
       }},
      {"ignores-signals",
       [](Communicator& c, const RankInfo&) {
         if (c.rank() == 1) {
           std::signal(SIGTERM, SIG_IGN);
           std::signal(SIGINT, SIG_IGN);
         }
         c.barrier();
         say(cat("rank ", c.rank(), " ready\n"));
         if (c.rank() == 0) throw Error("rank 0 gives up");
         std::this_thread::sleep_for(std::chrono::seconds(20));
       }},
      {"ignores-interrupts",
       [](Communicator& c, const RankInfo&) {
         std::signal(SIGINT, SIG_IGN);
         say(cat("rank ", c.rank(), " ready\n"));
         std::this_thread::sleep_for(std::chrono::seconds(20));
       }},
      {"disagree",
       [](Communicator& c, const RankInfo&) {
         check_agreement(c, {{"graph", cat("a\nlearning rate ", c.rank(), "\nc\n")}});
       }},
  };
  return all;
}

// "SCENARIO" or "SCENARIO/BACKEND".
int play_rank(const std::string& role) {
  const auto slash = role.find('/');
  const std::string scenario = role.substr(0, slash);
  const auto info = rank_from_environment();
  if (!info) return kExitUsage;
  die_with_parent(*info);
  try {
    const Job job = join_job(*info, milliseconds(10'000));
    CommunicatorOptions options;
    if (slash != std::string::npos) options.backend = role.substr(slash + 1);
    options.rank = info->rank;
    options.size = info->world_size;
    options.store = job.store.get();
    options.host = job.host;
    options.timeout = milliseconds(scenario == "one-hangs" || scenario == "one-stops" ? 1'000 : 20'000);
    options.heartbeat = milliseconds(200);
    const auto communicator = make_communicator(options);
    scenarios().at(scenario)(*communicator, *info);
    return kExitDone;
  } catch (const Error& error) {
    std::fprintf(stderr, "error: %s\n", error.report().c_str());
    return error.exit_code();
  }
}

int play_launcher(const std::vector<std::string>& role) {
  LaunchOptions options;
  options.nproc = std::atoi(role.at(2).c_str());
  options.command = {self(), "--as", "rank", role.at(1)};
  if (role.size() > 3) options.log_dir = role[3];
  options.notice = milliseconds(3'000);
  options.grace = milliseconds(500);
  return launch(options);
}

}  // namespace

int play_role(const std::vector<std::string>& role) {
  ::alarm(60);
  return role.at(0) == "launcher" ? play_launcher(role) : play_rank(role.at(1));
}

TestJob::TestJob(const std::vector<std::string>& role) {
  folder_ = testing::TempDir() + "onnxddp-XXXXXX";
  if (::mkdtemp(folder_.data()) == nullptr) throw std::runtime_error("mkdtemp " + folder_);
  std::vector<std::string> text = {self(), "--as"};
  text.insert(text.end(), role.begin(), role.end());
  std::vector<char*> argv;
  for (auto& t : text) argv.push_back(t.data());
  argv.push_back(nullptr);
  const std::string out = folder_ + "/out", err = folder_ + "/err";
  pid_ = ::fork();
  if (pid_ != 0) return;
  ::setsid();
  ::dup2(::open(out.c_str(), O_CREAT | O_WRONLY | O_APPEND, 0600), 1);
  ::dup2(::open(err.c_str(), O_CREAT | O_WRONLY | O_APPEND, 0600), 2);
  ::execv(argv[0], argv.data());
  ::_exit(99);
}

TestJob::~TestJob() {
  for (const pid_t pid : living()) ::kill(pid, SIGKILL);
  if (!reaped_) ::waitpid(pid_, nullptr, 0);
  std::filesystem::remove_all(folder_);
}

int TestJob::wait(milliseconds limit) {
  int status = 0;
  reaped_ = poll_until(limit, [&] { return ::waitpid(pid_, &status, WNOHANG) == pid_; });
  if (!reaped_) {
    ADD_FAILURE() << "still running\n" << out() << err();
    return -1;
  }
  return WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status);
}

std::string TestJob::out() const { return read_file(folder_ + "/out"); }
std::string TestJob::err() const { return read_file(folder_ + "/err"); }

bool TestJob::wait_for(const std::string& text) const {
  return poll_until(std::chrono::seconds(20), [&] { return out().find(text) != std::string::npos; });
}

long TestJob::number_after(const std::string& text) const {
  if (!wait_for(text)) return -1;
  std::string all;
  poll_until(std::chrono::seconds(5), [&] {  // the whole line
    all = out();
    return all.find('\n', all.find(text)) != std::string::npos;
  });
  return std::atol(all.c_str() + all.find(text) + text.size());
}

std::vector<pid_t> TestJob::living() const {
  std::vector<pid_t> found;
  for (const auto& entry : std::filesystem::directory_iterator("/proc")) {
    std::ifstream in(entry.path() / "stat");
    std::string line;
    if (!std::getline(in, line)) continue;
    std::istringstream fields(line.substr(line.rfind(')') + 1));  // state, parent, group, session
    char state = 'Z';
    pid_t parent = 0, group = 0, session = 0;
    fields >> state >> parent >> group >> session;
    if (session == pid_ && state != 'Z' && state != 'X')
      found.push_back(std::atoi(entry.path().filename().c_str()));
  }
  return found;
}

bool TestJob::gone_within(milliseconds limit) const {
  return poll_until(limit, [&] { return living().empty(); });
}

}  // namespace onnxddp
