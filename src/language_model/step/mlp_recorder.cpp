// SPDX-License-Identifier: Apache-2.0
#include "language_model/step/mlp_recorder.hpp"

#include <algorithm>
#include <tuple>
#include <utility>

#include "base/error.hpp"
#include "base/progress.hpp"
#include "dataset/activations/description.hpp"
#include "kernels/convert/affine.hpp"
#include "kernels/kokkos_runtime.hpp"
#include "kernels/language/head/cross_entropy.hpp"
#include "storage/digest.hpp"

namespace weft::language_model {
namespace {

using kernels::AnyMatrix;
using kernels::Scalar;

/// Converts `in` to the type of `out`.
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

// --- Recording ------------------------------------------------------------------------------------------------------

std::int64_t MlpRecorder::bytes(std::int64_t rows, Scalar type, const ModelSettings& model) {
  constexpr std::int64_t kSides = 2, kSlots = std::tuple_size_v<decltype(slots_)>;
  return kSlots * kSides * rows * model.layers * model.d_model * kernels::bytes_of(type);
}

MlpRecorder::MlpRecorder(std::int64_t rows, Scalar type, const ModelSettings& model, Transformer& transformer,
                         Staging& staging, const kernels::Execution& execution)
    : type_(type),
      model_(model),
      transformer_(transformer),
      staging_(staging),
      execution_(execution),
      copies_(execution),
      flags_(std::ssize(slots_)) {
  for (Slot& slot : slots_) {
    slot.inputs = device::Buffer<std::byte>(rows * row_bytes());
    slot.targets = device::Buffer<std::byte>(rows * row_bytes());
    *slot.flag.data() = 0;
  }
  device::zero(execution_, flags_.array());
  tap();
}

MlpRecorder::~MlpRecorder() { transformer_.tap({}); }

void MlpRecorder::tap() {
  transformer_.tap([this](std::int64_t layer, const AnyMatrix& input, const AnyMatrix& output) {
    const auto columns = [&](const device::Buffer<std::byte>& all) {
      const std::int64_t width = model_.layers * model_.d_model;
      return AnyMatrix{all.data(), type_, input.rows, width, width}.columns_from(layer * model_.d_model,
                                                                                 model_.d_model);
    };
    const Slot& slot = slots_[slot_];
    std::int32_t* const flag = flags_.data() + slot_;
    convert(execution_, input, columns(slot.inputs), flag);
    convert(execution_, output, columns(slot.targets), flag);
  });
}

void MlpRecorder::record(const TextStream& text, std::int64_t length, std::int64_t first, std::int64_t count) {
  note_progress();
  slot_ = (slot_ + 1) % slots_.size();
  Slot& slot = slots_[slot_];
  // The host is at most two batches ahead: Staging holds the ids of more.
  slot.recorded.wait();
  slot.copied.wait();
  last_ = {&text, length, first, count};
  unchecked_.push_back(last_);
  run(last_);
  slot.recorded.record(execution_);
}

void MlpRecorder::copy(std::int64_t begin, std::int64_t rows, std::byte* inputs, std::byte* targets) {
  Slot& slot = slots_[slot_];
  const kernels::Execution& stream = copies_.execution();
  slot.recorded.hold_back(stream);
  for (const auto& [to, from] : {std::pair(inputs, &slot.inputs), std::pair(targets, &slot.targets)})
    if (to != nullptr)
      device::copy(stream, to, from->data() + begin * row_bytes(), rows * row_bytes(), device::Direction::to_host);
  device::copy(stream, slot.flag.data(), flags_.data() + slot_, slot.flag.bytes(), device::Direction::to_host);
  slot.copied.record(stream);
}

void MlpRecorder::finish() {
  for (const Slot& slot : slots_) {
    slot.copied.wait();
    if (*slot.flag.data() != 0) locate();
  }
  unchecked_.clear();
}

void MlpRecorder::wait() {
  for (const Slot& slot : slots_) slot.copied.wait();
}

void MlpRecorder::finish_before_last() {
  const Slot& before = slots_[(slot_ + slots_.size() - 1) % slots_.size()];
  before.copied.wait();
  if (*before.flag.data() != 0) locate();
  unchecked_.erase(unchecked_.begin(), unchecked_.end() - 1);
}

void MlpRecorder::run(const Batch& batch) {
  batch_ = staging_.next(batch.count, batch.length);
  fill(batch);
  staging_.send(batch_);
  transformer_.forward(staging_.tokens(0, batch.count, batch.length), nullptr);
}

void MlpRecorder::fill(const Batch& windows) {
  dataset::TokenBatch& batch = batch_;
  const std::int64_t length = windows.length, begin = windows.first * length;
  windows.text->read(begin, batch.ids);
  windows.text->document_starts(begin, begin + batch.rows(), starts_);
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

void MlpRecorder::locate() {
  last_ = {};  // the rows are of no use
  for (const Batch& batch : unchecked_) locate(batch);
  throw error(ExitCode::internal, "a value that was not finite is finite when it is computed again");
}

/// Runs the batch once more and throws an error for the first value that is not finite: of the model, or in the type of
/// the rows.
void MlpRecorder::locate(const Batch& batch) {
  const std::int64_t rows = batch.count * batch.length;
  const device::Buffer<float> values(rows * model_.d_model), rounded(values.size());
  std::vector<float> host(static_cast<std::size_t>(values.size()));
  const AnyMatrix whole{values.data(), Scalar::fp32, rows, model_.d_model, model_.d_model};
  const AnyMatrix narrow{rounded.data(), type_, rows, model_.d_model, model_.d_model};
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
                           batch.first * batch.length + value / model_.d_model);
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
                    dataset::name_of(type_));
    }
  });
  run(batch);
  tap();
}

}  // namespace weft::language_model
