// Flat TOML: reading --config and run.toml, writing run.toml.
#pragma once

#include <string>
#include <vector>

namespace onnxddp {

/// One `key = value`: a list has `list` set; everything else is its text (strings unquoted).
struct ConfigEntry {
  std::string key, text;
  std::vector<std::string> list;
  bool is_list = false;
  int line = 0;
};
/// Keys with strings, numbers, booleans and arrays of those; tables are refused (keys are flat). Throws a
/// usage Error with file and line.
std::vector<ConfigEntry> parse_toml(const std::string& text, const std::string& file);

std::string toml_string(const std::string& text);
/// Always with a point or exponent, as TOML wants of floats.
std::string toml_float(double value);
std::string toml_list(const std::vector<std::string>& list);

}  // namespace onnxddp
