#include "graph/passes/options.h"

#include <algorithm>
#include <charconv>

#include "graph/nearest.h"

namespace onnxddp {

void OptionReader::only(const std::vector<std::string>& known) const {
  for (const auto& [key, unused] : options_) {
    if (std::find(known.begin(), known.end(), key) != known.end()) continue;
    std::string list;
    for (const std::string& name : known) list += (list.empty() ? "" : ", ") + name;
    throw usage_error(cat(what_, " has no option '", key, "'", did_you_mean(key, known)))
        .hint(list.empty() ? "it takes no options" : cat("options: ", list));
  }
}

double OptionReader::number(const std::string& key, double otherwise) const {
  if (!has(key)) return otherwise;
  const std::string& text = value(key);
  double out = 0;
  const char* begin = text.data() + (text.starts_with('+') ? 1 : 0);
  const auto [end, error] = std::from_chars(begin, text.data() + text.size(), out);
  if (error != std::errc() || end != text.data() + text.size() || !(out - out == 0))
    throw usage_error(cat(what_, ": ", key, "=", text, " is not a finite number"));
  return out;
}

std::int64_t OptionReader::integer(const std::string& key, std::int64_t otherwise) const {
  if (!has(key)) return otherwise;
  const std::string& text = value(key);
  std::int64_t out = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), out);
  if (error != std::errc() || end != text.data() + text.size())
    throw usage_error(cat(what_, ": ", key, "=", text, " is not a whole number"));
  return out;
}

bool OptionReader::flag(const std::string& key, bool otherwise) const {
  if (!has(key)) return otherwise;
  const std::string& text = value(key);
  if (text == "true") return true;
  if (text == "false") return false;
  throw usage_error(cat(what_, ": ", key, "=", text, " is neither true nor false"));
}

std::string OptionReader::text(const std::string& key, std::string otherwise) const {
  return has(key) ? value(key) : std::move(otherwise);
}

void OptionReader::require(bool ok, const std::string& key, const std::string& rule) const {
  if (!ok)
    throw usage_error(cat(what_, ": ", key, " must be ", rule, has(key) ? cat(", not ", value(key)) : ""));
}

}  // namespace onnxddp
