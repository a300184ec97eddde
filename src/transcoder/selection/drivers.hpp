// SPDX-License-Identifier: Apache-2.0
//
// The choice of a selector's driver.
#pragma once

#include "transcoder/selection/selection.hpp"

namespace weft::transcoder {

/// Factory of selectors other than the drivers of this folder, with the same result bit for bit.
class SelectorFactory {
 public:
  virtual ~SelectorFactory() = default;
  /// Takes the memory of the driver, or counts what a selector allocates itself.
  virtual void take(const SelectionSpec&, SelectionBuffers&, model::StepArena&) const = 0;
  /// Makes a selector. Collective over the grid.
  virtual std::unique_ptr<Selector> make(const SelectionSpec&, const SelectionBuffers&, const parallel::Grid&,
                                         const kernels::Execution&) const = 0;
};

/// Functions of the backend's driver: its memory, as SelectorFactory::take, and the driver itself, which is made
/// collectively over the grid.
void take_driver_buffers(const SelectionSpec&, SelectionBuffers&, model::StepArena&);
std::unique_ptr<Selector> make_driver(const SelectionSpec&, const SelectionBuffers&, const parallel::Grid&,
                                      const kernels::Execution&, const SumDecorator& = std::identity());

/// Makes the selector that spec and execution require. Collective over the grid, whose shape is that of the spec. The
/// arena of the buffers must outlive it.
std::unique_ptr<Selector> make_selector(const SelectionSpec&, const SelectionBuffers&, const parallel::Grid&,
                                        const kernels::Execution&);

}  // namespace weft::transcoder
