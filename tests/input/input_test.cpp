// SPDX-License-Identifier: Apache-2.0
//
// Reading an input: each kind of mistake is reported with position and hint, printed inputs give the same values, and
// no text crashes the program.
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdlib>
#include <filesystem>
#include <fstream>

#include "base/error.hpp"
#include "input/print.hpp"
#include "input/read.hpp"
#include "input/schema.hpp"
#include "input/strings.hpp"
#include "kernels/random.hpp"
#include "tests/test.hpp"

using namespace weft;

namespace {

enum class State { fp32, bf16, eight_bit };

struct Settings {
  std::int64_t steps = 1000;
  double rate = 4e-4;
  State state = State::fp32;
  std::string output = "runs/weft";
  std::string backend = "auto";
  bool accept = false;
  int threads = 0;
  std::int64_t features = 0;
  std::vector<std::string> cases = {"sparse"};
  double begin = 0.8;
};

input::Schema schema_of(Settings& s) {
  input::Schema schema;
  schema.table("run", "Length and output of the run.");
  schema.add("run.output", s.output, "where results go").path_name().free();
  schema.add("run.steps", s.steps, "steps to train").in("steps").at_least(1).free();
  schema.add("run.accept", s.accept, "continue anyway").free();
  schema.table("optimizer", "The optimizer.");
  schema.add("optimizer.learning_rate", s.rate, "largest learning rate").more_than(0).changeable();
  schema.add("optimizer.state", s.state, {{"fp32", State::fp32}, {"bf16", State::bf16}, {"8bit", State::eight_bit}},
             "storage");
  schema.add("optimizer.decay_begin", s.begin, "start of the decay").at_least(0).less_than(1).changeable();
  schema.add("device.backend", s.backend, "which kernels").one_of({"auto", "portable", "cuda"}).free();
  schema.add("device.threads", s.threads, "threads").at_least(0).free();
  schema.add("transcoder.features", s.features, "features per layer").at_least(1).required("768");
  schema.add("transcoder.cases", s.cases, "cases to measure").one_of({"sparse", "dense"}).free();
  schema.rule({"optimizer.decay_begin", "run.steps"}, [&s] {
    return s.begin * static_cast<double>(s.steps) < 1
               ? std::string("decay before the first step (too few steps); train longer")
               : "";
  });
  return schema;
}

/// The error message of `read`; "" if it succeeds.
std::string message(const std::string& text, const std::vector<input::Override>& overrides = {}) {
  Settings settings;
  try {
    input::read(schema_of(settings), text, "a.toml", overrides);
  } catch (const Error& failure) {
    CHECK(failure.code() == ExitCode::usage);
    CHECK(failure.known_to() == KnownTo::all_ranks);
    return failure.what();
  }
  return {};
}

Settings values(const std::string& text, const std::vector<input::Override>& overrides = {}) {
  Settings settings;
  input::read(schema_of(settings), text, "a.toml", overrides);
  return settings;
}

const std::string good = "[transcoder]\nfeatures = 768\n";

}  // namespace

TEST_CASE("values of every type are read") {
  const Settings s = values(
      "[run]\noutput = 'out'\nsteps = 1_000_000\naccept = true\n[optimizer]\nlearning_rate = 1\nstate = \"8bit\"\n"
      "[device]\nbackend = \"cuda\"\nthreads = 3\n[transcoder]\nfeatures = 12\ncases = [\"dense\", \"sparse\"]\n");
  CHECK(s.output == "out");
  CHECK(s.steps == 1000000);
  CHECK(s.accept);
  CHECK(s.rate == 1.0);
  CHECK(s.state == State::eight_bit);
  CHECK(s.backend == "cuda");
  CHECK(s.threads == 3);
  CHECK(s.features == 12);
  CHECK(s.cases == std::vector<std::string>{"dense", "sparse"});
}

