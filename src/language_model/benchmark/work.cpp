// SPDX-License-Identifier: Apache-2.0
//
// Of one rank: n tokens per step in m micro-batches of sequences of T, L layers, C = d_model, Q and K the widths of
// queries and keys, D = d_mlp, V ids, e bytes of an activation, w of a weight. A block's matrices have B = C (Q + 2 K)
// + Q C + C hidden + D C parameters, the head V C. Each datum counts once per phase, and twice where it is read and
// written. With adapters the matrices are frozen; theirs have P parameters, which pass forward, again, and twice
// backward.
#include "language_model/benchmark/work.hpp"

#include <algorithm>

#include "language_model/private_plan.hpp"
#include "language_model/trainer.hpp"

namespace weft::language_model {
namespace {

/// The sizes as floating-point numbers.
struct Sizes {
  double n, m, length, layers, width, query, key, mlp, hidden, vocabulary, trained;
  double owned;  ///< of the trained parameters: those that a rank updates
  double e, w, moments;
  Recompute recompute;
  bool adapted;
  bool slope_in_product;  ///< of a GELU: kernels/language/linear/linear.hpp

  Sizes(const Configuration& c, const Architecture& a)
      : n(number(c.rank_tokens())),
        m(number((c.rank_tokens() + c.micro_tokens() - 1) / c.micro_tokens())),
        length(number(c.data.sequence)),
        layers(number(a.model.layers)),
        width(number(a.model.d_model)),
        query(number(a.query_width())),
        key(number(a.key_width())),
        mlp(number(a.model.d_mlp)),
        hidden(number(a.hidden_width())),
        vocabulary(number(a.vocabulary)),
        trained(number(training::trained_elements_of(parameter_specs(a)))),
        owned(trained / number(c.parallel.data)),
        e(number(kernels::bytes_of(activation_type(c)))),
        w(number(training::weight_bytes(c.optimizer.state, 1, 1))),
        moments(number(training::moment_bytes(c.optimizer.state, 1, a.model.d_model, a.model.d_model)) / width),
        recompute(c.memory.recompute),
        adapted(a.lora.rank > 0),
        slope_in_product(device::planned_backend(device_settings(c)) == kernels::Backend::cuda &&
                         activation_type(c) == kernels::Scalar::bf16 && a.model.mlp == kernels::MlpActivation::gelu) {}

