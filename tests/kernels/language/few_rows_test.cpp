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
                           const FewRowsNorm& norm = {}) {
  const FewRowsOperands operands{x.data(),  weight.data(), x.stride,    weight.stride,
                                 size.rows, size.outputs,  size.inputs, norm};
  const int tiles = (size.outputs + Tile::kOutputs - 1) / Tile::kOutputs,
            chunks = (size.inputs + Tile::kChunk - 1) / Tile::kChunk, parts = few_rows_parts(tiles, chunks);
  std::vector<float> y(static_cast<std::size_t>(size.rows * size.outputs));
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
                            for (int i = 0; i < 4; ++i)
                              if (row < size.rows && first + i < size.outputs)
                                y[static_cast<std::size_t>(row * size.outputs + first + i)] += sums.value[i];
                          });
                    });
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

/// Rows with means of some standard deviations, and their product after a norm.
template <class Tile>
std::vector<float> check_normalised(const Size& size, Norm kind) {
  std::vector<float> values = random_floats(std::int64_t{size.rows} * size.inputs, 1);
  for (std::size_t i = 0; i < values.size(); ++i)
    values[i] += 3.0f - 2.0f * static_cast<float>(i / static_cast<std::size_t>(size.inputs) % 4);
  const Stored x(values, size.rows, size.inputs),
      weight(random_floats(std::int64_t{size.outputs} * size.inputs, 2), size.outputs, size.inputs);
  std::vector<FewRowsColumns> stored(static_cast<std::size_t>(size.inputs / 2));  // aligned to 16 bytes
  float* const gamma = stored.data()->value;
  float* const beta = gamma + size.inputs;
  const std::vector<float> random = random_floats(2 * size.inputs, 3);
  for (int i = 0; i < size.inputs; ++i) {
    gamma[i] = 1.0f + random[static_cast<std::size_t>(i)];
    beta[i] = random[static_cast<std::size_t>(size.inputs + i)];
  }
  const bool centred = kind == Norm::layer;
  const std::vector<Moments> moments = moments_of(x, size);
  const FewRowsNorm norm{.weight = gamma,
                         .bias = centred ? beta : nullptr,
                         .moments = moments.data(),
                         .epsilon = 1e-5f,
                         .share = 1.0f / static_cast<float>(size.inputs),
                         .centred = centred};
  const std::vector<float> y = product<Tile>(x, weight, size, false, norm);
  std::vector<double> want;
  for (int n = 0; n < size.rows; ++n) {
    double mean = 0, squares = 0;
    if (centred)
      for (int i = 0; i < size.inputs; ++i) mean += x.at(n, i) / size.inputs;
    for (int i = 0; i < size.inputs; ++i) squares += std::pow(x.at(n, i) - mean, 2);
    const double r = 1 / std::sqrt(squares / size.inputs + 1e-5);
    std::vector<double> normalised;
    for (int i = 0; i < size.inputs; ++i)
      normalised.push_back(static_cast<double>(float{to_bf16(static_cast<float>(
          static_cast<double>(gamma[i]) * (x.at(n, i) - mean) * r + (centred ? static_cast<double>(beta[i]) : 0)))}));
    for (int o = 0; o < size.outputs; ++o) {
      double sum = 0;
      for (int i = 0; i < size.inputs; ++i) sum += normalised[static_cast<std::size_t>(i)] * weight.at(o, i);
      want.push_back(sum);
    }
  }
  CAPTURE(size.rows);
  CAPTURE(size.outputs);
  CAPTURE(size.inputs);
  // As plain products, but for values so near to the middle of two bf16 that the rounding of the statistics to fp32
  // decides between them: about one of 10^4, with a distance of 2^-8 of it.
  CHECK(relative_error(y, want) <= 2e-4);
  CHECK(product<Tile>(x, weight, size, true, norm) == y);
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

TEST_CASE("a product of normalised rows is that of the rows of a norm, rounded to bf16") {
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
