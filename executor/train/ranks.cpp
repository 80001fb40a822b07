#include "executor/train/ranks.h"

namespace onnxddp {

using std::chrono::milliseconds;

RankGroup::RankGroup(const std::optional<RankInfo>& info, milliseconds timeout) : timeout_(timeout) {
  if (!info) return;
  info_ = *info;
  if (info_.world_size > 1) job_ = join_job(info_, timeout);
}

Communicator& RankGroup::communicator() {
  if (!communicator_) {
    CommunicatorOptions options;
    options.rank = rank();
    options.size = size();
    options.store = job_.store.get();
    if (!job_.host.empty()) options.host = job_.host;
    options.timeout = timeout_;
    communicator_ = make_communicator(options);
  }
  return *communicator_;
}

std::string RankGroup::on_rank_zero(const std::string& key, const std::function<std::string()>& work) {
  if (size() == 1) return work();
  const std::string name = "trainer/" + key;
  if (rank() == 0) {
    try {
      const std::string result = work();
      job_.store->set(name, "+" + result);
      return result;
    } catch (const Error& error) {
      job_.store->set(name, cat("-", error.exit_code(), " ", error.report()));
      throw;
    } catch (const std::exception& error) {
      job_.store->set(name, cat("-", static_cast<int>(kExitInternal), " ", error.what()));
      throw;
    }
  }
  const std::string answer = job_.store->get(name, timeout_);
  if (answer.starts_with('+')) return answer.substr(1);
  const std::size_t blank = answer.find(' ');
  CHECK(answer.starts_with('-') && blank != std::string::npos, answer);
  throw Error(answer.substr(blank + 1), std::stoi(answer.substr(1, blank - 1)));
}

bool RankGroup::should_print(const std::string& report) noexcept {
  if (size() == 1) return true;
  try {
    if (rank() == 0) {
      job_.store->set("trainer/report", report);
      return true;
    }
    return job_.store->get("trainer/report", milliseconds(3000)) != report;
  } catch (const std::exception&) {
    return true;  // no store, or rank 0 is not in trouble
  }
}

void broadcast_bytes(Communicator& communicator, std::string& bytes) {
  std::int64_t count = static_cast<std::int64_t>(bytes.size());
  communicator.broadcast(&count, sizeof count, 0);
  bytes.resize(static_cast<std::size_t>(count));
  if (count > 0) communicator.broadcast(bytes.data(), bytes.size(), 0);
}

}  // namespace onnxddp
