// SPDX-License-Identifier: Apache-2.0
//
// The MLPs of a language model on a text as the rows of a dataset that is not written: `weft train` with data.model.
//
// The rows are those of the files that `weft lm harvest` writes of the same text, with the same division into files. A
// forward pass computes one block (data.block_rows) from its first text segment on. The bits of a row therefore depend
// on model, text and block_rows alone, and equal those of a harvest with forward passes of as many rows.
//
// Ranks that have a divided model compute their blocks together, one rank's after the other's: each call is a round of
// all of them, which first exchange what they read.
#pragma once

#include "dataset/activations/description.hpp"
#include "dataset/activations/row_source.hpp"
#include "language_model/step/mlp_recorder.hpp"
#include "parallel/communicator.hpp"

namespace weft::language_model {

class TextRows final : public dataset::RowSource {
 public:
  /// block_rows: a multiple of the length of a text segment, at most what the recorder holds. copy: the ranks of one
  /// copy of the model; null: this one. References must outlive the object.
  TextRows(const Windows&, const TextStream&, std::int64_t block_rows, MlpRecorder&,
           const parallel::Communicator* copy = nullptr);

  /// The block of the last row stays in the recorder for the next call.
  void read(std::span<const dataset::RowRead>) override;
  /// Throws as MlpRecorder::finish.
  void finish() override;
  void wait() override { recorder_.wait(); }
  void conclude() override;

 private:
  /// What a rank wants of a round: rows, the checks of `finish`, or nothing any more.
  struct Wish {
    std::int64_t finishes = 0, concludes = 0, reads = 0;
  };
  bool is_shared() const { return copy_ != nullptr && copy_->size() > 1; }
  void form(const dataset::RowRead&, bool keeps);
  bool round(Wish, std::span<const dataset::RowRead>);
  const Windows windows_;
  const TextStream& text_;
  const std::int64_t block_windows_;
  MlpRecorder& recorder_;
  const parallel::Communicator* const copy_;
};

/// The segments of a text of this many ids, in files of about kRowsPerFile rows.
Windows windows_of(std::int64_t ids, std::int64_t length);

/// Description of a dataset of these text segments, without its source: the files have numbers for names and no bytes.
dataset::Description describe(const Windows&, const ModelSettings&, kernels::Scalar type);

}  // namespace weft::language_model
