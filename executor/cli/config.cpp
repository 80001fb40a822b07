#include "executor/cli/config.h"

#include <cctype>
#include <cstdio>

#include "graph/error.h"
#include "graph/types.h"

namespace onnxddp {
namespace {

/// Reads the few forms of TOML that flat files of options need.
class Reader {
 public:
  Reader(const std::string& text, const std::string& file) : text_(text), file_(file) {}

  std::vector<ConfigEntry> entries() {
    std::vector<ConfigEntry> out;
    for (skip_lines(); !done(); skip_lines()) {
      if (peek() == '[') fail("tables are not used here: keys are the long names of flags, without sections");
      ConfigEntry entry;
      entry.line = line_;
      entry.key = key();
      skip_blanks();
      if (!take('=')) fail(cat("expected '=' after '", entry.key, "'"));
      skip_blanks();
      value(entry);
      skip_blanks();
      if (!done() && peek() == '#') skip_comment();
      if (!done() && peek() != '\n' && peek() != '\r')
        fail(cat("unexpected text after the value of '", entry.key, "'"));
      for (const ConfigEntry& earlier : out)
        if (earlier.key == entry.key) fail(cat("'", entry.key, "' is given twice"));
      out.push_back(std::move(entry));
    }
    return out;
  }

 private:
  bool done() const { return at_ >= text_.size(); }
  char peek() const { return text_[at_]; }
  bool take(char c) {
    if (done() || peek() != c) return false;
    ++at_;
    return true;
  }
  [[noreturn]] void fail(const std::string& why) const {
    throw usage_error(cat(file_, ":", line_, ": ", why));
  }
  void skip_blanks() {
    while (!done() && (peek() == ' ' || peek() == '\t')) ++at_;
  }
  void skip_comment() {
    while (!done() && peek() != '\n') ++at_;
  }
  void skip_lines() {
    for (;;) {
      skip_blanks();
      if (done()) return;
      if (peek() == '#') {
        skip_comment();
      } else if (peek() == '\n' || peek() == '\r') {
        line_ += peek() == '\n' ? 1 : 0;
        ++at_;
      } else {
        return;
      }
    }
  }

  std::string key() {
    if (peek() == '"' || peek() == '\'') return string();
    const std::size_t begin = at_;
    while (!done() &&
           (std::isalnum(static_cast<unsigned char>(peek())) != 0 || peek() == '-' || peek() == '_'))
      ++at_;
    if (begin == at_) fail("expected a key");
    return text_.substr(begin, at_ - begin);
  }

  void value(ConfigEntry& entry) {
    if (!take('[')) {
      entry.text = scalar();
      return;
    }
    entry.is_list = true;
    for (skip_lines(); !take(']'); skip_lines()) {
      if (done()) fail("the array is not closed");
      entry.list.push_back(scalar());
      skip_lines();
      if (!take(',') && (done() || peek() != ']')) fail("expected ',' or ']' in the array");
    }
  }

  std::string scalar() {
    if (done()) fail("expected a value");
    if (peek() == '"' || peek() == '\'') return string();
    const std::size_t begin = at_;
    while (!done() && std::string_view(" \t\r\n,]#").find(peek()) == std::string_view::npos) ++at_;
    std::string word = text_.substr(begin, at_ - begin);
    if (word.empty()) fail("expected a value");
    const bool number = std::isdigit(static_cast<unsigned char>(word.back())) != 0 || word.back() == '.';
    if (!number && word != "true" && word != "false")
      fail(cat("'", word, "' is no number, true or false; text needs quotes"));
    std::erase(word, '_');
    return word;
  }

  std::string string() {
    const char quote = text_[at_++];
    std::string out;
    while (!done() && peek() != quote) {
      if (peek() == '\n') fail("the string is not closed on its line");
      const char c = text_[at_++];
      out += c == '\\' && quote == '"' ? escape() : std::string(1, c);
    }
    if (!take(quote)) fail("the string is not closed");
    return out;
  }

  std::string escape() {
    if (done()) fail("the string is not closed");
    const char c = text_[at_++];
    static const std::string_view from = "btnfr\"\\", to = "\b\t\n\f\r\"\\";
    if (const std::size_t i = from.find(c); i != std::string_view::npos) return std::string(1, to[i]);
    if (c != 'u' || at_ + 4 > text_.size()) fail("unknown escape in a string");
    unsigned code = 0;
    for (int i = 0; i < 4; ++i) {
      const char h = text_[at_++];
      if (std::isxdigit(static_cast<unsigned char>(h)) == 0) fail("unknown escape in a string");
      code = code * 16 + static_cast<unsigned>(std::isdigit(static_cast<unsigned char>(h)) != 0
                                                   ? h - '0'
                                                   : (h | 32) - 'a' + 10);
    }
    if (code < 0x80) return std::string(1, static_cast<char>(code));
    if (code < 0x800) return {static_cast<char>(0xC0 | code >> 6), static_cast<char>(0x80 | (code & 63))};
    return {static_cast<char>(0xE0 | code >> 12), static_cast<char>(0x80 | (code >> 6 & 63)),
            static_cast<char>(0x80 | (code & 63))};
  }

  const std::string& text_;
  const std::string& file_;
  std::size_t at_ = 0;
  int line_ = 1;
};

}  // namespace

std::vector<ConfigEntry> parse_toml(const std::string& text, const std::string& file) {
  return Reader(text, file).entries();
}

std::string toml_string(const std::string& text) {
  std::string out = "\"";
  for (const char c : text) {
    if (c == '"' || c == '\\') {
      out += {'\\', c};
    } else if (static_cast<unsigned char>(c) < 32 || c == 127) {
      char code[8];
      std::snprintf(code, sizeof code, "\\u%04X", static_cast<unsigned>(static_cast<unsigned char>(c)));
      out += code;
    } else {
      out += c;
    }
  }
  return out + "\"";
}

std::string toml_float(double value) {
  std::string text = number_str(value);
  if (text.find_first_of(".en") == std::string::npos) text += ".0";  // also "inf" and "nan"
  return text;
}

std::string toml_list(const std::vector<std::string>& list) {
  std::string out = "[";
  for (const std::string& item : list) out += (out.size() > 1 ? ", " : "") + toml_string(item);
  return out + "]";
}

}  // namespace onnxddp
