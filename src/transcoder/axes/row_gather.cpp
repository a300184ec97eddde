// SPDX-License-Identifier: Apache-2.0
#include "transcoder/axes/row_gather.hpp"

#include "kernels/convert/convert_rows.hpp"
#include "transcoder/axes/token_layout.hpp"

namespace weft::transcoder {

RowGather::Buffers::Buffers(const FeatureAxisSizes& sizes, model::StepArena& arena)
    : own(arena.exchange(parallel::kFeatureAxis, sizes.staged(arena) ? sizes.bytes(sizes.own * sizes.width) : 0)) {}

RowGather::RowGather(const FeatureAxis& axis, const char* name, const Buffers& buffers)
    : axis_(axis), name_(name), buffers_(buffers), arrived_(axis.blocks.size()) {}

kernels::AnyMatrix RowGather::own(const TokenLayout& layout, const kernels::AnyMatrix& all, std::size_t block) const {
  const std::int64_t first = axis_.blocks[block].begin * axis_.d_model;
  if (in_place()) return all.rows_from(layout.own.begin, layout.own.size()).columns_from(first, columns(block));
  const std::int64_t before = first * layout.own.size();
  return {buffers_.own.data() + before * kernels::bytes_of(axis_.scalar), axis_.scalar, layout.own.size(),
          columns(block), columns(block)};
}

void RowGather::send(const TokenLayout& layout, const kernels::AnyMatrix& all, std::size_t block) {
  if (axis_.ranks.size() == 1) return;
  const kernels::AnyMatrix of_block = all.columns_from(axis_.blocks[block].begin * axis_.d_model, columns(block));
  std::vector<std::int64_t> bytes;
  for (const parallel::Range& slice : layout.own_of_rank)
    bytes.push_back(slice.size() * columns(block) * kernels::bytes_of(axis_.scalar));
  formed_.record(axis_.computation);
  formed_.hold_back(axis_.communication);
  if (axis_.ranks.is_direct()) {
    axis_.ranks.all_gather_rows(of_block, layout.own_of_rank, name_);
  } else if (in_place()) {
    axis_.ranks.all_gather(all.data, bytes, name_);
  } else {
    axis_.ranks.all_gather(own(layout, all, block).data, axis_.staging, bytes, name_);
    kernels::copy_rows(axis_.communication, {axis_.staging, axis_.scalar, all.rows, columns(block), columns(block)},
                       of_block);
  }
  arrived_[block].record(axis_.communication);
}

void RowGather::wait(std::size_t block, const kernels::Execution& computation) {
  if (axis_.ranks.size() == 1 || axis_.communication.stream == computation.stream) return;
  axis_.idle.begin(computation);
  arrived_[block].hold_back(computation);
  axis_.idle.end(computation);
}

}  // namespace weft::transcoder
