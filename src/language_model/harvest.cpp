// SPDX-License-Identifier: Apache-2.0
#include "language_model/harvest.hpp"

#include <algorithm>
#include <deque>
#include <future>
#include <memory>

#include "base/error.hpp"
#include "base/progress.hpp"
#include "dataset/activations/description.hpp"
#include "kernels/convert/affine.hpp"
#include "kernels/language/head/cross_entropy.hpp"
#include "kernels/runtime.hpp"
#include "storage/digest.hpp"

namespace weft::language_model {
namespace {

using kernels::AnyMatrix;
using kernels::Scalar;

/// Files that are written at the same time: one thread fills the page cache with 1.5 to 2.5 GB/s, and a file system
/// lets one thread at a time write to a file.
constexpr std::size_t kOpenFiles = 8;

/// `in` in the type of `out`.
void convert(const kernels::Execution& execution, const AnyMatrix& in, const AnyMatrix& out,
             std::int32_t* flag = nullptr) {
  kernels::affine_rows(execution, in, {}, {}, {}, out, flag);
}

}  // namespace

// --- Text -----------------------------------------------------------------------------------------------------------

TextStream::TextStream(std::vector<dataset::TokenSet> sets) : sets_(std::move(sets)), begins_(1, 0) {
  for (const dataset::TokenSet& set : sets_) begins_.push_back(begins_.back() + set.size());
}

void TextStream::read(std::int64_t begin, std::span<std::uint32_t> ids) const {
  for (std::size_t i = 0; i < sets_.size(); ++i) {
    const std::int64_t end = begin + static_cast<std::int64_t>(ids.size()), first = std::max(begin, begins_[i]),
                       last = std::min(end, begins_[i + 1]);
    if (first < last)
      sets_[i].read(first - begins_[i],
                    ids.subspan(static_cast<std::size_t>(first - begin), static_cast<std::size_t>(last - first)));
  }
}

void TextStream::document_starts(std::int64_t begin, std::int64_t end, std::vector<std::int64_t>& starts) const {
  starts.clear();
  std::vector<std::int64_t> inside;
  for (std::size_t i = 0; i < sets_.size(); ++i) {
    const std::int64_t first = std::max(begin, begins_[i]), last = std::min(end, begins_[i + 1]);
    if (first >= last) continue;
    if (first == begins_[i]) starts.push_back(first - begin);
    // The set gives those after its first argument: one position earlier where the stretch begins inside it.
    const std::int64_t from = std::max<std::int64_t>(0, first - begins_[i] - 1);
    sets_[i].document_starts(from, last - begins_[i], inside);
    for (const std::int64_t start : inside) starts.push_back(begins_[i] + from + start - begin);
  }
}

std::string TextStream::fingerprint() const {
  std::string text;
  for (const dataset::TokenSet& set : sets_) {
    std::string one = set.fingerprint();
    if (one.empty()) {
      std::vector<std::uint32_t> ids(static_cast<std::size_t>(set.size()));
      set.read(0, ids);
      one = storage::sha256({reinterpret_cast<const char*>(ids.data()), ids.size() * sizeof ids[0]});
    }
    text += one + ";";
  }
  return storage::sha256(text);
}

std::vector<std::string> token_texts(const Tokenizer& tokenizer) {
  std::vector<std::string> texts;
  for (std::int64_t id = 0; id < tokenizer.vocabulary_size(); ++id) {
    const auto one = static_cast<std::uint32_t>(id);
    texts.push_back(tokenizer.decode({&one, 1}));
  }
  return texts;
}

// --- Harvest --------------------------------------------------------------------------------------------------------

Harvester::Harvester(const HarvestSettings& settings, const TextStream& text, const ModelSettings& model,
                     Transformer& transformer, Staging& staging, const kernels::Execution& execution)
    : settings_(settings),
      text_(text),
      model_(model),
      transformer_(transformer),
      staging_(staging),
      execution_(execution) {}

void Harvester::fill(std::int64_t first_window, dataset::TokenBatch& batch) {
  const std::int64_t length = settings_.length, begin = first_window * length;
  text_.read(begin, batch.ids);
  text_.document_starts(begin, begin + batch.rows(), starts_);
  std::fill(batch.targets.begin(), batch.targets.end(), kernels::kIgnored);
  positions_.resize(batch.ids.size());
  const bool masked = !batch.first_key.empty();
  auto start = starts_.begin();
  for (std::int64_t row = 0, document = 0; row < batch.rows(); ++row) {
    const auto at = static_cast<std::size_t>(row);
    if (row % length == 0) document = row;
    for (; start != starts_.end() && *start <= row; ++start)
      if (masked) document = *start;
    positions_[at] = static_cast<std::int32_t>(row % length);
    batch.positions[at] = static_cast<std::int32_t>(row - document);
    if (masked) batch.first_key[at] = static_cast<std::int32_t>(document - row / length * length);
  }
}

/// A file that is being written, and host memory for one batch of it.
struct Harvester::OpenFile {
  explicit OpenFile(std::int64_t bytes) : inputs(bytes), targets(bytes) {}

  /// Until the batch is written. Throws what its thread threw.
  void wait() {
    if (written.valid()) written.get();
  }

