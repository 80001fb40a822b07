#include "executor/cli/commands.h"

#include "executor/cli/command_line.h"

namespace onnxddp {

const std::vector<CommandDef>& commands() {
  static const std::vector<CommandDef> table = {
      {"train", kTrain, "MODEL.onnx", "train a model; writes RUN_DIR",
       "onnx-ddp train model.onnx --data data.npz --epochs 20", run_train},
      {"eval", kEval, "MODEL|RUN", "loss and metrics of a model on data",
       "onnx-ddp eval runs/model-1 --data test.npz", run_eval},
      {"predict", kPredict, "MODEL|RUN", "the model's outputs for data",
       "onnx-ddp predict runs/model-1 --data test.npz -o outputs.npz", run_predict},
      {"check", kCheck, "MODEL.onnx", "can it be trained? tensors, roles and problems",
       "onnx-ddp check model.onnx --data data.npz", run_check},
      {"show", kShow, "MODEL.onnx", "the graph after a stage of the pipeline, or the plan",
       "onnx-ddp show model.onnx --stage optimizer --ranks 2", run_show},
      {"export", kExport, "RUN|CHECKPOINT", "the trained model for inference",
       "onnx-ddp export runs/model-1 -o model.onnx", run_export},
      {"bench", kBench, "MODEL.onnx", "time training steps; one line of JSON",
       "onnx-ddp bench model.onnx --data data.npz --steps 100", run_bench},
      {"ops", kOps, "", "the ops that are supported", "onnx-ddp ops", run_ops},
  };
  return table;
}

}  // namespace onnxddp
