// SPDX-License-Identifier: Apache-2.0
#include "parallel/grid.hpp"

#include "base/contract.hpp"
#include "parallel/gpu_groups.hpp"
#include "parallel/nccl.hpp"
#include "parallel/watchdog.hpp"

namespace weft::parallel {

std::int64_t GridShape::size(std::string_view axis) const {
  for (const Axis& each : axes_)
    if (each.name == axis) return each.size;
  return 1;
}

std::int64_t GridShape::ranks() const {
  std::int64_t product = 1;
  for (const Axis& each : axes_) product *= each.size;
  return product;
}

std::int64_t GridShape::index_of(std::int64_t rank, std::string_view axis) const {
  std::int64_t inner = 1;
  for (std::size_t i = axes_.size(); i-- > 0; inner *= axes_[i].size)
    if (axes_[i].name == axis) return rank / inner % axes_[i].size;
  return 0;
}

Range GridShape::part_of_rank(std::int64_t n, std::int64_t rank) const {
  Range items{0, n};
  for (const Axis& each : axes_) {
    const Range slice = part(items.size(), each.size, index_of(rank, each.name));
    items = {items.begin + slice.begin, items.begin + slice.end};
  }
  return items;
}

std::int64_t GridShape::largest_part(std::int64_t n) const {
  for (const Axis& each : axes_) n = parallel::largest_part(n, each.size);
  return n;
}

std::map<std::string, std::int64_t> GridShape::sizes() const {
  std::map<std::string, std::int64_t> sizes;
  for (const Axis& each : axes_) sizes[each.name] = each.size;
  return sizes;
}

std::string GridShape::text() const {
  std::string numbers, names;
  for (const Axis& each : axes_) {
    numbers += fmt::format("{}{}", numbers.empty() ? "" : " x ", each.size);
    names += fmt::format("{}{}", names.empty() ? "" : " x ", each.name);
  }
  return fmt::format("{} ({})", numbers, names);
}

GridShape grid_shape(std::int64_t data, Axis inner, std::int64_t world) {
  if (inner.size == 0 && data > 0 && world % data == 0) inner.size = world / data;
  if (inner.size == 0)
    throw collective_error(ExitCode::usage,
                           "parallel.data = {} does not divide the {} rank{} of this job (all {} groups have the same "
                           "number of ranks); start "
                           "a multiple of {} ranks or change parallel.data",
                           data, world, world == 1 ? "" : "s", inner.name, data);
  if (data < 1 || inner.size < 1 || data * inner.size != world)
    throw collective_error(
        ExitCode::usage,
        "parallel.data = {} times parallel.{} = {} is not the {} rank{} of this job (each rank has one place "
        "in the grid); start {} ranks or change the grid",
        data, inner.name, inner.size, world, world == 1 ? "" : "s", data * inner.size);
  return GridShape({{std::string(kDataAxis), data}, std::move(inner)});
}

Grid::Grid(const Communicator& ranks, GridShape shape) : shape_(std::move(shape)), world_(ranks.duplicate()) {
  note_phase("connecting the ranks");
  WEFT_ASSERT(!shape_.axes().empty() && shape_.ranks() == ranks.size());
  for (const Axis& each : shape_.axes()) {
    // Ranks of one axis have equal coordinates along all other axes: the colour encodes those coordinates.
    std::int64_t colour = 0;
    for (const Axis& other : shape_.axes())
      if (other.name != each.name) colour = colour * other.size + shape_.index_of(ranks.rank(), other.name);
    axes_.push_back(ranks.split(static_cast<int>(colour), ranks.rank()));
  }
  // All ranks are compared: those of one axis may have separate GPUs and share them with ranks of another group.
  if (!nccl::share_gpus(world_)) return;
  exchange_through_host(world_);
  for (const Communicator& axis : axes_) exchange_through_host(axis);
}

const Communicator& Grid::axis(std::string_view name) const {
  for (std::size_t i = 0; i < axes_.size(); ++i)
    if (shape_.axes()[i].name == name) return axes_[i];
  throw error(ExitCode::internal, "this process grid has no axis \"{}\" (it is {})", name, shape_.text());
}

const Communicator& Grid::all_on_an_axis() const {
  for (std::size_t i = axes_.size(); i-- > 0;)
    if (shape_.axes()[i].size == world_.size()) return axes_[i];
  return world_;
}

}  // namespace weft::parallel
