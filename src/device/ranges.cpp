// SPDX-License-Identifier: Apache-2.0
#include "device/ranges.hpp"

#ifdef WEFT_ENABLE_CUDA
#include <nvtx3/nvToolsExt.h>
#endif

namespace weft::device {

#ifdef WEFT_ENABLE_CUDA
void begin_range(const char* name) { nvtxRangePushA(name); }
void end_range() { nvtxRangePop(); }
#else
void begin_range(const char*) {}
void end_range() {}
#endif

}  // namespace weft::device
