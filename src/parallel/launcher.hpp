// SPDX-License-Identifier: Apache-2.0
//
// Processes with and without a launcher. Without one a process is alone, and needs MPI only if it calculates: MPI takes
// half a second to start, and may fail on a login node.
#pragma once

#include <string>

namespace weft::parallel {

class Communicator;

/// True if mpirun, srun or another launcher started this process and gave it a rank.
bool started_by_launcher();

/// Before World is constructed: it then starts MPI only in a process that a launcher started. In another one it is a
/// world of one rank without MPI, whose collective calls return at once.
void start_mpi_if_launched();

/// Throws a collective Error(usage) unless all ranks have the same kind of program, with or without CUDA: they exchange
/// by different means. `host`: of this rank; `problem`: why it has the one without (device/host_program.hpp), or "".
/// Collective.
void require_one_program(const Communicator& all, bool with_cuda, const std::string& host, const std::string& problem);

}  // namespace weft::parallel
