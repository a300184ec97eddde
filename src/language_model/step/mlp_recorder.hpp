// SPDX-License-Identifier: Apache-2.0
//
// Inputs and outputs of every MLP of a language model on segments of a text, where the kernels run.
//
// The texts are one stream of ids, which is cut into segments of `length` ids. The model reads each segment separately.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "dataset/tokens/token_set.hpp"
#include "device/memory.hpp"
#include "device/stream.hpp"
#include "language_model/step/staging.hpp"
#include "language_model/step/transformer.hpp"

namespace weft::language_model {

/// Names of the places where values are recorded: "block_{}.mlp.input" is the input of the MLP (after its norm, if it
/// has one), the other its output, before a norm of it.
inline constexpr const char* kInputHook = "block_{}.mlp.input";
inline constexpr const char* kOutputHook = "block_{}.mlp.output";

/// Sets of ids, one after the other. Each begins a document.
class TextStream {
 public:
  /// Joins sets of tokens, at least one.
  explicit TextStream(std::vector<dataset::TokenSet> sets);

  std::int64_t size() const { return begins_.back(); }
  void read(std::int64_t begin, std::span<std::uint32_t> ids) const;
  /// Positions in [begin, end) at which a document starts, ascending, relative to `begin`. Replaces `starts`.
  void document_starts(std::int64_t begin, std::int64_t end, std::vector<std::int64_t>& starts) const;
  /// Identifies the ids: fingerprints of files, sha256 of ids in memory.
  std::string fingerprint() const;

 private:
  std::vector<dataset::TokenSet> sets_;
  std::vector<std::int64_t> begins_;  // of the sets, and the end of the last
};

/// The segments of a stream, in parts that are files of a harvest.
struct Windows {
  std::int64_t length = 0;            ///< ids of a window
  std::int64_t windows = 0;           ///< all of them
  std::int64_t windows_per_file = 0;  ///< the last file may have fewer

  std::int64_t files() const { return (windows + windows_per_file - 1) / windows_per_file; }
  std::int64_t windows_of(std::int64_t file) const {
    return std::min(windows_per_file, windows - file * windows_per_file);
  }
  std::int64_t rows_of(std::int64_t file) const { return windows_of(file) * length; }
};

/// Default number of rows of a file.
inline constexpr std::int64_t kRowsPerFile = 65536;

/// Where a model is divided over ranks, all of them call `record` and what waits for it, and find the same rows.
class MlpRecorder {
 public:
  /// Records up to `rows` rows at a time in `type`. The transformer and the staging memory take as many. References
  /// must outlive the object; until then the transformer is its own.
  MlpRecorder(std::int64_t rows, kernels::Scalar type, const ModelSettings&, Transformer&, Staging&,
              const kernels::Execution&);
  MlpRecorder(const MlpRecorder&) = delete;
  ~MlpRecorder();

  /// Memory of the recorded rows, where the kernels run.
  static std::int64_t bytes(std::int64_t rows, kernels::Scalar type, const ModelSettings&);

  kernels::Scalar type() const { return type_; }
  std::int64_t row_bytes() const { return model_.layers * model_.d_model * kernels::bytes_of(type_); }

  /// Starts to run the model on `count` segments from number `first` on, and returns. On a GPU the rows of the `record`
  /// before this one may still be copied to the host.
  void record(const TextStream&, std::int64_t length, std::int64_t first, std::int64_t count);
  /// True if these are the segments of the last `record`.
  bool holds(const TextStream& text, std::int64_t first, std::int64_t count) const {
    return last_.text == &text && last_.first == first && last_.count == count;
  }
  /// Starts to copy `rows` rows of the last `record`, from its row `begin` on, to host memory: [rows, layers *
  /// d_model]. Null: not that side; of neither, `finish` checks the rows nevertheless.
  void copy(std::int64_t begin, std::int64_t rows, std::byte* inputs, std::byte* targets);
  /// Waits for all copies. Throws Error(numeric) with layer and token if a value of the model in rows that were copied
  /// since the last `finish` was not finite, Error(data) if it is not in the type of the rows.
  void finish();
  /// Waits for all copies, and checks nothing.
  void wait();
  /// Waits like `finish`, for all but the last `record`, whose rows may still be computed or copied.
  void finish_before_last();

  // Data of the last `record`: ids, positions in the text segment, rows at which documents begin.
  std::int64_t rows() const { return batch_.rows(); }
  std::span<const std::uint32_t> ids() const { return batch_.ids; }
  const std::vector<std::int32_t>& positions() const { return positions_; }
  const std::vector<std::int64_t>& starts() const { return starts_; }

 private:
  /// Segments of a text that share one forward pass.
  struct Batch {
    const TextStream* text = nullptr;
    std::int64_t length = 0, first = 0, count = 0;
  };
  /// Memory of recorded rows: while those of one slot are copied to the host, the model fills the other.
  struct Slot {
    device::Buffer<std::byte> inputs, targets;
    device::HostBuffer<std::int32_t> flag{1};  // that of flags_ after its last copy
    device::Event recorded, copied;
  };
  void run(const Batch&);
  void fill(const Batch&);
  void tap();
  [[noreturn]] void locate();
  void locate(const Batch&);

  const kernels::Scalar type_;
  const ModelSettings model_;
  Transformer& transformer_;
  Staging& staging_;
  const kernels::Execution execution_;
  const device::Stream copies_;
  const device::Buffer<std::int32_t> flags_;  // [slot]: a value of its records was not finite
  std::array<Slot, 2> slots_;
  std::size_t slot_ = 0;  // of the last `record`
  Batch last_;
  std::vector<Batch> unchecked_;  // since the last `finish`
  dataset::TokenBatch batch_;
  std::vector<std::int64_t> starts_;
  std::vector<std::int32_t> positions_;
};

}  // namespace weft::language_model