TEST_CASE("keys of earlier versions are errors that state the new ones, except in the input of a checkpoint") {
  Settings s;
  input::Schema schema = schema_of(s);
  schema.at("run.steps").formerly("optimizer.iterations");
  schema.retired("run.colour", "leave it out");
  const std::string old = good + "[run]\ncolour = 3\n[optimizer]\niterations = 7\n";
  std::string problems;
  try {
    input::read(schema, old, "a.toml");
  } catch (const Error& error) {
    problems = error.what();
  }
  CHECK(problems.find("a.toml:4:1: unknown key \"colour\" in [run] (of an earlier version); leave it out") !=
        std::string::npos);
  CHECK(problems.find("a.toml:6:1: unknown key \"iterations\" in [optimizer]; it is \"steps\" in [run] now") !=
        std::string::npos);
  input::read(schema, old, "a.toml", {}, input::Writer::checkpoint);
  CHECK(s.steps == 7);
  CHECK(input::value_in(schema, "run.steps", "[optimizer]\niterations = 8\n", "old") == input::Value(std::int64_t{8}));
  CHECK(input::changed_keys(schema, "[optimizer]\niterations = 7\n[transcoder]\nfeatures = 768\n", "old").empty());
  CHECK_THROWS_AS(input::read(schema, good, "a.toml", {{"optimizer.iterations=3", ""}}, input::Writer::checkpoint),
                  Error);
}

TEST_CASE("a retired value is an error; in the input of a checkpoint only if it defines the run") {
  for (const input::Resume resume : {input::Resume::fixed, input::Resume::changeable}) {
    Settings s;
    input::Schema schema = schema_of(s);
    schema.at("optimizer.state").retired_value("4bit", "take another").resume = resume;
    const std::string old = good + "[optimizer]\nstate = \"4bit\"\n";
    const std::string problem = "a.toml:4:9: optimizer.state = \"4bit\" is of an earlier version; take another";
    CHECK_THROWS_WITH_AS(input::read(schema, old, "a.toml"), problem.c_str(), Error);
    const auto read_again = [&] { input::read(schema, old, "a.toml", {}, input::Writer::checkpoint); };
    if (resume == input::Resume::fixed) {
      CHECK_THROWS_WITH_AS(read_again(), problem.c_str(), Error);
      CHECK_THROWS_WITH_AS(input::changed_keys(schema, old, "old"),
                           "old: optimizer.state = \"4bit\" is of an earlier version; take another", Error);
    } else {
      read_again();
      CHECK(s.state == State::fp32);
      CHECK(input::changed_keys(schema, old, "old").size() == 1);
    }
  }
}

TEST_CASE("a key that depends on another one is checked, and the reference says so") {
  struct Parts {
    State kind = State::fp32;
    std::int64_t rank = 0, window = 0, every = 0;
    double scale = 1;
    bool enabled = false;
  };
  const auto keys_of = [](Parts& p) {
    input::Schema keys;
    keys.add("a.kind", p.kind, {{"fp32", State::fp32}, {"bf16", State::bf16}, {"8bit", State::eight_bit}}, "the kind");
    keys.add("a.rank", p.rank, "rank of the product").required_with("a.kind", {"8bit"});
    keys.add("a.scale", p.scale, "factor").only_with("a.kind", {"bf16", "8bit"}, "fp32 has none").free();
    keys.add("a.window", p.window, "positions").not_with("a.enabled", {}, "it couples them");
    keys.add("a.every", p.every, "blocks").only_with("a.window");
    keys.add("a.enabled", p.enabled, "on or off");
    return keys;
  };
  const auto problem = [&](const std::string& text, const std::vector<input::Override>& overrides = {}) -> std::string {
    Parts parts;
    try {
      input::read(keys_of(parts), "[a]\n" + text, "a.toml", overrides);
    } catch (const Error& failure) {
      CHECK(failure.code() == ExitCode::usage);
      return failure.what();
    }
    return {};
  };
  CHECK(problem("") == "");
  CHECK(problem("kind = '8bit'\nrank = 2\nscale = 2\nwindow = 4\nevery = 2\n") == "");
  CHECK(problem("rank = 2\n") == "a.toml:2:1: a.rank is for a.kind = \"8bit\" only; leave it out");
  CHECK(problem("kind = '8bit'\n") == "a.toml:2:1: a.kind = \"8bit\" needs a.rank (rank of the product); give it");
  CHECK(problem(" scale = 2\n") ==
        "a.toml:2:2: a.scale is for a.kind = \"bf16\" or \"8bit\" only (fp32 has none); leave it out");
  CHECK(problem("every = 2\n") ==
        "a.toml:2:1: a.every has no effect without a.window; give window, or leave every out");
  CHECK(problem("enabled = true\n", {{"a.window=4", ""}}) ==
        "--set a.window=4: a.window does not go with a.enabled (it couples them); leave one of them out");
  // A default may be given explicitly, as in a printed input.
  Parts parts;
  input::Schema keys = keys_of(parts);
  CHECK(problem("kind = 'fp32'\nrank = 0\nscale = 1.0\nwindow = 0\nevery = 0\nenabled = true\n") == "");
  const std::string reference = input::reference_markdown(keys);
  CHECK(reference.find("rank of the product; only with, and required with, a.kind = \"8bit\" |") != std::string::npos);
  CHECK(reference.find("positions; not with a.enabled |") != std::string::npos);
  CHECK(input::defaults(keys).find("# factor; only with a.kind = \"bf16\" or \"8bit\"\n") != std::string::npos);
}

