// SPDX-License-Identifier: Apache-2.0
//
// The program as its users meet it: options, texts and exit codes, by running it.
#include <sys/wait.h>
#include <unistd.h>

#include <array>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <fstream>

#include "commands/request.hpp"
#include "tests/test.hpp"

using namespace weft;

namespace {

struct Outcome {
  int code;
  std::string out, err;
};

/// A directory of this test alone, removed at its end.
struct Scratch {
  std::filesystem::path path = std::filesystem::temp_directory_path() / fmt::format("weft_command_line_{}", getpid());
  Scratch() { std::filesystem::create_directories(path); }
  ~Scratch() { std::filesystem::remove_all(path); }
  std::string file(const std::string& name, const std::string& text) const {
    std::ofstream(path / name) << text;
    return (path / name).string();
  }
};

std::string contents(const std::filesystem::path& path) {
  std::ifstream file(path);
  return {std::istreambuf_iterator<char>(file), {}};
}

Outcome shell(const Scratch& scratch, const std::string& command) {
  // Not a child of this test's MPI job: without its variables the program starts as a job of its own.
  const std::string line = fmt::format(
      "cd '{0}' && for v in $(env | grep -oE '^(OMPI|PMIX|PRTE)[A-Za-z0-9_]*' | grep -v ALLOW_RUN); do unset $v; done; "
      "{1} > '{0}/out' 2> '{0}/err' < /dev/null",
      scratch.path.string(), command);
  const int status = std::system(line.c_str());
  return {WIFEXITED(status) ? WEXITSTATUS(status) : -1, contents(scratch.path / "out"), contents(scratch.path / "err")};
}

Outcome weft_with(const Scratch& scratch, const std::string& arguments) {
  return shell(scratch, std::string(WEFT_PROGRAM) + " " + arguments);
}

const std::string good = "[data]\ntrain = \"d\"\n[transcoder]\nfeatures = 64\n";

}  // namespace

TEST_CASE("--help is one screen and names every command, option and exit code") {
  const Scratch scratch;
  const Outcome help = weft_with(scratch, "--help");
  CHECK(help.code == 0);
  CHECK(help.err == "");
  CHECK(std::count(help.out.begin(), help.out.end(), '\n') <= 40);
  for (const char* word : {"train INPUT",  "synth INPUT",     "evaluate CHECKPOINT",
                           "inspect PATH", "benchmark INPUT", "report RUN",
                           "--set",        "--defaults",      "--print-config",
                           "--dry-run",    "--output",        "--walltime",
                           "--resume",     "--compare",       "--tune",
                           "--data",       "--help",          "--version",
                           "0 finished",   "1 internal",      "2 input or usage",
                           "3 data",       "4 numeric",       "5 communication",
                           "6 I/O",        "75 stopped",      "93 no progress",
                           "128+n"})
    CHECK_MESSAGE(help.out.find(word) != std::string::npos, word);
  CHECK(weft_with(scratch, "train --help").out == help.out);
}

TEST_CASE("--version names revision and libraries") {
  const Scratch scratch;
  const Outcome version = weft_with(scratch, "--version");
  CHECK(version.code == 0);
  CHECK(version.out.starts_with("weft "));
  for (const char* word : {"MPI", "HDF5", "Kokkos"}) CHECK(version.out.find(word) != std::string::npos);
}

TEST_CASE("what --print-config prints loads back to the same") {
  const Scratch scratch;
  const std::string input = scratch.file("a.toml", good + "k = 7.25\n[optimizer]\nlearning_rate = 0.1\n");
  setenv("WEFT_COMMAND_LINE_TEST", "/some where", 1);
  const Outcome first = weft_with(scratch,
                                  "train --print-config --set data.validation='${WEFT_COMMAND_LINE_TEST}/v' --set "
                                  "optimizer.state=bf16 --walltime 1:00:00 --output 'o u t' a.toml");
  REQUIRE_MESSAGE(first.code == 0, first.err);
  for (const char* line :
       {"validation = \"/some where/v\"\n", "state = \"bf16\"\n", "k = 7.25\n", "learning_rate = 0.1\n",
        "walltime = \"1:00:00\"\n", "output = \"o u t\"\n", "train = \"d\"\n"})
    CHECK_MESSAGE(first.out.find(line) != std::string::npos, line);
  scratch.file("b.toml", first.out);
  const Outcome second = weft_with(scratch, "train b.toml --print-config");
  CHECK(second.code == 0);
  CHECK(second.out == first.out);
}

