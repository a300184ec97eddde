// SPDX-License-Identifier: Apache-2.0
//
// A thread pool that runs the iterations of a loop: for reading files and for host loops over rows.
#pragma once

#include <condition_variable>
#include <cstdint>
#include <exception>
#include <functional>
#include <mutex>
#include <span>
#include <thread>
#include <vector>

namespace weft::dataset {

using Job = std::function<void()>;

class Workers {
 public:
  /// Starts n_threads - 1 threads; the caller of `finish` works as well.
  explicit Workers(int n_threads);
  Workers(const Workers&) = delete;
  ~Workers();

  /// Starts function(i) for all i in [0, n) and returns. Iterations are started in ascending order.
  void start(std::int64_t n, std::function<void(std::int64_t)> function);
  /// Works until all iterations are complete. Throws the exception of the lowest index that failed.
  void finish();
  void run(std::int64_t n, std::function<void(std::int64_t)> function) {
    start(n, std::move(function));
    finish();
  }
  /// Starts jobs, which must live until `finish`.
  void start(std::span<const Job> jobs) {
    start(static_cast<std::int64_t>(jobs.size()), [jobs](std::int64_t i) { jobs[static_cast<std::size_t>(i)](); });
  }
  void run(std::span<const Job> jobs) {
    start(jobs);
    finish();
  }

 private:
  void work();
  void stop();

  std::vector<std::thread> threads_;
  std::mutex mutex_;
  std::condition_variable changed_;
  std::function<void(std::int64_t)> function_;
  std::int64_t next_ = 0, n_ = 0, running_ = 0;
  std::int64_t failed_at_ = 0;
  std::exception_ptr failure_;
  bool stopping_ = false;
};

}  // namespace weft::dataset
