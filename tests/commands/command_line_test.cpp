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
#include <set>
#include <sstream>

#include "commands/command.hpp"
#include "kernels/execution.hpp"
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
      "cd '{0}' && for v in $(env | grep -oE '^(OMPI|PMIX|PRTE)[A-Za-z0-9_]*' | grep -vE "
      "'ALLOW_RUN|^OMPI_MCA_(pml|ess_singleton_isolated|mpi_yield)'); do unset $v; done; "
      "{{ {1}; }} > '{0}/out' 2> '{0}/err' < /dev/null",
      scratch.path.string(), command);
  const int status = std::system(line.c_str());
  return {WIFEXITED(status) ? WEXITSTATUS(status) : -1, contents(scratch.path / "out"), contents(scratch.path / "err")};
}

Outcome weft_with(const Scratch& scratch, const std::string& arguments) {
  return shell(scratch, std::string(WEFT_PROGRAM) + " " + arguments);
}

const std::string good = "[data]\ntrain = \"d\"\n[transcoder]\nfeatures = 64\n";

}  // namespace

TEST_CASE("--help is one screen and names every command and exit code") {
  const Scratch scratch;
  const Outcome help = weft_with(scratch, "--help");
  CHECK(help.code == 0);
  CHECK(help.err == "");
  CHECK(std::count(help.out.begin(), help.out.end(), '\n') <= 40);
  for (const commands::Command* entry : commands::command_list()) {
    const std::string line = fmt::format("weft {} {}", entry->name, entry->subject);
    CHECK_MESSAGE((help.out.find(line) != std::string::npos) == entry->group().empty(), line);
  }
  for (const char* word : {"weft lm COMMAND", "--help", "--version", "0 finished", "1 internal", "2 input or usage",
                           "3 data", "4 numeric", "5 communication", "6 I/O", "75 stopped", "93 no progress", "128+n"})
    CHECK_MESSAGE(help.out.find(word) != std::string::npos, word);
  CHECK(weft_with(scratch, "-h").out == help.out);
  CHECK(weft_with(scratch, "help").out == help.out);
  CHECK(weft_with(scratch, "lm --help").out == weft_with(scratch, "help lm").out);
}

TEST_CASE("the help of a command has its options and no others, in lines of 80 columns") {
  const Scratch scratch;
  std::set<std::string> all;
  commands::Request request;
  const auto names = [&](const commands::Command& command) {
    const commands::Options options = commands::options_of(command, request);
    std::set<std::string> own;
    for (const commands::Option& option : options.list())
      if (!option.is_argument()) own.emplace(option.long_name());
    return own;
  };
  for (const commands::Command* entry : commands::command_list()) all.merge(names(*entry));
  CHECK(all.size() > 40);
  for (const commands::Command* entry : commands::command_list()) {
    const Outcome help = weft_with(scratch, fmt::format("{} --help", entry->name));
    CHECK(help.code == 0);
    CHECK(help.out == weft_with(scratch, fmt::format("help {}", entry->name)).out);
    std::set<std::string> shown;
    std::istringstream lines(help.out);
    for (std::string line; std::getline(lines, line);) {
      CHECK_MESSAGE(line.size() <= 80, line);
      // "  --data DIR" and "  -h, --help" begin a row.
      if (!line.starts_with("  -")) continue;
      const std::size_t begin = line.find("--");
      shown.insert(line.substr(begin, line.find(' ', begin) - begin));
    }
    CHECK_MESSAGE(shown == names(*entry), entry->name);
  }
}

