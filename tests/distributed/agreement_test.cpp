#include "distributed/agreement.h"

#include <gtest/gtest.h>

#include <mutex>

namespace onnxddp {
namespace {

using Items = std::vector<std::pair<std::string, std::string>>;

// The report on every rank, which must be the same; empty when they agree.
std::string report(const std::vector<Items>& items) {
  std::mutex mutex;
  std::vector<std::string> reports;
  run_ranks(static_cast<int>(items.size()), [&](Communicator& c) {
    std::string text;
    try {
      check_agreement(c, items[static_cast<std::size_t>(c.rank())]);
    } catch (const Error& error) {
      EXPECT_EQ(error.exit_code(), kExitUserError);
      text = error.report();
    }
    const std::lock_guard lock(mutex);
    reports.push_back(text);
  });
  for (const auto& r : reports) EXPECT_EQ(r, reports[0]);
  return reports[0];
}

constexpr const char* kHint =
    "\n   hint  start every rank with the same model, data, options and program version";

TEST(Agreement, IsSilentWhenAllAgree) {
  const Items items = {{"graph", "a\nb\n"}, {"options", ""}};
  EXPECT_EQ(report({items, items, items}), "");
  EXPECT_EQ(report({items}), "");
  EXPECT_EQ(report({{}, {}}), "");
}

TEST(Agreement, ShowsTheFirstDifferingLine) {
  EXPECT_EQ(report({{{"graph", "g v1\nx: f32[4]\n"}, {"options", "lr 0.1"}},
                    {{"graph", "g v1\nx: f32[4]\n"}, {"options", "lr 0.1"}},
                    {{"graph", "g v1\nx: f32[8]\n"}, {"options", "lr 0.2"}}}),
            std::string("the ranks do not agree: rank 2 has another graph than rank 0, first in line 2"
                        "\n   at    rank 0: x: f32[4]\n   in    rank 2: x: f32[8]") +
                kHint);
}

TEST(Agreement, ShowsAMissingEnd) {
  EXPECT_EQ(report({{{"data", "a\nb\n"}}, {{"data", "a\n"}}}),
            std::string("the ranks do not agree: rank 1 has another data than rank 0, first in line 2"
                        "\n   at    rank 0: b\n   in    rank 1: (nothing)") +
                kHint);
  EXPECT_EQ(report({{{"data", ""}}, {{"data", "a"}}}),
            std::string("the ranks do not agree: rank 1 has another data than rank 0, first in line 1"
                        "\n   at    rank 0: (nothing)\n   in    rank 1: a") +
                kHint);
}

TEST(Agreement, SeesOtherItems) {
  EXPECT_EQ(report({{{"graph", "x"}}, {{"graph", "x"}, {"data", "y"}}}),
            std::string("the ranks do not agree: rank 1 compares other things than rank 0"
                        "\n   at    rank 0: (nothing)\n   in    rank 1: data") +
                kHint);
}

TEST(Agreement, CutsLongLines) {
  const std::string text =
      report({{{"graph", std::string(100'000, 'a')}}, {{"graph", std::string(100'000, 'a') + "b"}}});
  EXPECT_LT(text.size(), 700u);
}

}  // namespace
}  // namespace onnxddp
