// SPDX-License-Identifier: Apache-2.0
//
// Phases on several ranks: each rank measures its own, and every rank gets the times of all.
#include "run/timers.hpp"

#include <thread>

#include "parallel/world.hpp"
#include "tests/test.hpp"

using namespace weft;

namespace {
void wait(double milliseconds) { std::this_thread::sleep_for(std::chrono::duration<double, std::milli>(milliseconds)); }
}  // namespace

TEST_CASE("phases follow one another and do not overlap") {
  const auto begin = std::chrono::steady_clock::now();
  run::Timers timers;
  timers.phase("a");
  wait(20);
  timers.phase("b");
  {
    const run::Timers::Scope inner(timers, "inner");
    wait(20);
  }
  timers.phase("a");
  timers.stop();
  const double elapsed = std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
  wait(30);  // counted to no phase
  // A sleep lasts at least as long as asked; above it any load of the machine may be added.
  CHECK(timers.seconds("a") >= 0.020);
  CHECK(timers.seconds("inner") >= 0.020);
  CHECK(timers.seconds("none") == 0);
  // Time inside the inner phase is not counted to the outer one as well.
  CHECK(timers.seconds("a") + timers.seconds("b") + timers.seconds("inner") <= elapsed);
}

TEST_CASE("phases that are split are counted by pass, others and those outside passes are not") {
  run::Timers timers;
  timers.pass("forward");
  timers.phase("products");  // not split yet
  timers.split({"products"});
  timers.phase("products");
  timers.phase("loss");
  timers.pass("backward");
  timers.phase("products");
  timers.pass("");
  timers.phase("products");
  std::vector<std::string> names;
  for (const auto& phase : timers.gather(testing::world().all()))
    names.push_back(phase.name + " " + std::to_string(phase.count));
  CHECK(names == std::vector<std::string>{"products 2", "products, forward 1", "loss 1", "products, backward 1"});
}

TEST_CASE("every rank gets the minimum, mean and maximum time of each phase") {
  const auto& ranks = testing::world().all();
  run::Timers timers;
  timers.phase("all");
  wait(5.0 * (1 + ranks.rank()));
  timers.phase("all");
  if (ranks.rank() == ranks.size() - 1) {
    timers.phase("last rank alone");
    wait(5);
  }
  const auto statistics = timers.gather(ranks);
  REQUIRE(statistics.size() == 2);
  CHECK(statistics[0].name == "all");
  CHECK(statistics[0].count == 2);
  CHECK(statistics[0].minimum >= 0.005);
  CHECK(statistics[0].maximum >= 0.005 * ranks.size());
  CHECK(statistics[0].mean >= 0.005 * (1 + ranks.size()) / 2.0);
  CHECK(statistics[0].mean <= statistics[0].maximum * (1 + 1e-12));  // the mean's own rounding
  CHECK(statistics[1].name == "last rank alone");
  CHECK((statistics[1].minimum == 0) == (ranks.size() > 1));
  const Json json = run::to_json(statistics);
  CHECK(json["all"]["max"].get<double>() == statistics[0].maximum);
  CHECK(run::to_table(statistics).find("last rank alone") != std::string::npos);
}