  static double number(std::int64_t value) { return static_cast<double>(value); }
  double projection() const { return query + 2 * key; }
  double down() const { return mlp * width; }
  double block() const { return width * (projection() + query + hidden) + down(); }
  /// Of a block whose rows are formed once more: the inputs of its last product, unless they are kept, and the
  /// gradients of the inputs of all but the first one (Transformer::repeat_block).
  double block_again() const {
    const double forward = recompute == Recompute::none ? width * hidden : block() - down();
    return forward + block() - width * projection();
  }
  double head() const { return vocabulary * width; }
  double matrices() const { return layers * block() + head(); }
  /// Inputs and outputs of the products of a block, in columns.
  double block_columns() const { return 4 * width + projection() + query + hidden + mlp; }
  double columns() const { return layers * block_columns() + width + vocabulary; }
  /// Blocks whose forward pass is computed again for this policy or a stronger one. The last one is still there.
  double again(Recompute policy) const { return recompute >= policy ? layers - 1 : 0; }
};

/// Of a private step: what replaces the weight gradients.
training::Work clipping_work(std::string_view phase, const Sizes& s, const privacy::Settings& settings,
                             const Configuration& configuration, const Architecture& architecture) {
  if (phase == "noise") return {8 * s.owned, 0};
  const bool norms = phase == "norms of records";
  if (!norms && phase != "clipped sums") return {};
  const privacy::ClippingShape shape = clipping_shape(configuration, architecture);
  const std::vector<training::ParameterSpec> specs = parameter_specs(architecture);
  const std::vector<privacy::Mode> modes = privacy::unit_modes(settings, unit_names(architecture));
  const double micro_batches = s.n / s.length / static_cast<double>(shape.examples.examples),
               rows = s.n * s.e * s.columns(), products = 2 * s.n * s.matrices();
  training::Work work{norms ? rows : s.m * 8 * s.matrices(), 0};
  for (std::size_t unit = 0; unit < modes.size(); ++unit) {
    const privacy::ProductWork of_unit = privacy::product_work(settings, specs, shape, shape.units[unit]);
    const double operations = micro_batches * of_unit.operations;
    const bool stores = modes[unit] == privacy::Mode::materialise;
    if (stores)
      work.bytes += 2 * micro_batches * of_unit.stored_elements;
    else if (!norms)
      work.bytes += rows * operations / products;
    if (norms)
      work.flops += stores ? operations : micro_batches * (of_unit.direct + of_unit.gram);
    else
      work.flops += stores ? 0 : operations;
  }
  return work;
}

/// Of a private step: blocks, and the head (0 or 1), whose rows are formed once more.
struct Repeated {
  double blocks = 0, head = 0;
};
Repeated repeated_of(const privacy::Settings& settings, const Architecture& architecture) {
  const std::vector<privacy::Mode> modes = privacy::unit_modes(settings, unit_names(architecture));
  const double head = modes.back() == privacy::Mode::recompute ? 1 : 0;
  return {static_cast<double>(std::count(modes.begin(), modes.end(), privacy::Mode::recompute)) - head, head};
}

/// Of a rank that has the whole model.
training::Work undivided_work_of(std::string_view phase, const Configuration& configuration,
                                 const Architecture& architecture) {
  Sizes s(configuration, architecture);
  Repeated repeated;
  if (configuration.privacy.enabled && configuration.privacy.algorithm != privacy::Algorithm::naive) {
    const privacy::Settings settings = clipping_settings(configuration, architecture, grid_shape(configuration),
                                                         device::planned_backend(device_settings(configuration)));
    if (phase == "weight gradients") return {};
    if (const training::Work work = clipping_work(phase, s, settings, configuration, architecture); work.bytes > 0)
      return work;
    repeated = repeated_of(settings, architecture);
    // Forward and backward pass twice.
    if (settings.mode == privacy::Mode::two_pass && phase != "update" && phase != "check") s.m *= 2, s.n *= 2;
  }
  if (phase == "tokens") return {s.n * 12, 0};
  if (phase == "embedding") return {s.n * s.width * (s.w + 2 * s.e + 2 * 4), 0};
  if (phase == "products") {
    // Outputs, input gradients, and outputs computed again (all of a block but the last product).
    const double again = s.again(Recompute::block), sum = 2 * s.matrices() + again * (s.block() - s.down()) +
                                                          repeated.head * s.head() + repeated.blocks * s.block_again();
    const double slopes = s.slope_in_product ? s.layers * s.hidden : 0;
    // In 8 bits: inputs are read, coded and read as codes; weights are coded once and read as codes.
    const double inputs = s.layers * (2 * s.width + s.query + s.mlp) + again * (2 * s.width + s.query),
                 coded = !configuration.fp8_forward
                             ? 0
                             : 2 * s.n * inputs + s.layers * s.block() * (s.w + 1) -
                                   s.m * (s.w - 1) * (s.layers * s.block() + again * (s.block() - s.down()));
    return {s.m * sum * s.w +
                s.n * s.e *
                    (2 * s.columns() + (again + 2 * repeated.blocks) * s.block_columns() +
                     repeated.head * (s.width + s.vocabulary) + slopes) +
                coded,
            2 * s.n * sum};
  }
  if (phase == "adapters" && s.adapted)
    return {4 * s.m * s.trained * s.w + s.n * s.e * 3 * s.layers * s.block_columns(), 2 * s.n * 3.5 * s.trained};
  if (phase == "weight gradients" && !s.adapted)
    return {s.m * 8 * s.matrices() + s.n * s.e * s.columns(), 2 * s.n * s.matrices()};
  if (phase == "attention") {
    // Causal: 2 T Q operations per token forward, 2.5 times as many backward.
    const double forward = s.again(Recompute::block) + (s.recompute == Recompute::none ? 0 : repeated.blocks),
                 passes = 3.5 * s.layers + 2.5 * repeated.blocks + forward;
    return {s.n * s.e * (s.projection() + s.query) * (3 * s.layers + 2 * repeated.blocks + forward),
            2 * s.n * s.length * s.query * passes};
  }
  if (phase == "norms") {
    // Forward with the sum of the residual stream: two read, two written; backward the same. Computed again: one and
    // one.
    const double norms = 2 * s.layers + 1;
    return {s.n * s.e * s.width * (8 * norms + 4 * s.again(Recompute::norm) + 4 * repeated.blocks), 0};
  }
  if (phase == "activation") {
    const double backward = s.slope_in_product ? 0 : (2 * s.hidden + s.mlp) * s.layers;
    return {s.n * s.e *
                ((s.hidden + s.mlp) * (s.layers + s.again(Recompute::activation) + repeated.blocks) +
                 backward * (1 + repeated.blocks / s.layers)),
            0};
  }
  if (phase == "loss") return {2 * s.n * s.e * s.vocabulary * (1 + repeated.head), 0};
  if (phase == "check") return {4 * s.owned, 0};
  if (phase == "update") return {s.owned * (4 + 2 * (s.w + s.moments)), 0};
  return {};
}

}  // namespace

training::Work work_of(std::string_view phase, const Configuration& configuration, const Architecture& architecture) {
  training::Work work = undivided_work_of(phase, configuration, architecture);
  // Ranks of the tensor axis divide the matrices and heads; each has all rows of the residual stream.
  if (phase != "tokens" && phase != "embedding" && phase != "norms") {
    const auto ranks = static_cast<double>(configuration.parallel.tensor);
    work.bytes /= ranks;
    work.flops /= ranks;
  }
  return work;
}

training::PhaseBytes phase_bytes(const Configuration& configuration, const Architecture& architecture) {
  training::PhaseBytes all;
  for (const char* phase : {"tokens", "embedding", "norms", "products", "attention", "activation", "loss", "adapters",
                            "weight gradients", "norms of records", "clipped sums", "noise", "check", "update"})
    if (const double bytes = work_of(phase, configuration, architecture).bytes; bytes > 0)
      all.emplace_back(phase, bytes);
  return all;
}

training::ModelFlops model_flops(const Architecture& architecture, std::int64_t length) {
  const double causal = flops_per_token(architecture, length);
  const double attention =
      6.0 * static_cast<double>(architecture.model.layers) * static_cast<double>(length * architecture.query_width());
  return {.causal = causal, .full = causal + attention};
}

}  // namespace weft::language_model
