// The option table: every option goes through flag, run.toml and configuration file unchanged.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>

#include "executor/cli/command_line.h"
#include "executor/cli/config.h"
#include "executor/cli/run_command.h"
#include "tests/cli/program.h"

namespace onnxddp {
namespace {

using ::testing::HasSubstr;

const CommandDef& command_of(unsigned bit) {
  for (const CommandDef& command : commands())
    if ((command.bit & bit) != 0) return command;
  throw std::logic_error("no command");
}

/// A value that is not the default and that check_options accepts.
std::string sample(const OptionDef& def) {
  static const std::map<std::string, std::string> special = {{"loss", "cross_entropy:ignore_index=-1"},
                                                             {"optimizer", "sgd:momentum=0.5,nesterov=true"},
                                                             {"schedule", "step:step_size=3,gamma=0.5"},
                                                             {"input", "a=1"},
                                                             {"dim", "T=3"},
                                                             {"nproc-per-node", "3"},
                                                             {"save-every", "7steps"},
                                                             {"stage", "plan"},
                                                             {"eval-fraction", "0.25"},
                                                             {"target", "a \"quoted\\\" \xc3\xa4 'name'\t#"},
                                                             {"collective-timeout", "1.5"}};
  if (const auto found = special.find(def.name); found != special.end()) return found->second;
  if (is_switch(def)) return "true";
  if (!def.choices.empty()) return def.choices.back();
  if (std::isfinite(def.least)) return "17";
  return "some text";
}

CommandLine parsed(const CommandDef& command, std::vector<std::string> words) {
  std::vector<std::string> argv = {"onnx-ddp", command.name};
  if (!command.operand.empty()) argv.emplace_back("model.onnx");
  argv.insert(argv.end(), words.begin(), words.end());
  return parse_command_line(command, argv);
}

class EveryOption : public ::testing::TestWithParam<const OptionDef*> {};

TEST_P(EveryOption, GoesThroughFlagAndFile) {
  const OptionDef& def = *GetParam();
  const CommandDef& command = command_of(def.commands);
  const CommandLine line = parsed(command, {"--" + def.name + "=" + sample(def)});
  EXPECT_EQ(line.given.count(def.name), 1U);
  const std::string value = toml_value(line.options, def);
  ASSERT_FALSE(value.empty());
  Options again;
  apply_config(again, run_toml(line.options, command.bit), "run.toml", command.bit, nullptr);
  for (const OptionDef& other : option_table())
    EXPECT_EQ(toml_value(again, other), toml_value(line.options, other)) << other.name;
  EXPECT_EQ(again.model, "model.onnx");
  const CommandLine relaunched = parsed(command, as_flags(line.options, command.bit));
  for (const OptionDef& other : option_table())
    EXPECT_EQ(toml_value(relaunched.options, other), toml_value(line.options, other)) << other.name;
}

TEST_P(EveryOption, KnowsBothSpellingsAndIsInTheHelp) {
  const OptionDef& def = *GetParam();
  const CommandDef& command = command_of(def.commands);
  std::string underscored = def.name;
  std::replace(underscored.begin(), underscored.end(), '-', '_');
  const CommandLine line = parsed(command, {"--" + underscored + "=" + sample(def)});
  EXPECT_EQ(line.given.count(def.name), 1U);
  EXPECT_THAT(command_help(command), HasSubstr("--" + def.name));
  EXPECT_FALSE(def.help.empty());
}

TEST_P(EveryOption, FlagsWinOverTheFile) {
  const OptionDef& def = *GetParam();
  if (is_list(def)) return;
  const CommandDef& command = command_of(def.commands);
  testing::Folder folder;
  const std::string other = is_switch(def) ? "false" : sample(def) == "17" ? "18" : sample(def);
  const std::string quoted =
      std::holds_alternative<std::string Options::*>(def.field) ? toml_string(sample(def)) : sample(def);
  testing::write_text(folder / "c.toml", def.name + " = " + quoted + "\n");
  const CommandLine line =
      parsed(command, {"--config", (folder / "c.toml").string(), "--" + def.name + "=" + other});
  Options expected;
  set_option(expected, def, other, "test");
  EXPECT_EQ(toml_value(line.options, def), toml_value(expected, def));
}

std::vector<const OptionDef*> all_options() {
  std::vector<const OptionDef*> out;
  for (const OptionDef& def : option_table()) out.push_back(&def);
  return out;
}
INSTANTIATE_TEST_SUITE_P(Table, EveryOption, ::testing::ValuesIn(all_options()), [](const auto& value) {
  std::string name = value.param->name;
  std::replace(name.begin(), name.end(), '-', '_');
  return name;
});

void expect_usage(const std::vector<std::string>& words, const std::string& text) {
  try {
    parsed(command_of(kTrain), words);
    FAIL() << "accepted: " << ::testing::PrintToString(words);
  } catch (const Error& error) {
    EXPECT_EQ(error.exit_code(), kExitUsage);
    EXPECT_THAT(error.report(), HasSubstr(text));
  }
}

TEST(CommandLine, RefusesWhatItDoesNotKnow) {
  expect_usage({"--lerning-rate", "1"}, "learning-rate");
  expect_usage({"--epoch", "1"}, "'--epochs'");
  expect_usage({"--confg", "x"}, "'--config'");
  expect_usage({"--quiet", "x"}, "unexpected 'x'");
  expect_usage({"--json"}, "no such option");
  expect_usage({"--epochs"}, "expects a value");
  expect_usage({"--epochs", "1.5"}, "whole number");
  expect_usage({"--epochs", "0"}, "out of range");
  expect_usage({"--epochs", "99999999999999999999"}, "whole number");
  expect_usage({"--lr", "nan"}, "out of range");
  expect_usage({"--lr", "1", "--lr", "2"}, "given twice");
  expect_usage({"--epochs", "1", "--steps", "2"}, "exclude each other");
  expect_usage({"--device", "cuad"}, "cuda");
  expect_usage({"--save-every", "3weeks"}, "steps or epochs");
  expect_usage({"--nproc-per-node", "0"}, "ranks");
  expect_usage({"--optimizer", "sgd:momentun=1"}, "momentum");
  expect_usage({"--optimizer", "adan"}, "adam");
  expect_usage({"--loss", "mae_"}, "mse");
  expect_usage({"--input", "x"}, "name=value");
  expect_usage({"--data"}, "FILE");
}

TEST(CommandLine, SaysWhatLaterVersionsHave) {
  expect_usage({"--nnodes", "2"}, "not in this version");
  expect_usage({"--profile", "t.json"}, "not in this version");
  expect_usage({"--sampler", "exact"}, "not in this version");
  expect_usage({"--precision", "bf16"}, "not in this version");
  expect_usage({"--on-nan", "skip"}, "not in this version");
  expect_usage({"--loss-denominator", "rank"}, "not in this version");
  expect_usage({"--schedule", "poly"}, "poly");
}

TEST(CommandLine, ReadsListsAliasesAndOperands) {
  const CommandLine line = parsed(command_of(kTrain), {"--data", "a.npz", "b.npz", "--learning-rate", "0.5",
                                                       "--no_shuffle", "--data=c.npz"});
  EXPECT_EQ(line.options.data, (std::vector<std::string>{"a.npz", "b.npz", "c.npz"}));
  EXPECT_EQ(line.options.lr, 0.5);
  EXPECT_TRUE(line.options.no_shuffle);
  const CommandLine after =
      parse_command_line(command_of(kTrain), {"onnx-ddp", "train", "--epochs", "3", "--", "-odd.onnx"});
  EXPECT_EQ(after.options.model, "-odd.onnx");
  EXPECT_THROW(parse_command_line(command_of(kTrain), {"onnx-ddp", "train"}), Error);
}

TEST(CommandLine, LaysGivenOptionsOverARun) {
  Options run;
  run.epochs = 10;
  run.seed = 4;
  run.lr = 0.1;
  const Options merged = parsed(command_of(kTrain), {"--steps", "7", "--lr", "0.2"}).over(run);
  EXPECT_EQ(merged.steps, 7);
  EXPECT_FALSE(merged.epochs.has_value());
  EXPECT_EQ(merged.seed, 4);
  EXPECT_EQ(merged.lr, 0.2);
}

void expect_bad_config(const std::string& text, const std::string& why) {
  Options options;
  try {
    apply_config(options, text, "c.toml", kTrain, nullptr);
    FAIL() << "accepted: " << text;
  } catch (const Error& error) {
    EXPECT_EQ(error.exit_code(), kExitUsage);
    EXPECT_THAT(error.report(), HasSubstr(why));
    EXPECT_THAT(error.report(), HasSubstr("c.toml:"));
  }
}

TEST(Config, ReadsFlatToml) {
  Options options;
  apply_config(options,
               "# head\nlr = 1e-3 # rate\n\ndata = [\"a.npz\",\n  'b.npz', # second\n]\r\nsync_bn = "
               "true\nout = 'C:\\x'\nepochs = 1_000\ntarget=\"\\u00e4\\\"\"\n",
               "c.toml", kTrain, nullptr);
  EXPECT_EQ(options.lr, 1e-3);
  EXPECT_EQ(options.data, (std::vector<std::string>{"a.npz", "b.npz"}));
  EXPECT_TRUE(options.sync_bn);
  EXPECT_EQ(options.out, "C:\\x");
  EXPECT_EQ(options.epochs, 1000);
  EXPECT_EQ(options.target, "\xc3\xa4\"");
}

TEST(Config, RefusesWhatItDoesNotKnow) {
  expect_bad_config("lerning_rate = 1\n", "learning-rate");
  expect_bad_config("\n[train]\nlr = 1\n", "c.toml:2");
  expect_bad_config("lr 1\n", "expected '='");
  expect_bad_config("lr = \n", "expected a value");
  expect_bad_config("out = runs\n", "needs quotes");
  expect_bad_config("out = \"runs\n", "not closed");
  expect_bad_config("data = [\"a\" \"b\"]\n", "expected ','");
  expect_bad_config("data = [\"a\"\n", "expected ','");
  expect_bad_config("lr = 1\nlr = 2\n", "given twice");
  expect_bad_config("bn_running_var = 'onnx'\nbn-running-var = 'onnx'\n", "given twice");
  expect_bad_config("epochs = 1\nsteps = 2\n", "exclude each other");
  expect_bad_config("lr = [1]\n", "one value");
  expect_bad_config("quiet = \"yes\"\n", "neither true nor false");
  expect_bad_config("lr = 1 2\n", "unexpected text");
  expect_bad_config("nnodes = 2\n", "not in this version");
}

}  // namespace
}  // namespace onnxddp
