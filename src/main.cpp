// SPDX-License-Identifier: Apache-2.0
//
// Weft: one process per GPU, or per few cores; the subcommand decides what they do together.
#include <csignal>
#include <utility>

#include "base/log.hpp"
#include "commands/command_line.hpp"
#include "commands/external.hpp"
#include "device/address_space.hpp"
#include "device/host_program.hpp"
#include "kernels/execution.hpp"
#include "parallel/failure.hpp"
#include "parallel/launcher.hpp"
#include "parallel/world.hpp"
#include "run/log_session.hpp"
#include "run/run_record.hpp"

namespace {

using namespace weft;

/// Ends the program after an error: records it, reports it once with rank and step; one exit code for all ranks.
int give_up(const Error& failure, const parallel::World& world) {
  if (world.is_root() || failure.known_to() == KnownTo::one_rank)
    run::record_end(static_cast<int>(failure.code()), failure.what());
  return parallel::end_run(world, failure, run::current_step());
}

}  // namespace

int main(int argc, char** argv) {
  // 0. A command of another program, as of the Python package, replaces this process; so does this program with the
  //    right kernels of OpenBLAS.
  commands::hand_over_to_external(argc, argv);
  device::restart_with_blas_core(argv);
  std::signal(SIGXFSZ, SIG_IGN);  // a file-size limit becomes an error of the write
  // 1. Join the other ranks, for a command that needs a device or if there are others. Nothing may fail alone before
  // this.
  commands::Call call = commands::parse(argc, argv);
  const bool on_device = call.needs == commands::Needs::device;
  if (on_device) {
    device::hand_over_without_gpu(argv);
    device::require_address_space_to_compute();
  }
  if (call.needs == commands::Needs::nothing) parallel::start_mpi_if_launched();
  const parallel::World world(&argc, &argv);
  const run::LogSession log(world.rank());
  parallel::set_failure_recorder([](ExitCode code, const std::string& why) {
    run::record_failure(run::record_path(), static_cast<int>(code), why);
  });
  try {
    parallel::require_matching_launcher(world);
    const std::string problem = device::replaces_cuda_because();
    parallel::require_one_program(world.all(), kernels::kCudaBuild, world.host(), problem);
    if (!problem.empty() && on_device && world.is_root())
      log::warning("{}; the program without CUDA computes on the host instead (device.backend = \"cuda\" forbids it)",
                   problem);
    // 2. Do what the command line asks for. A command starts the arithmetic that it needs and returns its exit code; it
    //    never exits.
    const int code = parallel::agreed_exit_code(world, commands::run(std::move(call), world));
    // 3. Record how it ended.
    if (world.is_root()) run::record_end(code, run::exit_reason(code));
    return code;
  } catch (const Error& failure) {
    return give_up(failure, world);
  } catch (const std::exception&) {
    const parallel::Failure failure = parallel::current_failure();
    return give_up(error(failure.code, "{}", failure.message), world);
  }
}
