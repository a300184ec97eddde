// SPDX-License-Identifier: Apache-2.0
//
// The groups of the GPUs of a communicator's ranks. A group is created on first use, which is collective, and lives as
// long as the communicator.
#pragma once

#include "parallel/communicator.hpp"
#include "parallel/nccl.hpp"
#include "parallel/peers.hpp"

namespace weft::parallel {

/// The NCCL group of these ranks; null if they exchange through MPI.
nccl::Group* gpus_of(const Communicator& ranks);

/// The group of GPUs that can access each other's memory; null if they cannot.
Peers* peers_of(const Communicator& ranks);

/// From now on these ranks exchange through MPI only. Before the first use of `gpus_of`. All ranks must call it.
void exchange_through_host(const Communicator& ranks);

}  // namespace weft::parallel
