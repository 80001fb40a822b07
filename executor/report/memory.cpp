#include "executor/report/memory.h"

#include <cstdlib>
#include <fstream>
#include <string>

namespace onnxddp {

double peak_rss_mb() {
  std::ifstream status("/proc/self/status");
  for (std::string line; std::getline(status, line);)
    if (line.rfind("VmHWM:", 0) == 0) return std::strtod(line.c_str() + 6, nullptr) / 1024;  // kB
  return 0;
}

}  // namespace onnxddp
