// SPDX-License-Identifier: Apache-2.0
//
// Writes that fail: the disk is full, the state or the registries are not valid. The previous checkpoint remains.
#include <sys/resource.h>

#include "base/error.hpp"
#include "base/fault.hpp"
#include "parallel/signals.hpp"
#include "storage/digest.hpp"
#include "tests/checkpoint/support.hpp"

namespace weft::checkpoint {
namespace fs = std::filesystem;
using namespace testing;

TEST_CASE(
    "after a failed write the previous checkpoint remains, files are removed, and training continues up to a limit") {
  const parallel::Signals signals;  // ignores SIGXFSZ: exceeding the limit becomes an error of the write
  Settings settings = settings_of();
  settings.failures_allowed = 2;
  for (const Staging staging : {Staging::full, Staging::chunked})
    for (const rlim_t limit : {rlim_t{0}, rlim_t{3000}, rlim_t{100'000}}) {
      settings.staging = staging;
      const Scratch scratch;
      Sample sample(world(), 1, 300'001);
      write_steps(world(), scratch.path, sample, {1});
      Writer writer(world(), scratch.path, settings, sample.registry, execution(), scratch.path / "step_00000001");
      const auto write = [&](std::int64_t step, bool full_disk) {
        rlimit former;
        getrlimit(RLIMIT_FSIZE, &former);
        rlimit small = former;
        if (full_disk && world().rank() == world().size() - 1) small.rlim_cur = limit;  // on one rank
        sample.fill(step);
        setrlimit(RLIMIT_FSIZE, &small);
        std::optional<Report> report;
        ExitCode code = ExitCode::finished;
        writer.start(manifest_of(step));
        try {
          report = writer.finish();
        } catch (const Error& failure) {
          CHECK(failure.known_to() == KnownTo::all_ranks);
          code = failure.code();
        }
        setrlimit(RLIMIT_FSIZE, &former);
        return std::pair(report, code);
      };
      Warnings warnings;
      const auto failed = write(2, true).first;
      REQUIRE(failed);
      CAPTURE(failed->failure);
      CHECK(!failed->durable);
      CHECK(failed->failure.find("File too large") != std::string::npos);
      CHECK(warnings.lines.size() == (root() ? 1 : 0));
      CHECK((!root() || warnings.mention("bytes free")));
      CHECK(names_in(scratch.path) == std::vector<std::string>{"latest", "step_00000001"});
      CHECK(find(world(), scratch.path, "auto", Verify::full)->manifest.step == 1);
      // The next one succeeds and resets the count of failures.
      CHECK(write(3, false).first->durable);
      sample.clear();
      load(world(), *find(world(), scratch.path, "auto", Verify::full), sample.registry, execution());
      CHECK(sample.holds(3));
      CHECK(!write(4, true).first->durable);
      CHECK(write(5, true).second == ExitCode::io);  // the second in a row ends the run
      CHECK(find(world(), scratch.path, "auto", Verify::full)->manifest.step == 3);
    }
}

TEST_CASE("a shard of several segments is digested during the write, also if the disk becomes full") {
  if (world().size() > 1) return;  // one rank only: 160 MB
  const parallel::Signals signals;
  const Scratch scratch;
  Sample sample(world(), 1, 8'000'001);
  write_steps(world(), scratch.path, sample, {1});
  const auto found = find(world(), scratch.path, "auto", Verify::full);
  REQUIRE(found);
  REQUIRE(found->manifest.shards[0].sha256.size() == 3);
  load(world(), *found, sample.registry, execution());
  CHECK(sample.holds(1));
  Writer writer(world(), scratch.path, settings_of(), sample.registry, execution(), found->path);
  rlimit former;
  getrlimit(RLIMIT_FSIZE, &former);
  rlimit small = former;
  small.rlim_cur = 2 * storage::kDigestSegment;  // after two digested segments
  setrlimit(RLIMIT_FSIZE, &small);
  Warnings warnings;
  writer.start(manifest_of(2));
  const auto report = writer.finish();
  setrlimit(RLIMIT_FSIZE, &former);
  REQUIRE(report);
  CHECK(!report->durable);
  CHECK(report->failure.find("File too large") != std::string::npos);
  CHECK(names_in(scratch.path) == std::vector<std::string>{"latest", "step_00000001"});
}

TEST_CASE("a state that is not finite is never written") {
  const Scratch scratch;
  Sample sample(world(), 1);
  write_steps(world(), scratch.path, sample, {1});
  for (const Staging staging : {Staging::full, Staging::chunked})
    for (const char* name :
         {"encoder_0/weight", "encoder_0/weight.first_moment", "decoder_0/weight", "statistics/mean_inputs"}) {
      Writer writer(world(), scratch.path, settings_of(staging), sample.registry, execution(),
                    scratch.path / "step_00000001");
      sample.fill(2);
      const Tensor& tensor = *sample.registry.find(name);
      if (tensor.owned.size() > 0)  // every owner makes its last number infinite or NaN
        std::memset(static_cast<char*>(tensor.data) + tensor.held.size() * tensor.row_bytes() - 2, 0x7f, 1),
            std::memset(static_cast<char*>(tensor.data) + tensor.held.size() * tensor.row_bytes() - 1, 0x7f, 1);
      if (tensor.owned.size() > 0 &&
          tensor.type != kernels::Scalar::fp16) {  // 0x7f7f is a finite bf16: make it infinite
        unsigned char* end = static_cast<unsigned char*>(tensor.data) + tensor.held.size() * tensor.row_bytes();
        end[-2] = tensor.type == kernels::Scalar::fp64 ? 0xf0 : 0x80;
      }
      writer.start(manifest_of(2));
      try {
        writer.finish();
        FAIL("accepted");
      } catch (const Error& failure) {
        CHECK(failure.code() == ExitCode::numeric);
        CHECK(failure.known_to() == KnownTo::all_ranks);
        CHECK(std::string(failure.what()).find(name) != std::string::npos);
      }
      CHECK(names_in(scratch.path) == std::vector<std::string>{"latest", "step_00000001"});
    }
}

TEST_CASE("after a full disk at any point of the protocol the previous checkpoint or the new one is intact") {
  for (const char* point : {"after-open", "mid-dataset", "before-close", "before-fsync", "before-manifest",
                            "before-rename", "after-rename", "before-latest", "mid-delete"})
    for (int rank = 0; rank < world().size(); ++rank) {
      const std::string name = point;
      const bool every_rank =
          name == "after-open" || name == "mid-dataset" || name == "before-close" || name == "before-fsync";
      if (rank > 0 && !every_rank) continue;  // only rank 0 writes there
      const Scratch scratch;
      Sample sample(world(), 1);
      write_steps(world(), scratch.path, sample, {1, 2});
      Warnings warnings;
      CAPTURE(name);
      CAPTURE(rank);
      {
        Writer writer(world(), scratch.path, settings_of(), sample.registry, execution(),
                      scratch.path / "step_00000002");
        sample.fill(3);
        fault::order(fmt::format("{}:{}:3:enospc", point, rank));
        writer.start(manifest_of(3));
        const auto report = writer.finish();
        fault::order("");
        world().barrier();
        const auto found = find(world(), scratch.path, "auto", Verify::full);
        REQUIRE(found);
        CHECK(found->manifest.step == (report->durable ? 3 : 2));
        if (root() && (rank == 0 || !report->durable)) CHECK(!warnings.lines.empty());
        load(world(), *found, sample.registry, execution());
        CHECK(sample.holds(found->manifest.step));
        // The next checkpoint succeeds.
        sample.fill(4);
        writer.start(manifest_of(4));
        CHECK(writer.finish()->durable);
      }
    }
}

TEST_CASE("inconsistent registries of the ranks are detected before a checkpoint is published") {
  const Scratch scratch;
  std::vector<float> numbers(4);
  const auto code = [&](Tensor tensor) {
    Registry registry;
    registry.add(std::move(tensor));
    try {
      Writer writer(world(), scratch.path, settings_of(), registry, execution());
      writer.start(manifest_of(1));
      writer.finish();
    } catch (const Error& failure) {
      CHECK(failure.known_to() == KnownTo::all_ranks);
      return failure.code();
    }
    return ExitCode::finished;
  };
  // A row without owner, a row with two owners, a different shape on one rank.
  const parallel::Range all{0, 4}, none{0, 0};
  CHECK(code({"w",
              kernels::Scalar::fp32,
              {4},
              all,
              root() ? parallel::Range{0, 3} : none,
              numbers.data(),
              false,
              {},
              {}}) == ExitCode::internal);
  if (world().size() > 1) {
    CHECK(code({"w", kernels::Scalar::fp32, {4}, all, all, numbers.data(), false, {}, {}}) == ExitCode::internal);
    CHECK(code({"w", kernels::Scalar::fp32, {4, root() ? 1 : 2}, none, none, nullptr, false, {}, {}}) ==
          ExitCode::internal);
  }
  CHECK(code({"w", kernels::Scalar::fp32, {4}, all, root() ? all : none, numbers.data(), false, {}, {}}) ==
        ExitCode::finished);
}

}  // namespace weft::checkpoint
