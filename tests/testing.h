// Helpers of all tests: expect tests on graph text, ordered lines, random graphs.
#pragma once

#include <gtest/gtest.h>

#include <functional>
#include <string>
#include <string_view>
#include <vector>

#include "graph/graph.h"
#include "graph/text.h"

namespace onnxddp::testing {

/// Removes the common indentation and leading/trailing blank lines of a raw string.
std::string unindent(std::string_view text);

/// Parses `before`, verifies, runs `pass`, verifies, dumps, compares with `after`. The failure shows a diff
/// and the new text ready to paste.
void expect_graph(const std::function<void(Graph&)>& pass, std::string_view before, std::string_view after,
                  const char* file, int line);
#define EXPECT_GRAPH(pass, before, after) \
  ::onnxddp::testing::expect_graph(pass, before, after, __FILE__, __LINE__)
#define EXPECT_UNCHANGED(pass, text) ::onnxddp::testing::expect_graph(pass, text, text, __FILE__, __LINE__)

/// One expectation about a text: a sub-string that must follow the previous ones; NEXT: on the very next
/// line; NOT: absent until the next match.
struct LinePattern {
  enum class Kind { any, next, absent } kind = Kind::any;
  std::string text;
  LinePattern(const char* t) : text(t) {}  // NOLINT(google-explicit-constructor)
  LinePattern(Kind k, std::string t) : kind(k), text(std::move(t)) {}
};
inline LinePattern next_line(std::string text) { return {LinePattern::Kind::next, std::move(text)}; }
inline LinePattern absent(std::string text) { return {LinePattern::Kind::absent, std::move(text)}; }
void expect_lines(std::string_view text, const std::vector<LinePattern>& patterns, const char* file,
                  int line);
#define EXPECT_LINES(text, ...) ::onnxddp::testing::expect_lines(text, __VA_ARGS__, __FILE__, __LINE__)

/// Compares with tests/golden/NAME; UPDATE_GOLDEN=1 rewrites the file instead.
void expect_golden(const std::string& name, const std::string& text);

}  // namespace onnxddp::testing
