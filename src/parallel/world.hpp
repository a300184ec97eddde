// SPDX-License-Identifier: Apache-2.0
//
// The processes of this job. The object lives as long as MPI.
#pragma once

#include <optional>
#include <string>

#include "base/error.hpp"
#include "parallel/communicator.hpp"
#include "parallel/failure.hpp"
#include "parallel/watchdog.hpp"

namespace weft::parallel {

/// Initialises MPI and finalises it, under a watchdog. One object, the first in main.
class World {
 public:
  World(int* argc, char*** argv);
  World(const World&) = delete;
  ~World();

  int rank() const { return all_.rank(); }
  int size() const { return all_.size(); }
  bool is_root() const { return rank() == 0; }
  const Communicator& all() const { return all_; }

  const std::string& host() const { return host_; }
  const Communicator& node() const { return node_; }  ///< the processes on the node of this one
  int node_rank() const { return node_.rank(); }      ///< index of this process on its node
  int node_size() const { return node_.size(); }      ///< processes on this node

  /// parallel::on_root of all ranks (parallel/failure.hpp).
  template <class Function>
  auto on_root(Function&& function) const {
    return parallel::on_root(all_, function);
  }

 private:
  struct Session {  // first member: MPI runs as long as the other members
    Session(int* argc, char*** argv);
    ~Session();
    std::optional<Watchdog> watchdog;
  } session_;
  Communicator all_, node_;
  std::string host_;
};

/// Collective. The highest exit code of all ranks: that of a program in which no rank failed.
int agreed_exit_code(const World& world, int code);

/// Logs the Error that ends the program, once: rank 0 if all ranks know it, else this rank, which then aborts the job
/// with its code. Returns the exit code (of an Error known to all ranks). `step` < 0: before the first step.
int end_run(const World& world, const Error& failure, std::int64_t step);

/// Throws a collective Error(usage) if a launcher started several copies of a world of one rank: launcher and MPI
/// library do not match, and each copy would train alone into the same directory.
void require_matching_launcher(const World& world);

/// MPI library and its version, for the run record.
std::string mpi_version();

}  // namespace weft::parallel
