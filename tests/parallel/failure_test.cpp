// SPDX-License-Identifier: Apache-2.0
//
// Runs on 1 to 4 ranks: failures of some ranks become one failure of all. How a job ends is tested on complete programs
// (tests/fault).
#include "parallel/failure.hpp"

#include <filesystem>
#include <new>
#include <stdexcept>
#include <system_error>

#include "parallel/launcher.hpp"
#include "tests/test.hpp"

namespace weft::parallel {
namespace {

const Communicator& all() { return testing::world().all(); }
int last() { return all().size() - 1; }

/// The Error that `function` throws; it must be known to all ranks.
template <class Function>
Failure thrown(Function&& function) {
  try {
    function();
  } catch (const Error& failure) {
    CHECK(failure.known_to() == KnownTo::all_ranks);
    return {failure.code(), failure.what()};
  }
  FAIL("not thrown");
  return {};
}

/// As `agree` names the rank.
std::string of_rank(int rank, const std::string& message) {
  return all().size() == 1 ? message : fmt::format("rank {}: {}", rank, message);
}

}  // namespace

TEST_CASE("exceptions of each kind have an exit code") {
  CHECK(!attempt([] {}));
  CHECK(attempt([] { throw error(ExitCode::numeric, "x"); })->code == ExitCode::numeric);
  CHECK(attempt([] { throw std::filesystem::filesystem_error("x", std::error_code()); })->code == ExitCode::io);
  CHECK(attempt([] { throw std::bad_alloc(); })->code == ExitCode::usage);
  const auto no_thread = std::make_error_code(std::errc::resource_unavailable_try_again);
  CHECK(attempt([&] { throw std::system_error(no_thread); })->message.find("a thread cannot be started") == 0);
  CHECK(attempt([] { throw std::runtime_error("x"); })->code == ExitCode::internal);
}

TEST_CASE("the failure of one rank is thrown on every rank") {
  CHECK_NOTHROW(on_all(all(), [] {}));
  const Failure failure = thrown([] {
    on_all(all(), [] {
      if (all().rank() == last()) throw error(ExitCode::data, "torn");
    });
  });
  CHECK(failure.code == ExitCode::data);
  CHECK(failure.message == of_rank(last(), "torn"));
}

TEST_CASE("of several failures the lowest rank has priority, and I/O errors come last") {
  CHECK(!agree(all(), std::nullopt));
  const auto same = agree(all(), Failure{ExitCode::io, fmt::format("disk {}", all().rank())});
  REQUIRE(same);
  CHECK(same->message == of_rank(0, "disk 0"));
  const ExitCode code = all().rank() == last() ? ExitCode::numeric : ExitCode::io;
  const auto mixed = agree(all(), Failure{code, "x"});
  REQUIRE(mixed);
  CHECK(mixed->code == ExitCode::numeric);
  CHECK(mixed->message == of_rank(last(), "x"));
}

TEST_CASE("ranks with and without CUDA are an error that names one of each kind") {
  const std::string host = fmt::format("node{}", all().rank());
  for (const bool with_cuda : {false, true}) CHECK_NOTHROW(require_one_program(all(), with_cuda, host, ""));
  if (all().size() == 1) return;
  const bool with_cuda = all().rank() < last();
  const Failure failure =
      thrown([&] { require_one_program(all(), with_cuda, host, with_cuda ? "" : "no GPU is visible"); });
  CHECK(failure.code == ExitCode::usage);
  CHECK(failure.message.starts_with(fmt::format(
      "rank 0 on node0 runs the program with CUDA, rank {0} on node{0} the one without (no GPU is visible);", last())));
}

TEST_CASE("of several failures the smallest order has priority") {
  CHECK(!first_failure(all(), std::nullopt, 3));
  const auto first =
      first_failure(all(), Failure{ExitCode::data, fmt::format("{}", all().rank())}, last() - all().rank());
  REQUIRE(first);
  CHECK(first->message == fmt::format("{}", last()));
  const auto equal = first_failure(all(), Failure{ExitCode::data, fmt::format("{}", all().rank())}, 7);
  REQUIRE(equal);
  CHECK(equal->message == "0");
}

TEST_CASE("the failure of rank 0 is thrown on every rank, and its text is returned on every rank") {
  const Failure failure =
      thrown([] { on_root(all(), []() -> std::string { throw error(ExitCode::data, "chunk_0.hdf5: torn"); }); });
  CHECK(failure.code == ExitCode::data);
  CHECK(failure.message == "chunk_0.hdf5: torn");
  CHECK(on_root(all(), [] { return std::string("text"); }) == "text");
  int calls = 0;
  on_root(all(), [&] { ++calls; });
  CHECK(calls == (all().rank() == 0 ? 1 : 0));
  CHECK(attempt_on_root(all(), [] { throw error(ExitCode::io, "x"); })->code == ExitCode::io);
}

TEST_CASE("the highest exit code of all ranks is the exit code") {
  CHECK(agreed_exit_code(testing::world(), all().rank() == last() ? 75 : 0) == 75);
}

}  // namespace weft::parallel
