// SPDX-License-Identifier: Apache-2.0
//
// The bytes are big-endian 16-bit words w[0] to w[n-1]; an odd last byte is the upper half of a word. The checksum is
// sum2 << 16 | sum1 with sum1 = sum of w[i] and sum2 = sum of (n - i) w[i], both modulo 65535, where nonzero multiples
// of 65535 give 65535 instead of 0.
//
// Swapping the bytes of a word multiplies it by 256 modulo 65535. Therefore words are summed in little-endian order,
// and both sums are multiplied by 256 at the end.
#include "storage/checksum.hpp"

#include <algorithm>
#include <bit>
#include <cstring>

namespace weft::storage {
namespace {

static_assert(std::endian::native == std::endian::little);

constexpr std::size_t kLanes = 32;
/// Words per lane whose weighted sum fits in 32 bits: 360 * 361 / 2 * 65535 < 2^32.
constexpr std::size_t kDepth = 360;

/// Modulo 65535; 0 only for 0.
std::uint64_t reduced(std::uint64_t sum) { return sum == 0 ? 0 : (sum - 1) % 65535 + 1; }

}  // namespace

/// Appends `words` words with the given sums.
void Fletcher32::append(std::uint64_t words, std::uint64_t plain, std::uint64_t weighted) {
  weighted_ = reduced(weighted_ + words * plain_ + weighted);
  plain_ = reduced(plain_ + plain);
}

/// Appends `depth` * kLanes words. Word k * kLanes + lane has weight (depth - k) * kLanes - lane.
void Fletcher32::append_rows(const unsigned char* data, std::size_t depth) {
  std::uint32_t plain[kLanes] = {}, weighted[kLanes] = {};
  for (std::size_t k = 0; k < depth; ++k) {
    std::uint16_t words[kLanes];
    std::memcpy(words, data + k * sizeof words, sizeof words);
    for (std::size_t lane = 0; lane < kLanes; ++lane) {  // vectorises
      plain[lane] += words[lane];
      weighted[lane] += plain[lane];
    }
  }
  std::uint64_t all = 0, all_weighted = 0;
  for (std::size_t lane = 0; lane < kLanes; ++lane) {
    all += plain[lane];
    all_weighted += std::uint64_t{kLanes} * weighted[lane] - std::uint64_t{lane} * plain[lane];
  }
  append(depth * kLanes, all, all_weighted);
}

void Fletcher32::add(const void* data, std::size_t bytes) {
  const auto* next = static_cast<const unsigned char*>(data);
  const unsigned char* const end = next + bytes;
  const auto append_word = [&](std::uint64_t word) { append(1, word, word); };
  if (half_ && next < end) {
    append_word(*half_ + (std::uint64_t{*next++} << 8));
    half_.reset();
  }
  constexpr std::size_t kRow = kLanes * sizeof(std::uint16_t);
  while (static_cast<std::size_t>(end - next) >= kRow) {
    const std::size_t depth = std::min(kDepth, static_cast<std::size_t>(end - next) / kRow);
    append_rows(next, depth);
    next += depth * kRow;
  }
  for (; end - next > 1; next += 2) append_word(next[0] + (std::uint64_t{next[1]} << 8));
  if (next < end) half_ = *next;
}

std::uint32_t Fletcher32::value() const {
  Fletcher32 all = *this;
  if (half_) all.append(1, *half_, *half_);
  return static_cast<std::uint32_t>(reduced(all.weighted_ * 256) << 16 | reduced(all.plain_ * 256));
}

std::uint32_t fletcher32(const void* data, std::size_t bytes) {
  Fletcher32 sum;
  sum.add(data, bytes);
  return sum.value();
}

}  // namespace weft::storage
