// SPDX-License-Identifier: Apache-2.0
//
// The main of every test program: MPI and the arithmetic are up before the first case. On several ranks all run the
// same cases; any rank's failure fails the program. WEFT_TEST_BACKEND: device.backend, for tests in fp32, which in a
// CUDA build take the portable kernels.
#include <cstdlib>

#include "test.hpp"

namespace weft::testing {
namespace {
const parallel::World* current_world = nullptr;
const device::Runtime* current_runtime = nullptr;
}  // namespace
const parallel::World& world() { return *current_world; }
const kernels::Execution& execution() { return current_runtime->execution(); }
}  // namespace weft::testing

int main(int argc, char** argv) {
  weft::parallel::World world(&argc, &argv);
  weft::parallel::set_timeout(0);  // ctest has one, and cases need not report progress
  weft::device::Settings settings;
  if (const char* const backend = std::getenv("WEFT_TEST_BACKEND")) settings.backend = backend;
  const weft::device::Runtime runtime(settings, world.node_rank(), world.node_size());
  weft::testing::current_world = &world;
  weft::testing::current_runtime = &runtime;
  doctest::Context context(argc, argv);
  return weft::parallel::agreed_exit_code(world, context.run());
}
