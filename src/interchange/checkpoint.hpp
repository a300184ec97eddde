// SPDX-License-Identifier: Apache-2.0
//
// The parts of a transcoder (rows.hpp) in Weft's checkpoints: read in pieces from any number of shards, and written as
// a checkpoint of one shard that has no moments.
#pragma once

#include <filesystem>

#include "checkpoint/manifest.hpp"
#include "checkpoint/resume.hpp"
#include "dataset/activations/statistics.hpp"
#include "interchange/rows.hpp"
#include "parallel/world.hpp"

namespace weft::interchange {

/// Weights of a transcoder's checkpoint, as trained: in the space of its normalised activations.
class CheckpointRows : public RowSource {
 public:
  /// Opens a checkpoint, which must have been verified. `contents`: contents of its model; thresholds and skip follow
  /// from the checkpoint. Without `tying`, tied decoders are read as a copy for each target, with its scale; if a
  /// per-layer model is read without `per_layer`, the other strips of a decoder row are zero. `alone`: communicator of
  /// this process alone.
  CheckpointRows(const parallel::Communicator& alone, const checkpoint::Found&, const Contents& contents);

  const Contents& contents() const override { return contents_; }
  void read(Part part, std::int64_t layer, parallel::Range rows, float* to) const override;

 private:
  void read_affine(Part part, std::int64_t target, parallel::Range rows, float* to) const;
  void read_decoder(std::int64_t layer, parallel::Range rows, std::int64_t columns, float* to) const;
  void read_rows(const std::string& name, parallel::Range rows, std::int64_t columns, float* to) const;

  const parallel::Communicator& alone_;
  const checkpoint::Found& found_;
  Contents contents_;
};

/// Statistics of the activations as a model's checkpoint stores them, and their use.
struct Normalised {
  dataset::Normalise mode = dataset::Normalise::none;
  dataset::Statistics statistics;
};

/// Statistics of a model whose weights apply to raw activations: mean 0, standard deviation 1 and mean norm 1.
Normalised not_normalised(const Sizes&);

/// Writes a checkpoint in fp32 with the parts, zero clocks of dead features and the statistics; no moments. `manifest`
/// has the fields of the caller. The directory appears complete, by a rename. Throws Error(usage) if it exists and is
/// not empty, Error(io), Error(data) and Error(numeric) for a value that is not finite.
void write_checkpoint(const RowSource& source, const Normalised& normalised, checkpoint::Manifest manifest,
                      const std::filesystem::path& directory);

}  // namespace weft::interchange
