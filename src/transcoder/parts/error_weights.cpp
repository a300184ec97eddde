// SPDX-License-Identifier: Apache-2.0
#include "transcoder/parts/error_weights.hpp"

#include <vector>

#include "kernels/transcoder/loss/loss.hpp"

namespace weft::transcoder {
namespace {

std::int64_t moment_bytes_of_rank(const Shape& shape) {
  return 2 * shape.width() * static_cast<std::int64_t>(sizeof(double));
}

}  // namespace

ErrorWeights::Buffers::Buffers(const Configuration& configuration, const Shape& shape, const parallel::GridShape& grid,
                               model::StepArena& arena) {
  arena.purpose("backward pass");
  weight = arena.take<float>(shape.width());
  if (configuration.transcoder.error == ErrorForm::unexplained)
    moments = arena.take<double>(grid.ranks() * 2 * shape.width());
}

ErrorWeights::ErrorWeights(PartContext& context)
    : form_(context.configuration.transcoder.error),
      forward_(context.forward),
      normalisation_(context.normalisation),
      targets_(context.targets),
      world_(context.world),
      execution_(context.execution),
      buffers_(context.configuration, context.model.shape(), context.grid.shape(), context.arena) {
  if (form_ == ErrorForm::raw) kernels::square(execution_, normalisation_.target_spread.array(), buffers_.weight);
}

void ErrorWeights::begin(ForwardRequest& request) {
  request.error_weights = buffers_.weight;
  if (form_ != ErrorForm::unexplained) return;
  const std::int64_t width = forward_.shape().width(), of_rank = 2 * width;
  const kernels::Array<double> own{buffers_.moments.data + world_.rank() * of_rank, of_rank};
  kernels::target_moments(execution_,
                          {targets_.data, kernels::Scalar::fp32, forward_.layout().own.size(), width, width},
                          normalisation_.centre.array(), own);
  const std::vector<std::int64_t> bytes(static_cast<std::size_t>(world_.size()),
                                        of_rank * static_cast<std::int64_t>(sizeof(double)));
  world_.all_gather(buffers_.moments.data, bytes, "moments of targets");
  kernels::unexplained_weights(execution_, buffers_.moments, world_.size(), forward_.layout().total,
                               forward_.shape().d_model, buffers_.weight);
}

std::int64_t ErrorWeights::largest_message(const Configuration& configuration, const Shape& shape,
                                           std::int64_t n_ranks) {
  return configuration.transcoder.error == ErrorForm::unexplained ? n_ranks * moment_bytes_of_rank(shape) : 0;
}

}  // namespace weft::transcoder
