// SPDX-License-Identifier: Apache-2.0
#include "transcoder/forward/gradient_rows.hpp"

namespace weft::transcoder {

GradientRows::Buffers::Buffers(const Configuration& configuration, const Shape& shape, const parallel::GridShape& grid,
                               model::StepArena& arena) {
  const FeatureAxisSizes sizes(configuration, shape, grid, configuration.data.batch_tokens);
  const std::int64_t batches = backward_batches(configuration.transcoder);
  arena.purpose("backward pass");
  rows = arena.exchange(parallel::kFeatureAxis, batches * sizes.bytes(configuration.data.batch_tokens * sizes.width),
                        sizes.strategy);
  own = RowGather::Buffers(sizes, arena);
}

GradientRows::GradientRows(const Configuration& configuration, const Forward& forward, DataAxis& data_axis,
                           const parallel::Grid& grid, const kernels::Execution& execution, model::StepArena& arena)
    : configuration_(configuration),
      forward_(forward),
      data_axis_(data_axis),
      execution_(execution),
      buffers_(configuration, forward.shape(), grid.shape(), arena),
      gather_(forward.axis(), "gradient rows", buffers_.own) {}

void GradientRows::open() {
  buffers_.rows.close();
  buffers_.rows.open();
}

kernels::AnyMatrix GradientRows::own(const Forward::OwnPart& part) const {
  return gather_.own(forward_.layout(), group(), part.block).rows_from(part.begin, part.count);
}

void GradientRows::send() {
  for (std::size_t block = forward_.axis().blocks.size(); block-- > 0;) gather_.send(forward_.layout(), group(), block);
}

kernels::LateRows GradientRows::await() {
  const std::size_t blocks = forward_.axis().blocks.size();
  if (data_axis_.active() || blocks == 1) {
    await_all();
    data_axis_.gather_rows(all());
    return {};
  }
  gather_.wait(blocks - 1, execution_);
  return {forward_.axis().blocks.back().begin, [this] { await_all(); }};
}

void GradientRows::await_all() { gather_.wait(0, execution_); }

kernels::AnyMatrix GradientRows::all() const {
  const std::int64_t width = forward_.shape().width();
  return {buffers_.rows.data(), scalar_of(configuration_.precision), forward_.layout().total, width, width};
}

kernels::AnyMatrix GradientRows::group() const {
  const parallel::Range group = forward_.layout().group;
  return all().rows_from(group.begin, group.size());
}

kernels::AnyMatrix GradientRows::of_dead() const {
  const kernels::AnyMatrix rows = all();
  return rows.rows_from(rows.rows, rows.rows);
}

float GradientRows::factor() const {
  // The loss of a record does not depend on how many others there are.
  const std::int64_t n_tokens = configuration_.privacy.enabled ? record_rows(configuration_) : forward_.layout().total;
  return static_cast<float>(
      2 / error_divisor(configuration_.transcoder, n_tokens, forward_.shape().n_layers, forward_.shape().d_model));
}

}  // namespace weft::transcoder
