// SPDX-License-Identifier: Apache-2.0
//
// The choice of a selector's driver, and the sizes that follow from it.
#pragma once

#include "transcoder/selection/selection.hpp"

namespace weft::transcoder {

/// Factory of selectors other than the drivers of this folder, with the same result bit for bit.
class SelectorFactory {
 public:
  virtual ~SelectorFactory() = default;
  /// Adds the buffers of the selector, but for those of Selector itself, to sizes.device_bytes and host_bytes.
  virtual void add_bytes(const SelectionSpec&, SelectionSizes& sizes) const = 0;
  /// Makes a selector. Collective over the grid.
  virtual std::unique_ptr<Selector> make(const SelectionSpec&, const SelectionSizes&, const parallel::Grid&,
                                         const kernels::Execution&) const = 0;
};

/// Functions of the backend's driver: its bytes, as SelectorFactory::add_bytes, and the driver itself, which is made
/// collectively over the grid.
void add_driver_bytes(const SelectionSpec&, SelectionSizes& sizes);
std::unique_ptr<Selector> make_driver(const SelectionSpec&, const SelectionSizes&, const parallel::Grid&,
                                      const kernels::Execution&, const SumDecorator& = std::identity());

/// Sizes of a selection. Needs no device and no other ranks. Throws a collective Error(usage) if the lists would need
/// more than 2^32 entries; with a data axis also the lists of the features that a rank updates (axes/data_axis.hpp).
SelectionSizes selection_sizes(const ModelSettings&, const SelectionShape&, const parallel::GridShape&, Precision,
                               kernels::Backend);

/// Makes the selector that shape, settings and execution require. Collective over the grid.
std::unique_ptr<Selector> make_selector(const ModelSettings&, const SelectionShape&, const parallel::Grid&,
                                        const kernels::Execution&, Precision);

}  // namespace weft::transcoder
