// SPDX-License-Identifier: Apache-2.0
#include "kernels/slow_paths.hpp"

#include <fmt/format.h>

#include <bit>

namespace weft::kernels {

std::string slow_attention(std::int64_t head_size, Scalar type, bool dropout) {
  if (bytes_of(type) != 2) return "numbers of 32 bits (tensor cores take 16)";
  if (head_size != 32 && head_size != 64 && head_size != 128)
    return fmt::format("head size {} (tensor cores take 32, 64 and 128)", head_size);
  return dropout ? "dropout of its probabilities" : "";
}

std::string slow_query_key(std::int64_t head_size, std::int64_t rotated) {
  const auto is_taken = [](std::int64_t columns) {
    return columns >= 16 && columns <= 256 && std::has_single_bit(static_cast<std::uint64_t>(columns));
  };
  if (!is_taken(head_size)) return fmt::format("head size {} (powers of two from 16 to 256 are taken)", head_size);
  if (rotated > 0 && !is_taken(rotated))
    return fmt::format("rotary positions of {} columns (powers of two from 16 on are taken)", rotated);
  return {};
}

std::string slow_norm(std::int64_t columns) {
  if (columns % kVectorColumns != 0)
    return fmt::format("{} columns (multiples of {} are taken)", columns, kVectorColumns);
  if (columns > kMostNormColumns) return fmt::format("{} columns (at most {} are taken)", columns, kMostNormColumns);
  return {};
}

std::string slow_feature_rows(std::int64_t width, Scalar rows) {
  if (rows != Scalar::bf16) return "rows of 32 bits (bf16 is taken)";
  if (width % kVectorColumns != 0)
    return fmt::format("{} columns per layer (multiples of {} are taken)", width, kVectorColumns);
  return {};
}

}  // namespace weft::kernels