  std::unique_ptr<dataset::ChunkFile> file;
  std::int64_t next = 0, end = 0;  // windows that are not yet computed
  device::HostBuffer<std::byte> inputs, targets;
  std::vector<std::int32_t> ids, positions;
  std::vector<std::int64_t> starts;
  std::future<void> written;  // waited for before what is above is destroyed
};

void Harvester::write(std::span<const std::int64_t> numbers, const dataset::ChunkFiles& files) {
  if (numbers.empty()) return;
  const Scalar type = files.settings().dtype;
  const std::int64_t width = model_.layers * model_.d_model,
                     bytes = settings_.together * settings_.length * width * kernels::bytes_of(type);
  inputs_ = device::Buffer<std::byte>(bytes);
  targets_ = device::Buffer<std::byte>(bytes);
  flag_ = device::Buffer<std::int32_t>(1);
  device::zero(execution_, flag_.array());
  transformer_.tap([&](std::int64_t layer, const AnyMatrix& input, const AnyMatrix& output) {
    const auto columns = [&](const device::Buffer<std::byte>& all) {
      return AnyMatrix{all.data(), type, input.rows, width, width}.columns_from(layer * model_.d_model, model_.d_model);
    };
    convert(execution_, input, columns(inputs_), flag_.data());
    convert(execution_, output, columns(targets_), flag_.data());
  });

  std::deque<OpenFile> open;
  for (std::size_t i = 0; i < std::min(numbers.size(), kOpenFiles); ++i) open.emplace_back(bytes);
  for (bool working = true; working;) {
    working = false;
    for (OpenFile& one : open) {
      one.wait();
      if (one.next == one.end && !numbers.empty()) {
        const std::int64_t number = numbers.front();
        numbers = numbers.subspan(1);
        one.file = files.begin(number, settings_.rows_of(number));
        one.next = number * settings_.windows_per_file;
        one.end = one.next + settings_.windows_of(number);
      }
      if (one.next == one.end) continue;
      append(one, type);
      working = true;
    }
  }
  transformer_.tap({});
}

void Harvester::append(OpenFile& to, Scalar type) {
  note_progress();
  const std::int64_t first = to.next;
  dataset::TokenBatch batch = staging_.next(std::min(settings_.together, to.end - first), settings_.length);
  fill(first, batch);
  staging_.send(batch);
  const Tokens tokens = staging_.tokens(0, batch.sequences, settings_.length);
  transformer_.forward(tokens, nullptr);
  const std::int64_t stored = batch.rows() * model_.layers * model_.d_model * kernels::bytes_of(type);
  device::copy(execution_, to.inputs.data(), inputs_.data(), stored, device::Direction::to_host);
  device::copy(execution_, to.targets.data(), targets_.data(), stored, device::Direction::to_host);
  if (device::read(execution_, flag_.data()) != 0) locate(first, tokens, type);
  to.ids.assign(batch.ids.begin(), batch.ids.end());
  to.positions = positions_;
  to.starts = starts_;
  to.next += batch.sequences;
  to.written = std::async(std::launch::async, [&to] {
    to.file->append(to.ids, to.positions, to.starts, to.inputs.data(), to.targets.data());
    if (to.next == to.end) to.file->finish();
  });
}

/// Runs the batch once more and names the first value that is not finite: of the model, or in the type of the files.
void Harvester::locate(std::int64_t first_window, const Tokens& tokens, Scalar stored) {
  const device::Buffer<float> values(tokens.rows() * model_.d_model), rounded(values.size());
  std::vector<float> host(static_cast<std::size_t>(values.size()));
  const AnyMatrix whole{values.data(), Scalar::fp32, tokens.rows(), model_.d_model, model_.d_model};
  const AnyMatrix narrow{rounded.data(), stored, tokens.rows(), model_.d_model, model_.d_model};
  const auto first_bad = [&](const AnyMatrix& matrix) -> std::int64_t {
    device::copy(execution_, host.data(), matrix.data, values.bytes(), device::Direction::to_host);
    kernels::fence(execution_);
    const auto bad = std::find_if(host.begin(), host.end(), [](float value) { return !kernels::is_finite(value); });
    return bad == host.end() ? -1 : bad - host.begin();
  };
  transformer_.tap([&](std::int64_t layer, const AnyMatrix& input, const AnyMatrix& output) {
    for (const AnyMatrix* const side : {&input, &output}) {
      const auto place = [&](std::int64_t value) {
        return fmt::format("the {} of the MLP of layer {} at token {}", side == &input ? "input" : "output", layer,
                           first_window * settings_.length + value / model_.d_model);
      };
      convert(execution_, *side, whole);
      if (const std::int64_t bad = first_bad(whole); bad >= 0)
        throw error(ExitCode::numeric,
                    "{} of the text is not finite (the model has weights that are not, or its activations are too "
                    "large for device.precision); use another checkpoint, or --set device.precision=\"fp32\"",
                    place(bad));
      convert(execution_, whole, narrow);
      convert(execution_, narrow, whole);
      if (const std::int64_t bad = first_bad(whole); bad >= 0)
        throw error(ExitCode::data, "{} of the text is too large for {}; use --type bf16", place(bad),
                    dataset::name_of(stored));
    }
  });
  transformer_.forward(tokens, nullptr);
  throw error(ExitCode::internal, "a value that was not finite is finite when it is computed again");
}

}  // namespace weft::language_model
