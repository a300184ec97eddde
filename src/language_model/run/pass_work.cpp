// SPDX-License-Identifier: Apache-2.0
//
// The work of one rank in a step. It has n tokens in m micro-batches of sequences of T; C = d_model, V ids, e bytes of
// an activation, w of a weight (of frozen ones: BaseBytes). Matrices and rows of the blocks are those of the products
// that their sublayers declare, and what sublayers compute besides is in Sublayer::work; the head has V C parameters.
// Each datum counts once per phase, and twice where it is read and written. With adapters the matrices are frozen;
// theirs have P parameters, which pass forward, again, and twice backward.
#include "language_model/run/pass_work.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <iterator>

#include "kernels/optimize/packed_weights.hpp"
#include "language_model/blocks/block_list.hpp"
#include "language_model/run/private_plan.hpp"
#include "language_model/step/clipping_shape.hpp"
#include "privacy/correlated_noise.hpp"

namespace weft::language_model {
namespace {

double number(std::int64_t value) { return static_cast<double>(value); }

/// Sums over products.
struct ProductSums {
  double elements = 0;                             ///< of the matrices
  double multiplied = 0, inputs = 0, outputs = 0;  ///< per token, on average
  double columns() const { return inputs + outputs; }
  void add(const Product& product) {
    elements += number(product.elements());
    multiplied += product.multiplied();
    inputs += product.share * number(product.inputs);
    outputs += product.share * number(product.outputs());
  }
};

/// Bytes per weight of the model without adapters.
struct BaseBytes {
  double read;          ///< that a product or the embedding reads
  double unpacked = 0;  ///< of a packed one, before each product: codes are read, bf16 is written
  BaseBytes(const Configuration& c, const Architecture& a)
      : read(number(
            a.lora.rank > 0 && a.lora.base != LoraBase::stored ? 2 : model::weight_bytes(c.optimizer.state, 1, 1))) {
    if (const kernels::Packing packing = a.lora.packing(); packing != kernels::Packing::none)
      unpacked = 2 + (packing == kernels::Packing::nf4 ? 0.5 : 1) + 1.0 / number(kernels::kPackedColumns);
  }
};

/// The sizes as floating-point numbers.
struct Sizes {
  double n, m, length, width, vocabulary, trained;
  double owned;  ///< of the trained parameters: those that a rank updates
  double e, w, moments;
  BaseBytes base;
  Recompute recompute;
  bool adapted;
  std::int64_t last_block;
  std::vector<ResidualSublayer> sublayers;
  ProductSums blocks;  ///< products of all blocks
  /// With memory.recompute = "block": products of the blocks that are computed again, all but the last one, and those
  /// of them that are: all but the last of each block. The activations of the last block are still in memory.
  ProductSums of_recomputed, again;
  ProductSums coded;  ///< products in 8 bits
  /// Columns of their inputs and of the gradients of their outputs that are not coded as an activation forms them.
  double coded_inputs = 0, coded_outputs = 0;

  Sizes(const Configuration& c, const Architecture& a)
      : n(number(c.rank_tokens())),
        m(number((c.rank_tokens() + c.micro_tokens() - 1) / c.micro_tokens())),
        length(number(c.data.sequence)),
        width(number(a.model.d_model)),
        vocabulary(number(a.vocabulary)),
        trained(number(model::trained_elements_of(parameter_specs(a)))),
        owned(trained / number(c.parallel.data)),
        e(number(kernels::bytes_of(activation_type(c)))),
        w(number(model::weight_bytes(c.optimizer.state, 1, 1))),
        moments(number(model::moment_bytes(c.optimizer.state, 1, a.model.d_model, a.model.d_model)) / width),
        base(c, a),
        recompute(c.memory.recompute),
        adapted(a.lora.rank > 0),
        last_block(a.model.layers - 1),
        sublayers(make_sublayers(a)) {
    const std::vector<Product> products = declared_parameters(a).products;
    for (std::size_t i = 0; i < products.size(); ++i) {
      blocks.add(products[i]);
      if (c.fp8 && products[i].block() != block_name(0) && products[i].block() != block_name(last_block))
        add_coded(products[i]);
      if (recompute != Recompute::block || products[i].block() == block_name(last_block)) continue;
      of_recomputed.add(products[i]);
      if (products[i + 1].block() == products[i].block()) again.add(products[i]);
    }
  }

