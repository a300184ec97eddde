// SPDX-License-Identifier: Apache-2.0
//
// checkpoint.scrub: verifies the kept checkpoints again while training continues, so that damage on the disk is found
// while another valid checkpoint exists, not when the run resumes.
//
// A thread of rank 0 with the lowest priority reads every shard, at most 100 MB/s on average and not from the page
// cache where the file system allows that, and compares it with its digests. A damaged checkpoint is reported and stays
// where it is until newer ones replace it.
#pragma once

#include <condition_variable>
#include <cstdint>
#include <filesystem>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

namespace weft::checkpoint {

class Scrub {
 public:
  struct Result {
    std::int64_t passes = 0;       ///< over all checkpoints
    std::int64_t checkpoints = 0;  ///< verified, each time counted
    std::int64_t bytes = 0;
    std::vector<std::string> damaged;     ///< "step_00000100: shard rank_00000.h5 differs …", each once
    std::vector<std::string> unreadable;  ///< the same, for those that could not be read: not proven damaged
  };

  /// Verifies the checkpoints in `directory` every `seconds`, for the first time after `seconds`.
  Scrub(std::filesystem::path directory, double seconds);
  Scrub(const Scrub&) = delete;
  ~Scrub();

  /// The results so far. From any thread.
  Result result() const;

 private:
  void run();
  /// Verifies all checkpoints once.
  void pass();
  void verify(const std::filesystem::path& step_directory);
  /// False if the scrub ends.
  bool wait(double seconds);

  const std::filesystem::path directory_;
  const double seconds_;
  mutable std::mutex mutex_;
  std::condition_variable changed_;
  bool ended_ = false;
  Result result_;
  std::thread thread_;
};

}  // namespace weft::checkpoint