TEST_CASE("an unknown command is refused with the nearest one, also in help") {
  const Scratch scratch;
  const auto says = [&](const std::string& arguments, const std::string& expected) {
    const Outcome outcome = weft_with(scratch, arguments);
    CHECK_MESSAGE(outcome.code == 2, arguments);
    CHECK(outcome.out == "");
    CHECK_MESSAGE(outcome.err.find(expected) != std::string::npos, outcome.err);
  };
  says("help trian", "unknown command \"trian\" (did you mean \"train\"?)");
  says("trian --help", "unknown command \"trian\" (did you mean \"train\"?)");
  says("trian a.toml --set run.steps=1 --quiet", "unknown command \"trian\" (did you mean \"train\"?)");
  says("lm trian a.toml --set run.steps=1", "unknown command \"trian\" of weft lm (did you mean \"train\"?)");
  says("help lm generat", "unknown command \"generat\" of weft lm (did you mean \"generate\"?)");
  says("lm", "weft lm needs one of its commands (train, polychromic, evaluate, ");
  says("generate", "unknown command \"generate\" (did you mean \"lm generate\"?)");
}

TEST_CASE("a file that is named like a command, or like the family of commands, can be an argument") {
  const Scratch scratch;
  const auto says = [&](const std::string& arguments, const std::string& expected) {
    const Outcome outcome = weft_with(scratch, arguments);
    CHECK_MESSAGE(outcome.code == 2, arguments);
    CHECK_MESSAGE(outcome.err.find(expected) != std::string::npos, (arguments + ": " + outcome.err));
  };
  for (const char* word : {"export", "train", "lm"}) {
    says(fmt::format("inspect {}", word), fmt::format("error: {}: no such file or directory", word));
    says(fmt::format("import {} --output i", word), fmt::format("error: DIR = \"{}\": no such directory", word));
    says(fmt::format("lm export {} --output i", word), fmt::format("error: {}: no such directory", word));
    says(fmt::format("lm evaluate {} --text evaluate", word), fmt::format("error: {}: no such directory", word));
  }
  says("lm tokenize tokenize lm --tokens bytes --output o", "error: weft lm tokenize: tokenize: no such file");
  // What is wrong elsewhere in the line is still named as such.
  says("inspect a export", "unexpected argument \"export\" of weft inspect");
  says("inspct train", "unknown command \"inspct\" (did you mean \"inspect\"?)");
  says("lm evalute train", "unknown command \"evalute\" of weft lm (did you mean \"evaluate\"?)");
  says("--quiet inspect train", "option \"--quiet\" is before its command; options follow it: weft inspect --quiet");
  says("lm --quiet evaluate train", "options follow it: weft lm evaluate --quiet");
  CHECK(weft_with(scratch, "help inspect").out == weft_with(scratch, "inspect train --help").out);
}

TEST_CASE("an input of the other kind of model is named as such") {
  const Scratch scratch;
  scratch.file("model.toml", "[language_model]\nlayers = 1\n");
  scratch.file("transcoder.toml", "[transcoder]\nfeatures = 8\n");
  for (const auto& [arguments, expected] :
       {std::pair{
            "train model.toml",
            "model.toml: is an input of a language model (it has a table [language_model]); weft lm train model.toml"},
        {"lm train transcoder.toml",
         "transcoder.toml: is an input of a transcoder (it has a table [transcoder]); weft train transcoder.toml"}}) {
    const Outcome outcome = weft_with(scratch, arguments);
    CHECK_MESSAGE(outcome.code == 2, arguments);
    CHECK_MESSAGE(outcome.err.find(expected) != std::string::npos, outcome.err);
  }
}

TEST_CASE("--version names revision and libraries") {
  const Scratch scratch;
  const Outcome version = weft_with(scratch, "--version");
  CHECK(version.code == 0);
  CHECK(version.out.starts_with("weft "));
  for (const char* word : {"MPI", "HDF5", "Kokkos"}) CHECK(version.out.find(word) != std::string::npos);
  CHECK(weft_with(scratch, "-V").out == version.out);
}

