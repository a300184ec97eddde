// SPDX-License-Identifier: Apache-2.0
//
// Runs on 1 to 4 ranks: for every number of ranks, grid and distribution over nodes, with and without prefetching, the
// rows are those of the pure function in order.hpp. Nodes are simulated: the Loader is given subsets of the ranks of
// one machine.
#include "dataset/activations/loader.hpp"

#include <fmt/format.h>
#include <sys/resource.h>

#include <algorithm>
#include <chrono>
#include <cstring>
#include <string>
#include <thread>
#include <vector>

#include "base/log.hpp"
#include "dataset/activations/stored_order.hpp"
#include "device/memory.hpp"
#include "storage/digest.hpp"
#include "tests/dataset/activations/samples.hpp"
#include "tests/test.hpp"

namespace weft::dataset {
namespace {

using testing::Sample;
using testing::Scratch;

std::vector<parallel::GridShape> shapes() {
  std::vector<parallel::GridShape> all;
  const std::int64_t world = testing::world().size();
  for (std::int64_t data = 1; data <= world; ++data)
    if (world % data == 0) all.push_back(parallel::data_by_feature(data, world / data));
  return all;
}

/// A distribution of the ranks over nodes; `node` is that of this rank.
struct Nodes {
  std::string name;
  parallel::Communicator node;
};
std::vector<Nodes> distributions() {
  const parallel::Communicator& all = testing::world().all();
  std::vector<Nodes> list;
  list.push_back({"one node", testing::world().all().split(0, all.rank())});
  if (all.size() > 2) list.push_back({"two ranks per node", all.split(all.rank() / 2, all.rank())});
  if (all.size() > 2)
    list.push_back({"even and odd ranks on two nodes, in descending order", all.split(all.rank() % 2, -all.rank())});
  if (all.size() > 1) list.push_back({"one rank per node", all.split(all.rank(), 0)});
  return list;
}

/// Global rows of an epoch in training order.
std::vector<std::int64_t> expected_rows(const Description& description, const Settings& settings, std::uint64_t seed,
                                        std::int64_t epoch) {
  const BlockTable table = block_table(description, settings);
  const EpochOrder order = epoch_order(table, seed, epoch);
  std::vector<std::int64_t> first_row{0}, rows;
  for (const FileDescription& file : description.files) first_row.push_back(first_row.back() + file.rows);
  for (std::int64_t w = 0; w < table.n_windows(); ++w) {
    const WindowOrder window = window_order(table, order, seed, w);
    for (const WindowOrder::Row row : window.rows) {
      const Block& block = table.blocks[window.blocks[row.block]];
      rows.push_back(first_row[static_cast<std::size_t>(block.file)] + block.row_begin + row.row);
    }
  }
  return rows;
}

bool same_row(const kernels::AnyMatrix& matrix, std::int64_t row, const std::vector<std::byte>& expected) {
  return std::memcmp(matrix.rows_from(row, 1).data, expected.data(), expected.size()) == 0;
}

/// Checks a batch on this rank against the expected global rows of the whole batch.
bool batch_is(const RawBatch& batch, const parallel::Grid& grid, const Sample& sample,
              const std::vector<std::int64_t>& rows) {
  const parallel::Range own = grid.own_part(batch.n_tokens);
  bool same = batch.n_tokens == static_cast<std::int64_t>(rows.size()) && batch.inputs.rows == own.size() &&
              batch.targets.rows == own.size();
  for (std::int64_t i = own.begin; same && i < own.end; ++i)
    for (const bool target : {false, true})
      same = same && same_row(target ? batch.targets : batch.inputs, i - own.begin,
                              testing::sample_row(sample, rows[static_cast<std::size_t>(i)], target));
  return same;
}

void check_run(const Description& description, const Sample& sample, const Settings& settings,
               const parallel::GridShape& shape, const Nodes& nodes, Cursor start, int n_batches) {
  const parallel::Grid grid(testing::world(), shape);
  constexpr std::uint64_t kSeed = 5;
  std::vector<std::int64_t> rows;
  for (std::int64_t epoch = start.epoch;
       static_cast<std::int64_t>(rows.size()) < start.position + n_batches * settings.batch_tokens; ++epoch) {
    const std::vector<std::int64_t> more = expected_rows(description, settings, kSeed, epoch);
    rows.insert(rows.end(), more.begin(), more.end());
  }
  Loader loader(description, settings, kSeed, testing::world(), nodes.node, grid, start, 2);
  const BlockTable table = block_table(description, settings);
  Cursor cursor = start;
  for (int b = 0; b < n_batches; ++b) {
    const RawBatch& batch = loader.next();
    const auto from = rows.begin() + start.position + b * settings.batch_tokens;
    CHECK(batch.begin == cursor);
    cursor = advance(table, cursor, settings.batch_tokens);
    CHECK(batch.end == cursor);
    CHECK_MESSAGE(batch_is(batch, grid, sample, {from, from + settings.batch_tokens}), "batch ", b, " of grid ",
                  shape.text(), ", ", nodes.name, ", prefetch = ", settings.prefetch);
    // Rows in shared memory are not sent.
    if (nodes.node.size() == testing::world().size()) CHECK(batch.exchanged == 0);
    loader.release();
  }
}

/// Sizes of files, blocks, windows and batches of which none divides another.
struct ThreeFiles {
  Sample sample{2, 6, {300, 300, 77}, kernels::Scalar::bf16, Compression::none};
  Scratch directory;
  Settings settings;
  Description description;

