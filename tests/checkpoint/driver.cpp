// SPDX-License-Identifier: Apache-2.0
//
// checkpoint_driver DIRECTORY STEPS EVERY: a run without arithmetic, for tests that kill it. Resumes from the newest
// checkpoint, compares it bit for bit with the expected state, and writes checkpoints up to STEPS. Prints the step at
// which it began; exits with 9 if a checkpoint has wrong bits.
#include <cstdio>
#include <cstdlib>

#include "checkpoint/resume.hpp"
#include "checkpoint/writer.hpp"
#include "device/runtime.hpp"
#include "parallel/world.hpp"
#include "tests/checkpoint/sample.hpp"

int main(int argc, char** argv) {
  using namespace weft;
  parallel::World world(&argc, &argv);
  std::int64_t step = -1;
  try {
    if (argc != 4) throw collective_error(ExitCode::usage, "checkpoint_driver DIRECTORY STEPS EVERY");
    const device::Runtime runtime({}, world.node_rank(), world.node_size());
    checkpoint::testing::Sample sample(world.all(), 1, 300'001);
    const auto found = checkpoint::find(world.all(), argv[1], "auto", checkpoint::Verify::full);
    step = 0;
    if (found) {
      checkpoint::load(world.all(), *found, sample.registry, runtime.execution());
      step = found->manifest.step;
      if (!sample.holds(step)) return parallel::agreed_exit_code(world, 9);
    }
    if (world.is_root()) std::printf("from %lld\n", static_cast<long long>(step));
    checkpoint::Settings settings;
    checkpoint::Writer writer(world.all(), argv[1], settings, sample.registry, runtime.execution(),
                              found ? found->path : "");
    const std::int64_t steps = std::atoll(argv[2]), every = std::atoll(argv[3]);
    while (step < steps) {
      ++step;
      sample.fill(step);
      writer.poll();
      if (step % every != 0) continue;
      writer.finish();
      writer.start(checkpoint::testing::manifest_of(step));
    }
    writer.finish();
  } catch (const Error& failure) {
    return parallel::end_run(world, failure, step);
  }
  return parallel::agreed_exit_code(world, 0);
}
