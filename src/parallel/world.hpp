// SPDX-License-Identifier: Apache-2.0
//
// The processes of this job: joined first, left last.
#pragma once

#include <string>

#include "base/error.hpp"
#include "parallel/communicator.hpp"

namespace weft::parallel {

/// MPI from start to end. One object, made first thing in main.
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
  const Communicator& node() const { return node_; }  ///< the processes on this one's node
  int node_rank() const { return node_.rank(); }      ///< index of this process on its node
  int node_size() const { return node_.size(); }      ///< processes on this node

  /// The highest code of all ranks: how the program ends when nobody threw.
  int agree(int code) const;
  /// How the program ends after an Error, said once. What all ranks know ends together with the code; what one rank
  /// knows aborts the job. `step` < 0: before the first step. Returns the exit code (in the collective case).
  int abort(const Error&, std::int64_t step) const;

  /// Runs `function` on rank 0 and gives its text to all; what it throws is thrown on every rank, known to all.
  template <class Function>
  std::string on_root(Function&& function) const {
    std::string text, message;
    std::int64_t code = 0;
    if (is_root()) {
      try {
        text = function();
      } catch (const Error& failure) {
        code = static_cast<std::int64_t>(failure.code());
        message = failure.what();
      }
    }
    all_.broadcast(&code, sizeof code);
    if (code != 0) throw Error(static_cast<ExitCode>(code), all_.broadcast(std::move(message)), KnownTo::all_ranks);
    return all_.broadcast(std::move(text));
  }

 private:
  struct Session {  // first member: starts MPI before, and ends it after, everything else
    Session(int* argc, char*** argv);
    ~Session();
  } session_;
  Communicator all_, node_;
  std::string host_;
};

/// Throws a collective Error(usage) when a launcher started several copies of a world of one rank: launcher and MPI
/// library do not match, and each copy would train alone into the same directory.
void require_matching_launcher(const World& world);

/// MPI library and standard, for the record of a run.
std::string mpi_version();

}  // namespace weft::parallel
