// SPDX-License-Identifier: Apache-2.0
//
// The MLPs of a language model on a text as the rows of a dataset that is not written: `weft train` with data.model.
//
// The rows are those of the files that `weft lm harvest` writes of the same text, with the same division into files. A
// forward pass computes one block (data.block_rows) from its first text segment on. The bits of a row therefore depend
// on model, text and block_rows alone, and equal those of a harvest with forward passes of as many rows.
#pragma once

#include "dataset/activations/description.hpp"
#include "dataset/activations/row_source.hpp"
#include "language_model/step/mlp_recorder.hpp"

namespace weft::language_model {

class TextRows final : public dataset::RowSource {
 public:
  /// block_rows: a multiple of the length of a text segment, at most what the recorder holds. References must outlive
  /// the object.
  TextRows(const Windows&, const TextStream&, std::int64_t block_rows, MlpRecorder&);

  /// The block of the last row stays in the recorder for the next call.
  void read(std::span<const dataset::RowRead>) override;
  /// Throws as MlpRecorder::finish.
  void finish() override;

 private:
  const Windows windows_;
  const TextStream& text_;
  const std::int64_t block_windows_;
  MlpRecorder& recorder_;
};

/// The segments of a text of this many ids, in files of about kRowsPerFile rows.
Windows windows_of(std::int64_t ids, std::int64_t length);

/// Description of a dataset of these text segments, without its source: the files have numbers for names and no bytes.
dataset::Description describe(const Windows&, const ModelSettings&, kernels::Scalar type);

}  // namespace weft::language_model