  ThreeFiles() {
    testing::write_sample(directory / "train", sample);
    settings.block_rows = 16;
    settings.window_rows = 128;
    settings.batch_tokens = 96;
    description = describe(testing::world(), directory / "train", settings);
  }
};

}  // namespace

TEST_CASE("batches are those of the pure function for every grid, type and size, with and without prefetching") {
  struct Case {
    Sample sample;
    std::int64_t block_rows, window_rows, batch_tokens;
  };
  using kernels::Scalar;
  const Case cases[] = {
      {{2, 6, {40, 40, 7}, Scalar::fp32, Compression::none}, 8, 32, 10},
      {{3, 5, {64, 64, 64, 3}, Scalar::bf16, Compression::none}, 4, 64, 33},
      {{2, 6, {50, 50, 20}, Scalar::fp16, Compression::gzip}, 16, 48, 16},
      {{1, 8, {5}, Scalar::fp32, Compression::none},
       256,
       65536,
       16},  // fewer rows than a block, a window and a batch: epochs repeat
      {{2, 5, {90}, Scalar::bf16, Compression::none}, 4, 4, 50},              // a batch spans many windows
      {{2, 5, {1500, 1100}, Scalar::bf16, Compression::none}, 64, 512, 128},  // rows beyond one HDF5 chunk
      {{2, 5, {1500, 1100}, Scalar::bf16, Compression::gzip}, 64, 512, 100},
      {{1, 5, {9}, Scalar::fp32, Compression::none}, 2, 4, 1},  // most ranks own no token
  };
  for (const Case& c : cases) {
    const Scratch directory;
    testing::write_sample(directory / "train", c.sample);
    Settings settings;
    settings.block_rows = c.block_rows;
    settings.window_rows = c.window_rows;
    settings.batch_tokens = c.batch_tokens;
    const Description description = describe(testing::world(), directory / "train", settings);
    for (const parallel::GridShape& shape : shapes())
      for (const Nodes& nodes : distributions())
        for (const bool prefetch : {true, false}) {
          settings.prefetch = prefetch;
          const int per_epoch = static_cast<int>((description.n_rows + c.batch_tokens - 1) / c.batch_tokens);
          check_run(description, c.sample, settings, shape, nodes, {0, 0}, per_epoch + 2);
          check_run(description, c.sample, settings, shape, nodes, {3, description.n_rows / 2}, 2);
          check_run(description, c.sample, settings, shape, nodes, {1, description.n_rows - 1}, 1);
        }
  }
}

TEST_CASE("the rows of an epoch and their order have the same hash on every number of ranks") {
  const ThreeFiles files;
  const auto& [sample, directory, settings, description] = files;
  for (const parallel::GridShape& shape : shapes()) {
    const parallel::Grid grid(testing::world(), shape);
    std::vector<std::int64_t> sent;  // bytes over MPI, of all ranks
    for (const Nodes& nodes : distributions()) {
      Loader loader(description, settings, 11, testing::world(), nodes.node, grid, {}, 1);
      std::string received;
      sent.push_back(0);
      for (std::int64_t done = 0; done < description.n_rows; done += settings.batch_tokens) {
        const RawBatch& batch = loader.next();
        sent.back() += batch.exchanged;
        // Targets of all ranks, in token order: own tokens ascend with the rank.
        std::vector<std::int64_t> bytes;
        for (int r = 0; r < testing::world().size(); ++r)
          bytes.push_back(shape.part_of_rank(batch.n_tokens, r).size() * description.row_bytes());
        std::string all(static_cast<std::size_t>(batch.n_tokens * description.row_bytes()), '\0');
        testing::world().all().all_gather_uneven(batch.targets.data, all.data(), bytes);
        received += all.substr(
            0, static_cast<std::size_t>(std::min(batch.n_tokens, description.n_rows - done) * description.row_bytes()));
        loader.release();
      }
      // Reference value of the pure function: the same for all ranks, grids, nodes and machines.
      CHECK_MESSAGE(storage::sha256(received) == "b7e1a86267a497c4eebffd0f1ba392015041a2cefbb84761fdcf7637373c618b",
                    nodes.name);
    }
    // Only rows outside shared memory are sent.
    testing::world().all().sum(std::span<std::int64_t>(sent));
    CHECK(sent.front() == 0);
    for (std::size_t i = 1; i + 1 < sent.size(); ++i) CHECK((0 < sent[i] && sent[i] < sent.back()));
    CHECK((sent.back() > 0) == (testing::world().size() > 1));
  }
}

TEST_CASE("if one rank cannot share its memory, a warning gives the reason and rows are sent over MPI") {
  const parallel::World& world = testing::world();
  const ThreeFiles files;
  const auto& [sample, directory, settings, description] = files;
  const std::vector<std::int64_t> rows = expected_rows(description, settings, 1, 0);
  const parallel::Grid grid(world, shapes().back());
  std::vector<std::string> warnings;
  log::set_sink([&](log::Level level, std::string_view line) {
    if (level == log::Level::warning) warnings.emplace_back(line);
  });
  rlimit former{};
  getrlimit(RLIMIT_FSIZE, &former);
  if (world.rank() == world.size() - 1) {
    const rlimit small{1000, former.rlim_max};
    setrlimit(RLIMIT_FSIZE, &small);
  }
  Loader loader(description, settings, 1, world, world.node(), grid, {}, 2);
  setrlimit(RLIMIT_FSIZE, &former);
  log::set_sink([](log::Level level, std::string_view line) {
    if (level != log::Level::info) fmt::print(stderr, "{}\n", line);
  });
  if (world.is_root() && world.size() > 1) {
    REQUIRE(warnings.size() == 1);
    CHECK(warnings[0].starts_with("shared memory unavailable on a node (" + world.host() + ": memfd: "));
    CHECK(warnings[0].find("File too large") != std::string::npos);
  } else {
    CHECK(warnings.empty());
  }
  std::int64_t sent = 0;
  for (std::int64_t b = 0; b < 6; ++b) {
    const RawBatch& batch = loader.next();
    const auto from = rows.begin() + b * settings.batch_tokens;
    CHECK(batch_is(batch, grid, sample, {from, from + settings.batch_tokens}));
    sent += batch.exchanged;
    loader.release();
  }
  CHECK((sent > 0) == (world.size() > 1));
}

TEST_CASE("a loader can be destroyed at any time") {
  const Sample sample{2, 6, {40, 40, 7}, kernels::Scalar::fp32, Compression::none};
  const Scratch directory;
  testing::write_sample(directory / "train", sample);
  Settings settings;
  settings.block_rows = 8;
  settings.window_rows = 32;
  settings.batch_tokens = 10;
  const Description description = describe(testing::world(), directory / "train", settings);
  const parallel::Grid grid(testing::world(), shapes().back());
  for (const bool prefetch : {true, false}) {
    settings.prefetch = prefetch;
    for (int taken = 0; taken < 4; ++taken)
      for (const bool release : {true, false}) {
        if (!release && taken > 2) continue;
        Loader loader(description, settings, 1, testing::world(), testing::world().node(), grid, {}, 1);
        for (int i = 0; i < taken; ++i) {
          loader.next();
          if (release) loader.release();
        }
        if (testing::world().rank() == 1) std::this_thread::sleep_for(std::chrono::milliseconds(5));
      }
  }
}

TEST_CASE("a read failure of one rank is thrown on all ranks, after the batches that were complete") {
  const Sample sample{2, 6, {64, 64, 8}, kernels::Scalar::fp32, Compression::none};
  const Scratch directory;
  testing::write_sample(directory / "train", sample);
  Settings settings;
  settings.block_rows = 8;
  settings.window_rows = 16;
  settings.batch_tokens = 8;
  const Description description = describe(testing::world(), directory / "train", settings);
  testing::world().all().barrier();
  if (testing::world().is_root()) std::filesystem::resize_file(directory / "train/chunk_2.hdf5", 100);
  testing::world().all().barrier();
  const parallel::Grid grid(testing::world(), shapes().back());
  // A batch has the size of a block; a window has two of both.
  constexpr std::uint64_t kSeed = 1;
  const BlockTable table = block_table(description, settings);
  const EpochOrder epoch = epoch_order(table, kSeed, 0);
  std::int64_t complete = 0;
  while (table.blocks[epoch.blocks[static_cast<std::size_t>(complete)]].file != 2) ++complete;
  complete = complete / 2 * 2;
  REQUIRE(complete > 0);
  for (const bool prefetch : {true, false}) {
    settings.prefetch = prefetch;
    Loader loader(description, settings, kSeed, testing::world(), testing::world().node(), grid, {}, 1);
    std::int64_t good = 0;
    std::string message;
    try {
      for (; good < 100; ++good) {
        loader.next();
        loader.release();
      }
    } catch (const Error& failure) {
      message = failure.what();
      CHECK(failure.code() == ExitCode::data);
      CHECK(failure.known_to() == KnownTo::all_ranks);
    }
    CHECK(message.find("chunk_2.hdf5") != std::string::npos);
    std::vector<std::int64_t> least{good}, most{good};
    testing::world().all().minimum(least);
    testing::world().all().maximum(most);
    CHECK(least == most);
    // Without prefetching a window is read when its first row is needed, not before.
    if (!prefetch) CHECK(good == complete);
  }
}

TEST_CASE("a cursor outside the dataset is rejected") {
  const Sample sample;
  const Scratch directory;
  testing::write_sample(directory / "train", sample);
  const Description description = describe(testing::world(), directory / "train", {});
  const parallel::Grid grid(testing::world(), shapes().back());
  CHECK_THROWS_AS(Loader(description, {}, 1, testing::world(), testing::world().node(), grid, {0, 87}, 1), Error);
}

TEST_CASE("loader_memory covers the allocations") {
  const ThreeFiles files;
  const auto& [sample, directory, settings, description] = files;
  for (const parallel::GridShape& shape : shapes()) {
    const LoaderMemory memory = loader_memory(description, settings, shape);
    const std::int64_t world = testing::world().size(), row = description.row_bytes();
    // Two windows of 8 blocks of 16 rows, inputs and targets, distributed over the ranks.
    CHECK(memory.windows == 2 * parallel::largest_part(8, world) * 16 * 2 * row);
    CHECK((world == 1) == (memory.staging == 0));
    const std::int64_t before = device::memory_use().host_bytes;
    const parallel::Grid grid(testing::world(), shape);
    const Loader loader(description, settings, 1, testing::world(), testing::world().node(), grid, {}, 1);
    CHECK(device::memory_use().host_bytes - before <= memory.slots);
  }
}

TEST_CASE("StoredOrder reads the rows in stored order, with a short last batch") {
  const Sample sample{2, 6, {40, 40, 7}, kernels::Scalar::bf16, Compression::gzip};
  const Scratch directory;
  testing::write_sample(directory / "validation", sample);
  const Description description = describe(testing::world(), directory / "validation", {});
  for (const parallel::GridShape& shape : shapes())
    for (const std::int64_t batch_tokens : {87, 30, 1000, 1}) {
      const parallel::Grid grid(testing::world(), shape);
      StoredOrder order(description, batch_tokens, grid, 2);
      CHECK(order.n_batches() == (87 + batch_tokens - 1) / batch_tokens);
      for (std::int64_t i = 0; i < order.n_batches(); i += std::max<std::int64_t>(1, order.n_batches() / 4)) {
        std::vector<std::int64_t> rows;
        for (std::int64_t r = i * batch_tokens; r < std::min<std::int64_t>(87, (i + 1) * batch_tokens); ++r)
          rows.push_back(r);
        CHECK(batch_is(order.read(i), grid, sample, rows));
      }
    }
}

}  // namespace weft::dataset
