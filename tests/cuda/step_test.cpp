// Whole training steps on the device: a session's plan made of the table's kernels.
#include "executor/cuda/nccl.h"
#include "tests/cuda/device_case.h"
#include "tests/cuda/training_case.h"

namespace onnxddp::cuda {
namespace {

class Steps : public DeviceTest {};
INSTANTIATE_DEVICE_TESTS(Steps);

TEST_P(Steps, TrainAsOnTheCpu) {
  NcclCommunicator alone({}, device_->comm().get());
  const std::unique_ptr<Device> cpu = make_cpu_device(1);
  // Adam divides small gradients by their size: rounding shows more.
  for (const auto& [optimizer, tolerance] : {std::pair(OptimizerSpec{"sgd", {{"momentum", "0.9"}}}, 1e-5),
                                             std::pair(OptimizerSpec{"adam", {}}, 1e-4)}) {
    SCOPED_TRACE(optimizer.name);
    EXPECT_LE(worst_difference(train(*device_, alone, optimizer), train(*cpu, alone, optimizer)), tolerance);
  }
}

}  // namespace
}  // namespace onnxddp::cuda
