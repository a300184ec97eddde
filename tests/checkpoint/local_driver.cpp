// SPDX-License-Identifier: Apache-2.0
//
// local_driver RUN DISKS STEPS EVERY: a run without arithmetic whose checkpoints go through the nodes, for tests that
// kill it. Every rank is a node with its own directory DISKS/RANK. Prints the step at which it began; exits with 9 if a
// checkpoint has wrong bits.
#include <cstdio>
#include <cstdlib>
#include <optional>

#include "checkpoint/checkpoints.hpp"
#include "checkpoint/resume.hpp"
#include "device/runtime.hpp"
#include "parallel/world.hpp"
#include "tests/checkpoint/sample.hpp"

int main(int argc, char** argv) {
  using namespace weft;
  parallel::World world(&argc, &argv);
  std::int64_t step = -1;
  try {
    if (argc != 5) throw collective_error(ExitCode::usage, "local_driver RUN DISKS STEPS EVERY");
    const device::Runtime runtime({}, world.node_rank(), world.node_size());
    const std::filesystem::path run = argv[1];
    if (world.is_root()) std::filesystem::create_directories(run / "checkpoints");
    const parallel::Communicator node = world.all().split(world.rank(), 0);
    checkpoint::Settings settings;
    settings.local = std::string(argv[2]) + "/" + std::to_string(world.rank());
    std::filesystem::create_directories(settings.local);
    world.all().barrier();
    checkpoint::copy_left_on_nodes(world.all(), node, run / "checkpoints", settings);
    checkpoint::testing::Sample sample(world.all(), 1, 300'001);
    const auto found = checkpoint::find(world.all(), run / "checkpoints", "auto", checkpoint::Verify::full);
    step = 0;
    if (found) {
      checkpoint::load(world.all(), *found, sample.registry, runtime.execution());
      step = found->manifest.step;
      if (!sample.holds(step)) return parallel::agreed_exit_code(world, 9);
    }
    if (world.is_root()) std::printf("from %lld\n", static_cast<long long>(step));
    std::optional<checkpoint::Starts> starts;
    if (world.is_root()) starts.emplace(run);
    checkpoint::Checkpoints checkpoints(world.all(), node, run / "checkpoints", settings, sample.registry,
                                        runtime.execution(), found ? found->path : "", starts ? &*starts : nullptr,
                                        false);
    const std::int64_t steps = std::atoll(argv[3]), every = std::atoll(argv[4]);
    while (step < steps) {
      ++step;
      sample.fill(step);
      std::vector<std::int64_t> least = checkpoints.progress();
      world.all().minimum(least);
      checkpoints.advance(least);
      if (step % every != 0) continue;
      checkpoints.start(checkpoint::testing::manifest_of(step));
      checkpoints.finish();  // every checkpoint passes every point before the next one begins
    }
    checkpoints.close();
  } catch (const Error& failure) {
    return parallel::end_run(world, failure, step);
  }
  return parallel::agreed_exit_code(world, 0);
}
