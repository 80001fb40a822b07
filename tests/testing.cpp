#include "tests/testing.h"

#include <algorithm>
#include <cstdlib>
#include <fstream>
#include <sstream>

#include "graph/pass.h"

namespace onnxddp::testing {
namespace {

std::vector<std::string> lines_of(std::string_view text) {
  std::vector<std::string> out;
  std::string line;
  std::istringstream in{std::string(text)};
  while (std::getline(in, line)) out.push_back(line);
  return out;
}

std::string diff(const std::string& expected, const std::string& got) {
  const std::vector<std::string> a = lines_of(expected), b = lines_of(got);
  std::string out;
  for (std::size_t i = 0; i < std::max(a.size(), b.size()); ++i) {
    const std::string left = i < a.size() ? a[i] : "", right = i < b.size() ? b[i] : "";
    if (left == right) continue;
    out += cat("line ", i + 1, "\n- ", left, "\n+ ", right, "\n");
  }
  return out;
}

}  // namespace

std::string unindent(std::string_view text) {
  std::vector<std::string> lines = lines_of(text);
  const auto blank = [](const std::string& line) { return line.find_first_not_of(' ') == std::string::npos; };
  while (!lines.empty() && blank(lines.front())) lines.erase(lines.begin());
  while (!lines.empty() && blank(lines.back())) lines.pop_back();
  std::size_t indent = std::string::npos;
  for (const std::string& line : lines)
    if (!blank(line)) indent = std::min(indent, line.find_first_not_of(' '));
  std::string out;
  for (const std::string& line : lines) out += line.size() > indent ? line.substr(indent) + "\n" : "\n";
  return out;
}

void expect_graph(const std::function<void(Graph&)>& pass, std::string_view before, std::string_view after,
                  const char* file, int line) {
  const ::testing::ScopedTrace trace(file, line, "EXPECT_GRAPH");
  Graph graph = parse(unindent(before));
  verify(graph);
  pass(graph);
  verify(graph);
  const std::string got = dump(graph);
  const std::string expected = unindent(after);
  EXPECT_TRUE(got == expected) << diff(expected, got) << "the new text:\n" << got;
}

void expect_lines(std::string_view text, const std::vector<LinePattern>& patterns, const char* file,
                  int line) {
  const ::testing::ScopedTrace trace(file, line, "EXPECT_LINES");
  const std::vector<std::string> lines = lines_of(text);
  std::size_t at = 0;
  std::vector<std::string> forbidden;
  for (const LinePattern& pattern : patterns) {
    if (pattern.kind == LinePattern::Kind::absent) {
      forbidden.push_back(pattern.text);
      continue;
    }
    std::size_t found = at;
    const auto holds = [&](std::size_t i) { return lines[i].find(pattern.text) != std::string::npos; };
    while (found < lines.size() && !holds(found)) {
      for (const std::string& bad : forbidden) {
        EXPECT_EQ(lines[found].find(bad), std::string::npos)
            << "unwanted '" << bad << "' in line " << found + 1;
      }
      ++found;
    }
    ASSERT_LT(found, lines.size()) << "'" << pattern.text << "' does not follow; the text:\n" << text;
    if (pattern.kind == LinePattern::Kind::next) {
      EXPECT_EQ(found, at) << "'" << pattern.text << "' is not on the next line";
    }
    at = found + 1;
    forbidden.clear();
  }
  for (const std::string& bad : forbidden) {
    for (std::size_t i = at; i < lines.size(); ++i) {
      EXPECT_EQ(lines[i].find(bad), std::string::npos) << "unwanted '" << bad << "' in line " << i + 1;
    }
  }
}

void expect_golden(const std::string& name, const std::string& text) {
  const std::string path = std::string(ONNXDDP_SOURCE_DIR) + "/tests/golden/" + name;
  if (std::getenv("UPDATE_GOLDEN") != nullptr) {
    std::ofstream(path) << text;
    return;
  }
  std::ifstream in(path);
  ASSERT_TRUE(in) << path << " is missing; UPDATE_GOLDEN=1 writes it";
  std::ostringstream expected;
  expected << in.rdbuf();
  EXPECT_TRUE(expected.str() == text) << name << " differs (UPDATE_GOLDEN=1 rewrites it; read the diff):\n"
                                      << diff(expected.str(), text);
}

}  // namespace onnxddp::testing
