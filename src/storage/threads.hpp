// SPDX-License-Identifier: Apache-2.0
//
// Runs a function in several threads: each takes the next item of a list until none is left.
#pragma once

#include <cstdint>
#include <exception>
#include <mutex>
#include <thread>
#include <vector>

namespace weft::storage {

/// Runs `work` in `threads` threads, this one among them. Throws the first failure of any.
template <class Work>
void in_parallel(std::int64_t threads, Work&& work) {
  std::mutex mutex;
  std::exception_ptr failure;
  const auto guarded = [&] {
    try {
      work();
    } catch (...) {
      const std::lock_guard lock(mutex);
      if (!failure) failure = std::current_exception();
    }
  };
  {
    std::vector<std::jthread> helpers;  // joined also if another one cannot be started
    for (std::int64_t i = 1; i < threads; ++i) helpers.emplace_back(guarded);
    guarded();
  }
  if (failure) std::rethrow_exception(failure);
}

}  // namespace weft::storage
