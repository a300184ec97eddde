// SPDX-License-Identifier: Apache-2.0
#include "transcoder/parts/dead_features.hpp"

#include <algorithm>

#include "base/error.hpp"
#include "device/memory.hpp"
#include "kernels/convert/convert_rows.hpp"
#include "kernels/kokkos_runtime.hpp"
#include "kernels/metrics/metric_sums.hpp"
#include "kernels/reduce/reduce.hpp"
#include "kernels/transcoder/loss/auxiliary_loss.hpp"
#include "kernels/transcoder/sparse/restrict.hpp"
#include "transcoder/selection/drivers.hpp"

namespace weft::transcoder {
namespace {

SelectionSpec spec_of(const Configuration& configuration, const Shape& shape, const parallel::GridShape& grid,
                      kernels::Backend backend = kernels::Backend::portable) {
  return dead_feature_selection(selection_spec(configuration, shape, grid, configuration.data.batch_tokens, backend));
}

}  // namespace

std::int64_t DeadFeatures::capacity(const Configuration& configuration, const Shape& shape,
                                    const parallel::GridShape& grid) {
  if (!wanted(configuration, shape)) return 0;
  const std::int64_t entries =
      DataAxis::capacity(configuration, shape, grid) + owned_list_capacity(spec_of(configuration, shape, grid));
  if (entries >= std::int64_t{1} << 32)
    throw collective_error(ExitCode::usage,
                           "active and dead features together need room for {} entries on a rank (at most 2^32 are "
                           "possible); take a smaller transcoder.auxk_features, a smaller batch or more ranks",
                           entries);
  return entries;
}

DeadFeatures::Buffers::Buffers(const Configuration& configuration, const Shape& shape, const parallel::GridShape& grid,
                               model::StepArena& arena)
    : selection(spec_of(configuration, shape, grid, arena.backend()), arena.purpose("dead features")) {
  const FeatureAxisSizes axis(configuration, shape, grid, configuration.data.batch_tokens);
  const std::int64_t tokens = configuration.data.batch_tokens, groups = grid.size(parallel::kDataAxis),
                     n_keys = shape.n_layers * largest_owned(shape, grid),
                     entries = capacity(configuration, shape, grid);
  bias = arena.take<float>(shape.n_layers * selection.sizes.max_features);
  own_rows = RowGather::Buffers(axis, arena);
  squares = arena.take<double>(axis.own);
  workspace = arena.take<double>(kernels::total_workspace(axis.own));
  value = arena.take<double>(1);
  if (groups > 1) {
    const std::int64_t listed = selection.sizes.capacity,
                       owned = owned_list_capacity(spec_of(configuration, shape, grid));
    group_offsets = arena.take<std::int64_t>(groups * (selection.sizes.max_tokens + 1));
    group_key = arena.take<std::uint32_t>(groups * listed);
    group_value = arena.take<float>(groups * listed);
    owned_offsets = arena.take<std::int64_t>(tokens + 1);
    owned_key = arena.take<std::uint32_t>(owned);
    owned_value = arena.take<float>(owned);
  }
  row_offsets = arena.take<std::int64_t>(2 * tokens + 1);
  key = arena.take<std::uint32_t>(entries);
  value_of_entry = arena.take<float>(entries);
  hit_offsets = arena.take<std::int64_t>(n_keys + 1);
  hit_token = arena.take<std::uint32_t>(entries);
  hit_position = arena.take<std::uint32_t>(entries);
  transpose_workspace = arena.take<std::byte>(kernels::transpose_workspace(arena.backend(), n_keys, entries));
}

DeadFeatures::DeadFeatures(PartContext& context)
    : configuration_(context.configuration),
      model_(context.model),
      forward_(context.forward),
      data_axis_(context.data_axis),
      gradient_rows_(context.gradient_rows),
      timers_(context.timers),
      execution_(context.execution),
      buffers_(configuration_, model_.shape(), context.grid.shape(), context.arena),
      selector_(make_selector(spec_of(configuration_, model_.shape(), context.grid.shape(), execution_.backend),
                              buffers_.selection, context.grid, execution_)),
      gather_(forward_.axis(), "gradient rows of dead features", buffers_.own_rows) {
  selector_->mark(&forward_.idle());
  selector_->report_faults_to(&forward_.flags()->model_fault);
  hits_ = {{buffers_.hit_offsets.data, model_.shape().n_layers * model_.owned().size() + 1},
           buffers_.hit_token,
           buffers_.hit_position};
  device::zero(execution_, hits_.offsets);  // also if this rank owns no feature
  device::zero(execution_, buffers_.value);
  context.selectors.push_back(selector_.get());
  context.values.push_back({&TrainingMetrics::auxiliary_loss, [this] { return value(); }});
}

void DeadFeatures::begin(ForwardRequest& request) {
  timers_.phase("dead features");
  const kernels::AnyMatrix all = model_.encoder_biases();
  const std::int64_t n = all.columns, owned = model_.owned().size(), begin = model_.owned().begin;
  const kernels::Matrix<float> masked{buffers_.bias.data, all.rows, n, n};
  kernels::mask_alive(execution_, {static_cast<const float*>(all.data) + begin, all.rows, owned, all.stride},
                      model_.clocks(), configuration_.transcoder.dead_window,
                      {masked.data + begin, all.rows, owned, masked.stride});
  data_axis_.gather_vectors({masked.data, kernels::Scalar::fp32, all.rows, n, n});
  bias_.clear();
  for (std::int64_t s = 0; s < all.rows; ++s) bias_.push_back({masked.row(s), n});
  selector_->follow(forward_.layout().total, bias_);
  request.follower = selector_.get();
}

void DeadFeatures::on_loss() {
  timers_.phase("dead features");
  selector_->finish();
  const parallel::Range group = forward_.layout().group;
  const kernels::AnyMatrix rows = gradient_rows_.of_dead().rows_from(group.begin, group.size());
  const float factor = gradient_rows_.factor(), coefficient = static_cast<float>(configuration_.transcoder.auxk);
  const std::int64_t own = forward_.layout().own.size();
  device::zero(execution_, buffers_.squares);
  forward_.decode(selector_->activations(), [&](const Forward::OwnPart& part) {
    kernels::auxiliary_rows(execution_, part.partial, part.n_parts, gradient_rows_.own(part), factor, coefficient,
                            gather_.own(forward_.layout(), rows, part.block).rows_from(part.begin, part.count),
                            {buffers_.squares.data + part.begin, part.count});
  });
  kernels::total(execution_, kernels::Array<const double>{buffers_.squares.data, own}, buffers_.workspace,
                 buffers_.value.data);
  for (std::size_t block = forward_.axis().blocks.size(); block-- > 0;) gather_.send(forward_.layout(), rows, block);
  const double largest = kLargestResidual * static_cast<double>(factor) * configuration_.transcoder.auxk;
  kernels::flag_above(execution_, {buffers_.value.data, 1}, largest * largest, forward_.not_finite());
}

void DeadFeatures::before_backward(BackwardPass& pass) {
  timers_.phase("dead features");
  join(pass.selected.activations);
  const kernels::AnyMatrix x = forward_.all_inputs();
  kernels::copy_rows(execution_, x, x.rows_from(x.rows, x.rows));
  timers_.phase("exchange");
  gather_.wait(0, execution_);
  gradient_rows_.await_all();
  data_axis_.gather_rows(gradient_rows_.of_dead());
  pass.late = {};
  const auto twice = [](kernels::AnyMatrix rows) { return rows.rows_from(0, 2 * rows.rows); };
  pass.all = {joint_, hits_};
  pass.inputs = twice(x);
  pass.gradient_rows = twice(gradient_rows_.all());
}

/// Returns the lists of the owned features over all tokens.
kernels::SparseActivations DeadFeatures::of_owned() {
  const kernels::SparseActivations& own = selector_->activations();
  if (!data_axis_.active()) return own;
  const std::int64_t n_tokens = forward_.layout().total;
  const kernels::SparseActivations out{
      n_tokens, own.n_layers, model_.owned().size(), buffers_.owned_offsets, buffers_.owned_key, buffers_.owned_value};
  data_axis_.gather_lists(own, n_tokens, {buffers_.group_offsets, buffers_.group_key, buffers_.group_value}, out);
  return out;
}

void DeadFeatures::join(const kernels::SparseActivations& of_active) {
  const std::int64_t owned = model_.owned().size();
  joint_ = {2 * of_active.n_tokens, of_active.n_layers, owned,
            buffers_.row_offsets,   buffers_.key,       buffers_.value_of_entry};
  const std::vector<kernels::SparseActivations> both{of_active, of_owned()};
  if (owned == 0) return;
  kernels::restrict_features(execution_, both, 0, joint_, {});
  kernels::transpose(execution_, joint_, hits_, buffers_.transpose_workspace);
}

/// Returns the auxiliary loss of the last step, with its coefficient, over this rank's own tokens.
double DeadFeatures::value() const {
  return device::read(execution_, buffers_.value.data) /
         (2 * static_cast<double>(gradient_rows_.factor()) * static_cast<double>(configuration_.transcoder.auxk));
}

}  // namespace weft::transcoder
