// SPDX-License-Identifier: Apache-2.0
//
// Checkpoints are written and read: by other numbers of ranks, while training continues, with other registries.
#include "base/error.hpp"
#include "storage/durable.hpp"
#include "tests/checkpoint/support.hpp"

namespace weft::checkpoint {
namespace fs = std::filesystem;
using namespace testing;

TEST_CASE("checkpoints of n ranks are read by m ranks bit for bit, for all grids") {
  Warnings warnings;
  for (int n = 1; n <= world().size(); ++n)
    for (int n_data = 1; n_data <= n; ++n_data) {
      if (n % n_data != 0) continue;
      const Scratch scratch;
      const bool writes = world().rank() < n;
      const parallel::Communicator writers = world().split(writes ? 0 : 1, world().rank());
      if (writes) {
        Sample sample(writers, n_data, 300'001);  // rows wider than a chunk
        write_steps(writers, scratch.path, sample, {5});
      }
      world().barrier();
      for (int m = 1; m <= world().size(); ++m)
        for (int m_data = 1; m_data <= m; ++m_data) {
          if (m % m_data != 0) continue;
          const bool reads = world().rank() < m;
          const parallel::Communicator readers = world().split(reads ? 0 : 1, world().rank());
          if (!reads) continue;
          Sample sample(readers, m_data, 300'001);
          sample.clear();
          const auto found = find(readers, scratch.path, "auto", Verify::full);
          REQUIRE(found);
          CHECK(found->manifest.step == 5);
          CHECK(found->manifest.world == n);
          load(readers, *found, sample.registry, execution());
          CHECK(sample.holds(5));
        }
    }
  CHECK(warnings.lines.empty());
}

TEST_CASE("the manifest contains all fields set by the caller") {
  const Scratch scratch;
  Sample sample(world(), 1);
  write_steps(world(), scratch.path, sample, {12});
  const auto found = find(world(), scratch.path, "auto", Verify::full);
  REQUIRE(found);
  const Manifest &got = found->manifest, given = manifest_of(12);
  CHECK(got.tokens == given.tokens);
  CHECK(got.cursor == given.cursor);
  CHECK(got.grid == given.grid);
  CHECK(got.input == given.input);
  CHECK(got.libraries == given.libraries);
  CHECK(got.dataset_fingerprint == given.dataset_fingerprint);
  CHECK(got.extra == given.extra);
  CHECK(found->path == scratch.path / "step_00000012");
  CHECK(storage::read_text(scratch.path / "latest", 100) == "step_00000012\n");
}

TEST_CASE("the same state gives the same files") {
  const Scratch a, b;
  Sample sample(world(), 1, 300'001);
  write_steps(world(), a.path, sample, {3});
  write_steps(world(), b.path, sample, {3}, settings_of(Staging::chunked));
  CHECK(storage::read_text(a.path / "step_00000003/manifest.json", 1 << 20) ==
        storage::read_text(b.path / "step_00000003/manifest.json", 1 << 20));
}

TEST_CASE("chunked staging writes the same files, and packed tensors use their functions") {
  for (const Staging staging : {Staging::full, Staging::chunked}) {
    const Scratch scratch;
    Sample packed(world(), 1, 0, true), plain(world(), 1);
    write_steps(world(), scratch.path, packed, {7}, settings_of(staging));
    const auto found = find(world(), scratch.path, "auto", Verify::full);
    REQUIRE(found);
    plain.clear();
    load(world(), *found, plain.registry, execution());
    CHECK(plain.holds(7));  // the tensor is not inverted in the file
    packed.clear();
    load(world(), *found, packed.registry, execution());
    CHECK(packed.holds(7));
    CHECK(Writer::staging_bytes(settings_of(Staging::chunked), plain.registry) == 0);
    CHECK(Writer::staging_bytes(settings_of(), plain.registry) >= plain.registry.bytes());
  }
}

TEST_CASE("training continues while the thread writes, and poll completes on all ranks at once") {
  const Scratch scratch;
  Sample sample(world(), 1, 300'001);
  Writer writer(world(), scratch.path, settings_of(), sample.registry, execution());
  CHECK(!writer.finish());
  sample.fill(1);
  REQUIRE(writer.start(manifest_of(1)));
  CHECK(writer.busy());
  sample.fill(2);  // the next step overwrites the state
  std::optional<Report> report;
  while (!report) report = writer.poll();
  CHECK(report->durable);
  CHECK(report->seconds >= report->pause);
  CHECK(!writer.busy());
  CHECK(writer.shard_done());
  CHECK(!writer.start(manifest_of(1)));  // already durable
  sample.clear();
  load(world(), *find(world(), scratch.path, "auto", Verify::full), sample.registry, execution());
  CHECK(sample.holds(1));
}

TEST_CASE("an optional tensor may be missing, superfluous or of another shape in a checkpoint, any other may not") {
  const auto tensor = [](std::vector<std::uint32_t>& values, const char* name) {
    return Tensor{.name = name,
                  .type = kernels::Scalar::u32,
                  .shape = {static_cast<std::int64_t>(values.size())},
                  .held = {0, static_cast<std::int64_t>(values.size())},
                  .owned = {0, root() ? static_cast<std::int64_t>(values.size()) : 0},
                  .data = values.data()};
  };
  std::vector<std::uint32_t> state{1, 2}, two{3, 4}, three{5, 6, 7};
  struct Case {
    std::vector<std::uint32_t>*written, *read;
  };
  for (const bool optional : {true, false})
    for (const Case one : {Case{&two, &three}, Case{&two, nullptr}, Case{nullptr, &three}}) {
      const Scratch scratch;
      Registry writes, reads;
      for (Registry* registry : {&writes, &reads}) {
        registry->add(tensor(state, "state"));
        if (optional) registry->make_optional("hint");
      }
      if (one.written != nullptr) writes.add(tensor(*one.written, "hint"));
      if (one.read != nullptr) reads.add(tensor(*one.read, "hint"));
      Writer writer(world(), scratch.path, settings_of(), writes, execution());
      writer.start(manifest_of(1));
      REQUIRE(writer.finish()->durable);
      state = {0, 0};
      const auto load_it = [&] {
        load(world(), *find(world(), scratch.path, "auto", Verify::full), reads, execution());
      };
      if (optional)
        CHECK_NOTHROW(load_it());
      else
        CHECK_THROWS_AS(load_it(), Error);
      CHECK(three == std::vector<std::uint32_t>{5, 6, 7});
      CHECK((state == std::vector<std::uint32_t>{1, 2}) == optional);
      state = {1, 2};
    }
}

TEST_CASE("a checkpoint of other settings is a usage error") {
  const Scratch scratch;
  Sample sample(world(), 1), wider(world(), 1, 100);
  write_steps(world(), scratch.path, sample, {1});
  const auto found = find(world(), scratch.path, "auto", Verify::full);
  const auto code = [&](const Registry& registry, Load what) {
    try {
      load(world(), *found, registry, execution(), what);
    } catch (const Error& failure) {
      return failure.code();
    }
    return ExitCode::finished;
  };
  CHECK(code(wider.registry, Load::everything) == ExitCode::usage);
  Registry part;
  part.add(sample.registry.tensors()[0]);
  CHECK(code(part, Load::everything) == ExitCode::usage);
  CHECK(code(part, Load::part) == ExitCode::finished);
  Registry other;
  Tensor changed = sample.registry.tensors()[0];
  changed.shape[1] = 6;
  other.add(changed);
  CHECK(code(other, Load::part) == ExitCode::usage);
}

}  // namespace weft::checkpoint
