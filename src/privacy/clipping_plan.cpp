// SPDX-License-Identifier: Apache-2.0
//
// Memory of private steps, and their description.
#include "privacy/clipping_plan.hpp"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <map>
#include <set>
#include <string>
#include <vector>

#include "kernels/privacy/clipped_sums.hpp"
#include "kernels/privacy/tiles.hpp"
#include "kernels/reduce/reduce.hpp"

namespace weft::privacy {

using model::ParameterSpec;

bool ClippingShape::is_table(std::size_t parameter) const {
  return std::find(tables.begin(), tables.end(), parameter) != tables.end();
}

std::int64_t padded_rows(const ParameterSpec& spec, std::int64_t out) {
  return spec.group.empty() ? spec.rows_in_memory(out) : out;
}

namespace {

/// Calls each(first parameter, rows of all, columns) for the matrices of products that take their gradients together.
template <class Each>
void for_each_product(std::span<const ParameterSpec> specs, const ClippingShape& shape, const Each& each) {
  for (std::size_t i = 0; i < specs.size();) {
    std::int64_t out = specs[i].rows();
    std::size_t next = i + 1;
    while (next < specs.size() && !specs[i].group.empty() && specs[next].group == specs[i].group)
      out += specs[next++].rows();
    if (specs[i].is_matrix() && !specs[i].frozen && !shape.is_table(i)) each(i, out, specs[i].columns());
    i = next;
  }
}

/// Fused kernels are for rows of 16 bits, and have tiles of one size.
kernels::ProductImplementation norm_products(const Settings& settings, const ClippingShape& shape) {
  using kernels::ProductImplementation;
  return settings.tile > 0 || shape.type == kernels::Scalar::fp32 ? ProductImplementation::library : settings.products;
}

std::int64_t norm_tile(const Settings& settings, const ClippingShape& shape) {
  if (norm_products(settings, shape) == kernels::ProductImplementation::fused) return kernels::kTileSide;
  return settings.tile > 0 ? settings.tile : kernels::automatic_tile(shape.examples.most_rows);
}

}  // namespace

kernels::NormMethod method_of(const Settings& settings, std::int64_t in, std::int64_t out, const ClippingShape& shape) {
  using kernels::NormAlgorithm;
  const Algorithm algorithm = settings.algorithm;
  const kernels::ProductImplementation products = norm_products(settings, shape);
  if (algorithm == Algorithm::input_length) return {NormAlgorithm::direct, settings.tile, products};
  if (algorithm == Algorithm::width) return {NormAlgorithm::gram, settings.tile, products};
  // The rate of the fused Gram kernel relative to the direct one, measured on an H200 (docs/private_performance.md):
  // 0.73 to 0.85 at widths from 768 x 2304 to 2048 x 16384.
  const double rate = products == kernels::ProductImplementation::fused ? 0.75 : 1;
  return {kernels::choose_algorithm(in, out, shape.examples.most_rows, norm_tile(settings, shape), rate), settings.tile,
          products};
}

namespace {

std::int64_t workspace_bytes(const Settings& settings, std::span<const ParameterSpec> specs,
                             const ClippingShape& shape) {
  const kernels::ExampleSizes& sizes = shape.examples;
  std::int64_t bytes = 0, vectors = 0;
  const auto need = [&](std::int64_t more) { bytes = std::max(bytes, more); };
  for_each_product(specs, shape, [&](std::size_t parameter, std::int64_t held, std::int64_t in) {
    const kernels::NormMethod method = method_of(settings, in, held, shape);
    for (const std::int64_t out : {held, padded_rows(specs[parameter], held)}) {
      need(kernels::product_norms_workspace(shape.type, shape.type, in, out, sizes, method));
      need(kernels::clipped_product_workspace(shape.type, shape.type, in, out, sizes, settings.products));
      if (settings.mode != Mode::materialise) continue;
      need(kernels::form_examples_workspace(shape.type, shape.type, in, out, sizes));
      need(kernels::stored_norms_workspace(sizes.examples, in * out));
      need(kernels::lookup_to_examples_workspace(sizes));
    }
    if (shape.tied == parameter) need(kernels::tied_rows_workspace(shape.type, shape.type, in, sizes));
  });
  for (const ParameterSpec& spec : specs) {
    if (spec.frozen) continue;
    if (!spec.is_matrix()) {
      vectors += spec.elements();
      continue;
    }
    need(kernels::clipped_lookup_workspace(spec.columns(), sizes));
    need(kernels::lookup_norms_workspace(spec.columns(), sizes));
  }
  need(kernels::stored_norms_workspace(sizes.examples, vectors));
  need(kernels::tied_norms_workspace(sizes));
  return bytes;
}

const char* name_of(kernels::NormAlgorithm algorithm) {
  return algorithm == kernels::NormAlgorithm::direct ? "input_length" : "width";
}

/// Elements of vectors of which each rank of the tensor axis has a part of the gradient.
std::int64_t partial_elements(std::span<const ParameterSpec> specs, const ClippingShape& shape) {
  std::int64_t elements = 0;
  for (const ParameterSpec& spec : specs)
    if (spec.partial_gradient && !spec.frozen && shape.tensor_ranks > 1) elements += spec.elements();
  return elements;
}

std::int64_t largest_rows(std::span<const ParameterSpec> specs) {
  std::int64_t rows = 0;
  for (const ParameterSpec& spec : specs)
    if (!spec.frozen) rows = std::max(rows, spec.is_matrix() ? spec.rows() : 1);
  return rows;
}

}  // namespace

ClipParts::ClipParts(std::span<const ParameterSpec> specs, Scheme scheme) {
  std::map<std::string, std::size_t> parts;
  for (std::size_t i = 0; i < specs.size(); ++i) {
    // Parameters that take their gradients together are one part.
    const bool together = i > 0 && !specs[i].group.empty() && specs[i].group == specs[i - 1].group;
    const std::string& name = specs[i].name;
    if (specs[i].frozen) {
      this->part.push_back(parts.size());  // that of the next trained one
      continue;
    }
    std::string part;
    if (scheme == Scheme::group) part = name.substr(0, name.find('/'));
    if (scheme == Scheme::per_layer) part = name;
    this->part.push_back(together ? this->part.back() : parts.emplace(part, parts.size()).first->second);
  }
  count = parts.size();
  for (std::size_t& of_frozen : this->part) of_frozen = std::min(of_frozen, count - 1);
}

std::string to_text(const Settings& settings, std::span<const ParameterSpec> specs, const ClippingShape& shape) {
  if (settings.algorithm == Algorithm::naive) return "naive, the gradient of each record";
  std::set<std::string> products;
  for_each_product(specs, shape, [&](std::size_t, std::int64_t out, std::int64_t in) {
    const kernels::NormMethod method = method_of(settings, in, out, shape);
    products.insert(fmt::format("{} x {} {}", out, in, name_of(method.algorithm)));
  });
  return fmt::format("{}", fmt::join(products, ", "));
}

ProductWork product_work(const Settings& settings, std::span<const ParameterSpec> specs, const ClippingShape& shape) {
  ProductWork work;
  const auto examples = static_cast<double>(shape.examples.examples);
  for_each_product(specs, shape, [&](std::size_t, std::int64_t out, std::int64_t in) {
    const kernels::NormAlgorithm algorithm = method_of(settings, in, out, shape).algorithm;
    const double elements = static_cast<double>(in) * static_cast<double>(out);
    (algorithm == kernels::NormAlgorithm::direct ? work.direct : work.gram) +=
        examples * kernels::norm_cost(algorithm, in, out, shape.examples.most_rows, norm_tile(settings, shape));
    work.operations += 2 * static_cast<double>(shape.examples.rows) * elements;
    work.stored_elements += examples * elements;
  });
  return work;
}

std::int64_t gathered_bytes(const Settings& settings, std::span<const ParameterSpec> specs,
                            const ClippingShape& shape) {
  const auto parts = static_cast<std::int64_t>(ClipParts(specs, settings.scheme).count);
  return std::max({8 * parts * shape.examples.examples, 8 * static_cast<std::int64_t>(specs.size()),
                   4 * partial_elements(specs, shape) * shape.examples.examples});
}

// --- Memory ---------------------------------------------------------------------------------------------------------

ClippingBuffers::ClippingBuffers(const Settings& settings, std::span<const ParameterSpec> specs,
                                 const ClippingShape& shape, model::StepArena& arena) {
  arena.purpose("clipping");
  const std::int64_t examples = shape.examples.examples, rows = shape.examples.rows;
  bound = arena.take<double>(2);
  if (settings.algorithm == Algorithm::naive) {
    squares = arena.take<double>(largest_rows(specs));
    totals =
        arena.take<double>(static_cast<std::int64_t>(specs.size()) + kernels::total_workspace(largest_rows(specs)));
    return;
  }
  const auto parts = static_cast<std::int64_t>(ClipParts(specs, settings.scheme).count);
  norms = arena.take<double>((parts + 1) * examples);
  factors = arena.take<float>(parts * examples);
  std::int64_t in_vectors = 0, in_products = 0;
  for (const ParameterSpec& spec : specs)
    if (!spec.is_matrix() && !spec.frozen) in_vectors += spec.elements();
  for_each_product(specs, shape, [&](std::size_t parameter, std::int64_t out, std::int64_t in) {
    // `out` is that of all matrices which take their gradients together.
    if (settings.mode == Mode::materialise) in_products += padded_rows(specs[parameter], out) * in;
  });
  vectors = arena.take<float>(examples * in_vectors);
  partial = arena.take<float>(examples * partial_elements(specs, shape));
  if (shape.tied && settings.mode != Mode::materialise)
    tied_rows = arena.take<float>(rows * specs[*shape.tied].columns());
  stored = arena.take<kernels::bf16>(examples * in_products);
  const bool keeps = settings.mode == Mode::book_keeping || settings.release == Release::end;
  // The head comes in chunks of whole examples, each with its own copies.
  const auto copies = 2 * (static_cast<std::int64_t>(specs.size()) + examples);
  if (keeps && shape.kept_columns > 0)
    kept = arena.take<std::byte>(shape.kept_columns * rows * kernels::bytes_of(shape.type) + kKeptAlignment * copies);
  workspace = arena.take<std::byte>(workspace_bytes(settings, specs, shape));
}

std::int64_t own_bytes(const Settings& settings, std::span<const ParameterSpec> specs, const parallel::GridShape& grid,
                       const ClippingShape& shape) {
  return settings.algorithm == Algorithm::naive
             ? model::AccumulatingSink::bytes(specs, grid, grid.ranks() - 1, shape.examples.rows * shape.sum_rows)
             : 0;
}

}  // namespace weft::privacy
