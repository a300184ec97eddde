// SPDX-License-Identifier: Apache-2.0
//
// checkpoint_driver DIRECTORY STEPS EVERY: a run without arithmetic, to be killed. Goes on from what it finds, checks
// that bit for bit, and "trains" to STEPS. Prints the step it began from; exit 9 when a checkpoint held other bits than
// were written.
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
      if (!sample.holds(step)) return world.agree(9);
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
    return world.abort(failure, step);
  }
  return world.agree(0);
}