TEST_CASE("each mistake is reported with position, reason and hint") {
  const auto says = [](const std::string& text, const std::string& expected) { CHECK(message(text) == expected); };
  says(good + "[optimizer]\nlerning_rate = 1\n",
       "a.toml:4:1: unknown key \"lerning_rate\" in [optimizer]; did you mean \"learning_rate\"?");
  says(good + "[optimiser]\nlearning_rate = 1\n", "a.toml:3:2: unknown table [optimiser]; did you mean [optimizer]?");
  says(good + "[zebra]\n", "a.toml:3:2: unknown table [zebra] (valid: [run], [optimizer], [device], [transcoder])");
  says(good + "[optimizer]\nstep = 1\n",
       "a.toml:4:1: unknown key \"step\" in [optimizer]; did you mean \"steps\" in [run]?");
  says(good + "[run]\nzzzzzzzz = 1\n", "a.toml:4:1: unknown key \"zzzzzzzz\" in [run] (valid: output, steps, accept)");
  says("steps = 5\n" + good,
       "a.toml:1:1: unknown key \"steps\" (every key belongs to a table); did you mean run.steps?");
  says("run = 5\n" + good, "a.toml:1:1: [run] must be a table, not the integer 5; write [run] and its keys below");
  says("[[run]]\n" + good, "a.toml:1:3: [run] must be a table, not a list; write [run] and its keys below");
  says(good + "[run]\n  steps = \"many\"\n", "a.toml:4:11: run.steps must be an integer, not the string \"many\"");
  says(good + "[run]\nsteps = 1e6\n",
       "a.toml:4:9: run.steps must be an integer, not the number 1000000.0; write 1000000");
  says(good + "[run]\nsteps = 1.5\n", "a.toml:4:9: run.steps must be an integer, not the number 1.5");
  says(good + "[run]\nsteps = 2024-01-01\n", "a.toml:4:9: run.steps must be an integer, not a date or time");
  says(good + "[run]\naccept = 1\n", "a.toml:4:10: run.accept must be true or false, not the integer 1");
  says(good + "[run]\noutput = 1\n",
       "a.toml:4:10: run.output must be a string, not the integer 1; write strings in \"quotation marks\"");
  says(good + "[run]\nsteps = 0\n", "a.toml:4:9: run.steps = 0 is out of range (allowed: at least 1; unit: steps)");
  says(good + "[optimizer]\nlearning_rate = 0.0\n",
       "a.toml:4:17: optimizer.learning_rate = 0.0 is out of range (allowed: more than 0)");
  says(good + "[optimizer]\ndecay_begin = 1\n",
       "a.toml:4:15: optimizer.decay_begin = 1.0 is out of range (allowed: at least 0, less than 1)");
  says(good + "[optimizer]\nlearning_rate = nan\n",
       "a.toml:4:17: optimizer.learning_rate must be a number, not the number nan (it must be finite)");
  says(good + "[device]\nthreads = 3000000000\n",
       "a.toml:4:11: device.threads = 3000000000 is out of range (allowed: at least 0, at most 2147483647)");
  says(good + "[optimizer]\nstate = \"fp23\"\n",
       "a.toml:4:9: optimizer.state = \"fp23\" is not known (valid: \"fp32\", \"bf16\", \"8bit\"); did you mean "
       "\"fp32\"?");
  says(good + "cases = [\"sparse\", \"danse\"]\n",
       "a.toml:3:9: transcoder.cases = \"danse\" is not known (valid: \"sparse\", \"dense\"); did you mean \"dense\"?");
  says(good + "cases = [1]\n", "a.toml:3:9: transcoder.cases must be a list of strings, but has the integer 1");
  says("[transcoder]\n",
       "a.toml:1:2: transcoder.features is missing (features per layer; it has no default); add features = 768 to "
       "[transcoder]");
  says("",
       "a.toml:1:1: transcoder.features is missing (features per layer; it has no default); add features = 768 to "
       "[transcoder]");
  says(good + "[run]\nsteps = 1\n steps = 2\n",
       "a.toml:5:2: \"steps\" is defined twice (each key and table must be unique); remove one");
  says(good + "[run]\nsteps = 1\n[run]\n",
       "a.toml:5:1: \"[run]\" is defined twice (each key and table must be unique); remove one");
  says(good + "[run]\noutput = abc\n",
       "a.toml:4:10: not TOML (could not determine value type); write strings in \"quotation marks\"; the rest of the "
       "file "
       "was not read");
  says(good + "[run]\noutput = \"x\n",
       "a.toml:4:12: not TOML (unescaped control characters other than TAB (U+0009) are explicitly prohibited); "
       "close the string on the same line with the same quotation mark; the rest of the file was not read");
  says(good + "[run]\noutput = \"a\\u0007\"\n",
       "a.toml:4:10: run.output = \"a?\" has control characters or is not UTF-8");
  says(good + "[run]\nsteps = 1\n[optimizer]\ndecay_begin = 0.5\n",
       "a.toml:6:1: decay before the first step (too few steps); train longer");
}

