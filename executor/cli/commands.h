// The sub-commands, one file each. They return the exit code.
#pragma once

namespace onnxddp {

struct CommandLine;
int run_train(CommandLine& line);
int run_eval(CommandLine& line);
int run_predict(CommandLine& line);
int run_check(CommandLine& line);
int run_show(CommandLine& line);
int run_export(CommandLine& line);
int run_bench(CommandLine& line);
int run_ops(CommandLine& line);

}  // namespace onnxddp
