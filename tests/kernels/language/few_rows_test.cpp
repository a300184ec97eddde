// SPDX-License-Identifier: Apache-2.0
//
// The tensor-core code of products of few rows, run on the host by an emulated block: copies, permuted words,
// fragments, barriers and the order of sums are those of the GPU.
#include "kernels/language/linear/few_rows.hpp"

#include "kernels/language/norm/norm.hpp"
#include "kernels/shared_memory.hpp"
#include "tests/kernels/language/emulated_block.hpp"
#include "tests/kernels/language/rows_support.hpp"

namespace weft::testing {
namespace {

using namespace weft::kernels;

struct Size {
  int rows, outputs, inputs;
};

/// 16-bit rows aligned to 16 bytes, with 8 columns of NaN after the last.
struct Stored {
  std::int64_t columns, stride;
  std::vector<FlashWord> words;

  Stored(const std::vector<float>& values, std::int64_t rows, std::int64_t columns_)
      : columns(columns_), stride(columns_ + 8), words(static_cast<std::size_t>(rows * stride / 8)) {
    std::memset(words.data(), 0xff, words.size() * sizeof(FlashWord));
    auto* const to = reinterpret_cast<bf16*>(words.data());
    for (std::int64_t i = 0; i < rows * columns; ++i)
      to[i / columns * stride + i % columns] = to_bf16(values[static_cast<std::size_t>(i)]);
  }
  const bf16* data() const { return reinterpret_cast<const bf16*>(words.data()); }
  double at(std::int64_t row, std::int64_t column) const {
    return static_cast<double>(float{data()[row * stride + column]});
  }
};

/// The product as the kernel forms it: parts of the inputs are added in their order.
template <class Tile>
std::vector<float> product(const Stored& x, const Stored& weight, const Size& size, bool reversed,
                           const FewRowsNorm& norm = {}, const std::vector<float>& weight_sums = {}) {
  const FewRowsOperands operands{x.data(),  weight.data(), x.stride,    weight.stride,
                                 size.rows, size.outputs,  size.inputs, norm};
  const int tiles = (size.outputs + Tile::kOutputs - 1) / Tile::kOutputs,
            chunks = (size.inputs + Tile::kChunk - 1) / Tile::kChunk, parts = few_rows_parts(tiles, chunks);
  std::vector<float> y(static_cast<std::size_t>(size.rows * size.outputs));
  std::vector<FewRowsStatistics> statistics(static_cast<std::size_t>(size.rows));
  for (int tile = 0; tile < tiles; ++tile)
    for (int part = 0; part < parts; ++part)
      EmulatedBlock(Tile::kThreads, Tile::shared_bytes((chunks + parts - 1) / parts), reversed,
                    [&](EmulatedContext& context) {
                      few_rows_sum<Tile>(
                          context, operands, tile * Tile::kOutputs, chunks * part / parts, chunks * (part + 1) / parts,
                          (chunks + parts - 1) / parts, [] {},
                          [&](int unit, const FewRowsColumns& sums, FewRowsColumns*) {
                            constexpr int kOfRow = Tile::kOutputs / 4;
                            const int row = unit / kOfRow, first = tile * Tile::kOutputs + unit % kOfRow * 4;
                            if constexpr (Tile::kNormalised) {  // of whole warps, as in the kernels
                              FewRowsMoments moments;
                              moments.load(operands, row, context.thread);
                              const FewRowsStatistics of_row = moments.merge(context, operands);
                              if (row < size.rows) statistics[static_cast<std::size_t>(row)] = of_row;
                            }
                            for (int i = 0; i < 4; ++i)
                              if (row < size.rows && first + i < size.outputs)
                                y[static_cast<std::size_t>(row * size.outputs + first + i)] += sums.value[i];
                          });
                    });
  if (Tile::kNormalised)
    for (std::size_t i = 0; i < y.size(); ++i)
      y[i] = few_rows_normalised(statistics[i / static_cast<std::size_t>(size.outputs)], y[i],
                                 weight_sums[i % static_cast<std::size_t>(size.outputs)]);
  return y;
}

template <class Tile>
std::vector<float> check(const Size& size) {
  const Stored x(random_floats(std::int64_t{size.rows} * size.inputs, 1), size.rows, size.inputs);
  std::vector<float> values = random_floats(std::int64_t{size.outputs} * size.inputs, 2), kept = values;
  if (Tile::kTransposed)
    for (int o = 0; o < size.outputs; ++o)
      for (int i = 0; i < size.inputs; ++i)
        kept[static_cast<std::size_t>(i * size.outputs + o)] = values[static_cast<std::size_t>(o * size.inputs + i)];
  const Stored weight(kept, Tile::kTransposed ? size.inputs : size.outputs,
                      Tile::kTransposed ? size.outputs : size.inputs);
  const std::vector<float> y = product<Tile>(x, weight, size, false);
  std::vector<double> want;
  for (int n = 0; n < size.rows; ++n)
    for (int o = 0; o < size.outputs; ++o) {
      double sum = 0;
      for (int i = 0; i < size.inputs; ++i) sum += x.at(n, i) * (Tile::kTransposed ? weight.at(i, o) : weight.at(o, i));
      want.push_back(sum);
    }
  CAPTURE(size.rows);
  CAPTURE(size.outputs);
  CAPTURE(size.inputs);
  // Products of bf16 are exact in fp32; sums of hundreds of them in fp32.
  CHECK(relative_error(y, want) <= 1e-6);
  CHECK(product<Tile>(x, weight, size, true) == y);  // whatever the order in which warps run
  return y;
}

/// The moments of the rows, as a product before leaves them.
std::vector<Moments> moments_of(const Stored& x, const Size& size) {
  std::vector<Moments> moments;
  for (int n = 0; n < size.rows; ++n)
    for (int first = 0; first < size.inputs; first += kMomentColumns) {
      const int count = std::min(kMomentColumns, size.inputs - first);
      double sum = 0, squares = 0;
      for (int i = first; i < first + count; ++i) sum += x.at(n, i);
      for (int i = first; i < first + count; ++i) squares += std::pow(x.at(n, i) - sum / count, 2);
      moments.push_back({static_cast<float>(sum / count), static_cast<float>(squares)});
    }
  return moments;
}

/// Rows with means of 0, 8, 16, … and one column of 100, where a mean of squares would lose digits, and their product
/// after a norm whose weights are 1: x is h.
template <class Tile>
std::vector<float> check_normalised(const Size& size, Norm kind) {
  constexpr float kEpsilon = 1e-5f;
  const bool centred = kind == Norm::layer;
  std::vector<float> values = random_floats(std::int64_t{size.rows} * size.inputs, 1);
  for (std::size_t i = 0; i < values.size(); ++i) {
    const int row = static_cast<int>(i) / size.inputs, column = static_cast<int>(i) % size.inputs;
    values[i] += static_cast<float>(8 * row + (column == 3 ? 100 : 0));
  }
  const Stored x(values, size.rows, size.inputs),
      weight(random_floats(std::int64_t{size.outputs} * size.inputs, 2), size.outputs, size.inputs);
  std::vector<float> weight_sums;
  for (int o = 0; o < size.outputs; ++o) {
    double sum = 0;
    for (int i = 0; i < size.inputs; ++i) sum += weight.at(o, i);
    weight_sums.push_back(static_cast<float>(sum));
  }
  const std::vector<Moments> moments = moments_of(x, size);
  const FewRowsNorm norm{.moments = moments.data(),
                         .epsilon = kEpsilon,
                         .share = 1.0f / static_cast<float>(size.inputs),
                         .centred = centred};
  const std::vector<float> y = product<Tile>(x, weight, size, false, norm, weight_sums);
  double error = 0, largest = 0;
  for (int n = 0; n < size.rows; ++n) {
    double mean = 0, squares = 0;
    if (centred)
      for (int i = 0; i < size.inputs; ++i) mean += x.at(n, i) / size.inputs;
    for (int i = 0; i < size.inputs; ++i) squares += std::pow(x.at(n, i) - mean, 2);
    const double r = 1 / std::sqrt(squares / size.inputs + static_cast<double>(kEpsilon));
    for (int o = 0; o < size.outputs; ++o) {
      double sum = 0, absolute = 0;
      for (int i = 0; i < size.inputs; ++i) {
        sum += (x.at(n, i) - mean) * r * weight.at(o, i);
        absolute += std::abs(x.at(n, i) * r * weight.at(o, i));
      }
      error = std::max(error, std::abs(static_cast<double>(y[static_cast<std::size_t>(n * size.outputs + o)]) - sum));
      largest = std::max(largest, absolute);
    }
  }
  CAPTURE(size.rows);
  CAPTURE(size.outputs);
  CAPTURE(size.inputs);
  CAPTURE(centred);
  // Sums of products in fp32, from which those of the mean are subtracted: an error is that of the absolute sum.
  CHECK(error <= 1e-6 * largest);
  CHECK(product<Tile>(x, weight, size, true, norm, weight_sums) == y);
  return y;
}

}  // namespace

TEST_CASE("sums of few rows agree with float64: any number of rows, short tiles, more chunks than stages") {
  for (const Size& size : {Size{1, 8, 8}, Size{3, 40, 72}, Size{8, 32, 64}, Size{2, 24, 7 * 128 + 8}}) {
    check<FewRowsTile<8, 32, false>>(size);
    check<FewRowsTile<8, 32, true>>(size);
    check<FewRowsTile<8, 64, false>>(size);
    check<FewRowsTile<8, 128, false>>(size);
  }
  for (const Size& size : {Size{64, 32, 128}, Size{33, 40, 200}, Size{9, 24, 7 * 128 + 8}}) {
    check<FewRowsTile<64, 32, false>>(size);
    check<FewRowsTile<64, 32, true>>(size);
    check<FewRowsTile<64, 64, true>>(size);
    check<FewRowsTile<64, 128, false>>(size);
  }
  check<FewRowsTile<32, 32, true>>({19, 40, 200});
  // One part with more chunks than stages: 128 tiles.
  check<FewRowsTile<8, 32, true>>({2, 4096, 8 * 64});
  // Outputs need not be a multiple of 8 where they are rows of W.
  check<FewRowsTile<8, 32, false>>({2, 13, 64});
}

TEST_CASE("sums of normalised rows agree with float64, also where the mean is large") {
  for (const Size& size : {Size{1, 8, 8}, Size{3, 40, 72}, Size{8, 32, 64}, Size{2, 24, 7 * 128 + 8}, Size{7, 16, 1600},
                           Size{2, 4096, 8 * 64}})  // the last: one part with more chunks than stages
    for (const Norm kind : {Norm::layer, Norm::rms}) {
      check_normalised<FewRowsTile<8, 32, false, true>>(size, kind);
      check_normalised<FewRowsTile<8, 64, false, true>>(size, kind);
    }
  for (const Size& size : {Size{64, 32, 128}, Size{33, 40, 200}, Size{9, 24, 7 * 128 + 8}})
    for (const Norm kind : {Norm::layer, Norm::rms}) {
      check_normalised<FewRowsTile<64, 32, false, true>>(size, kind);
      check_normalised<FewRowsTile<64, 64, false, true>>(size, kind);
    }
  check_normalised<FewRowsTile<32, 32, false, true>>({19, 40, 200}, Norm::layer);
  check_normalised<FewRowsTile<32, 64, false, true>>({32, 4096, 8 * 64}, Norm::layer);
}

TEST_CASE("a normalised row has the same bits with one row and with 64") {
  for (const Norm kind : {Norm::layer, Norm::rms}) {
    const std::vector<float> alone = check_normalised<FewRowsTile<8, 32, false, true>>({1, 40, 200}, kind),
                             together = check_normalised<FewRowsTile<64, 32, false, true>>({64, 40, 200}, kind);
    CHECK(std::equal(alone.begin(), alone.end(), together.begin()));
  }
}

TEST_CASE("a row has the same bits with one row and with 64") {
  const Size one{1, 40, 200}, many{64, 40, 200};
  const std::vector<float> alone = check<FewRowsTile<8, 32, false>>(one),
                           together = check<FewRowsTile<64, 32, false>>(many);
  CHECK(std::equal(alone.begin(), alone.end(), together.begin()));
}

TEST_CASE("parts of the inputs: enough blocks for a GPU, no more parts than chunks") {
  CHECK(few_rows_parts(24, 48) == 8);
  CHECK(few_rows_parts(24, 12) == 8);
  CHECK(few_rows_parts(72, 12) == 2);
  CHECK(few_rows_parts(1000, 12) == 1);
  CHECK(few_rows_parts(1, 1) == 1);
  CHECK(few_rows_parts(1, 3) == 2);
}

TEST_CASE("a block of any product of few rows has shared memory on every GPU that the kernels are for") {
  const auto check = [&]<class Tile>(int least_tiles) {
    // From 128 tiles on there is one part, from 8 chunks per part on all stages are in use.
    for (int tiles = least_tiles; tiles <= std::max(least_tiles, 130); ++tiles)
      for (int chunks = 1; chunks <= 130; ++chunks) {
        const int parts = few_rows_parts(tiles, chunks),
                  bytes = few_rows_shared_bytes<Tile>((chunks + parts - 1) / parts, parts);
        if (bytes > cuda::kDynamicSharedMemory) FAIL_CHECK(bytes << " bytes for " << tiles << " tiles, " << chunks);
      }
  };
  const auto check_rows = [&]<int kRows>() {
    check.operator()<FewRowsTile<kRows, 32, false>>(1);
    check.operator()<FewRowsTile<kRows, 32, true>>(1);
    check.operator()<FewRowsTile<kRows, 32, false, true>>(1);
    check.operator()<FewRowsTile<kRows, 64, false, true>>(1024 / 64);
    check.operator()<FewRowsTile<kRows, 64, false>>(1024 / 64);
    check.operator()<FewRowsTile<kRows, 128, false>>(16384 / 128);
  };
  check_rows.operator()<8>();
  check_rows.operator()<32>();
  check_rows.operator()<64>();
}

}  // namespace weft::testing
