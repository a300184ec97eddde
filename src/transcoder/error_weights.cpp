// SPDX-License-Identifier: Apache-2.0
#include "transcoder/error_weights.hpp"

#include <vector>

#include "kernels/transcoder/loss/loss.hpp"

namespace weft::transcoder {
namespace {

std::int64_t moment_bytes_of_rank(const Shape& shape) {
  return 2 * shape.width() * static_cast<std::int64_t>(sizeof(double));
}

}  // namespace

ErrorWeights::Buffers::Buffers(const Configuration& configuration, const Shape& shape, const parallel::GridShape& grid,
                               training::StepArena& arena) {
  const ErrorForm form = configuration.transcoder.error;
  if (form == ErrorForm::normalised) return;
  arena.purpose("backward pass");
  weight = arena.take<float>(shape.width());
  if (form == ErrorForm::unexplained) moments = arena.take<double>(grid.ranks() * 2 * shape.width());
}

ErrorWeights::ErrorWeights(const Configuration& configuration, const Shape& shape,
                           const NormalisationOnDevice& normalisation, const parallel::GridShape& grid,
                           parallel::DeviceCommunicator& world, const kernels::Execution& execution,
                           training::StepArena& arena)
    : form_(configuration.transcoder.error),
      d_model_(shape.d_model),
      normalisation_(normalisation),
      world_(world),
      execution_(execution),
      buffers_(configuration, shape, grid, arena) {
  if (form_ == ErrorForm::raw) kernels::square(execution, normalisation.target_spread.array(), buffers_.weight);
}

void ErrorWeights::form(kernels::AnyMatrix targets, std::int64_t n_tokens) {
  if (form_ != ErrorForm::unexplained) return;
  const std::int64_t of_rank = 2 * buffers_.weight.size;
  const kernels::Array<double> own{buffers_.moments.data + world_.rank() * of_rank, of_rank};
  kernels::target_moments(execution_, targets, normalisation_.centre.array(), own);
  const std::vector<std::int64_t> bytes(static_cast<std::size_t>(world_.size()),
                                        of_rank * static_cast<std::int64_t>(sizeof(double)));
  world_.all_gather(buffers_.moments.data, bytes, "moments of targets");
  kernels::unexplained_weights(execution_, buffers_.moments, world_.size(), n_tokens, d_model_, buffers_.weight);
}

std::int64_t ErrorWeights::largest_message(const Configuration& configuration, const Shape& shape,
                                           std::int64_t n_ranks) {
  return configuration.transcoder.error == ErrorForm::unexplained ? n_ranks * moment_bytes_of_rank(shape) : 0;
}

}  // namespace weft::transcoder
