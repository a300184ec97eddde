// SPDX-License-Identifier: Apache-2.0
//
// The main of every test program: MPI and the arithmetic are up before the first case. On several ranks all run the
// same cases; any rank's failure fails the program.
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
  const weft::device::Runtime runtime({}, world.node_rank(), world.node_size());
  weft::testing::current_world = &world;
  weft::testing::current_runtime = &runtime;
  doctest::Context context(argc, argv);
  return weft::parallel::agreed_exit_code(world, context.run());
}
