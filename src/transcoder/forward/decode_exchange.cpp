// SPDX-License-Identifier: Apache-2.0
//
// Decode: y^_t = sum over s <= t of a_s W_dec[s->t] + W_t x~_t, from the features of this rank, in chunks of tokens and
// blocks of layers; the parts of all ranks go to the owners of the tokens.
#include <optional>
#include <utility>

#include "transcoder/forward/forward.hpp"
#include "transcoder/forward/skip.hpp"

namespace weft::transcoder {

void Forward::decode(const kernels::SparseActivations& activations, bool with_skip,
                     const std::function<void(const OwnPart&)>& consume) {
  struct Decoded {
    OwnPart part;
    std::size_t slot;
  };
  const std::int64_t d = model_.shape().d_model;
  const auto give = [&](const Decoded& decoded) {
    if (stream_) {
      idle_.begin(execution_);
      events_[decoded.slot].arrived.hold_back(execution_);
      idle_.end(execution_);
    }
    const OwnPart& part = decoded.part;
    if (part.count > 0 && with_skip) {
      timers_.phase("skip");
      const kernels::AnyMatrix x = inputs().rows_from(layout_->own.begin + part.begin, part.count);
      add_skip(execution_, model_.skip(), x, part.layers, part.partial.rows_from(0, part.count),
               buffers_.skip_workspace);
    }
    if (part.count > 0) consume(part);
    buffers_.chunks[decoded.slot].partial.close();
    buffers_.chunks[decoded.slot].received.close();
  };

  timers_.phase("decode");
  buffers_.decoder->begin(activations);
  // The encoder has waited for all inputs, unless this rank has no features.
  if (with_skip) await_inputs(model_.shape().n_layers - 1, execution_);
  std::optional<Decoded> under_way;
  std::size_t slot = 0;
  // The first layers have the shortest sums: the exchange begins early, and decoding the last layers takes longest,
  // which hides the transfer of the earlier ones.
  for (std::size_t block = 0; block < axis_.blocks.size(); ++block)
    for (std::int64_t begin = 0; begin < layout_->group.size(); begin += sizes_.chunk) {
      timers_.phase("decode");
      ChunkBuffers& buffers = buffers_.chunks[slot];
      const parallel::Range layers = axis_.blocks[block];
      const parallel::Range chunk{begin, std::min(begin + sizes_.chunk, layout_->group.size())};
      const parallel::Range own = intersection(chunk, layout_->own);
      const std::int64_t columns = layers.size() * d;
      const kernels::AnyMatrix partial{buffers.partial.open(), sizes_.scalar, chunk.size(), columns, columns};
      buffers_.decoder->form(chunk, layers, partial);
      OwnPart part{own.begin - layout_->own.begin, own.size(), block, layers, partial, 1};
      if (exchange_.size() > 1) {
        timers_.phase("exchange");
        // Own slices lie in rank order, so the rows of the chunk are already in the order of their destinations.
        std::vector<std::int64_t> bytes;
        for (const parallel::Range& slice : layout_->own_of_rank)
          bytes.push_back(sizes_.bytes(intersection(chunk, slice).size() * columns));
        events_[slot].decoded.record(execution_);
        events_[slot].decoded.hold_back(communication_);
        exchange_.send_to_owners(partial.data, bytes, buffers.received.open(), "partial sums");
        events_[slot].arrived.record(communication_);
        part.n_parts = exchange_.size();
        part.partial = {buffers.received.data(), sizes_.scalar, part.n_parts * own.size(), columns, columns};
      }
      // With a second slot the next chunk is decoded before this one is used.
      if (under_way) give(*under_way);
      under_way = Decoded{part, slot};
      if (sizes_.n_slots == 1) give(*std::exchange(under_way, std::nullopt));
      slot = (slot + 1) % sizes_.n_slots;
    }
  if (under_way) give(*under_way);
}

}  // namespace weft::transcoder
