// SPDX-License-Identifier: Apache-2.0
//
// Which algorithm the GPU's dense library uses for products, and which implementation computes attention. Training
// never chooses by timing, because then two runs could differ: it takes the entry of an algorithm table (a file,
// device.algorithms) for the shape, the GPU and the version of the library, or else the first algorithm that the
// library proposes, and Weft's kernels of attention. `weft benchmark --tune` writes such a file. Without CUDA there is
// nothing to choose.
#pragma once

#include <string>

#include "kernels/gemm/gemm_cuda.hpp"
#include "kernels/language/attention/attention_records.hpp"
#include "parallel/world.hpp"
#include "storage/json_file.hpp"

namespace weft::run {

/// Reads `path` (device.algorithms), if it is not empty. Before the first product. Throws a collective Error(usage) if
/// the file cannot be read. A resumed run keeps the algorithms of its checkpoint, also if the file has changed:
/// `manifest_extra` is Manifest::extra of that checkpoint, "" for a fresh run.
void use_recorded_algorithms(const std::string& path, const parallel::World&, const std::string& manifest_extra = "");

/// Algorithms that this process has used so far, for the run record: [] without CUDA.
Json algorithms_in_use();

/// An algorithm as files, manifests and run records have it. Attention is in the list of products, marked by
/// "operation".
Json to_json(const kernels::cuda::GemmRecord&);
Json to_json(const kernels::AttentionRecord&);

}  // namespace weft::run
