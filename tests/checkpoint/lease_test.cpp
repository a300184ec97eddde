// SPDX-License-Identifier: Apache-2.0
//
// One owner per run directory: who may acquire its lease, and that an owner which lost it knows, and cannot get it
// back.
#include "checkpoint/lease.hpp"

#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <fstream>
#include <iterator>
#include <optional>
#include <thread>
#include <vector>

#include "base/error.hpp"
#include "base/fault.hpp"
#include "base/system.hpp"
#include "checkpoint/checkpoint_writer.hpp"
#include "checkpoint/resume.hpp"
#include "tests/checkpoint/sample.hpp"
#include "tests/scratch.hpp"

namespace weft::checkpoint {
namespace fs = std::filesystem;
namespace {

struct Scratch : weft::testing::Scratch {
  std::string contents(const std::string& name) const { return weft::testing::contents(path / name); }
  Owner owner(const std::string& name) const { return parse_owner(contents(name)); }
  std::vector<std::string> names() const {
    std::vector<std::string> all;
    for (const fs::directory_entry& entry : fs::directory_iterator(path)) all.push_back(entry.path().filename());
    std::sort(all.begin(), all.end());
    return all;
  }
};

using Names = std::vector<std::string>;

/// Short, so that no test waits long; a run has 60 s.
constexpr Lease::Settings kShort{.seconds = 1, .take_over = false};
/// Not renewed during a test.
constexpr Lease::Settings kLong{.seconds = 3600, .take_over = false};
constexpr Lease::Settings kTakeOver{.seconds = 3600, .take_over = true};

const parallel::Communicator& world() { return weft::testing::world().all(); }

/// An owner on this host, of this process.
Owner present_owner() {
  const Scratch scratch;
  const Lease lease(world(), scratch.path, kShort);
  return scratch.owner("lease.1");
}

/// The number of a process that has ended.
std::int64_t ended_process() {
  const pid_t child = ::fork();
  if (child == 0) ::_exit(0);
  ::waitpid(child, nullptr, 0);
  return child;
}

std::string refusal(const Scratch& scratch, const Lease::Settings& settings) {
  return weft::testing::refusal(ExitCode::io, [&] { const Lease lease(world(), scratch.path, settings); });
}

}  // namespace

TEST_CASE("a lease is acquired, released, and acquired again with a higher fence") {
  const Scratch scratch;
  std::string token;
  {
    const Lease lease(world(), scratch.path, kLong);
    CHECK(lease.fence() == 1);
    CHECK(lease.lost().empty());
    CHECK(lease.taken_over_from().empty());
    CHECK(scratch.names() == Names{"lease.1"});
    CHECK(scratch.owner("lease.1").token == lease.token());
    CHECK(!scratch.owner("lease.1").released);
    token = lease.token();
  }
  CHECK(scratch.owner("lease.1").released);
  const Lease lease(world(), scratch.path, kLong);
  CHECK(lease.fence() == 2);
  CHECK(lease.token() != token);
  CHECK(lease.taken_over_from().empty());
  CHECK(scratch.names() == Names{"lease.2"});
}

TEST_CASE("a directory whose owner is alive is refused, with the owner's name and age, and not modified") {
  const Scratch scratch;
  const Lease owner(world(), scratch.path, kLong);
  const std::string before = scratch.contents("lease.1");
  const std::string message = refusal(scratch, kShort);
  for (const std::string& part :
       {"belongs to another run: process " + std::to_string(::getpid()) + " on " + host_name(), std::string(", 0:00:0"),
        std::string(" ago"), std::string("--take-over")})
    CHECK_MESSAGE(message.find(part) != std::string::npos, message);
  CHECK(scratch.contents("lease.1") == before);
  CHECK(scratch.names() == Names{"lease.1"});
  CHECK(owner.lost().empty());
}

TEST_CASE("the lease of a process that does not exist any more is taken over at once") {
  Owner gone = present_owner(), reused = gone;
  gone.process = ended_process();
  gone.seconds = reused.seconds = 3600;
  ++reused.process_start;  // another process has its number now
  for (const Owner& owner : {gone, reused}) {
    const Scratch scratch;
    scratch.write("lease.4", to_text(owner));
    scratch.write("lease.3", to_text(owner));  // left by a kill between two deletions
    const Lease lease(world(), scratch.path, kLong);
    CHECK(lease.fence() == 5);
    CHECK(scratch.names() == Names{"lease.5"});
    CHECK(lease.taken_over_from().find("(that process does not exist any more)") != std::string::npos);
  }
}

TEST_CASE("the lease of another host is taken over after its time without a renewal, not before") {
  Owner silent = present_owner();
  silent.seconds = 1;
  Owner renamed = silent, rebooted = silent, contained = silent;
  renamed.host += "x";
  rebooted.boot += "x";
  contained.pid_namespace += "x";  // a container of the same host: its processes are not visible
  for (const Owner& owner : {renamed, rebooted, contained}) {
    const Scratch scratch;
    scratch.write("lease.1", to_text(owner));
    const auto begin = std::chrono::steady_clock::now();
    const Lease lease(world(), scratch.path, kLong);
    CHECK(std::chrono::steady_clock::now() - begin >= std::chrono::seconds(1));
    CHECK(lease.taken_over_from().find("its lease was not renewed for 1 s") != std::string::npos);
  }
}

TEST_CASE("an owner on another host that renews its lease is refused; one that releases it is followed") {
  const Scratch scratch;
  Owner owner = present_owner();
  owner.host = "else\x1bwhere\n";  // a foreign file must not reach a terminal as it is
  owner.seconds = 3600;
  scratch.write("lease.1", to_text(owner));
  const auto rewrite = [&] {
    std::fstream file(scratch.path / "lease.1", std::ios::in | std::ios::out | std::ios::binary);
    file << to_text(owner);
  };
  std::atomic<bool> stop{false};
  std::thread renewing([&] {
    for (; !stop; std::this_thread::sleep_for(std::chrono::milliseconds(20)), ++owner.renewals) rewrite();
  });
  const std::string message = refusal(scratch, kShort);
  stop = true;
  renewing.join();
  CHECK_MESSAGE(message.find(" on else?where?") != std::string::npos, message);
  CHECK(message.find('\x1b') == std::string::npos);
  std::thread releasing([&] {
    std::this_thread::sleep_for(std::chrono::milliseconds(200));
    owner.released = true;
    rewrite();
  });
  const Lease lease(world(), scratch.path, kLong);
  releasing.join();
  CHECK(lease.taken_over_from().empty());
}

TEST_CASE("an owner from which the directory was taken knows it, and cannot get it back") {
  const Scratch scratch;
  std::optional<Lease> first(std::in_place, world(), scratch.path, kShort);  // renews while the second one takes over
  const Lease second(world(), scratch.path, kTakeOver);
  CHECK(second.fence() == 2);
  CHECK(second.lost().empty());
  const std::string why = first->lost();
  CHECK_MESSAGE(why.find("taken over by another run: process ") != std::string::npos, why);
  const std::string before = scratch.contents("lease.2");
  std::this_thread::sleep_for(std::chrono::milliseconds(300));  // several renewals of the first
  first->begin_at(7);
  first.reset();
  CHECK(scratch.names() == Names{"lease.2"});
  CHECK(scratch.contents("lease.2") == before);
  CHECK(second.lost().empty());
}

TEST_CASE("a deleted lease is lost") {
  const Scratch scratch;
  const Lease lease(world(), scratch.path, kLong);
  fs::remove(scratch.path / "lease.1");
  CHECK(lease.lost().find("lease.1: is gone") != std::string::npos);
  fs::remove_all(scratch.path);
  CHECK(lease.lost().find("lease.1: is gone") != std::string::npos);
}

TEST_CASE("of several contenders exactly one acquires the lease") {
  Owner gone = present_owner();
  gone.process = ended_process();
  for (const bool after_a_kill : {false, true}) {
    const Scratch scratch;
    if (after_a_kill) scratch.write("lease.1", to_text(gone));
    constexpr int kContenders = 8;
    std::vector<parallel::Communicator> worlds;
    for (int i = 0; i < kContenders; ++i) worlds.push_back(world().duplicate());
    std::vector<std::unique_ptr<Lease>> acquired(kContenders);
    std::vector<std::thread> contenders;
    for (std::size_t i = 0; i < kContenders; ++i)
      contenders.emplace_back([&, i] {
        try {
          acquired[i] = std::make_unique<Lease>(worlds[i], scratch.path, kShort);
        } catch (const Error&) {
        }
      });
    for (std::thread& contender : contenders) contender.join();
    CHECK(std::count(acquired.begin(), acquired.end(), nullptr) == kContenders - 1);
    CHECK(scratch.names().size() == 1);
    for (const std::unique_ptr<Lease>& lease : acquired)
      if (lease) CHECK(lease->lost().empty());
  }
}

TEST_CASE("a lease of which only the name was written is taken over in time") {
  const Scratch scratch;
  fault::order("lease-created:*:*:throw");
  CHECK_THROWS_AS(Lease(world(), scratch.path, kShort), Error);
  fault::order("");
  CHECK(scratch.contents("lease.1").empty());
  const Lease lease(world(), scratch.path, kShort);
  CHECK(lease.fence() == 2);
  CHECK(lease.taken_over_from().find("an owner whose lease cannot be read") != std::string::npos);
}

TEST_CASE("unreadable leases and other files do no harm") {
  for (const std::string text : {"", "{", "[]", "{\"token\":3,\"process\":\"x\",\"seconds\":\"y\"}",
                                 "{\"seconds\":1e300}", "{\"seconds\":-1}", "\xff\xfe"}) {
    CHECK(parse_owner(text).token.empty());
    CHECK(parse_owner(text).seconds <= 3600);
    CHECK(parse_owner(text).seconds >= 1);
  }
  const Scratch scratch;
  for (const char* name : {"lease.", "lease.0", "lease.01", "lease.x", "lease.9999999999999999", "lease.-1"})
    scratch.write(name, "x");
  const Lease lease(world(), scratch.path, kLong);
  CHECK(lease.fence() == 1);
  const Scratch linked;
  linked.write("target", "precious");
  fs::create_symlink("target", linked.path / "lease.1");
  CHECK(refusal(linked, kTakeOver).find("lease.1") != std::string::npos);
  CHECK(linked.contents("target") == "precious");
}

TEST_CASE("a checkpoint that an owner published after it had lost the directory is stale") {
  const Scratch scratch;
  const auto checkpoint = [](std::int64_t fence, std::int64_t step) {
    Manifest manifest;
    manifest.fence = fence;
    manifest.step = step;
    return manifest;
  };
  {
    Lease first(world(), scratch.path, kLong);
    first.begin_at(-1);
  }
  {
    Lease second(world(), scratch.path, kLong);
    CHECK(!second.stale(checkpoint(1, 500)));  // the work of the first
    second.begin_at(100);
  }
  {  // Ended before it had settled: what the second settled remains valid.
    const Lease third(world(), scratch.path, kLong);
    CHECK(!third.stale(checkpoint(2, 500)));
  }
  const Lease fourth(world(), scratch.path, kLong);
  CHECK(fourth.stale(checkpoint(1, 500)));
  CHECK(!fourth.stale(checkpoint(1, 100)));
  CHECK(!fourth.stale(checkpoint(2, 500)));
  CHECK(!fourth.stale(checkpoint(0, 500)));  // of a version without leases
}

TEST_CASE("a stale checkpoint is not used for resuming") {
  const Scratch scratch;
  testing::Sample sample(world(), 1);
  const auto publish = [&](std::int64_t fence, std::int64_t step, const fs::path& resumed_from) {
    Writer writer(world(), scratch.path, {}, sample.registry, weft::testing::execution(), resumed_from);
    sample.fill(step);
    Manifest manifest = testing::manifest_of(step);
    manifest.fence = fence;
    manifest.owner = std::string(32, 'a');
    writer.start(manifest);
    REQUIRE(writer.finish()->durable);
  };
  const auto newest = [&] {
    Lease lease(world(), scratch.path, kLong);
    const auto found = find(world(), scratch.path, "auto", Verify::full, Leftovers::remove, &lease);
    return found ? found->manifest.step : -1;
  };
  publish(1, 10, {});
  CHECK(newest() == 10);  // fence 1
  {
    Lease second(world(), scratch.path, kLong);
    REQUIRE(second.fence() == 2);
    second.begin_at(10);
  }
  publish(2, 20, scratch.path / directory_name(10));
  publish(1, 30, scratch.path / directory_name(20));  // of the first owner, late
  CHECK(newest() == 20);
  fs::remove_all(scratch.path / directory_name(20));
  fs::remove_all(scratch.path / directory_name(10));
  CHECK(newest() == -1);  // none, instead of none that is valid
}

}  // namespace weft::checkpoint
