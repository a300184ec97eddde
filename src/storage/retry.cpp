// SPDX-License-Identifier: Apache-2.0
#include "storage/retry.hpp"

#include <cerrno>
#include <chrono>
#include <thread>

#include "base/log.hpp"

namespace weft::storage {
namespace {

constexpr int kAttempts = 7;
constexpr std::chrono::milliseconds kFirstPause{250};

bool may_pass(int number) {
  switch (number) {
    case EIO:
    case ESTALE:
    case EREMOTEIO:
    case ETIMEDOUT:
    case EHOSTDOWN:
    case ENOTCONN:  // clients of FUSE and Lustre without their server
    case ESHUTDOWN:
    case EAGAIN:
    case ENOMEM:
    case ENFILE:
      return true;
    default:
      return false;
  }
}

}  // namespace

bool wait_to_retry(const SystemError& failure, int attempt) {
  if (!may_pass(failure.number()) || attempt == kAttempts) return false;
  const auto pause = kFirstPause * (1 << (attempt - 1));
  log::warning("{}; attempt {} of {} follows in {} s", failure.what(), attempt + 1, kAttempts,
               std::chrono::duration<double>(pause).count());
  std::this_thread::sleep_for(pause);
  return true;
}

}  // namespace weft::storage
