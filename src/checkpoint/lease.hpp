// SPDX-License-Identifier: Apache-2.0
//
// One owner per run directory. The owner holds a lease: the file lease.N in the run directory, a JSON object that names
// its host, process, job and start, with a random token and a counter that rank 0 increases every tenth of run.lease
// seconds. N, the fence, increases with every owner.
//
//   acquire   create lease.N+1 exclusively, N being the highest one present; write and sync it; list the directory
//             again and withdraw if there is a higher one; delete the lower ones
//   renew     open lease.N, compare the token, overwrite the counter in place through the same descriptor
//   check     open lease.N and compare the token, on any rank: before every publication, deletion and append
//   release   mark it in place
//
// An owner never creates lease.N again, so a process that was stopped or cut off while another run took over cannot get
// it back: its file is deleted, and what it writes through an open descriptor goes to the deleted file. Another run
// takes over if the lease is released, if the owner's process does not exist any more (same host), or if the lease has
// not changed for run.lease seconds of the contender's own clock; no clocks of two hosts are compared.
//
// Between a check and the write that follows it the lease may be lost. Therefore the fence is in every manifest
// (`stale`), incomplete checkpoints have the token in their name, and a new owner replaces the files that the old one
// may have open (run/run_directory.hpp). Only exclusive creation, overwriting in place, deletion and listing are
// used, which NFS and Lustre define; no flock.
#pragma once

#include <condition_variable>
#include <cstdint>
#include <filesystem>
#include <mutex>
#include <string>
#include <thread>

#include "base/clock.hpp"
#include "checkpoint/manifest.hpp"
#include "parallel/communicator.hpp"

namespace weft::checkpoint {

/// What a lease says. An unreadable one has empty fields.
struct Owner {
  std::string token;                      ///< 32 hex digits
  std::string host, boot, pid_namespace;  ///< on which system `process` can be looked for
  std::int64_t process = 0;
  std::int64_t process_start = 0;  ///< distinguishes processes of one number: field 22 of /proc/PID/stat
  std::string job;                 ///< "SLURM_JOB_ID=1234"; empty outside a scheduler
  std::string started;             ///< "2026-11-22T06:14:04Z"
  double seconds = 60;             ///< run.lease of the owner
  std::int64_t renewals = 0;
  bool released = false;
  /// Fence and step of the last owner, this one or an earlier one, that has recorded the step from which it resumes
  /// (-1: a new run).
  std::int64_t resumed_fence = 0, resumed_step = -1;
};

Owner parse_owner(const std::string& text);
/// The text of a lease. Its length is fixed, so that a lease can be overwritten in place.
std::string to_text(const Owner& owner);

class Lease {
 public:
  struct Settings {
    double seconds = 60;     ///< without a renewal until another run may take over
    bool take_over = false;  ///< take over from an owner that may be active
  };

  /// Collective. Acquires the lease of an existing directory. If it has an owner, waits until that is known to have
  /// ended or to be active: a few seconds for an owner on this host, the owner's `seconds` for one on another host.
  /// Throws a collective Error(io) that names an active owner.
  Lease(const parallel::Communicator& world, std::filesystem::path run_directory, const Settings& settings);
  /// Releases it, unless it was lost.
  ~Lease();
  Lease(const Lease&) = delete;

  std::int64_t fence() const { return fence_; }
  const std::string& token() const { return mine_.token; }
  /// From whom the directory was taken over, and why; empty if its last owner had released it, or there was none. Rank
  /// 0.
  const std::string& taken_over_from() const { return taken_over_from_; }

  /// Why the lease is not held any more; "" while it is. From any thread. Throws Error(io) if it cannot be read.
  std::string lost() const;

  /// Records the step from which this run resumes (-1: a new run), once newer checkpoints are set aside. Rank 0.
  void begin_at(std::int64_t resumed_step);
  /// True for a checkpoint that an earlier owner published after it had lost the directory: newer than the step from
  /// which the next owner resumed. Those that were there before, the next owner has set aside.
  bool stale(const Manifest& manifest) const;

 private:
  bool attempt(const Settings& settings);
  bool create(std::int64_t fence);
  bool rewrite(bool sync);
  void renew();

  const std::filesystem::path directory_;
  Owner mine_;
  std::int64_t fence_ = 0;
  std::int64_t resumed_fence_ = 0, resumed_step_ = -1;  // values of the earlier owners
  std::string taken_over_from_;

  // The lease that a contender watches.
  std::int64_t seen_fence_ = 0;
  std::string seen_;
  Clock::time_point waiting_since_, seen_since_;
  bool waiting_ = false, renewed_ = false, announced_ = false;

  std::mutex mutex_;  // protects mine_.renewals and mine_.resumed_*
  std::condition_variable wake_;
  bool ended_ = false;
  std::thread thread_;  // rank 0
};

}  // namespace weft::checkpoint
