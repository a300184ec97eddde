// SPDX-License-Identifier: Apache-2.0
//
// Selector by the hand-written CUDA kernels (kernels/transcoder/select/select_cuda.hpp). It takes the steps of the host
// driver on the GPU, with two differences. Only ranks whose list is not complete compute their tiles again, without an
// exchange in between; and the last histogram is summed for each slice of the batch (D of them). The host does
// not wait while the stream is captured.
//
//   bytes sent per rank and step   8 * groups * (2 * 2048 + 512 * D + 5) to be summed; and on the feature axis
//                                  (N/D * groups + L) * 4, of GPUs that exchange directly only if ties are cut in this
//                                  slice
//
// CUDA builds only: other builds declare these functions and do not define them.
#pragma once

#include "transcoder/selection/selection.hpp"

namespace weft::transcoder {

/// Sets buffers.device and counts the memory of the communicators.
void take_device_selector_buffers(const SelectionSpec&, SelectionBuffers& buffers, model::StepArena&);

/// Makes the selector. Collective over the grid.
std::unique_ptr<Selector> make_device_selector(const SelectionSpec&, const SelectionBuffers&, const parallel::Grid&,
                                               const kernels::Execution&, const SumDecorator&);

}  // namespace weft::transcoder