  void add_coded(const Product& product) {
    coded.add(product);
    const bool mlp = product.prefix.ends_with("mlp/");
    coded_inputs += mlp && product.writes_residual ? 0 : number(product.inputs);
    coded_outputs += mlp && !product.writes_residual ? 0 : number(product.outputs());
  }
  double head() const { return vocabulary * width; }
  double matrices() const { return blocks.elements + head(); }
  double multiplied() const { return blocks.multiplied + head(); }
  double columns() const { return blocks.columns() + width + vocabulary; }
  /// Number of sublayers of which something is computed again with this value of memory.recompute or one that keeps
  /// less.
  double repeated(Recompute least) const {
    if (recompute < least) return 0;
    return number(std::count_if(sublayers.begin(), sublayers.end(),
                                [&](const ResidualSublayer& each) { return each.block() < last_block; }));
  }
};

/// Work that replaces the weight gradients in a private step.
run::Work clipping_work(std::string_view phase, const Sizes& s, const privacy::Settings& settings,
                        const Configuration& configuration, const Architecture& architecture) {
  if (phase == "noise") return {privacy::CorrelatedNoise::traffic(settings.bands) * s.owned, 0};
  const bool norms = phase == "norms of records";
  if (!norms && phase != "clipped sums") return {};
  const privacy::ClippingShape shape = clipping_shape(configuration, architecture);
  const privacy::ProductWork products = privacy::product_work(settings, parameter_specs(architecture), shape);
  const double micro_batches = s.n / s.length / static_cast<double>(shape.examples.examples),
               rows = s.n * s.e * s.columns(), weights = s.m * 8 * s.matrices(),
               operations = micro_batches * products.operations, stored = 2 * micro_batches * products.stored_elements;
  if (settings.mode == privacy::Mode::materialise) return {(norms ? rows : weights) + stored, norms ? operations : 0};
  if (norms) return {rows, micro_batches * (products.direct + products.gram)};
  return {weights + rows * operations / (2 * s.n * s.matrices()), operations};
}

/// The work of a phase. Of one that only one pass has, all is in `forward`.
struct PassWork {
  run::Work forward, backward;
};

run::Work operator+(const run::Work& a, const run::Work& b) { return {a.bytes + b.bytes, a.flops + b.flops}; }

/// What the sublayers compute in a phase beside their products.
PassWork sublayer_work(std::string_view phase, const Sizes& s) {
  PassWork sum;
  for (const ResidualSublayer& sublayer : s.sublayers)
    for (const SublayerWork& work : sublayer.sublayer().work(s.length)) {
      if (work.phase != phase) continue;
      sum.forward = sum.forward + work.forward;
      sum.backward = sum.backward + work.backward;
      if (s.recompute >= work.again && sublayer.block() < s.last_block) sum.backward = sum.backward + work.forward;
    }
  const auto of_tokens = [&](const run::Work& work) -> run::Work { return {s.n * s.e * work.bytes, s.n * work.flops}; };
  return {of_tokens(sum.forward), of_tokens(sum.backward)};
}

/// Work of a rank that has the whole model.
PassWork undivided_work_of(std::string_view phase, const Configuration& configuration,
                           const Architecture& architecture) {
  Sizes s(configuration, architecture);
  if (configuration.privacy.enabled && configuration.privacy.algorithm != privacy::Algorithm::naive) {
    const privacy::Settings settings = with_clipping_mode(configuration, architecture, grid_shape(configuration),
                                                          device::planned_backend(device_settings(configuration)))
                                           .privacy;
    if (phase == "weight gradients") return {};
    if (const run::Work work = clipping_work(phase, s, settings, configuration, architecture); work.bytes > 0)
      return {work, {}};
    // Forward and backward pass twice.
    if (settings.mode == privacy::Mode::two_pass && phase != "update" && phase != "check") s.m *= 2, s.n *= 2;
  }
  if (phase == "tokens") return {{s.n * 12, 0}, {}};
  if (phase == "embedding") return {{s.n * s.width * (s.base.read + s.e), 0}, {s.n * s.width * (s.e + 2 * 4), 0}};
  PassWork work = sublayer_work(phase, s);
  if (phase == "products") {
    // Outputs; then input gradients, and outputs computed again.
    const double read = s.matrices() + s.again.elements, multiplied = s.multiplied() + s.again.multiplied;
    // Operands in 8 bits have a byte per element, and so have the weights, in the forms that both passes read.
    const double coded_weights = s.m * (s.base.read - 1) * s.coded.elements;
    work.forward.bytes += s.m * (s.matrices() * s.base.read + s.blocks.elements * s.base.unpacked) +
                          s.n * (s.e * s.columns() - (s.e - 1) * s.coded.inputs) - coded_weights;
    work.forward.flops += 2 * s.n * s.multiplied();
    work.backward.bytes += s.m * (read * s.base.read + (s.blocks.elements + s.again.elements) * s.base.unpacked) +
                           s.n * (s.e * (s.columns() + s.of_recomputed.columns()) - (s.e - 1) * s.coded.outputs) -
                           coded_weights;
    work.backward.flops += 2 * s.n * multiplied;
  }
  if (work.forward.bytes > 0) return work;
  if (phase == "adapters" && s.adapted) {
    const double weights = s.m * s.trained * s.w, rows = s.n * s.e * s.blocks.columns();
    return {{weights + rows, 2 * s.n * s.trained}, {3 * weights + 2 * rows, 2 * s.n * 2.5 * s.trained}};
  }
  if (phase == "weight gradients" && !s.adapted)
    return {
        {s.m * 8 * s.matrices() + s.n * (s.e * s.columns() - (s.e - 1) * s.coded.columns()), 2 * s.n * s.multiplied()},
        {}};
  if (phase == "codes") {
    // Rows are read once and written in two forms; weights are read twice, for their largest value and to be coded.
    const double formed = s.e + 2, weights = (2 * s.base.read + 2) * s.coded.elements;
    return {{s.n * formed * s.coded_inputs + weights, 0}, {s.n * formed * s.coded_outputs, 0}};
  }
  if (phase == "norms") {
    // Forward with the sum of the residual stream: two read, two written; backward the same. Computed again: one and
    // one.
    const double norms = number(std::ssize(s.sublayers)) + 1, rows = s.n * s.e * s.width;
    return {{rows * 4 * norms, 0}, {rows * (4 * norms + 2 * s.repeated(Recompute::norm)), 0}};
  }
  if (phase == "loss") return {{2 * s.n * s.e * s.vocabulary, 0}, {}};
  if (phase == "check") return {{4 * s.owned, 0}, {}};
  if (phase == "update") return {{s.owned * (4 + 2 * (s.w + s.moments)), 0}, {}};
  return {};
}

constexpr std::string_view kForward = ", forward", kBackward = ", backward";

constexpr const char* kOfBothPasses[] = {"embedding",  "norms", "products", "attention",
                                         "activation", "codes", "adapters"};

}  // namespace

std::vector<std::string> phases_of_both_passes() { return {std::begin(kOfBothPasses), std::end(kOfBothPasses)}; }

run::Work work_of(std::string_view phase, const Configuration& configuration, const Architecture& architecture) {
  const bool forward = phase.ends_with(kForward), backward = phase.ends_with(kBackward);
  if (forward) phase.remove_suffix(kForward.size());
  if (backward) phase.remove_suffix(kBackward.size());
  const PassWork passes = undivided_work_of(phase, configuration, architecture);
  run::Work work = forward ? passes.forward : backward ? passes.backward : passes.forward + passes.backward;
  // Ranks of the tensor axis divide the matrices and heads; each has all rows of the residual stream.
  if (phase != "tokens" && phase != "embedding" && phase != "norms") {
    const auto ranks = static_cast<double>(configuration.parallel.tensor);
    work.bytes /= ranks;
    work.flops /= ranks;
  }
  return work;
}

run::PhaseBytes phase_bytes(const Configuration& configuration, const Architecture& architecture, bool by_pass) {
  run::PhaseBytes all;
  const auto add = [&](const std::string& phase) {
    if (const double bytes = work_of(phase, configuration, architecture).bytes; bytes > 0)
      all.emplace_back(phase, bytes);
  };
  for (const char* phase :
       {"tokens", "embedding", "norms", "products", "attention", "activation", "codes", "loss", "adapters",
        "weight gradients", "norms of records", "clipped sums", "noise", "check", "update"}) {
    const bool both = std::find(std::begin(kOfBothPasses), std::end(kOfBothPasses), std::string_view(phase)) !=
                      std::end(kOfBothPasses);
    if (!by_pass || !both) {
      add(phase);
      continue;
    }
    for (const std::string_view pass : {kForward, kBackward}) add(fmt::format("{}{}", phase, pass));
  }
  return all;
}

run::Work generation_work(std::string_view phase, const Configuration& configuration,
                          const GenerationSettings& generation) {
  const Architecture& a = generation.architecture;
  const double layers = number(a.model.layers), width = number(a.model.d_model), query = number(a.query_width()),
               key = number(a.key_width()), vocabulary = number(a.vocabulary), rows = number(generation.rows),
               steps = number(generation.new_tokens), prefix = number(generation.longest_prompt - 1),
               prompts = number(generation.prompts);
  const double e = number(kernels::bytes_of(generation.type));
  const BaseBytes base(configuration, a);
  ProductSums blocks;
  for (const Product& product : declared_parameters(a).products) blocks.add(product);
  const std::vector<ResidualSublayer> sublayers = make_sublayers(a);
  // Rows through the blocks: prompts once, then one row per sequence and step.
  const double through = prompts * prefix + rows * steps,
               passes = steps + (prefix > 0 ? 1 : 0);  // that read the weights, at least
  const double head = vocabulary * width;
  if (phase == "embedding") return {through * width * (base.read + e), 0};
  if (phase == "norms") return {through * e * width * 4 * (number(std::ssize(sublayers)) + 1), 0};
  if (phase == "products")
    return {passes * blocks.elements * (base.read + base.unpacked) + steps * head * base.read +
                e * (through * blocks.columns() + rows * steps * (width + vocabulary)),
            2 * (through * blocks.multiplied + rows * steps * head)};
  if (phase == "attention") {
    // Keys and values of all positions so far: prefix + 1, …, prefix + steps.
    const double positions = steps * prefix + steps * (steps + 1) / 2;
    return {layers * e * (rows * positions * 2 * key + through * (2 * query + 2 * key)),
            layers * 2 * query * (2 * rows * positions + prompts * prefix * prefix)};
  }
  if (phase == "activation") {
    double bytes = 0;
    for (const ResidualSublayer& each : sublayers)
      for (const SublayerWork& work : each.sublayer().work(1))
        if (work.phase == phase) bytes += work.forward.bytes;
    return {through * e * bytes, 0};
  }
  if (phase == "sampling") return {rows * steps * number(a.whole_vocabulary()) * e, 0};
  return {};
}

}  // namespace weft::language_model
