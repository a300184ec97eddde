// SPDX-License-Identifier: Apache-2.0
//
// The gradient rows g = d loss / d y^ of a batch: each rank forms those of its own tokens, and all ranks need all.
#pragma once

#include <cstdint>

#include "kernels/transcoder/decode/decode.hpp"
#include "model/step_arena.hpp"
#include "parallel/exchange_buffer.hpp"
#include "transcoder/axes/data_axis.hpp"
#include "transcoder/axes/row_gather.hpp"
#include "transcoder/forward/forward.hpp"

namespace weft::transcoder {

class GradientRows {
 public:
  struct Buffers {
    Buffers(const Configuration&, const Shape&, const parallel::GridShape&, model::StepArena&);
    /// Gradient rows [largest batch, L * d]; this group's rows at their place in the batch. With dead features
    /// (parts/dead_features.hpp) the gradient rows of their loss follow.
    parallel::ExchangeBuffer rows;
    RowGather::Buffers own;
  };

  /// What is passed by reference must outlive this object. Collective.
  GradientRows(const Configuration&, const Forward&, DataAxis&, const parallel::Grid&, const kernels::Execution&,
               model::StepArena&);

  /// Starts a step. Until then the rows are those of the previous step.
  void open();
  /// Rows of the own tokens of a part, [count, layers of the part * d], to be written before `send`.
  kernels::AnyMatrix own(const Forward::OwnPart&) const;
  /// Sends this rank's rows to all ranks, the last layers first: the backward pass begins with them, and the rows of
  /// the other layers arrive while it runs. Collective.
  void send();
  /// Waits for the rows with which the backward pass begins; returns the rows for which it must wait itself. With a
  /// data axis waits for all rows and gathers those of the other groups. Collective.
  kernels::LateRows await();
  /// Waits for all rows.
  void await_all();

  kernels::AnyMatrix all() const;      ///< [all tokens, L * d]
  kernels::AnyMatrix group() const;    ///< [group tokens, L * d], the part of `all` that belongs to this group
  kernels::AnyMatrix of_dead() const;  ///< [all tokens, L * d]: space for the rows of dead features, after `all`
  /// 2 / (divisor of the sum of squared errors, of a private step those of a record): g is this factor times the error.
  float factor() const;

 private:
  const Configuration configuration_;
  const Forward& forward_;
  DataAxis& data_axis_;
  const kernels::Execution execution_;
  Buffers buffers_;
  RowGather gather_;  // over the feature axis
};

}  // namespace weft::transcoder
