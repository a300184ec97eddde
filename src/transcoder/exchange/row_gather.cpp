// SPDX-License-Identifier: Apache-2.0
#include "transcoder/exchange/row_gather.hpp"

#include <algorithm>

#include "kernels/convert/convert.hpp"
#include "transcoder/forward.hpp"

namespace weft::transcoder {

std::vector<parallel::Range> layer_blocks(std::int64_t n_layers, std::int64_t n_blocks) {
  std::vector<parallel::Range> blocks;
  std::int64_t begin = 0;
  for (std::int64_t i = 1; i <= n_blocks; ++i) {
    // As 1 : 2 : 3 ..., rounded, and at least one layer for each.
    const std::int64_t all = n_blocks * (n_blocks + 1), ideal = (2 * n_layers * i * (i + 1) + all) / (2 * all);
    const std::int64_t end = std::clamp(ideal, begin + 1, n_layers - (n_blocks - i));
    blocks.push_back({begin, end});
    begin = end;
  }
  return blocks;
}

std::int64_t RowGather::bytes(std::int64_t own_tokens, std::int64_t width, std::int64_t n_blocks,
                              kernels::Scalar scalar) {
  return n_blocks > 1 ? own_tokens * width * kernels::bytes_of(scalar) : 0;
}

RowGather::RowGather(const Lane& lane, const char* name, std::int64_t own_tokens, std::int64_t width)
    : lane_(lane),
      name_(name),
      own_(lane.ranks,
           in_place() ? 0 : bytes(own_tokens, width, static_cast<std::int64_t>(lane.blocks.size()), lane.scalar)),
      arrived_(lane.blocks.size()) {}

kernels::AnyMatrix RowGather::own(const TokenLayout& layout, const kernels::AnyMatrix& all, std::size_t block) const {
  const std::int64_t first = lane_.blocks[block].begin * lane_.d_model;
  if (in_place()) return all.rows_from(layout.own.begin, layout.own.size()).columns_from(first, columns(block));
  const std::int64_t before = first * layout.own.size();
  return {own_.data() + before * kernels::bytes_of(lane_.scalar), lane_.scalar, layout.own.size(), columns(block),
          columns(block)};
}

void RowGather::send(const TokenLayout& layout, const kernels::AnyMatrix& all, std::size_t block) {
  if (lane_.axis.size() == 1) return;
  const kernels::AnyMatrix of_block = all.columns_from(lane_.blocks[block].begin * lane_.d_model, columns(block));
  std::vector<std::int64_t> bytes;
  for (const parallel::Range& slice : layout.own_of_rank)
    bytes.push_back(slice.size() * columns(block) * kernels::bytes_of(lane_.scalar));
  formed_.record(lane_.execution);
  formed_.hold_back(lane_.beside);
  if (lane_.axis.is_direct()) {
    lane_.axis.all_gather_rows(of_block, layout.own_of_rank, name_);
  } else if (in_place()) {
    lane_.axis.all_gather(all.data, bytes, name_);
  } else {
    lane_.axis.all_gather(own(layout, all, block).data, lane_.arriving, bytes, name_);
    kernels::copy_rows(lane_.beside, {lane_.arriving, lane_.scalar, all.rows, columns(block), columns(block)},
                       of_block);
  }
  arrived_[block].record(lane_.beside);
}

void RowGather::wait(std::size_t block, const kernels::Execution& computation) {
  if (lane_.axis.size() == 1 || lane_.beside.stream == computation.stream) return;
  lane_.idle.begin(computation);
  arrived_[block].hold_back(computation);
  lane_.idle.end(computation);
}

}  // namespace weft::transcoder
