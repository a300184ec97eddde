// SPDX-License-Identifier: Apache-2.0
#include "language_model/run/harvester.hpp"

#include <algorithm>
#include <deque>
#include <future>
#include <memory>
#include <utility>

#include "base/error.hpp"

namespace weft::language_model {
namespace {

/// Files that are written at the same time: one thread fills the page cache with 1.5 to 2.5 GB/s, and a file system
/// lets one thread at a time write to a file.
constexpr std::size_t kOpenFiles = 8;

}  // namespace

std::vector<std::string> token_texts(const Tokenizer& tokenizer) {
  std::vector<std::string> texts;
  for (std::int64_t id = 0; id < tokenizer.vocabulary_size(); ++id) {
    const auto one = static_cast<std::uint32_t>(id);
    texts.push_back(tokenizer.detokenise({&one, 1}, true));
  }
  return texts;
}

Harvester::Harvester(const HarvestSettings& settings, const TextStream& text, const ModelSettings& model,
                     Transformer& transformer, Staging& staging, const kernels::Execution& execution)
    : settings_(settings),
      text_(text),
      model_(model),
      transformer_(transformer),
      staging_(staging),
      execution_(execution) {}

/// A file that is being written, and host memory for one batch of it.
struct Harvester::OpenFile {
  explicit OpenFile(std::int64_t bytes) : inputs(bytes), targets(bytes) {}

  /// Begins to write the batch, unless another rank does.
  void begin_to_write() {
    if (file == nullptr) return;
    written = std::async(std::launch::async, [this] {
      file->append(ids, positions, starts, inputs.data(), targets.data());
      if (next == end) file->finish();
    });
  }
  /// Waits until the batch is written. Rethrows an exception of its thread.
  void wait() {
    if (written.valid()) written.get();
  }

  std::unique_ptr<dataset::ChunkFile> file;
  std::int64_t next = 0, end = 0;  // text segments that are not yet computed
  device::HostBuffer<std::byte> inputs, targets;
  std::vector<std::int32_t> ids, positions;
  std::vector<std::int64_t> starts;
  std::future<void> written;  // waited for before what is above is destroyed
};

void Harvester::write(std::span<const std::int64_t> numbers, const dataset::ChunkFiles& files, bool writes) {
  if (numbers.empty()) return;
  MlpRecorder recorder(settings_.together * settings_.length, files.settings().dtype, model_, transformer_, staging_,
                       execution_);
  std::deque<OpenFile> open;
  for (std::size_t i = 0; i < std::min(numbers.size(), kOpenFiles); ++i)
    open.emplace_back(writes ? settings_.together * settings_.length * recorder.row_bytes() : 0);
  OpenFile* computed = nullptr;  // whose batch is not yet being written
  for (bool working = true; working;) {
    working = false;
    for (OpenFile& one : open) {
      if (computed == &one) {
        recorder.finish();
        std::exchange(computed, nullptr)->begin_to_write();
      }
      one.wait();
      if (one.next == one.end && !numbers.empty()) {
        const std::int64_t number = numbers.front();
        numbers = numbers.subspan(1);
        if (writes) one.file = files.begin(number, settings_.rows_of(number));
        one.next = number * settings_.windows_per_file;
        one.end = one.next + settings_.windows_of(number);
      }
      if (one.next == one.end) continue;
      append(one, recorder);
      if (computed != nullptr) {
        recorder.finish_before_last();
        computed->begin_to_write();
      }
      computed = &one;
      working = true;
    }
  }
}

void Harvester::append(OpenFile& to, MlpRecorder& recorder) {
  const std::int64_t count = std::min(settings_.together, to.end - to.next);
  recorder.record(text_, settings_.length, to.next, count);
  to.next += count;
  if (to.file == nullptr) return recorder.copy(0, 0, nullptr, nullptr);
  recorder.copy(0, recorder.rows(), to.inputs.data(), to.targets.data());
  to.ids.assign(recorder.ids().begin(), recorder.ids().end());
  to.positions = recorder.positions();
  to.starts = recorder.starts();
}

}  // namespace weft::language_model
