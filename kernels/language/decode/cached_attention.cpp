// SPDX-License-Identifier: Apache-2.0
#include "kernels/language/decode/cached_attention.hpp"

#include <algorithm>
#include <initializer_list>
#include <limits>

#include "base/error.hpp"
#include "kernels/dispatch.hpp"
#include "kernels/language/attention/attention.hpp"

namespace weft::kernels {

namespace portable {
decltype(kernels::cached_attention) cached_attention;
}  // namespace portable

namespace cuda {
decltype(kernels::cached_attention) cached_attention;
}  // namespace cuda

namespace {

/// True for numbers of 16 bits of which eight columns from any multiple of eight can be read as 16-byte words.
bool have_words(std::initializer_list<AnyMatrix> matrices) {
  return std::all_of(matrices.begin(), matrices.end(), [](const AnyMatrix& matrix) {
    return bytes_of(matrix.type) == 2 && matrix.stride % 8 == 0 &&
           reinterpret_cast<std::uintptr_t>(matrix.data) % 16 == 0;
  });
}

}  // namespace

void cached_attention(const Execution& execution, const CachedAttention& shape, AnyMatrix queries, AnyMatrix keys,
                      AnyMatrix values, AnyMatrix cached_keys, AnyMatrix cached_values, AnyMatrix out) {
  if (shape.head_size < 8 || shape.head_size % 8 != 0 || shape.head_size > kLargestHead)
    throw Error(ExitCode::internal, "cached_attention: the head size is not a multiple of 8 up to 256");
  if (shape.longest < 1) throw Error(ExitCode::internal, "cached_attention: the longest sequence is not stated");
  if (shape.kv_heads < 1 || shape.heads % shape.kv_heads != 0)
    throw Error(ExitCode::internal, "cached_attention: the number of heads is not a multiple of that of key heads");
  if (shape.sequences.size != queries.rows || shape.positions.size != queries.rows)
    throw Error(ExitCode::internal, "cached_attention: sequences and positions do not have one entry per row");
  constexpr std::int64_t kMost = std::numeric_limits<std::int32_t>::max();
  if (cached_keys.stride != cached_values.stride || cached_keys.rows > kMost || cached_keys.stride > kMost)
    throw Error(ExitCode::internal, "cached_attention: keys and values have different strides, or too many rows");
  const bool words = have_words({queries, keys, values, cached_keys, cached_values, out});
  const Execution place = words ? execution : Execution{Backend::portable, execution.stream};
  dispatch<portable::cached_attention, cuda::cached_attention>(place, shape, queries, keys, values, cached_keys,
                                                               cached_values, out);
}

}  // namespace weft::kernels