TEST_CASE("all mistakes are reported at once, in the order of the file, overrides last") {
  CHECK(message("[optimizer]\nstate = 'x'\nlearning_rate = -1\n[run]\nstps = 1\naccept = 'no'\n",
                {{"run.steps=0", ""}, {"steps=1", ""}}) ==
        "7 problems in the input\n"
        "a.toml:1:1: transcoder.features is missing (features per layer; it has no default); add features = 768 to "
        "[transcoder]\n"
        "a.toml:2:9: optimizer.state = \"x\" is not known (valid: \"fp32\", \"bf16\", \"8bit\")\n"
        "a.toml:3:17: optimizer.learning_rate = -1.0 is out of range (allowed: more than 0)\n"
        "a.toml:5:1: unknown key \"stps\" in [run]; did you mean \"steps\"?\n"
        "a.toml:6:10: run.accept must be true or false, not the string \"no\"\n"
        "--set run.steps=0: run.steps = 0 is out of range (allowed: at least 1; unit: steps)\n"
        "--set steps=1: unknown key \"steps\" (every key belongs to a table); did you mean run.steps?");
  std::string many = good + "[run]\n";
  for (int i = 0; i < 250; ++i) many += fmt::format("x{} = 1\n", i);
  const std::string told = message(many);
  CHECK(std::count(told.begin(), told.end(), '\n') ==
        101);  // the count, a hundred problems, the number of further ones
  CHECK(told.ends_with("… and 150 more problems"));
}

