// SPDX-License-Identifier: Apache-2.0
//
// The backward pass of whole small models, with every option, against central differences of their loss; and what must
// not change the gradients: recomputation, chunks of the head, micro-batches.
#include "language_model/step/transformer.hpp"

#include <cmath>
#include <cstring>

#include "tests/language_model/small_model.hpp"
#include "tests/language_model/variants.hpp"

namespace weft::language_model {
namespace {

using weft::testing::gpt2;
using weft::testing::kLength;
using weft::testing::kSequences;
using weft::testing::llama;
using weft::testing::norm_of;
using weft::testing::SmallModel;
using weft::testing::variants;
using Gradients = std::vector<std::vector<float>>;

/// Four blocks of keys, of which a block of queries reads its own and one more.
TransformerSettings sparse(std::int64_t length, std::int64_t blocks) {
  TransformerSettings settings = llama();
  ModelSettings& model = settings.architecture.model;
  model.heads = 2;
  model.kv_heads = 1;
  model.d_model = 16;
  model.d_mlp = 16;
  model.sparse_blocks = blocks;
  settings.architecture.positions = settings.length = length;
  settings.rows = 2 * length;
  return settings;
}

/// Of activations. The largest relative difference of all gradients from those in fp32; the
/// largest of the loss.
struct Types {
  kernels::Scalar type;
  double gradients, loss;
};
// Hand-written kernels multiply fp32 weights by their upper 16 bits, but round all of them to fp16.
constexpr double kHalfGradients = kernels::kCudaBuild ? 3e-2 : 4e-3;
constexpr Types kTypes[] = {
    {kernels::Scalar::fp32, 0, 0}, {kernels::Scalar::bf16, 3e-2, 5e-3}, {kernels::Scalar::fp16, kHalfGradients, 5e-3}};

/// |a - b| / |b| over all parameters together.
double relative_difference(const Gradients& a, const Gradients& b) {
  double difference = 0, size = 0;
  for (std::size_t i = 0; i < a.size(); ++i)
    for (std::size_t k = 0; k < a[i].size(); ++k) {
      const double x = static_cast<double>(a[i][k]), y = static_cast<double>(b[i][k]);
      difference += (x - y) * (x - y);
      size += y * y;
    }
  return std::sqrt(difference / size);
}

/// Leaves a third of the weights, still five times those of a new model: the saturated probabilities of SmallModel
/// would magnify the rounding of scores.
void shrink(SmallModel& model) {
  for (std::size_t i = 0; i < model.parameters().size(); ++i) {
    std::vector<float> values = model.get(i);
    for (float& value : values) value *= model.parameters().specs()[i].is_matrix() ? 1.0f / 3 : 1.0f;
    model.set(i, values);
  }
}

bool same_bits(const Gradients& a, const Gradients& b) {
  for (std::size_t i = 0; i < a.size(); ++i)
    if (std::memcmp(a[i].data(), b[i].data(), 4 * a[i].size()) != 0) return false;
  return true;
}

}  // namespace

TEST_CASE("the gradient of each parameter is the slope of the loss in its direction") {
  for (const auto& [name, settings] : variants()) {
    CAPTURE(name);
    SmallModel model(settings, kSequences, kLength);
    Gradients gradients;
    CHECK(model.gradient(gradients) == doctest::Approx(model.loss()).epsilon(1e-6));
    for (std::size_t i = 0; i < gradients.size(); ++i) {
      const std::string parameter = model.parameters().specs()[i].name;
      CAPTURE(parameter);
      const double length = norm_of(gradients[i]);
      // The exact gradient of the key's bias is 0: it moves all scores of a query alike, unless something lies between.
      if (parameter.ends_with("key/bias") && settings.architecture.model.qk_norm == QueryKeyNorm::none &&
          settings.architecture.model.attention_softcap == 0 &&
          settings.architecture.model.position == Position::learned) {
        CHECK(length < 1e-6);
        continue;
      }
      REQUIRE(length > 1e-4);
      CHECK(slope_along(model, i, gradients[i]) == doctest::Approx(length).epsilon(0.01 + 5e-5 / length));
    }
  }
}

TEST_CASE("gradients in every type are those in fp32 but for rounding") {
  const auto gradient = [](const TransformerSettings& settings, Gradients& gradients) {
    SmallModel model(settings, kSequences, kLength);
    shrink(model);
    return model.gradient(gradients);
  };
  for (auto [name, settings] : variants()) {
    Gradients exact;
    const double loss = gradient(settings, exact);
    for (const Types& types : kTypes) {
      CAPTURE(name);
      const int type = static_cast<int>(types.type);
      CAPTURE(type);
      settings.type = types.type;
      Gradients gradients;
      const double rounded = gradient(settings, gradients);
      CHECK(relative_difference(gradients, exact) <= types.gradients);
      CHECK(std::abs(rounded - loss) <= types.loss * loss);
    }
  }
}

TEST_CASE("recomputation gives the same bits") {
  for (auto [name, settings] : variants())
    for (const Types& types : kTypes) {
      CAPTURE(name);
      settings.type = types.type;
      SmallModel keeps(settings, kSequences, kLength);
      Gradients expected;
      keeps.gradient(expected);
      for (const Recompute plan : {Recompute::activation, Recompute::norm, Recompute::block}) {
        CAPTURE(static_cast<int>(plan));
        settings.memory.recompute = plan;
        SmallModel recomputes(settings, kSequences, kLength);
        Gradients gradients;
        recomputes.gradient(gradients);
        CHECK(same_bits(gradients, expected));
      }
      settings.memory.recompute = Recompute::none;
    }
}

TEST_CASE("gradients in 8 bits are those in bf16 but for rounding, and recomputation gives their bits") {
  constexpr std::int64_t kTokens = 16;
  const auto in_8_bits = [](TransformerSettings settings) {
    settings.architecture.model.layers = 4;  // the second and the third multiply in 8 bits
    settings.architecture.positions = settings.length = kTokens;
    settings.rows = kSequences * kTokens;
    settings.type = kernels::Scalar::bf16;
    settings.fp8 = true;
    return settings;
  };
  TransformerSettings dropping = in_8_bits(gpt2()), biased = in_8_bits(llama());
  dropping.architecture.model.dropout = 0.2;
  dropping.architecture.model.norm_position = NormPosition::both;
  biased.architecture.model.bias = true;
  biased.architecture.model.residual = Residual::parallel;
  biased.architecture.model.qk_norm = QueryKeyNorm::head;
  for (TransformerSettings settings : {in_8_bits(gpt2()), in_8_bits(llama()), dropping, biased}) {
    Gradients expected, gradients;
    {
      TransformerSettings without = settings;
      without.fp8 = false;
      SmallModel bf16(without, kSequences, kTokens), coded(settings, kSequences, kTokens);
      shrink(bf16);
      shrink(coded);
      const double loss = bf16.gradient(expected), of_coded = coded.gradient(gradients);
      CHECK(std::abs(of_coded - loss) <= 0.02 * loss);
      CHECK(relative_difference(gradients, expected) <= 0.2);
      // In each product that has codes, and in no other one before the first of them.
      for (std::size_t i = 0; i < gradients.size(); ++i) {
        const model::ParameterSpec& spec = coded.parameters().specs()[i];
        CAPTURE(spec.name);
        if (spec.is_matrix() && (spec.name.starts_with("block_1/") || spec.name.starts_with("block_2/")))
          CHECK(gradients[i] != expected[i]);
      }
    }
    SmallModel keeps(settings, kSequences, kTokens);
    keeps.gradient(expected);
    for (const Recompute plan : {Recompute::activation, Recompute::norm, Recompute::block}) {
      CAPTURE(static_cast<int>(plan));
      settings.memory.recompute = plan;
      SmallModel recomputes(settings, kSequences, kTokens);
      recomputes.gradient(gradients);
      CHECK(same_bits(gradients, expected));
    }
  }
}

TEST_CASE("sparse attention that chooses all blocks gives the bits of dense attention") {
  constexpr std::int64_t kLong = 220;
  for (const kernels::Scalar type : {kernels::Scalar::fp32, kernels::Scalar::bf16}) {
    TransformerSettings dense = sparse(kLong, 0), all = sparse(kLong, 4), few = sparse(kLong, 1);
    dense.type = all.type = few.type = type;
    Gradients expected, same, fewer, again;
    SmallModel(dense, 2, kLong).gradient(expected);
    SmallModel(all, 2, kLong).gradient(same);
    CHECK(same_bits(same, expected));
    SmallModel(few, 2, kLong).gradient(fewer);
    CHECK(!same_bits(fewer, expected));
    few.memory.recompute = Recompute::block;
    SmallModel(few, 2, kLong).gradient(again);
    CHECK(same_bits(again, fewer));
  }
}

TEST_CASE("the gradient of sparse attention is the slope of the loss while the choice of blocks stays") {
  constexpr std::int64_t kLong = 220;
  SmallModel model(sparse(kLong, 1), 1, kLong);
  Gradients gradients;
  model.gradient(gradients);
  for (std::size_t i = 0; i < gradients.size(); ++i) {
    const std::string parameter = model.parameters().specs()[i].name;
    CAPTURE(parameter);
    const double length = norm_of(gradients[i]);
    const std::vector<float> at = model.get(i);
    // Small, so that no block is chosen anew: the rounding of the losses is then 1e-7 / kStep = 1e-4.
    constexpr double kStep = 1e-3;
    double losses[2] = {};
    for (const int side : {0, 1}) {
      std::vector<float> moved = at;
      for (std::size_t k = 0; k < at.size(); ++k)
        moved[k] += static_cast<float>((side == 1 ? kStep : -kStep) * static_cast<double>(gradients[i][k]) / length);
      model.set(i, moved);
      losses[side] = model.loss();
    }
    model.set(i, at);
    CHECK((losses[1] - losses[0]) / (2 * kStep) == doctest::Approx(length).epsilon(0.01 + 2e-4 / length));
  }
}

TEST_CASE("the head in chunks gives the loss and gradients of one chunk") {
  for (TransformerSettings settings : {gpt2(), llama()}) {
    SmallModel whole(settings, kSequences, kLength);
    settings.memory.head_chunk = 7;  // the last one is short
    SmallModel chunked(settings, kSequences, kLength);
    for (SmallModel* model : {&whole, &chunked}) shrink(*model);
    CHECK(chunked.transformer().head_chunk() == 7);
    Gradients expected, gradients;
    const double loss = whole.gradient(expected);
    CHECK(std::abs(chunked.gradient(gradients) - loss) <= 2e-6);
    CHECK(relative_difference(gradients, expected) <= 1e-6);
    const std::vector<float> a = whole.hidden_gradient(), b = chunked.hidden_gradient();
    REQUIRE(a.size() == static_cast<std::size_t>(kSequences * kLength * 32));
    float largest = 0, apart = 0;
    for (std::size_t i = 0; i < a.size(); ++i) {
      largest = std::max(largest, std::abs(a[i]));
      apart = std::max(apart, std::abs(a[i] - b[i]));
    }
    CHECK(largest > 1e-3f);
    CHECK(apart <= 1e-8f);
  }
}

TEST_CASE("micro-batches add up to the gradients of one batch, with a short last one") {
  for (auto& [name, settings] : variants()) {
    CAPTURE(name);
    SmallModel model(settings, kSequences, kLength);
    shrink(model);
    Gradients whole, gradients;
    const double loss = model.gradient(whole);
    CHECK(std::abs(model.gradient(gradients, 2) - loss) <= 2e-6);
    // The dense library takes other kernels for other numbers of rows, which round other sums: up to 0.65e-6 with
    // OpenBLAS's kernels for AVX2 and AVX-512, 0.12e-6 with those for SSE, which compute each row alike.
    CHECK(relative_difference(gradients, whole) <= 1e-6);
    // Without that, for each tensor: two gradients of one micro-batch each, added in fp64.
    const Gradients first = model.gradient_of(0, 2), last = model.gradient_of(2, 1);
    for (std::size_t i = 0; i < gradients.size(); ++i) {
      const std::string parameter = model.parameters().specs()[i].name;
      CAPTURE(parameter);
      double difference = 0, size = 0;
      for (std::size_t k = 0; k < gradients[i].size(); ++k) {
        const double sum = static_cast<double>(first[i][k]) + static_cast<double>(last[i][k]);
        difference += std::pow(static_cast<double>(gradients[i][k]) - sum, 2);
        size += sum * sum;
      }
      // The exact gradient of the key's bias may be 0.
      CHECK(std::sqrt(difference) <= 1e-6 * (parameter.ends_with("key/bias") ? 1 : std::sqrt(size)));
    }
  }
}

TEST_CASE("a sink that takes no sums of rows gets all rows, with the same gradients") {
  for (auto& [name, settings] : variants()) {
    CAPTURE(name);
    SmallModel model(settings, kSequences, kLength);
    Gradients expected, gradients;
    model.gradient(expected);
    model.gradient(gradients, 0, true);
    CHECK(relative_difference(gradients, expected) <= 1e-6);
  }
}

TEST_CASE("a new model predicts every token with equal probability") {
  TransformerSettings settings = gpt2();
  SmallModel model(settings, kSequences, kLength);
  for (std::size_t i = 0; i < model.parameters().size(); ++i) {  // initial values, not those of SmallModel
    const model::ParameterSpec& spec = model.parameters().specs()[i];
    std::vector<float> values = model.get(i);
    for (std::size_t k = 0; k < values.size(); ++k)
      values[k] =
          static_cast<float>(spec.initial.kind == model::Initial::Kind::constant
                                 ? spec.initial.value
                                 : spec.initial.value * weft::testing::random_normal(i, static_cast<std::int64_t>(k)));
    model.set(i, values);
  }
  CHECK(model.loss() == doctest::Approx(std::log(29.0)).epsilon(0.02));
}

TEST_CASE("the tap sees input and output of every MLP") {
  SmallModel model(gpt2(), kSequences, kLength);
  std::vector<std::int64_t> layers;
  model.transformer().tap([&](std::int64_t layer, const kernels::AnyMatrix& input, const kernels::AnyMatrix& output) {
    layers.push_back(layer);
    CHECK(input.rows == kSequences * kLength);
    CHECK(output.columns == 32);
    CHECK(input.data != output.data);
  });
  Gradients gradients;
  model.gradient(gradients);
  CHECK(layers == std::vector<std::int64_t>{0, 1});
}

}  // namespace weft::language_model
