// The tests, or with "--as ROLE…" a process of a job that a test has started.
#include <gmock/gmock.h>

#include <string>
#include <vector>

#include "tests/distributed/processes.h"

int main(int argc, char** argv) {
  if (argc > 2 && std::string(argv[1]) == "--as") return onnxddp::play_role({argv + 2, argv + argc});
  testing::InitGoogleMock(&argc, argv);
  return RUN_ALL_TESTS();
}