TEST_CASE("overrides replace values of the file; a bare word is a string") {
  const Settings s = values(good + "[run]\nsteps = 5\n", {{"run.steps = 7", ""},
                                                          {"run.steps=8", ""},
                                                          {"run.output=runs/a=b#c", ""},
                                                          {"optimizer.state=8bit", ""},
                                                          {"optimizer.learning_rate=1e-3", ""},
                                                          {"device.backend=\"portable\"", ""},
                                                          {"transcoder.cases=['dense']", ""}});
  CHECK(s.steps == 8);
  CHECK(s.output == "runs/a=b#c");
  CHECK(s.state == State::eight_bit);
  CHECK(s.rate == 1e-3);
  CHECK(s.backend == "portable");
  CHECK(s.cases == std::vector<std::string>{"dense"});
  CHECK(values(good, {{"run.output=2024", ""}}).output == "2024");
  CHECK(values("", {{"transcoder.features=3", ""}}).features == 3);
  CHECK(message(good, {{"run.steps", ""}}) == "--set run.steps: has no \"=\" (the syntax is table.key=value)");
  CHECK(message(good, {{"run.stepz=1", ""}}) ==
        "--set run.stepz=1: unknown key \"stepz\" in [run]; did you mean \"steps\"?");
  CHECK(message(good, {{"rum.steps=1", ""}}) == "--set rum.steps=1: unknown table [rum]; did you mean [run]?");
  CHECK(message(good, {{"run.steps=fast", ""}}) ==
        "--set run.steps=fast: run.steps must be an integer, not the string \"fast\"");
  CHECK(message(good, {{"run.steps=1\naccept=true", ""}}) ==
        "--set run.steps=1?accept=true: run.steps must be an integer, not the string \"1?accept=true\"");
  CHECK(message(good, {{"run.output=[1", ""}}).starts_with("--set run.output=[1: not TOML ("));
  // Errors of an override are reported with its origin, also by rules.
  CHECK(message(good, {input::override_text("run.output", "${NO_SUCH_VARIABLE_AT_ALL}/x", "--output")}) ==
        "--output: run.output: environment variable NO_SUCH_VARIABLE_AT_ALL is not set (used in "
        "\"${NO_SUCH_VARIABLE_AT_ALL}/x\"); "
        "set it or give the full path");
  CHECK(message(good, {{"run.steps=1", ""}}) ==
        "--set run.steps=1: decay before the first step (too few steps); train longer");
  // Of several keys of a rule, the one that the override changed.
  CHECK(message(good + "[optimizer]\ndecay_begin = 0.7\n", {{"run.steps=1", ""}})
            .starts_with("--set run.steps=1: decay"));
}

TEST_CASE("environment variables are expanded in paths only") {
  setenv("WEFT_INPUT_TEST", "/folder", 1);
  CHECK(values(good + "[run]\noutput = \"${WEFT_INPUT_TEST}/a/${WEFT_INPUT_TEST}\"\n").output == "/folder/a//folder");
  CHECK(values(good + "[run]\noutput = \"$${WEFT_INPUT_TEST}$x\"\n").output == "${WEFT_INPUT_TEST}$x");
  CHECK(message(good + "[run]\noutput = \"${WEFT\"\n")
            .starts_with("a.toml:4:10: run.output: \"${WEFT\" has a \"${\" without a name"));
  CHECK(message(good + "[device]\nbackend = \"${WEFT_INPUT_TEST}\"\n")
            .starts_with("a.toml:4:11: device.backend = \"${WEFT_INPUT_TEST}\" is not known"));
  setenv("WEFT_INPUT_TEST", "", 1);
  CHECK(message(good + "[run]\noutput = \"${WEFT_INPUT_TEST}/a\"\n")
            .find("environment variable WEFT_INPUT_TEST is not set") != std::string::npos);
}

namespace {

/// 64 random bits, the same in every run of the test.
std::uint64_t random_bits(std::uint64_t step, std::uint64_t index) {
  const kernels::Random4 random = kernels::philox(1, kernels::Purpose::test, step, index);
  return (static_cast<std::uint64_t>(random.word[0]) << 32) | random.word[1];
}

bool same(const Settings& a, const Settings& b) {
  return a.steps == b.steps && std::bit_cast<std::uint64_t>(a.rate) == std::bit_cast<std::uint64_t>(b.rate) &&
         a.state == b.state && a.output == b.output && a.backend == b.backend && a.accept == b.accept &&
         a.threads == b.threads && a.features == b.features && a.cases == b.cases && a.begin == b.begin;
}

}  // namespace

