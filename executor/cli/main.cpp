// The program: finds the sub-command, and is the only place that turns errors into exit codes.
#include <poll.h>
#include <unistd.h>

#include <climits>
#include <csignal>
#include <cstdio>
#include <iostream>

#include "executor/cli/command_line.h"
#include "executor/cli/run_command.h"
#include "graph/nearest.h"

namespace onnxddp {
namespace {

std::string own_path(const char* name) {
  char path[PATH_MAX];
  const ssize_t size = readlink("/proc/self/exe", path, sizeof path);
  return size > 0 && size < static_cast<ssize_t>(sizeof path)
             ? std::string(path, static_cast<std::size_t>(size))
             : name;
}

const CommandDef& find_command(const std::string& name) {
  std::vector<std::string> names;
  for (const CommandDef& command : commands()) {
    if (command.name == name) return command;
    names.push_back(command.name);
  }
  for (const char* later : {"data", "lr-find", "report", "completion", "doctor"})
    if (name == later) throw usage_error(cat("the command '", name, "' is not in this version"));
  throw usage_error(cat("unknown command '", name, "'", did_you_mean(name, names)))
      .hint("`onnx-ddp --help` lists the commands");
}

int run(const std::vector<std::string>& argv) {
  if (argv.size() < 2) {
    std::cerr << program_help();
    return kExitUsage;
  }
  if (argv[1] == "--help" || argv[1] == "-h" || argv[1] == "help") {
    std::cout << program_help();
    return kExitDone;
  }
  if (argv[1] == "--version") {
    std::cout << "onnx-ddp " ONNXDDP_VERSION "\n";
    return kExitDone;
  }
  const CommandDef& command = find_command(argv[1]);
  CommandLine line = parse_command_line(command, argv);
  if (line.help) {
    std::cout << command_help(command);
    return kExitDone;
  }
  process().program = own_path(argv[0].c_str());
  process().rank = rank_from_environment();
  if (process().rank) die_with_parent(*process().rank);
  return command.run(line);
}

/// Whether all that was printed has arrived, or nobody wants it any more (`| head`).
bool output_is_complete() {
  std::cout.flush();
  if (std::fflush(stdout) == 0 && std::ferror(stdout) == 0 && std::cout.good()) return true;
  pollfd out{STDOUT_FILENO, POLLOUT, 0};
  return poll(&out, 1, 0) == 1 && (out.revents & POLLERR) != 0;
}

}  // namespace
}  // namespace onnxddp

int main(int argc, char** argv) {
  using onnxddp::print_error;
  std::signal(SIGPIPE, SIG_IGN);  // a closed pipe or a file that may not grow is an error of that write, not
  std::signal(SIGXFSZ, SIG_IGN);  // the end of hours of training
  try {
    const int code = onnxddp::run({argv, argv + argc});
    if (code != onnxddp::kExitDone || onnxddp::output_is_complete()) return code;
    print_error("cannot write to the standard output", -1);
    return onnxddp::kExitUserError;
  } catch (const onnxddp::Error& error) {
    print_error(error.report(), -1);
    return error.exit_code();
  } catch (const std::bad_alloc&) {
    print_error("out of memory\n   hint  a smaller --batch-size, or a smaller model", -1);
    return onnxddp::kExitUserError;
  } catch (const std::exception& error) {  // InternalError, and what nobody expected
    print_error(std::string(error.what()) +
                    "\n   hint  this is a bug of onnx-ddp: please report it with the command and the model",
                -1);
    return onnxddp::kExitInternal;
  }
}
