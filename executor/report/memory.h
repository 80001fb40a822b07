// The memory that this process has used.
#pragma once

#include "graph/error.h"

namespace ONNXDDP_API onnxddp {

/// MiB, the largest resident set so far (VmHWM); 0 where /proc is not mounted. Not getrusage's ru_maxrss,
/// which on Linux keeps that of the process before exec: a rank would report its fat parent.
double peak_rss_mb();

}  // namespace onnxddp
