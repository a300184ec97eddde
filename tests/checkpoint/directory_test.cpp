// SPDX-License-Identifier: Apache-2.0
//
// What a directory of checkpoints holds: which one a run resumes from, which are deleted or renamed, and what
// interrupted writes leave behind.
#include <fstream>

#include "base/error.hpp"
#include "base/fault.hpp"
#include "checkpoint/checkpoint_directory.hpp"
#include "storage/durable.hpp"
#include "tests/checkpoint/support.hpp"

namespace weft::checkpoint {
namespace fs = std::filesystem;
using namespace testing;

TEST_CASE("a run starts from step 0 only if there is no checkpoint") {
  const Scratch scratch;
  CHECK(!find(world(), scratch.path / "absent", "auto", Verify::full));
  CHECK(!find(world(), scratch.path, "auto", Verify::full));
  Sample sample(world(), 1);
  write_steps(world(), scratch.path, sample, {1, 2});
  CHECK(!find(world(), scratch.path, "never", Verify::full));
  CHECK(find(world(), scratch.path, (scratch.path / "step_00000001").string() + "/", Verify::full)->manifest.step == 1);
  CHECK(code_of_find(scratch.path, (scratch.path / "step_00000009").string()) == ExitCode::usage);
  Warnings warnings;
  world().barrier();
  if (root())
    for (const char* name : {"step_00000001", "step_00000002"})
      fs::resize_file(scratch.path / name / shard_name(0), 100);
  world().barrier();
  CHECK(code_of_find(scratch.path) == ExitCode::io);
}

TEST_CASE("files of an interrupted write are reported and removed, and a dangling `latest` is ignored") {
  const Scratch scratch;
  Sample sample(world(), 1);
  write_steps(world(), scratch.path, sample, {1});
  if (root()) {
    for (const char* name : {"step_00000002.tmp", "step_00000003.tmp"}) {
      fs::create_directories(scratch.path / name);
      std::ofstream(scratch.path / name / "rank_00000.h5") << "torn";
    }
    storage::write_text(scratch.path / "latest", "step_00000009\n");
    storage::write_text(scratch.path / "latest.tmp", "step");
  }
  world().barrier();
  Warnings warnings;
  const auto found = find(world(), scratch.path, "auto", Verify::full);
  REQUIRE(found);
  CHECK(found->manifest.step == 1);
  CHECK(warnings.lines.size() == (root() ? 3 : 0));
  CHECK(names_in(scratch.path) == std::vector<std::string>{"latest", "step_00000001"});
}

TEST_CASE("while a checkpoint of the same step is replaced, the old one or the new one exists") {
  const Scratch scratch;
  Sample sample(world(), 1);
  write_steps(world(), scratch.path, sample, {1, 2});
  const fs::path step = scratch.path / "step_00000002", replaced = replaced_name(step);
  // Interrupted between the two renames: the old one returns.
  if (root()) {
    fs::rename(step, replaced);
    fs::create_directories(step.string() + ".tmp");
  }
  world().barrier();
  Warnings warnings;
  CHECK(find(world(), scratch.path, "auto", Verify::full)->manifest.step == 2);
  CHECK((!root() || warnings.mention("renamed back to step_00000002")));
  CHECK(names_in(scratch.path) == std::vector<std::string>{"latest", "step_00000001", "step_00000002"});
  // Interrupted after them: the new one remains.
  if (root()) fs::copy(step, replaced);
  world().barrier();
  CHECK(find(world(), scratch.path, "auto", Verify::full)->manifest.step == 2);
  CHECK(names_in(scratch.path) == std::vector<std::string>{"latest", "step_00000001", "step_00000002"});
  // Replaced by the writer: step 2 appears again after it has been set aside.
  Writer writer(world(), scratch.path, settings_of(), sample.registry, execution(), scratch.path / "step_00000001");
  if (root()) fs::rename(step.string() + ".abandoned", step);
  world().barrier();
  for (const bool fails : {true, false}) {
    fault::order(fails ? "mid-replace:0:2:enospc" : "");
    sample.fill(2);
    REQUIRE(writer.start(manifest_of(2)));
    CHECK(writer.finish()->durable == !fails);
    fault::order("");
    world().barrier();
    const auto found = find(world(), scratch.path, "auto", Verify::full);
    REQUIRE(found);
    CHECK(found->manifest.step == 2);
    sample.clear();
    load(world(), *found, sample.registry, execution());
    CHECK(sample.holds(2));
    CHECK(names_in(scratch.path) == std::vector<std::string>{"latest", "step_00000001", "step_00000002"});
  }
}

TEST_CASE("old checkpoints are deleted once the new one is durable, except multiples of keep_every") {
  const Scratch scratch;
  Sample sample(world(), 1);
  write_steps(world(), scratch.path, sample, {100, 200, 300, 400, 500}, settings_of(Staging::full, 2, 300));
  CHECK(names_in(scratch.path) ==
        std::vector<std::string>{"latest", "step_00000300", "step_00000400", "step_00000500"});
  // The checkpoint resumed from is kept until two newer ones exist, even if `keep` is smaller.
  world().barrier();
  write_steps(world(), scratch.path, sample, {600}, settings_of(Staging::full, 0), scratch.path / "step_00000500");
  CHECK(names_in(scratch.path) == std::vector<std::string>{"latest", "step_00000500", "step_00000600"});
}

TEST_CASE("checkpoints newer than the one resumed from are renamed, so that histories never mix") {
  const Scratch scratch;
  Sample sample(world(), 1);
  write_steps(world(), scratch.path, sample, {1, 2, 3}, settings_of(Staging::full, 5));
  Warnings warnings;
  write_steps(world(), scratch.path, sample, {2}, settings_of(Staging::full, 5), scratch.path / "step_00000001");
  CHECK(names_in(scratch.path) == std::vector<std::string>{"latest", "step_00000001", "step_00000002",
                                                           "step_00000002.abandoned", "step_00000003.abandoned"});
  CHECK(warnings.lines.size() == (root() ? 2 : 0));
}

TEST_CASE("abandoned checkpoints count as older than those of the run, and expire with them") {
  const Scratch scratch;
  Sample sample(world(), 1);
  write_steps(world(), scratch.path, sample, {10, 20, 30}, settings_of(Staging::full, 5));
  // A new run: of three checkpoints in all, its own stay.
  write_steps(world(), scratch.path, sample, {1}, settings_of(Staging::full, 3));
  CHECK(names_in(scratch.path) ==
        std::vector<std::string>{"latest", "step_00000001", "step_00000020.abandoned", "step_00000030.abandoned"});
  write_steps(world(), scratch.path, sample, {2}, settings_of(Staging::full, 3), scratch.path / "step_00000001");
  CHECK(names_in(scratch.path) ==
        std::vector<std::string>{"latest", "step_00000001", "step_00000002", "step_00000030.abandoned"});
  write_steps(world(), scratch.path, sample, {3}, settings_of(Staging::full, 3), scratch.path / "step_00000002");
  CHECK(names_in(scratch.path) ==
        std::vector<std::string>{"latest", "step_00000001", "step_00000002", "step_00000003"});
}

TEST_CASE("the checkpoint that --resume names is never deleted") {
  const Scratch scratch;
  Sample sample(world(), 1);
  Settings settings = settings_of();
  write_steps(world(), scratch.path, sample, {1, 2}, settings);
  settings.protected_step = 1;
  write_steps(world(), scratch.path, sample, {2, 3, 4, 5}, settings, scratch.path / "step_00000001");
  CHECK(names_in(scratch.path) ==
        std::vector<std::string>{"latest", "step_00000001", "step_00000004", "step_00000005"});
}

TEST_CASE("a run that ends with an error does not wait for its checkpoint") {
  const Scratch scratch;
  Sample sample(world(), 1, 300'001);
  sample.fill(1);
  {
    Writer writer(world(), scratch.path, settings_of(), sample.registry, execution());
    writer.start(manifest_of(1));
  }
  world().barrier();
  Warnings warnings;
  CHECK(!find(world(), scratch.path, "auto", Verify::full));
  CHECK(warnings.lines.size() == (root() ? 1 : 0));
}

TEST_CASE("a directory that cannot be written is refused before the first step") {
  const Scratch scratch;
  if (root()) storage::write_text(scratch.path / "file", "");
  world().barrier();
  try {
    require_writable(world(), scratch.path / "file" / "checkpoints");
    FAIL("accepted");
  } catch (const Error& failure) {
    CHECK(failure.code() == ExitCode::io);
    CHECK(failure.known_to() == KnownTo::all_ranks);
  }
}

}  // namespace weft::checkpoint
