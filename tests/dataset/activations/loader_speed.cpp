// SPDX-License-Identifier: Apache-2.0
//
// Throughput of the loader alone, without training:
//
//   mpirun -n RANKS loader_speed DIR BATCH_TOKENS WINDOW_ROWS THREADS BATCHES [RANKS_PER_NODE]
//
// prints GB/s of all ranks together over BATCHES batches, after the first two windows. RANKS_PER_NODE simulates nodes
// on one machine, between which rows are sent over MPI.
#include <fmt/format.h>

#include <charconv>
#include <chrono>
#include <cstring>

#include "dataset/activations/describe.hpp"
#include "dataset/activations/loader.hpp"
#include "parallel/grid.hpp"
#include "parallel/world.hpp"

namespace weft {
namespace {

using Clock = std::chrono::steady_clock;

std::int64_t number(const char* text) {
  std::int64_t value = 0;
  const char* const end = text + std::strlen(text);
  if (std::from_chars(text, end, value).ptr != end || value < 1)
    throw collective_error(ExitCode::usage, "\"{}\" is not a number of at least 1", text);
  return value;
}

void measure(const parallel::World& world, int argc, char** argv) {
  if (argc < 6 || argc > 7)
    throw collective_error(ExitCode::usage,
                           "loader_speed DIR BATCH_TOKENS WINDOW_ROWS THREADS BATCHES [RANKS_PER_NODE]");
  dataset::Settings settings;
  settings.train = argv[1];
  settings.batch_tokens = number(argv[2]);
  settings.window_rows = number(argv[3]);
  const std::int64_t threads = number(argv[4]), batches = number(argv[5]);
  const std::int64_t per_node = argc > 6 ? number(argv[6]) : world.size();
  const parallel::Communicator node =
      world.node().split(static_cast<int>(world.node_rank() / per_node), world.node_rank());
  const dataset::Description description = dataset::describe(world, settings.train, settings);
  const parallel::Grid grid(world, parallel::data_by_feature(1, world.size()));
  dataset::Loader loader(description, settings, 1, world, node, grid, {}, static_cast<int>(threads));
  const std::int64_t before = 2 * (settings.window_rows + settings.batch_tokens - 1) / settings.batch_tokens;
  Clock::time_point began;
  double exchanging = 0;
  std::int64_t exchanged = 0;
  for (std::int64_t b = -before; b < batches; ++b) {
    if (b == 0) {
      world.all().barrier();
      began = Clock::now();
    }
    const dataset::RawBatch& batch = loader.next();
    if (b >= 0) {
      exchanging += batch.exchanging;
      exchanged += batch.exchanged;
    }
    loader.release();
  }
  world.all().barrier();
  const double seconds = std::chrono::duration<double>(Clock::now() - began).count();
  const double tokens = static_cast<double>(settings.batch_tokens * batches);
  if (world.is_root())
    fmt::print(
        "{} ranks of {} threads: {:.2f} GB/s, {:.0f} tokens/s; rank 0 sent {:.1f} MB/batch over MPI, in transit {:.0f} "
        "% "
        "of the time\n",
        world.size(), threads, 2e-9 * tokens * static_cast<double>(description.row_bytes()) / seconds, tokens / seconds,
        1e-6 * static_cast<double>(exchanged) / static_cast<double>(batches), 100 * exchanging / seconds);
}

}  // namespace
}  // namespace weft

int main(int argc, char** argv) {
  const weft::parallel::World world(&argc, &argv);
  try {
    weft::measure(world, argc, argv);
    return 0;
  } catch (const weft::Error& failure) {
    return weft::parallel::end_run(world, failure, -1);
  }
}