TEST_CASE("a printed input gives the same values, bit for bit") {
  for (std::uint64_t i = 0; i < 2000; ++i) {
    Settings s = values(good);
    const input::Schema schema = schema_of(s);
    s.rate = std::bit_cast<double>(random_bits(i, 0) & 0x7FFFFFFFFFFFFFFF);
    if (!std::isfinite(s.rate) || s.rate == 0) s.rate = 5e-324;
    s.steps = static_cast<std::int64_t>(random_bits(i, 1) >> 8) + 100;
    s.state = static_cast<State>(random_bits(i, 2) % 3);
    s.output = "a \\\"quoted\\\" ${HOME} $${x} ’ \\ path";
    s.output += std::to_string(i);
    s.cases = i % 2 ? std::vector<std::string>{} : std::vector<std::string>{"dense", "sparse"};
    const std::string text = input::print(schema);
    Settings again;
    const input::Schema schema_again = schema_of(again);
    input::read(schema_again, text, "printed", {});
    REQUIRE_MESSAGE(same(s, again), text);
    REQUIRE(input::print(schema_again) == text);
  }
}

TEST_CASE("the template can be read and gives the defaults") {
  Settings s;
  const std::string text = input::defaults(schema_of(s));
  Settings loaded = values(text);
  CHECK(loaded.features == 768);  // the example: this key has no default
  loaded.features = 0;
  CHECK(same(loaded, Settings{}));
  CHECK(text.find("# steps to train [steps]; at least 1\nsteps = 1000\n") != std::string::npos);
  CHECK(text.find("# features per layer; at least 1 (required: no default)\nfeatures = 768\n") != std::string::npos);
  CHECK(text.find("# storage; one of \"fp32\", \"bf16\", \"8bit\"\nstate = \"fp32\"\n") != std::string::npos);
}

TEST_CASE("the reference contains every key") {
  Settings s;
  const input::Schema schema = schema_of(s);
  const std::string text = input::reference_markdown(schema);
  for (const input::Key& key : schema.keys())
    CHECK(text.find(fmt::format("| `{}` | {} |", key.name, input::type_name(key))) != std::string::npos);
}

TEST_CASE("JSON has typed values") {
  Settings s = values(good);
  const Json json = input::to_json(schema_of(s));
  CHECK(json["run"]["steps"] == 1000);
  CHECK(json["optimizer"]["state"] == "fp32");
  CHECK(json["run"]["accept"] == false);
  CHECK(json["transcoder"]["cases"] == Json::array({"sparse"}));
}

TEST_CASE("changed_keys finds changes except of free keys") {
  Settings s = values(good);
  const input::Schema schema = schema_of(s);
  const std::string before = input::print(schema);
  CHECK(input::changed_keys(schema, before, "input.toml").empty());
  s.steps = 5;
  s.rate = 1e-3;
  s.state = State::bf16;
  const auto changes = input::changed_keys(schema, before, "input.toml");
  REQUIRE(changes.size() == 2);
  CHECK(changes[0].path == "optimizer.learning_rate");
  CHECK(changes[0].before == "0.0004");
  CHECK(changes[0].after == "0.001");
  CHECK(changes[0].resume == input::Resume::changeable);
  CHECK(changes[1].path == "optimizer.state");
  CHECK(changes[1].before == "\"fp32\"");
  CHECK(changes[1].resume == input::Resume::fixed);
  // Keys missing in the old input had their default. Unknown keys of the old input are ignored.
  Settings defaults = values(good);
  CHECK(input::changed_keys(schema_of(defaults), good + "[old]\nx = 1\n", "input.toml").empty());
  CHECK_THROWS_AS(input::changed_keys(schema, "[", "input.toml"), Error);
}

TEST_CASE("load_text rejects files that are missing or too large") {
  CHECK_THROWS_WITH_AS(input::load_text("no/such/file.toml"),
                       "no/such/file.toml: cannot be read (No such file or directory); give the path of an input file",
                       Error);
  CHECK_THROWS_AS(input::load_text("/"), Error);
  CHECK_THROWS_AS(input::load_text("/dev/zero"), Error);  // endless
  const auto path = std::filesystem::temp_directory_path() / fmt::format("weft_input_test_{}.toml", getpid());
  REQUIRE(mkfifo(path.c_str(), 0600) == 0);
  CHECK_THROWS_WITH_AS(
      input::load_text(path.string()),
      (path.string() + ": is a FIFO (only regular files are read); give the path of an input file").c_str(), Error);
  std::filesystem::remove(path);
  std::ofstream(path) << good;
  CHECK(input::load_text(path.string()) == good);
  std::filesystem::remove(path);
}

