// SPDX-License-Identifier: Apache-2.0
#include "parallel/gpu_groups.hpp"

#include <memory>
#include <optional>

namespace weft::parallel {

/// Each is nullopt before first use; then the group, or null.
struct GpuGroups {
  std::optional<std::unique_ptr<nccl::Group>> gpus;
  std::optional<std::unique_ptr<Peers>> peers;
};

namespace {

GpuGroups& groups_of(const Communicator& ranks) {
  if (ranks.gpu_groups() == nullptr) ranks.gpu_groups() = std::make_shared<GpuGroups>();
  return *ranks.gpu_groups();
}

}  // namespace

nccl::Group* gpus_of(const Communicator& ranks) {
  GpuGroups& groups = groups_of(ranks);
  if (!groups.gpus) groups.gpus = nccl::make_group(ranks);
  return groups.gpus->get();
}

Peers* peers_of(const Communicator& ranks) {
  GpuGroups& groups = groups_of(ranks);
  if (!groups.peers) groups.peers = gpus_of(ranks) != nullptr ? Peers::join(ranks) : nullptr;
  return groups.peers->get();
}

void exchange_through_host(const Communicator& ranks) {
  GpuGroups& groups = groups_of(ranks);
  groups.gpus.emplace();
  groups.peers.emplace();
}

}  // namespace weft::parallel
