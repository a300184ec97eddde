// SPDX-License-Identifier: Apache-2.0
//
// A transcoder as rows, independent of the files that hold it. Every part is a matrix in Weft's orientation, the one of
// its checkpoints; L layers, F features per layer, d = d_model:
//
//   encoder        of source layer s   [F, d]
//   encoder_bias   of source layer s   [F, 1]
//   threshold      of source layer s   [F, 1]            theta of JumpReLU; only if Contents::thresholds
//   decoder        of source layer s   [F, (L - s) * d]  the strips of targets s..L-1 in one row; [F, d], the strip of
//                                                        s alone, with Contents::per_layer; [F, d] also if tied:
//                                                        the vector from s to each target, or from each source to s
//   offset, scale  of target layer t   [F, 1]            only if Contents::affine: writes (activation + offset) scale
//
//   decoder_bias   of target layer t   [d, 1]
//
//   skip           of target layer t   [d, d]            (output, input); only if Contents::skip
//
// Exporters and importers read such rows in pieces; memory does not depend on F.
#pragma once

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "parallel/grid.hpp"

namespace weft::interchange {

struct Sizes {
  std::int64_t n_layers = 0;
  std::int64_t d_model = 0;
  std::int64_t n_features = 0;  ///< per layer
};

enum class Part { encoder, encoder_bias, threshold, decoder, decoder_bias, skip, offset, scale };

/// Sharing of decoders: one per source layer for all its targets, or one per target layer for all its sources.
enum class Tying { none, per_source, per_target };

/// True for offset and scale.
bool is_affine(Part);

/// Contents of a transcoder.
struct Contents {
  Sizes sizes;
  bool thresholds = false;
  bool skip = false;
  bool per_layer = false;  ///< features write to their own layer only
  Tying tying = Tying::none;
  bool affine = false;       ///< per_target: offsets and scales of features, the same from every source
  bool autoencoder = false;  ///< the targets are the inputs
  std::int64_t k = 0;        ///< TopK per token and layer, of positive pre-activations; 0: all above 0
                             ///< or the threshold
};

struct Extent {
  std::int64_t rows = 0, columns = 0;
};
Extent extent_of(const Contents&, Part, std::int64_t layer);

/// Returns the parts of a transcoder, layer by layer.
std::vector<std::pair<Part, std::int64_t>> parts_of(const Contents&);

/// Returns the number of rows of one piece: about 64 MiB of fp32.
std::int64_t piece_rows(const Extent&);

class RowSource {
 public:
  virtual ~RowSource() = default;
  virtual const Contents& contents() const = 0;
  /// Reads rows of a part into contiguous memory, [rows.size(), columns] fp32. Throws Error(data) or Error(io) that
  /// names file and tensor.
  virtual void read(Part part, std::int64_t layer, parallel::Range rows, float* to) const = 0;
};

}  // namespace weft::interchange
