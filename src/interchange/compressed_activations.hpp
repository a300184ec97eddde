// SPDX-License-Identifier: Apache-2.0
//
// The quantised and compressed activation caches of CLT-Forge, DIR/activations_ctx_{C}_split_{i}.bin, little-endian:
//
//   u32 length, JSON of that length:  quantization "none" (fp16), "int8", "int4" or "int2"; compression "none", "zstd"
//                                     or "lz4"; symmetric; original_shape_in, _out [rows, layers, d]; original_dtype;
//                                     scale_shape_in, _out; has_tokens
//   u32 n, then n items:              u32 length, name, u64 length, bytes, each item compressed alone
//
//   act_in_data, act_out_data    int8: the value; int4: value + 8, low half of a byte first; int2: value + 2, high bits
//                                first. Times the scale, rounded to original_dtype
//   act_in_scale, act_out_scale  fp32, one per layer or one in all
//   tokens                       int64, one per row; texts of C rows follow one another
//
// A row can only be found by unpacking all rows before it. Such a cache is therefore converted into a dataset in Weft's
// layout, in pieces of bounded memory.
#pragma once

#include <cstdint>
#include <filesystem>
#include <string>

namespace weft::interchange {

/// True if the directory has the first file of such a cache, with the files named above.
bool is_compressed_cache(const std::filesystem::path& directory);

struct ConvertedActivations {
  std::int64_t files = 0, rows = 0, n_layers = 0, d_model = 0;
  std::string stored;  ///< "int8, zstd"
};

/// Writes the rows of all files, in their order, as a new dataset in Weft's own layout at `output`. Throws Error(data)
/// that names file and item, Error(usage) for asymmetric quantisation and an `output` that holds a dataset, Error(io).
ConvertedActivations convert_cache(const std::filesystem::path& directory, const std::filesystem::path& output);

}  // namespace weft::interchange