TEST_CASE("a process that no launcher started needs no session directory of MPI") {
  // Open MPI 4 with ess_singleton_isolated has one such directory for all of them: the end of one can break the start
  // of another.
  const Scratch scratch;
  const Outcome outcome = shell(
      scratch, "OMPI_MCA_ess_singleton_isolated=1 OMPI_MCA_orte_tmpdir_base=/proc '" WEFT_PROGRAM "' evaluate none");
  CHECK(outcome.code != 0);
  CHECK_MESSAGE(outcome.err.starts_with("error: none: "), outcome.err);
  CHECK(std::count(outcome.err.begin(), outcome.err.end(), '\n') == 1);
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
  // The message refers to the help of the command, where there is one.
  const auto says = [&](const std::string& arguments, const std::string& expected) {
    const Outcome outcome = weft_with(scratch, arguments);
    CHECK_MESSAGE(outcome.code == 2, arguments);
    CHECK(outcome.out == "");
    const std::string command = arguments.substr(0, arguments.find(' '));
    const bool known = command == "train" || command == "inspect" || command == "evaluate" || command == "export";
    CHECK(outcome.err == fmt::format("error: {}; see weft {}--help\n", expected, known ? command + " " : ""));
  };
  says("", "no command was given");
  says("trian a.toml", "unknown command \"trian\" (did you mean \"train\"?)");
  says("train a.toml --dryrun", "unknown option \"--dryrun\" of weft train (did you mean \"--dry-run\"?)");
  says("export a b --to csv", "--to csv is not known (one of circuit-tracer, crosslayer-coding, saelens, sparsify)");
  says("train a.toml --quiet --verbose", "--quiet and --verbose exclude each other");
  says("train a.toml --print-config --json", "--json has no effect here (inputs are TOML); leave it out");
  says("train a.toml --device-memory 141GB",
       "--device-memory describes another machine (it needs --dry-run); device.memory limits this one's");
  for (const char* amount : {"much", "141", "-1GB", "1e999GB", "1e30GB", "GB"})
    says(fmt::format("train a.toml --dry-run --device-memory={}", amount),
         fmt::format("--device-memory {} is no amount of memory (a number with GB or GiB, as in 141GB)", amount));
  says("train --outptu=x a.toml", "unknown option \"--outptu\" of weft train (did you mean \"--output\"?)");
  says("--verison", "unknown option \"--verison\" (did you mean \"--version\"?)");
  says("inspect --resume auto x", "unknown option \"--resume\" of weft inspect");
  says("train", "weft train needs its INPUT");
  says("evaluate", "weft evaluate needs its CHECKPOINT");
  says("synth a.toml --output x --output y", "--output is given several times (it takes one value); give it once");
  for (const char* number : {"x", "1.5", "1e6"})
    says(
        fmt::format("lm generate x --prompt a --samples {}", number),
        fmt::format("--samples = {} is not what the option takes (a number; an integer has neither point nor exponent)",
                    number));
  says("train a.toml b.toml", "unexpected argument \"b.toml\" of weft train (it takes one argument without an option)");
  says("train a.toml --walltime 5m", "--walltime 5m is not a time (hours:minutes:seconds, as in 11:55:00)");
  // A part of a name is completed; another word is not bent into a name of the same length.
  says("train --out x a.toml", "unknown option \"--out\" of weft train (did you mean \"--output\"?)");
  says("train --gpus 2 a.toml", "unknown option \"--gpus\" of weft train");
  for (const char* option : {"--output", "--set", "--walltime", "--resume", "--start-id"})
    says(fmt::format("train a.toml {} ''", option),
         fmt::format("{} is empty (it takes a value); give one, or leave the option out", option));
  says("evaluate runs/a --data ''", "--data is empty (it takes a value); give one, or leave the option out");
  CHECK(weft_with(scratch, "train a.toml --walltime 00:00:00").err ==
        "error: --walltime 00:00:00: run.walltime = \"00:00:00\" leaves no time for a step; give the time that the job "
        "has, or \"\" for no limit\n");
  CHECK(weft_with(scratch, "train a.toml --set").err == "error: --set needs a value; see weft --help\n");
  CHECK(weft_with(scratch, "train nothing.toml").err ==
        "error: nothing.toml: cannot be read (No such file or directory); give the path of an input file\n");
}

