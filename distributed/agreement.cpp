#include "distributed/agreement.h"

#include <algorithm>
#include <array>
#include <cstring>
#include <optional>
#include <string_view>

#include "distributed/digest.h"

namespace onnxddp {
namespace {

using Items = std::vector<std::pair<std::string, std::string>>;

constexpr std::size_t kLongestLine = 160;

// Each item as "LENGTH NAME\nLENGTH TEXT\n": no two lists of items give the same text.
std::string serialise(const Items& items) {
  std::string all;
  for (const auto& [name, text] : items)
    all += cat(name.size(), ' ', name, '\n', text.size(), ' ', text, '\n');
  return all;
}

std::string take(std::string_view& from) {
  const auto space = from.find(' ');
  CHECK(space != std::string_view::npos);
  const std::size_t size = std::stoull(std::string(from.substr(0, space)));
  std::string text(from.substr(space + 1, size));
  from.remove_prefix(space + 1 + size + 1);
  return text;
}

Items parse(std::string_view all) {
  Items items;
  while (!all.empty()) {
    std::string name = take(all);
    items.emplace_back(std::move(name), take(all));
  }
  return items;
}

std::string_view line_at(std::string_view text, std::size_t at) {
  if (at > text.size()) return "(nothing)";
  const auto begin = at == 0 ? 0 : text.rfind('\n', at - 1) + 1;  // npos + 1 is 0
  const auto line = text.substr(begin, std::min(text.find('\n', begin), text.size()) - begin);
  return begin >= text.size() ? "(nothing)" : line.substr(0, kLongestLine);
}

// What rank `rank` has to report against rank 0: three lines "what", "rank 0's line", "its line".
std::array<std::string, 3> compare(int rank, const Items& first, const Items& own) {
  for (std::size_t i = 0; i < std::max(first.size(), own.size()); ++i) {
    const std::string a = i < first.size() ? first[i].first : "(nothing)",
                      b = i < own.size() ? own[i].first : "(nothing)";
    if (a != b) return {cat("rank ", rank, " compares other things than rank 0"), a, b};
    const std::string &x = first[i].second, &y = own[i].second;
    if (x == y) continue;
    const auto at = static_cast<std::size_t>(
        std::mismatch(x.begin(), x.begin() + static_cast<std::ptrdiff_t>(std::min(x.size(), y.size())),
                      y.begin())
            .first -
        x.begin());
    const auto line = 1 + std::count(x.begin(), x.begin() + static_cast<std::ptrdiff_t>(at), '\n');
    return {cat("rank ", rank, " has another ", a, " than rank 0, first in line ", line),
            std::string(line_at(x, at)), std::string(line_at(y, at))};
  }
  return {};
}

using Report = std::array<char, 1024>;

}  // namespace

void check_agreement(Communicator& communicator, const Items& items) {
  std::string own = serialise(items);
  const Digest digest = sha256(own);
  std::vector<Digest> digests(static_cast<std::size_t>(communicator.size()));
  communicator.all_gather(digest.data(), digest.size(), digests.data());
  const auto differs =
      std::find_if(digests.begin(), digests.end(), [&](const Digest& d) { return d != digests[0]; });
  if (differs == digests.end()) return;

  // Only now the texts travel. The lowest rank that differs from rank 0 reports to all.
  std::uint64_t size = own.size();
  communicator.broadcast(&size, sizeof(size), 0);
  std::string first = communicator.rank() == 0 ? own : std::string(size, '\0');
  communicator.broadcast(first.data(), size, 0);
  const int reporter = static_cast<int>(differs - digests.begin());
  Report report{};
  if (communicator.rank() == reporter) {
    const auto lines = compare(reporter, parse(first), items);
    const std::string text = cat(lines[0], '\n', lines[1], '\n', lines[2]);
    std::memcpy(report.data(), text.data(), std::min(text.size(), report.size() - 1));
  }
  communicator.broadcast(report.data(), report.size(), reporter);
  const std::string text(report.data());
  const auto one = text.find('\n'), two = text.find('\n', one + 1);
  throw Error("the ranks do not agree: " + text.substr(0, one))
      .at(cat("rank 0: ", text.substr(one + 1, two - one - 1)))
      .in(cat("rank ", reporter, ": ", text.substr(two + 1)))
      .hint("start every rank with the same model, data, options and program version");
}

}  // namespace onnxddp
