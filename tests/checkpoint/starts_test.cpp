// SPDX-License-Identifier: Apache-2.0
//
// The history of starts: only two silent deaths at one step, from one step, end a chain of jobs (exit code 93).
#include "checkpoint/starts.hpp"

#include <unistd.h>

#include <fstream>
#include <iterator>

#include "base/error.hpp"
#include "tests/scratch.hpp"

namespace weft::checkpoint {
namespace fs = std::filesystem;
namespace {

struct Scratch : weft::testing::Scratch {
  void dies(std::int64_t from, std::int64_t at, const std::string& resume = "auto") const {
    Starts starts(path);
    starts.begin(from, resume, false);
    for (std::int64_t step = from + 1; step <= at; ++step) starts.reached(step);
  }
  bool refuses(std::int64_t from) const {
    try {
      Starts(path).begin(from, "auto", false);
    } catch (const Error& failure) {
      CHECK(failure.code() == ExitCode::no_progress);
      return true;
    }
    return false;
  }
};

}  // namespace

TEST_CASE("two deaths at one step refuse the third start, again and again, until the option is given") {
  const Scratch run;
  run.dies(10, 18);
  run.dies(10, 18);
  CHECK(run.refuses(10));
  CHECK(run.refuses(10));
  CHECK_NOTHROW(Starts(run.path).begin(10, "auto", true));
}

TEST_CASE("a death before the first step counts as well") {
  const Scratch run;
  run.dies(0, 0);
  run.dies(0, 0);
  CHECK(run.refuses(0));
}

TEST_CASE("kills at different steps are no loop") {
  const Scratch run;
  for (const std::int64_t at : {18, 24, 18, 24, 19}) run.dies(10, at);
  CHECK_FALSE(run.refuses(10));
}

TEST_CASE("one death from another step and one from this step are no loop") {
  const Scratch run;
  run.dies(10, 18);
  run.dies(15, 18);
  CHECK_FALSE(run.refuses(15));
}

TEST_CASE("a start that ended with a message or cleanly is no death") {
  for (const bool clean : {false, true}) {
    const Scratch run;
    run.dies(10, 18);
    {
      Starts starts(run.path);
      const std::int64_t number = starts.begin(10, "auto", false);
      CHECK(number == 2);
      starts.reached(18);
      if (clean) starts.end(18);
    }
    if (!clean) {
      Starts(run.path).failed(1, 4);  // not the last start: another record
      Starts(run.path).failed(2, 4);
      Starts(run.path).failed(2, 4);  // known already
    }
    CHECK_FALSE(run.refuses(10));  // begins, and dies
    CHECK_FALSE(run.refuses(10));  // dies at step 10: two deaths since the message
    CHECK(run.refuses(10));
  }
}

TEST_CASE("the option of the last start is known") {
  const Scratch run;
  CHECK(Starts(run.path).last_resume() == "auto");
  run.dies(0, 3, "runs/\"a\"/step_00000010");
  CHECK(Starts(run.path).last_resume() == "runs/\"a\"/step_00000010");
  run.dies(0, 3);
  CHECK(Starts(run.path).last_resume() == "auto");
}

TEST_CASE("damaged lines and lines of earlier versions count for nothing") {
  const Scratch run;
  std::ofstream(run.path / "starts.jsonl") << "{\"start\":10}\n{\"start\":10}\n\xff\n[1]\n{\"start\":\"x\"}\n{\"sta";
  CHECK_FALSE(run.refuses(10));  // where those died is not known
  CHECK_FALSE(run.refuses(10));
  CHECK(run.refuses(10));
  std::ifstream file(run.path / "starts.jsonl");
  const std::string text{std::istreambuf_iterator<char>(file), {}};
  CHECK(text.find("{\"sta\n{\"start\":10,\"reached\":") !=
        std::string::npos);  // the torn line does not damage the next
}

}  // namespace weft::checkpoint