TEST_CASE("--defaults loads, for every command that takes an input") {
  const Scratch scratch;
  for (const std::string command : {"", "train", "synth", "benchmark"}) {
    const Outcome defaults = weft_with(scratch, command + " --defaults");
    REQUIRE(defaults.code == 0);
    scratch.file("d.toml", defaults.out);
    const Outcome loaded = weft_with(scratch, (command.empty() ? "train" : command) + " --print-config d.toml");
    CHECK_MESSAGE(loaded.code == 0, loaded.err);
  }
}

TEST_CASE("wrong usage ends with 2 and suggests a correction") {
  const Scratch scratch;
  scratch.file("a.toml", good);
  const auto says = [&](const std::string& arguments, const std::string& expected) {
    const Outcome outcome = weft_with(scratch, arguments);
    CHECK_MESSAGE(outcome.code == 2, arguments);
    CHECK(outcome.out == "");
    CHECK(outcome.err == "error: " + expected + "; see weft --help\n");
  };
  says("", "no command was given");
  says("trian a.toml", "unknown command \"trian\" (did you mean \"train\"?)");
  says("train a.toml --dryrun", "unknown option \"--dryrun\" of weft train (did you mean \"--dry-run\"?)");
  says("train --outptu=x a.toml", "unknown option \"--outptu\" of weft train (did you mean \"--output\"?)");
  says("--verison", "unknown option \"--verison\" (did you mean \"--version\"?)");
  says("inspect --resume auto x", "unknown option \"--resume\" of weft inspect");
  says("train", "weft train needs its INPUT");
  says("evaluate", "weft evaluate needs its CHECKPOINT");
  says("train a.toml b.toml", "unexpected argument \"b.toml\" of weft train (it takes one argument without an option)");
  says("train a.toml --walltime 5m", "--walltime 5m is not a time (hours:minutes:seconds, as in 11:55:00)");
  CHECK(weft_with(scratch, "train a.toml --set").code == 2);
  CHECK(weft_with(scratch, "train nothing.toml").err ==
        "error: nothing.toml: cannot be read (No such file or directory); give the path of an input file\n");
}

TEST_CASE("--set does not swallow the input") {
  const Scratch scratch;
  scratch.file("a.toml", good);
  const Outcome outcome = weft_with(scratch, "train --print-config --set run.steps=5 --set run.seed=6 a.toml");
  CHECK(outcome.code == 0);
  CHECK(outcome.out.find("steps = 5\nseed = 6\n") != std::string::npos);
}

TEST_CASE("a wrong input ends with 2 and reports every problem with its position") {
  const Scratch scratch;
  scratch.file("a.toml", "[transcoder]\nfeatures = 64\n[optimizer]\nlerning_rate = 1e-3\nbeta1 = 1.5\n[runn]\n");
  const Outcome outcome = weft_with(scratch, "train a.toml --set log.every=0");
  CHECK(outcome.code == 2);
  CHECK(outcome.out == "");
  CHECK(outcome.err ==
        "error: 5 problems in the input\n"
        "a.toml:1:1: data.train is missing (directory of the training activations; it has no default); add train = "
        "\"data/train\" to [data]\n"
        "a.toml:4:1: unknown key \"lerning_rate\" in [optimizer]; did you mean \"learning_rate\"?\n"
        "a.toml:5:9: optimizer.beta1 = 1.5 is out of range (allowed: at least 0, less than 1)\n"
        "a.toml:6:2: unknown table [runn]; did you mean [run]?\n"
        "--set log.every=0: log.every = 0 is out of range (allowed: at least 1; unit: steps)\n");
}

TEST_CASE("on several ranks texts and errors appear once, and all end with the same code") {
  const Scratch scratch;
  scratch.file("a.toml", "[run]\nstepz = 1\n" + good);
  const std::string mpiexec = std::string(WEFT_MPIEXEC) + " -n 2 --oversubscribe --bind-to none " + WEFT_PROGRAM;
  const Outcome version = shell(scratch, mpiexec + " --version");
  CHECK(version.code == 0);
  CHECK(version.out.find("weft ") == version.out.rfind("weft "));
  const Outcome wrong = shell(scratch, mpiexec + " train a.toml");
  CHECK(wrong.code == 2);
  const std::string problem = "error: a.toml:2:1: unknown key \"stepz\" in [run]; did you mean \"steps\"?";
  CHECK(wrong.err.find(problem) != std::string::npos);
  CHECK(wrong.err.find(problem) == wrong.err.rfind(problem));
}
