// SPDX-License-Identifier: Apache-2.0
//
// Rewards: their values, and the messages for files, patterns and programs that are wrong.
#include "polychromic/reward.hpp"

#include <sys/stat.h>
#include <unistd.h>

#include <chrono>
#include <cmath>
#include <filesystem>
#include <fstream>
#include <limits>
#include <sstream>
#include <thread>

#include "base/error.hpp"
#include "tests/scratch.hpp"
#include "tests/test.hpp"

namespace weft::polychromic {

namespace {

using Scores = std::vector<std::vector<double>>;

/// Two prompts with two answers and one.
std::vector<AnsweredPrompt> two_prompts() {
  return {{.id = "a", .prompt = "2 + 2 =", .reference = "4", .answers = {" 4\n", "5"}, .answer_ids = {{1}, {}}},
          {.id = "b", .prompt = "3 \"x\"", .reference = "x", .answers = {"\xff x"}, .answer_ids = {{1, 2}}}};
}

/// The error of a call: its exit code and its message, which must contain `part`.
template <class Call>
void check_error(ExitCode code, const std::string& part, const Call& call) {
  CAPTURE(part);
  try {
    call();
    FAIL("no error");
  } catch (const Error& error) {
    const std::string message = error.what();
    CAPTURE(message);
    CHECK(error.code() == code);
    CHECK(message.find(part) != message.npos);
  }
}

TEST_CASE("constant, exact match, likelihood") {
  const std::vector<AnsweredPrompt> prompts = two_prompts();
  CHECK(constant_reward()->scores(prompts) == Scores{{1, 1}, {1}});
  CHECK(exact_match_reward()->scores(prompts) == Scores{{1, 0}, {0}});
  std::vector<AnsweredPrompt> without = prompts;
  without[1].reference = " ";
  check_error(ExitCode::data, "prompt \"b\" has no reference answer", [&] { exact_match_reward()->scores(without); });

  // exp of the mean; the empty second answer has 0, not exp(0).
  const std::vector<double> log_probabilities = {std::log(0.25), 0, -2};
  const auto likelihood = likelihood_reward(&log_probabilities);
  const Scores scores = likelihood->scores(prompts);
  CHECK(std::abs(scores[0][0] - 0.25) <= 1e-15);
  CHECK(scores[0][1] == 0);
  CHECK(scores[1][0] == std::exp(-2.0));
}

TEST_CASE("length, and several rewards with weights") {
  std::vector<AnsweredPrompt> prompts = two_prompts();
  CHECK(length_reward(2)->scores(prompts) == Scores{{0.5, 0}, {1}});
  prompts[1].answer_ids[0].assign(9, 1);
  CHECK(length_reward(2)->scores(prompts) == Scores{{0.5, 0}, {0}});
  const auto sum = [](double weight) {
    std::vector<WeightedReward> terms;
    terms.push_back({exact_match_reward(), 1});
    terms.push_back({length_reward(2), weight});
    return sum_reward(std::move(terms));
  };
  CHECK(sum(-0.5)->scores(prompts) == Scores{{0.75, 0}, {0}});
  check_error(ExitCode::data, "prompt \"a\" have a sum that is not finite",
              [&] { sum(std::numeric_limits<double>::infinity())->scores(prompts); });
}

TEST_CASE("regular expression") {
  const std::vector<AnsweredPrompt> prompts = two_prompts();
  CHECK(regex_reward("^\\s*\\d+\\s*$")->scores(prompts) == Scores{{1, 1}, {0}});
  CHECK(regex_reward("x")->scores(prompts) == Scores{{0, 0}, {1}});  // also beside bytes that are not UTF-8
  check_error(ExitCode::usage, "cannot be compiled", [] { regex_reward("(a"); });
  check_error(ExitCode::usage, "at most 4096", [] { regex_reward(std::string(5000, 'a')); });
  std::vector<AnsweredPrompt> slow = two_prompts();
  slow[0].answers[1] = std::string(60, 'a');
  check_error(ExitCode::data, "fails on answer 2 to prompt \"a\"",
              [&] { regex_reward("^(a|aa)+$(?<=b)|^(a+)+b")->scores(slow); });
}

TEST_CASE("file of scores") {
  const testing::Scratch folder;
  const std::string path = folder.write("scores.jsonl",
                                        "{\"prompt\": \"a\", \"answer\": \"5\", \"score\": 0.5}\r\n"
                                        "{\"prompt\": \"a\", \"score\": -1}\n"
                                        "{\"prompt\": \"3 \\\"x\\\"\", \"score\": 2}");
  CHECK(file_reward(path)->scores(two_prompts()) == Scores{{-1, 0.5}, {2}});
  std::vector<AnsweredPrompt> unknown = two_prompts();
  unknown[1].id = "c", unknown[1].prompt = "?";
  check_error(ExitCode::data, "has no score for the answer", [&] { file_reward(path)->scores(unknown); });
  check_error(ExitCode::usage, "no such file", [&] { file_reward(folder / "none.jsonl"); });
  for (const char* const line : {"1", "{\"prompt\": \"a\"}", "{\"prompt\": 1, \"score\": 1}", "{\"score\": 1}",
                                 "{\"prompt\": \"a\", \"score\": \"1\"}", "{\"prompt\": \"a\", \"score\": 1e999}",
                                 "{\"prompt\": \"a\", \"answer\": [], \"score\": 1}", "not JSON", ""}) {
    const std::string bad = folder.write("bad.jsonl", "{\"prompt\": \"a\", \"score\": 1}\n" + std::string(line) + "\n");
    check_error(ExitCode::data, bad + ":2: ", [&] { file_reward(bad); });
  }
  const std::string twice =
      folder.write("twice.jsonl", "{\"prompt\":\"a\",\"score\":1}\n{\"prompt\":\"a\",\"score\":2}\n");
  check_error(ExitCode::data, ":2: a second score", [&] { file_reward(twice); });
}

TEST_CASE("command: lines in, lines out, one process for all batches") {
  const testing::Scratch folder;
  // The scores show that the program sees prompt and answers, and remembers the batches before.
  const auto reward = command_reward(
      "n=0; while IFS= read -r line; do n=$((n+1)); case \"$line\" in *'\"id\":\"a\"'*'\"answers\":[\" "
      "4\\n\",\"5\"]'*) echo "
      "\"{\\\"scores\\\": [$n, 0.5]}\";; *) echo \"{\\\"scores\\\": [-$n]}\";; esac; done",
      600);
  CHECK(reward->scores({}).empty());
  CHECK(reward->scores(two_prompts()) == Scores{{1, 0.5}, {-2}});
  CHECK(reward->scores(two_prompts()) == Scores{{3, 0.5}, {-4}});
}

TEST_CASE("command: batches beyond the size of a pipe") {
  std::vector<AnsweredPrompt> many;
  for (int i = 0; i < 3000; ++i)
    many.push_back({.id = std::to_string(i),
                    .prompt = std::string(100, 'p'),
                    .reference = "",
                    .answers = {"x"},
                    .answer_ids = {}});
  // sed writes while it still has lines to read: neither side may wait for the other.
  const Scores scores =
      command_reward("sed -u 's/.*\"id\":\"\\([0-9]*\\)\".*/{\"scores\": [\\1], \"note\": \"some more bytes\"}/'", 600)
          ->scores(many);
  REQUIRE(scores.size() == many.size());
  for (std::size_t i = 0; i < many.size(); ++i) CHECK(scores[i] == std::vector<double>{static_cast<double>(i)});
}

TEST_CASE("command: what is wrong with it is said") {
  const std::vector<AnsweredPrompt> prompts = two_prompts();
  const auto fails = [&](ExitCode code, const std::string& part, const std::string& command) {
    CAPTURE(command);
    const auto reward = command_reward(command, 600);
    check_error(code, part, [&] { reward->scores(prompts); });
  };
  fails(ExitCode::io, "ended after 0 of 2 lines (exit status 3)", "exit 3");
  fails(ExitCode::io, "ended after 1 of 2 lines (signal 9)", "echo '{\"scores\": [1, 2]}'; kill -9 $$");
  fails(ExitCode::io, "(exit status 127)", "weft-no-such-program 2> /dev/null");
  fails(ExitCode::data, "writes \"hello\" for prompt \"a\"", "while read -r line; do echo hello; done");
  fails(ExitCode::data, "writes \"[1]\"", "while read -r line; do echo '[1]'; done");
  fails(ExitCode::data, "1 scores for 2 answers to prompt \"a\"",
        "while read -r line; do echo '{\"scores\": [1]}'; done");
  fails(ExitCode::data, "not a finite number for answer 2",
        "while read -r line; do echo '{\"scores\": [1, null]}'; done");
  fails(ExitCode::data, "the scores of \"\"b\"\" where those of prompt \"a\" are next",
        "while read -r line; do echo '{\"id\": \"b\", \"scores\": [1, 2]}'; done");
  fails(ExitCode::data, "more than one line per line",
        "read -r line; printf '{\"scores\": [1, 2]}\\n{\"scores\": [1]}\\nmore\\n'; cat > /dev/null");
}

TEST_CASE("command: a line after the last answer of a batch is not taken for the first of the next") {
  const testing::Scratch folder;
  const std::string file = folder / "written";
  const auto reward =
      command_reward("read -r a; read -r b; echo '{\"scores\": [1, 2]}'; echo '{\"scores\": [3]}'; read -r wait < " +
                         folder / "go" + "; echo '{\"scores\": [4, 5]}'; : > " + file + "; cat > /dev/null",
                     600);
  REQUIRE(mkfifo((folder / "go").c_str(), 0600) == 0);
  CHECK(reward->scores(two_prompts()) == Scores{{1, 2}, {3}});
  std::ofstream(folder / "go") << "go\n";
  while (!std::filesystem::exists(file)) std::this_thread::sleep_for(std::chrono::milliseconds(1));
  check_error(ExitCode::data, "more than one line per line", [&] { reward->scores(two_prompts()); });
}

/// True if no process of this number runs (a zombie does not).
bool has_ended(const std::string& process) {
  std::ifstream stat("/proc/" + process + "/stat");
  std::stringstream text;
  text << stat.rdbuf();
  const std::size_t end = text.str().rfind(") ");
  return end == std::string::npos || text.str()[end + 2] == 'Z';
}

TEST_CASE("command: a program that hangs is ended with the processes that it has started") {
  const testing::Scratch folder;
  const std::string file = folder / "process";
  const auto reward = command_reward("sleep 1000 & echo $! > " + file + "; wait", 0.5);
  check_error(ExitCode::io, "0 of 2 lines within 0.5 s", [&] { reward->scores(two_prompts()); });
  std::string process;
  std::ifstream(file) >> process;
  REQUIRE(!process.empty());
  // The signal was sent before the call returned; the process may take a moment to end.
  for (int i = 0; i < 2000 && !has_ended(process); ++i) std::this_thread::sleep_for(std::chrono::milliseconds(5));
  CHECK(has_ended(process));
}

}  // namespace
}  // namespace weft::polychromic
