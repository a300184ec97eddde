// SPDX-License-Identifier: Apache-2.0
#include "transcoder/parts/list.hpp"

#include "transcoder/parts/dead_features.hpp"
#include "transcoder/parts/error_weights.hpp"
#include "transcoder/parts/initial_biases.hpp"
#include "transcoder/parts/penalties.hpp"
#include "transcoder/parts/resampling.hpp"
#include "transcoder/parts/skip_gradient.hpp"
#include "transcoder/parts/thresholds.hpp"

namespace weft::transcoder {
namespace {

/// Tag of a class of parts. A new part is a file with a class and a line in `visit_parts`.
template <class P>
struct Kind {};

/// Calls visit(Kind<P>) for each class of parts that the input requests.
template <class Visit>
void visit_parts(const Configuration& configuration, const Shape& shape, const Visit& visit) {
  const auto one = [&]<class P>(Kind<P> kind) {
    if (P::wanted(configuration, shape)) visit(kind);
  };
  one(Kind<ErrorWeights>());
  one(Kind<InitialBias>());
  one(Kind<Penalties>());
  one(Kind<Thresholds>());  // after the penalties, whose sums over pre-activations they form
  one(Kind<SkipGradient>());
  one(Kind<DeadFeatures>());  // after the thresholds, which determine the active entries
  one(Kind<Resampling>());
}

}  // namespace

std::vector<std::unique_ptr<Part>> make_parts(PartContext context) {
  std::vector<std::unique_ptr<Part>> parts;
  visit_parts(context.configuration, context.model.shape(),
              [&]<class P>(Kind<P>) { parts.push_back(std::make_unique<P>(context)); });
  return parts;
}

void measure_parts(const Configuration& configuration, const Shape& shape, const parallel::GridShape& grid,
                   model::StepArena& arena) {
  visit_parts(configuration, shape,
              [&]<class P>(Kind<P>) { const typename P::Buffers buffers(configuration, shape, grid, arena); });
}

}  // namespace weft::transcoder