TEST_CASE("no text crashes the program, however deeply nested or damaged") {
  // Valid or nearly valid TOML whose recursive treatment would overflow the stack.
  const auto repeat = [](const std::string& piece, int n) {
    std::string text;
    for (int i = 0; i < n; ++i) text += piece;
    return text;
  };
  CHECK(message(repeat("a.", 300000) + "a = 1\n").find("more than 1000 dots") != std::string::npos);
  CHECK(message("[" + repeat("a.", 300000) + "a]\n").find("more than 1000 dots") != std::string::npos);
  CHECK(message("a = [ \"\"\"x\"\"\"\", {" + repeat("a.", 300000) + "a = 1}]\n").find("more than 1000 dots") !=
        std::string::npos);
  CHECK(message("x = " + repeat("[", 300000)) != "");
  CHECK(message("x = " + repeat("{a=", 300000)) != "");
  CHECK(message(repeat("[", 300000)) != "");
  CHECK(message(repeat("a", 1 << 20)) != "");
  CHECK(message(repeat("a", (1 << 20) + 1)).find("at most 1048576") != std::string::npos);
  CHECK(message(good + "[run]\noutput = \"" + repeat("x", 5000) + "\"\n") ==
        "a.toml:4:10: run.output is longer than 4096 bytes");
  CHECK(message(good + "# " + repeat(".", 5000) + "\n") == "");
  CHECK(message(good, {{"run.output=" + repeat("a.", 300000), ""}}) != "");
  CHECK(message(good, {{"run.steps=" + repeat("[", 300000), ""}}) != "");

  Settings s;
  const std::string original = input::defaults(schema_of(s));
  const std::string alphabet = "[]{}=.\"'\\#\n\r\t ,abz09_-+:\xff\xc3\xa9";
  int errors = 0;
  for (std::uint64_t i = 0; i < 4000; ++i) {
    // Even trials: the template with up to eight mutations. Odd trials: random characters of TOML's syntax.
    std::string text = i % 2 ? "" : original;
    if (i % 2)
      for (std::uint64_t j = 0; j < random_bits(i, 0) % 200; ++j)
        text += alphabet[random_bits(i, j + 1) % alphabet.size()];
    else
      for (std::uint64_t j = 0; j <= random_bits(i, 0) % 8; ++j) {
        const std::size_t at = random_bits(i, 3 * j + 1) % text.size();
        const char c = random_bits(i, 3 * j + 2) % 2 ? alphabet[random_bits(i, 3 * j + 3) % alphabet.size()]
                                                     : static_cast<char>(random_bits(i, 3 * j + 3));
        switch (random_bits(i, 3 * j + 2) / 2 % 3) {
          case 0:
            text[at] = c;
            break;
          case 1:
            text.erase(at, 1 + random_bits(i, j + 90) % 20);
            break;
          default:
            text.insert(at, text.substr(at, 1 + random_bits(i, j + 91) % 40));
            break;
        }
      }
    Settings unused;
    try {
      input::read(schema_of(unused), text, "fuzzed", {{text.substr(0, 40), ""}});
    } catch (const Error& failure) {
      ++errors;
      REQUIRE(failure.code() == ExitCode::usage);
      REQUIRE(std::string(failure.what()).size() < 100000);
    }
  }
  CHECK(errors > 3000);  // most mutations are invalid
}

TEST_CASE("a name is suggested only if it is near") {
  const std::vector<std::string> names = {"train",         "synth", "evaluate", "data",
                                          "learning_rate", "seed",  "output",   "set"};
  const auto suggests = [&](const char* word, const char* expected) {
    CHECK_MESSAGE(input::nearest(word, names) == expected, word);
  };
  suggests("trian", "train");
  suggests("Train", "train");
  suggests("lerning_rte", "learning_rate");
  suggests("eval", "evaluate");  // a beginning
  suggests("out", "output");
  suggests("rate", "learning_rate");  // a part
  suggests("seed_value", "seed");
  suggests("path", "");  // two letters of four differ from "data"
  suggests("foo", "");
  suggests("lr", "");
  suggests("plot", "");
  suggests("best", "");
  suggests("", "");
}
