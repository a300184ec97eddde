// SPDX-License-Identifier: Apache-2.0
#include "dataset/activations/workers.hpp"

#include <utility>

namespace weft::dataset {

Workers::Workers(int n_threads) {
  try {
    for (int i = 1; i < n_threads; ++i)
      threads_.emplace_back([this] {
        std::unique_lock lock(mutex_);
        while (true) {
          changed_.wait(lock, [this] { return stopping_ || next_ < n_; });
          if (stopping_) return;
          lock.unlock();
          work();
          lock.lock();
        }
      });
  } catch (...) {  // the system has no more threads
    stop();
    throw;
  }
}

Workers::~Workers() { stop(); }

void Workers::stop() {
  {
    const std::lock_guard lock(mutex_);
    stopping_ = true;
    next_ = n_;
  }
  changed_.notify_all();
  for (std::thread& thread : threads_) thread.join();
}

void Workers::start(std::int64_t n, std::function<void(std::int64_t)> function) {
  {
    const std::lock_guard lock(mutex_);
    function_ = std::move(function);
    next_ = 0;
    n_ = n;
    failure_ = nullptr;
  }
  changed_.notify_all();
}

void Workers::work() {
  std::unique_lock lock(mutex_);
  while (next_ < n_) {
    const std::int64_t i = next_++;
    ++running_;
    lock.unlock();
    std::exception_ptr failure;
    try {
      function_(i);
    } catch (...) {
      failure = std::current_exception();
    }
    lock.lock();
    --running_;
    if (failure && (!failure_ || i < failed_at_)) {
      failure_ = failure;
      failed_at_ = i;
    }
    if (next_ >= n_ && running_ == 0) changed_.notify_all();
  }
}

void Workers::finish() {
  work();
  std::unique_lock lock(mutex_);
  changed_.wait(lock, [this] { return next_ >= n_ && running_ == 0; });
  function_ = nullptr;
  if (failure_) std::rethrow_exception(std::exchange(failure_, nullptr));
}

}  // namespace weft::dataset