TEST_CASE("an option before its command is named as such") {
  const Scratch scratch;
  for (const char* command : {"train", "lm train"}) {
    const Outcome early = weft_with(scratch, fmt::format("--quiet {} in.toml", command));
    CHECK(early.code == 2);
    CHECK(early.err.find(fmt::format("option \"--quiet\" is before its command; options follow it: weft {} --quiet",
                                     command)) != std::string::npos);
  }
}

TEST_CASE("--set does not swallow the input") {
  const Scratch scratch;
  scratch.file("a.toml", good);
  const Outcome outcome = weft_with(scratch, "train --print-config --set run.steps=5 --set run.seed=6 a.toml");
  CHECK(outcome.code == 0);
  CHECK(outcome.out.find("\nsteps = 5\n") != std::string::npos);
  CHECK(outcome.out.find("\nseed = 6\n") != std::string::npos);
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
        "\"data/train\" to [data], or give data.model\n"
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

TEST_CASE("a text that cannot be printed ends with 6") {
  const Scratch scratch;
  scratch.file("a.toml", good);
  for (const char* arguments : {"--help", "--version", "train --defaults", "train a.toml --print-config"}) {
    const Outcome outcome = weft_with(scratch, std::string(arguments) + " > /dev/full");
    CHECK_MESSAGE(outcome.code == 6, arguments);
    CHECK(outcome.err.find("standard output cannot be written") != std::string::npos);
    // A reader that has read enough is no error.
    CHECK(weft_with(scratch, std::string(arguments) + " | head -n 1").err == "");
  }
}

namespace {

/// A dataset of 2 layers in data/, its input a.toml and a finished run of 2 steps in runs/a.
struct Trained : Scratch {
  std::string input =
      "[data]\ntrain = \"data/train\"\nvalidation = \"data/validation\"\nbatch_tokens = 64\n"
      "block_rows = 16\nwindow_rows = 64\n[transcoder]\nfeatures = 24\nk = 2\n[run]\nsteps = 2\n"
      "[synthetic]\noutput = \"data\"\nlayers = 2\nd_model = 16\nfeatures = 16\nk = 2\ntokens = 200\n"
      "validation_tokens = 64\n";
  Trained() {
    file("a.toml", input);
    REQUIRE(weft_with(*this, "synth a.toml").code == 0);
    REQUIRE(weft_with(*this, "train a.toml --output runs/a").code == 0);
  }
};

}  // namespace

TEST_CASE("a path that does not exist, or is of another kind, ends with 2 in every command and creates nothing") {
  const Trained there;
  const auto says = [&](const std::string& arguments, const std::string& expected) {
    const Outcome outcome = weft_with(there, arguments);
    CHECK_MESSAGE(outcome.code == 2, arguments);
    CHECK_MESSAGE(outcome.err.find(expected) != std::string::npos, (arguments + ": " + outcome.err));
  };
  for (const char* command : {"train", "synth", "benchmark"})
    says(std::string(command) + " nowhere", "nowhere: cannot be read");
  says("evaluate nowhere", "nowhere: no such directory; name a checkpoint");
  says("inspect nowhere", "nowhere: no such file or directory");
  says("evaluate runs/a --data nowhere", "--data = \"nowhere\": no such directory (relative paths begin at ");
  says("evaluate runs/a --data a.toml", "--data = \"a.toml\" is a file");
  says("evaluate data/train", "data/train: a dataset, not a checkpoint");
  says("evaluate a.toml", "a.toml: a file, not a checkpoint");
  const std::string train = "train a.toml --output runs/b ";
  says(train + "--set data.train=nowhere", "data.train = \"nowhere\": no such directory");
  says(train + "--set data.validation=nowhere", "data.validation = \"nowhere\": no such directory");
  says(train + "--set data.train=nowhere --dry-run", "data.train = \"nowhere\": no such directory");
  CHECK_FALSE(std::filesystem::exists(there.path / "runs" / "b"));
  says(train + "--resume sometimes",
       "--resume sometimes: no such directory; name a checkpoint (RUN/checkpoints/step_XXXXXXXX), auto or never");
  says(train + "--resume runs/a", "--resume runs/a: a run, not one of its checkpoints");
  says(train + "--resume data/train", "--resume data/train: a dataset, not a checkpoint");
  // A run without a checkpoint is one: nothing is wrong with the path.
  for (const char* command : {"evaluate", "inspect"}) {
    const Outcome outcome = weft_with(there, std::string(command) + " runs/b");
    CHECK(outcome.code == 6);
    CHECK(outcome.err.find("runs/b: no checkpoint") != std::string::npos);
  }
}

TEST_CASE("an output that cannot be there, or a path that the system refuses, is named with a suggestion") {
  const Trained there;
  const auto says = [&](const std::string& arguments, int code, const std::string& expected) {
    const Outcome outcome = weft_with(there, arguments);
    CHECK_MESSAGE(outcome.code == code, arguments);
    CHECK_MESSAGE(outcome.err.find(expected) != std::string::npos, (arguments + ": " + outcome.err));
  };
  const std::string too_long(300, 'a');
  says("inspect " + too_long, 6, "aaa: cannot be used (File name too long); check the path");
  says("train a.toml --output " + too_long, 6, "aaa: cannot be used (File name too long); check the path");
  for (const char* command : {"train a.toml", "encode runs/a", "features runs/a", "evaluate runs/a"})
    says(std::string(command) + " --output a.toml/x", 6,
         "a.toml/x: cannot be created (a.toml: File exists); choose another");
  // A run of the other kind of model.
  there.file("text.txt", std::string(2000, 'a'));
  there.file("lm.toml",
             "[run]\nsteps = 1\n[data]\ntrain = \"text.txt\"\ntokens = \"bytes\"\nsequence = 16\nbatch_tokens = 32\n"
             "[language_model]\nlayers = 1\nheads = 1\nd_model = 16\n[optimizer]\nwarmup_steps = 0\n");
  says("lm train lm.toml --output runs/a", 2, "(it has no tensor \"embedding/tokens\"); choose another --output");
  says("lm train lm.toml --output runs/l --set language_model.initial=runs/a", 2,
       "language_model.initial = \"runs/a\": belongs to another kind of model");
  // A checkpoint without its manifest is one.
  std::filesystem::create_directories(there.path / "torn");
  there.file("torn/rank_00000.h5", "");
  says("inspect torn", 6, "torn: cannot be used, manifest.json is missing");
}

TEST_CASE("results that cannot be printed end with 6") {
  const Trained there;
  for (const char* arguments : {"evaluate runs/a", "inspect runs/a", "inspect data/train", "train a.toml --dry-run"})
    CHECK_MESSAGE(weft_with(there, std::string(arguments) + " > /dev/full").code == 6, arguments);
  // The run itself is in files: a broken output does not end it.
  CHECK(weft_with(there, "train a.toml --output runs/c > /dev/full").code == 0);
}

TEST_CASE("a run that cannot fit, or is for another machine, is refused before anything is created") {
  const Trained there;
  for (const char* dry : {"", " --dry-run"}) {
    const Outcome outcome =
        weft_with(there, std::string("train a.toml --output runs/b --set transcoder.features=268435456") + dry);
    CHECK(outcome.code == 2);
    for (const char* part :
         {"of host memory (", "are available (transcoder.features = 268435456, data.batch_tokens = 64)",
          "what fits: transcoder.features = "})
      CHECK_MESSAGE(outcome.err.find(part) != std::string::npos, outcome.err);
    // What the message says fits does fit.
    const std::size_t at = outcome.err.find("what fits: transcoder.features = ") + 33;
    const std::int64_t fits = std::atoll(outcome.err.c_str() + at);
    CHECK(weft_with(there, fmt::format("train a.toml --dry-run --output runs/b --set transcoder.features={}", fits / 2))
              .code == 0);
  }
  // The plan for another machine is not compared with this one.
  CHECK(weft_with(there, "train a.toml --dry-run --set transcoder.features=268435456 --set parallel.world=4096").code ==
        0);
  const Outcome world = weft_with(there, "train a.toml --output runs/b --set parallel.world=8");
  CHECK(world.code == 2);
  CHECK(world.err.find("parallel.world = 8 only plans (this is no --dry-run)") != std::string::npos);
  CHECK(weft_with(there, "train a.toml --output runs/b --set transcoder.k=1e-5").code == 2);
  if (!kernels::kCudaBuild)
    for (const char* precision : {"fp32", "bf16"}) {
      const Outcome cuda = weft_with(
          there,
          fmt::format("train a.toml --output runs/b --set device.backend=cuda --set device.precision={}", precision));
      CHECK(cuda.code == 2);
      CHECK(cuda.err.find("is not available (built without CUDA)") != std::string::npos);
      CHECK(cuda.err.find("take precision") == std::string::npos);
    }
  CHECK_FALSE(std::filesystem::exists(there.path / "runs" / "b"));
}

TEST_CASE("a dry run says whether the run fits, here or on a GPU of another machine") {
  const Trained there;
  const auto dry = [&](const std::string& options) { return weft_with(there, "train a.toml --dry-run " + options); };
  const Outcome here = dry("");
  CHECK(here.code == 0);
  CHECK_MESSAGE(here.out.find("\nfits: ") != std::string::npos, here.out);
  CHECK(here.out.find(" of host memory (") != std::string::npos);
  const Outcome fits = dry("--device-memory 1GB");
  CHECK(fits.code == 0);
  CHECK_MESSAGE(fits.out.find(" of 954 MiB of device memory, per rank (") != std::string::npos, fits.out);
  // The memory of this machine is not that of the other one.
  CHECK(fits.out.find("of host memory") == std::string::npos);
  CHECK(dry("--device-memory 100GB --set transcoder.features=10000000").code == 0);
  const Outcome large = dry("--device-memory 1GB --set transcoder.features=10000000");
  CHECK(large.code == 2);
  CHECK_MESSAGE(large.err.find("what fits: transcoder.features = ") != std::string::npos, large.err);
  // The batch that the message names does fit.
  const Outcome wide = dry("--device-memory 0.05GiB --set data.batch_tokens=1048576 --set data.window_rows=1048576");
  CHECK(wide.code == 2);
  const std::size_t at = wide.err.find("data.batch_tokens = ", wide.err.find("what fits"));
  REQUIRE(at != std::string::npos);
  const std::int64_t batch = std::atoll(wide.err.c_str() + at + 20);
  CHECK(dry(fmt::format("--device-memory 0.05GiB --set data.batch_tokens={} --set data.window_rows=1048576", batch))
            .code == 0);
  const Outcome json = dry("--device-memory 1GB --json");
  CHECK(json.out.starts_with("{\n  \"fits\": true,\n  \"device_bytes\": "));
}

TEST_CASE("settings that train nothing are refused or warned about") {
  const Trained there;
  const auto warned = [&](const std::string& set) {
    const Outcome outcome = weft_with(there, "train a.toml --dry-run --set " + set);
    CHECK_MESSAGE(outcome.code == 0, outcome.err);
    return outcome.err.find("warning: " + set.substr(0, set.find('='))) == 0 &&
           outcome.err.find("nothing (") != std::string::npos;
  };
  CHECK(warned("optimizer.learning_rate=1e-9"));
  CHECK(warned("optimizer.epsilon=1e4"));
  CHECK_FALSE(warned("optimizer.learning_rate=1e-3"));
  CHECK_FALSE(warned("optimizer.epsilon=1"));
  for (const char* set : {"optimizer.learning_rate=1e-60", "optimizer.learning_rate=1e60", "optimizer.epsilon=1e-60"})
    CHECK(weft_with(there, std::string("train a.toml --dry-run --set ") + set).code == 2);
}

TEST_CASE("a start records its id") {
  const Trained there;
  CHECK(contents(there.path / "runs/a/run.json").find("start_id") == std::string::npos);
  REQUIRE(weft_with(there, "train a.toml --output runs/id --start-id 7.1700000000").code == 0);
  CHECK(contents(there.path / "runs/id/run.json").find("\"start_id\": \"7.1700000000\",\n") != std::string::npos);
}
