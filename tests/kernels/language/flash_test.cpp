// SPDX-License-Identifier: Apache-2.0
//
// The tensor-core kernels of attention, run on the host by an emulated block: layouts of fragments, swizzles, barriers,
// masks and sums are those of the GPU; only the instructions are emulated.
#include "kernels/language/attention/flash.hpp"

#include "tests/kernels/language/attention_reference.hpp"
#include "tests/kernels/language/emulated_block.hpp"

namespace weft::testing {

using namespace weft::kernels;

namespace {

constexpr std::uint16_t kUnwritten = 0xffff;

/// 16-bit numbers in memory of the host, aligned as the kernels require.
template <class Number>
struct HostMatrix {
  std::int64_t stride;
  std::vector<FlashWord> words;

  HostMatrix(std::int64_t rows, std::int64_t stride_) : stride(stride_), words((rows * stride_ + 7) / 8) {
    std::memset(words.data(), 0xff, words.size() * sizeof(FlashWord));
  }
  HostMatrix(const std::vector<float>& values, std::int64_t rows, std::int64_t stride_) : HostMatrix(rows, stride_) {
    for (std::int64_t i = 0; i < rows * stride; ++i) data()[i] = from_float<Number>(values[i]).bits;
  }
  std::uint16_t* data() { return reinterpret_cast<std::uint16_t*>(words.data()); }
  FlashMatrix from(std::int64_t column) { return {data() + column, stride}; }
  std::vector<float> part(std::int64_t rows, std::int64_t begin, std::int64_t columns) {
    std::vector<float> out;
    for (std::int64_t i = 0; i < rows; ++i)
      for (std::int64_t j = begin; j < begin + columns; ++j) out.push_back(Number{data()[i * stride + j]});
    return out;
  }
};

template <int kHead, class Context = EmulatedContext>
void check_emulated(const Case& c, bool reversed) {
  using Number = typename Context::Number;
  using Sizes = FlashSizes<kHead>;
  CAPTURE(c.length);
  CAPTURE(c.head_size);
  CAPTURE(c.softcap);
  CAPTURE(c.window);
  CAPTURE(c.documents);
  CAPTURE(c.sparse);
  CAPTURE(reversed);
  Reference r(c);
  r.compute();
  const std::int64_t rows = r.rows(), columns = r.query_columns(), kept = r.key_columns();
  HostMatrix<Number> inputs(r.packed, rows, r.stride()), gradients(rows, r.stride()), out(rows, columns);
  HostMatrix<Number> out_gradient({r.out_gradient.begin(), r.out_gradient.end()}, rows, columns);
  std::vector<float> log_sum(c.sequences * c.heads * c.length, NAN), delta(log_sum.size(), NAN);
  FlashArguments a{};
  a.shape = r.shape;
  a.shape.first_key = {r.first_key.data(), std::ssize(r.first_key)};
  a.shape.kept = {r.kept.data(), std::ssize(r.kept)};
  a.queries = inputs.from(0), a.keys = inputs.from(columns), a.values = inputs.from(columns + kept);
  a.dq = gradients.from(0), a.dk = gradients.from(columns), a.dv = gradients.from(columns + kept);
  a.out = out.from(0), a.out_gradient = out_gradient.from(0);
  a.new_log_sum = log_sum.data(), a.log_sum = log_sum.data(), a.delta = delta.data();
  const auto blocks = [&](std::int64_t heads, int row_tiles) {
    const std::int64_t block_rows = kFlashWarps * 16 * row_tiles;
    return c.sequences * heads * ((c.length + block_rows - 1) / block_rows);
  };
  for (std::int64_t task = 0; task < blocks(c.heads, Sizes::forward_row_tiles); ++task)
    EmulatedBlock(kFlashThreads, flash_forward_shared<kHead, Sizes::forward_row_tiles, Sizes::forward_tile>(), reversed,
                  [&](EmulatedContext& given) {
                    Context context(given);
                    flash_forward<kHead, Sizes::forward_row_tiles, Sizes::forward_tile>(context, a, task);
                  });
  for (std::int64_t task = 0; task < blocks(c.heads, Sizes::queries_row_tiles); ++task)
    EmulatedBlock(kFlashThreads, flash_queries_backward_shared<kHead, Sizes::queries_row_tiles, Sizes::queries_tile>(),
                  reversed, [&](EmulatedContext& given) {
                    Context context(given);
                    flash_queries_backward<kHead, Sizes::queries_row_tiles, Sizes::queries_tile>(context, a, task);
                  });
  for (std::int64_t task = 0; task < blocks(c.kv_heads, Sizes::keys_row_tiles); ++task)
    EmulatedBlock(kFlashThreads, flash_keys_backward_shared<kHead, Sizes::keys_row_tiles, Sizes::keys_tile>(), reversed,
                  [&](EmulatedContext& given) {
                    Context context(given);
                    flash_keys_backward<kHead, Sizes::keys_row_tiles, Sizes::keys_tile>(context, a, task);
                  });
  // Results and, for the second product, probabilities and their gradients are rounded to bf16, or to fp16.
  constexpr double kTolerance = std::is_same_v<Number, bf16> ? 5e-3 : 7e-4;
  CHECK(relative_error(out.part(rows, 0, columns), r.out) <= kTolerance);
  CHECK(relative_error(log_sum, r.log_sum) <= 1e-5);
  CHECK(relative_error(gradients.part(rows, 0, columns), r.dq) <= kTolerance);
  CHECK(relative_error(gradients.part(rows, columns, kept), r.dk) <= kTolerance);
  CHECK(relative_error(gradients.part(rows, columns + kept, kept), r.dv) <= kTolerance);
  for (std::int64_t i = 0; i < rows; ++i)
    for (std::int64_t j = columns + 2 * kept; j < r.stride(); ++j)
      REQUIRE(gradients.data()[i * r.stride() + j] == kUnwritten);
}

Case bf16_case(std::int64_t length, std::int64_t heads, std::int64_t kv_heads, std::int64_t head_size) {
  Case c{1, length, heads, kv_heads, head_size};
  c.type = Scalar::bf16;
  return c;
}

}  // namespace

TEST_CASE("emulated tensor-core attention agrees with the definition") {
  check_emulated<32>(bf16_case(150, 2, 1, 32), false);
  check_emulated<64>(bf16_case(170, 1, 1, 64), true);
  check_emulated<128>(bf16_case(70, 2, 1, 128), false);
}

TEST_CASE("emulated tensor-core attention in fp16 agrees with the definition") {
  for (const std::int64_t head_size : {32, 64, 128}) {
    Case c = bf16_case(90, 2, 1, head_size);
    c.type = Scalar::fp16;
    if (head_size == 32) check_emulated<32, EmulatedHalfContext>(c, true);
    if (head_size == 64) check_emulated<64, EmulatedHalfContext>(c, false);
    if (head_size == 128) check_emulated<128, EmulatedHalfContext>(c, false);
  }
}

TEST_CASE("emulated tensor-core attention: lengths around the blocks") {
  for (const std::int64_t length : {1, 15, 64, 65}) check_emulated<64>(bf16_case(length, 1, 1, 64), length % 2 == 0);
}

TEST_CASE("emulated tensor-core attention: window, cap, documents") {
  for (int features = 1; features < 8; ++features) {
    Case c = bf16_case(110, 1, 1, 32);
    c.sequences = features == 7 ? 2 : 1;
    c.window = (features & 1) != 0 ? 30 : 0;
    c.softcap = (features & 2) != 0 ? 3.0f : 0.0f;
    c.documents = (features & 4) != 0;
    check_emulated<32>(c, features % 2 == 0);
  }
}

TEST_CASE("emulated tensor-core attention: sparse blocks") {
  Case c = bf16_case(300, 2, 1, 32);
  c.sparse = true;
  check_emulated<32>(c, false);
  c.length = 140;
  c.head_size = 64;
  c.window = 100;
  check_emulated<64>(c, true);
}

TEST_CASE("the chunks of eight successive rows of a tile lie in different banks, and no two chunks in one place") {
  const auto check = [](auto head) {
    constexpr int kHead = decltype(head)::value;
    std::vector<bool> taken(64 * kHead / 8);
    for (int row = 0; row < 64; ++row)
      for (int chunk = 0; chunk < kHead / 8; ++chunk) {
        const std::uint32_t place = flash_place<kHead>(row, chunk);
        REQUIRE(place % 16 == 0);
        REQUIRE(place / 16 < taken.size());
        REQUIRE_FALSE(taken[place / 16]);
        taken[place / 16] = true;
      }
    for (int row = 0; row < 64; row += 8)
      for (int chunk = 0; chunk < kHead / 8; ++chunk) {
        std::uint32_t banks = 0;  // eight groups of four banks
        for (int i = 0; i < 8; ++i) banks |= 1u << flash_place<kHead>(row + i, chunk) / 16 % 8;
        CHECK(banks == 0xff);
      }
  };
  check(std::integral_constant<int, 32>());
  check(std::integral_constant<int, 64>());
  check(std::integral_constant<int, 128>());
}

}  // namespace weft::testing
