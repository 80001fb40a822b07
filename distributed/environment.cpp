// A rank's view of its launcher: environment, secret, life-time, store.
#include <arpa/inet.h>
#include <fcntl.h>
#include <netdb.h>
#include <netinet/in.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <unistd.h>

#include <cerrno>
#include <charconv>
#include <csignal>
#include <cstdlib>
#include <cstring>
#include <thread>

#include "distributed/launch.h"

namespace onnxddp {
namespace {

constexpr const char* kLifeline = "ONNX_DDP_LIFELINE";
constexpr std::size_t kSecret = 64;

const char* get(const char* name) {
  const char* value = std::getenv(name);
  return value != nullptr && *value != '\0' ? value : nullptr;
}

const char* expect(const char* name) {
  const char* value = get(name);
  if (value == nullptr) throw usage_error(cat("environment variable ", name, " expected, but not set"));
  return value;
}

int number(const char* name, const char* text, int low, int high) {
  int value = 0;
  const auto [end, error] = std::from_chars(text, text + std::strlen(text), value);
  if (error != std::errc() || *end != '\0' || value < low || value > high) {
    throw usage_error(
        cat("environment variable ", name, " is '", text, "', expected a number from ", low, " to ", high));
  }
  return value;
}

int number_or(const char* name, int fallback, int low, int high) {
  const char* text = get(name);
  return text == nullptr ? fallback : number(name, text, low, high);
}

std::string read_secret(int fd) {
  std::string secret(kSecret, '\0');
  for (std::size_t done = 0; done < kSecret;) {
    const ssize_t n = ::read(fd, secret.data() + done, kSecret - done);
    if (n < 0 && errno == EINTR) continue;
    if (n <= 0)
      throw usage_error(cat("environment variable ", kLifeline, " does not name a launcher's pipe"));
    done += static_cast<std::size_t>(n);
  }
  return secret;
}

// The numeric local address by which packets leave for `host`.
std::string address_towards(const std::string& host, std::uint16_t port) {
  addrinfo hints{}, *found = nullptr;
  hints.ai_socktype = SOCK_DGRAM;
  if (const int error = ::getaddrinfo(host.c_str(), std::to_string(port).c_str(), &hints, &found);
      error != 0) {
    throw usage_error(cat("cannot find host '", host, "': ", ::gai_strerror(error)));
  }
  const std::unique_ptr<addrinfo, decltype(&::freeaddrinfo)> owner(found, &::freeaddrinfo);
  sockaddr_storage local{};
  socklen_t size = sizeof(local);
  const int fd = ::socket(found->ai_family, SOCK_DGRAM | SOCK_CLOEXEC, 0);
  const bool known = fd >= 0 && ::connect(fd, found->ai_addr, found->ai_addrlen) == 0 &&  // sends nothing
                     ::getsockname(fd, reinterpret_cast<sockaddr*>(&local), &size) == 0;
  if (fd >= 0) ::close(fd);
  char text[NI_MAXHOST] = "";
  if (!known || ::getnameinfo(reinterpret_cast<sockaddr*>(&local), size, text, sizeof(text), nullptr, 0,
                              NI_NUMERICHOST) != 0) {
    throw usage_error(cat("no network leads to host '", host, "'"));
  }
  return text;
}

}  // namespace

std::optional<RankInfo> rank_from_environment() {
  if (get("RANK") == nullptr && get("WORLD_SIZE") == nullptr) return std::nullopt;
  constexpr int kMany = 1 << 20;
  RankInfo info;
  info.world_size = number("WORLD_SIZE", expect("WORLD_SIZE"), 1, kMany);
  info.rank = number("RANK", expect("RANK"), 0, info.world_size - 1);
  info.local_world_size = number_or("LOCAL_WORLD_SIZE", 1, 1, info.world_size);
  info.local_rank = number_or("LOCAL_RANK", info.rank % info.local_world_size, 0, info.local_world_size - 1);
  info.master_addr = expect("MASTER_ADDR");
  info.master_port = static_cast<std::uint16_t>(number("MASTER_PORT", expect("MASTER_PORT"), 1, 65535));
  if (get(kLifeline) != nullptr) {
    info.lifeline = number(kLifeline, get(kLifeline), 0, kMany);
    info.secret = read_secret(info.lifeline);
    ::fcntl(info.lifeline, F_SETFD, FD_CLOEXEC);
    ::unsetenv(kLifeline);
  }
  return info;
}

Job join_job(const RankInfo& info, std::chrono::milliseconds timeout) {
  Job job;
  std::uint16_t port = info.master_port;
  if (info.lifeline < 0) {
    if (get("TORCHELASTIC_USE_AGENT_STORE") != nullptr)
      ++port;  // the port itself is taken by torchrun's own store
    if (info.rank == 0) job.server = std::make_unique<StoreServer>(info.master_addr, port, info.secret);
  }
  job.store = connect_store(info.master_addr, port, info.secret, timeout);
  job.host = address_towards(info.master_addr, port);
  return job;
}

void die_with_parent(const RankInfo& info) {
  if (info.lifeline < 0) return;
  ::prctl(PR_SET_PDEATHSIG, SIGKILL);
  // The signal may have come before this call, and does not cross a change of user: the pipe's end says the
  // same.
  sigset_t all, before;
  sigfillset(&all);
  pthread_sigmask(SIG_SETMASK, &all, &before);
  std::thread([fd = info.lifeline] {
    char byte;
    ssize_t n;
    do n = ::read(fd, &byte, 1);
    while (n > 0 || (n < 0 && errno == EINTR));
    ::_exit(kExitPeer);
  }).detach();
  pthread_sigmask(SIG_SETMASK, &before, nullptr);
}

}  // namespace onnxddp
