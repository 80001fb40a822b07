// onnx-ddp eval
#include <cstdio>

#include "executor/cli/commands.h"
#include "executor/cli/run_command.h"
#include "executor/cuda/loader.h"
#include "executor/train/stepper.h"
#include "executor/train/trainer.h"

namespace onnxddp {

int run_eval(CommandLine& line) {
  const Options options = resolve_run(line, {"loss", "target", "loss-input", "input", "dim"});
  return run_in_ranks(line, options, [&](RankGroup& ranks) {
    if (ranks.rank() == 0 && !options.quiet) {
      say("model    " + options.model);
      for (const std::string& file : options.data) say("data     " + file);
    }
    const EvalSetup setup = prepare_evaluation(options);
    if (ranks.rank() == 0 && !options.quiet)
      for (const std::string& note : setup.notes) say("note     " + note);
    const std::unique_ptr<Device> device = make_device(options.device, thread_count(options, ranks.size()));
    Session session(*device, ranks.communicator());
    session.add_program("evaluate", setup.evaluate);
    set_values(session, setup.model.values);
    const EvalResult result = evaluate(session, ranks.communicator(), *setup.data, setup.batch_size,
                                       setup.loss, setup.model.batch_symbol, setup.dims);
    if (ranks.rank() == 0) {
      std::string text = "loss: " + number_str(result.loss);
      if (result.has_accuracy) text += "  accuracy: " + number_str(result.accuracy);
      std::printf("%s  samples: %lld\n", text.c_str(), static_cast<long long>(result.samples));
      std::fflush(stdout);
    }
    ranks.communicator().barrier();
    return static_cast<int>(kExitDone);
  });
}

}  // namespace onnxddp
