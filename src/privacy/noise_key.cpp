// SPDX-License-Identifier: Apache-2.0
#include "privacy/noise_key.hpp"

#include <sys/random.h>

#include <cerrno>
#include <cstring>

#include "base/error.hpp"

namespace weft::privacy {

kernels::NoiseKey new_noise_key(KeySource source, std::uint64_t seed, std::uint64_t step) {
  kernels::NoiseKey key{};
  if (source == KeySource::test) {
    for (std::size_t i = 0; i < key.size(); ++i)
      key[i] = kernels::philox(seed, kernels::Purpose::test, step, i).word[0];
    return key;
  }
  ssize_t got;
  do got = ::getrandom(key.data(), sizeof key, 0);  // of so few bytes all or none
  while (got < 0 && errno == EINTR);
  if (got != static_cast<ssize_t>(sizeof key))
    throw error(ExitCode::io, "the operating system gives no random numbers ({}); noise needs a secret key",
                std::strerror(errno));
  return key;
}

}  // namespace weft::privacy
