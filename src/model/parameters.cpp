// SPDX-License-Identifier: Apache-2.0
#include "model/parameters.hpp"

#include <fmt/ranges.h>

#include <algorithm>
#include <cstring>
#include <map>
#include <numeric>

#include "base/error.hpp"
#include "base/progress.hpp"
#include "kernels/kokkos_runtime.hpp"
#include "kernels/optimize/adam.hpp"
#include "kernels/optimize/packed_weights.hpp"

namespace weft::model {

using kernels::ParameterRows;
using kernels::Scalar;
using kernels::StorageType;
using Part = Plane::Part;

namespace {

/// Elements that pass through a buffer at a time, to or from a checkpoint or as initial values: 16 MiB of fp32.
constexpr std::int64_t kPieceElements = std::int64_t{4} << 20;

Scalar weight_type(StorageType storage) { return storage == StorageType::fp32 ? Scalar::fp32 : Scalar::bf16; }
Scalar moment_type(StorageType storage) {
  return storage == StorageType::fp32 ? Scalar::fp32 : storage == StorageType::bf16 ? Scalar::bf16 : Scalar::u8;
}

std::int64_t segment_of(const ParameterSpec& spec) { return spec.segment > 0 ? spec.segment : spec.columns(); }

std::int64_t scales_per_row(std::int64_t columns, std::int64_t segment) {
  return ParameterRows{.columns = columns, .segment = segment}.blocks_per_row();
}

/// Hand-written kernels keep fp32 weights as two 16-bit planes (ParameterRows::weight_rest).
bool is_split(const ParameterSpec& spec, StorageType storage, kernels::Backend backend) {
  return spec.is_matrix() && spec.packing == kernels::Packing::none &&
         spec.storage.value_or(storage) == StorageType::fp32 && backend == kernels::Backend::cuda;
}

std::int64_t conversion_elements(std::span<const ParameterSpec> specs, StorageType storage, kernels::Backend backend) {
  std::int64_t most = 0;
  for (const ParameterSpec& spec : specs)
    if (is_split(spec, storage, backend)) most = std::max({most, kPieceElements, spec.columns()});
  return most;
}

std::int64_t bytes_per_row(const Plane& plane) { return plane.columns * kernels::bytes_of(plane.type); }

std::string tensor_name(const ParameterSpec& spec, const Plane& plane) {
  if (plane.key == "weight") return spec.name;
  if (plane.part == Part::row_state) return spec.name.substr(0, spec.name.rfind('/') + 1) + plane.key;
  return spec.name + "." + plane.key;
}

std::vector<std::int64_t> tensor_shape(const ParameterSpec& spec, const Plane& plane) {
  if (spec.is_matrix() && plane.part != Part::row_state) return {spec.rows(), plane.columns};
  return {spec.rows()};
}

/// Calls piece(row, count) for the rows of a range, at most so many at a time as fit into `elements`.
template <class Piece>
void by_pieces(parallel::Range rows, std::int64_t columns, std::int64_t elements, const Piece& piece) {
  const std::int64_t most = std::max<std::int64_t>(1, elements / columns);
  for (std::int64_t row = rows.begin; row < rows.end; row += most) piece(row, std::min(most, rows.end - row));
}

/// Bytes per held row and per owned row.
struct RowBytes {
  std::int64_t weights = 0, moments = 0, row_state = 0;
  std::int64_t host_weights = 0, host_moments = 0;  // in host memory
};

RowBytes row_bytes(const ParameterSpec& spec, StorageType storage, kernels::Backend backend, Moments moments) {
  RowBytes bytes;
  for (const Plane& plane : planes_of(spec, storage, backend, moments)) {
    const bool host = is_on_host(spec, plane, moments);
    (plane.part == Part::weight   ? (host ? bytes.host_weights : bytes.weights)
     : plane.part == Part::moment ? (host ? bytes.host_moments : bytes.moments)
                                  : bytes.row_state) += bytes_per_row(plane);
  }
  return bytes;
}

std::vector<RowBytes> row_bytes_of(std::span<const ParameterSpec> specs, StorageType storage, kernels::Backend backend,
                                   Moments moments) {
  std::vector<RowBytes> all;
  for (const ParameterSpec& spec : specs) all.push_back(row_bytes(spec, storage, backend, moments));
  return all;
}

StateBytes bytes_on_rank(std::span<const ParameterSpec> specs, std::span<const RowBytes> per_row,
                         const parallel::GridShape& grid, std::int64_t rank, StoredWeights weights) {
  StateBytes bytes;
  for (std::size_t i = 0; i < specs.size(); ++i) {
    const RowParts parts = row_parts(specs[i], grid, rank);
    const bool whole = weights == StoredWeights::of_held_rows || !specs[i].is_matrix();
    const std::int64_t stored = whole ? specs[i].rows_in_memory(parts.held.size()) : parts.owned.size();
    bytes.weights += stored * per_row[i].weights;
    bytes.moments += parts.owned.size() * per_row[i].moments;
    bytes.row_state += parts.owned.size() * per_row[i].row_state;
    bytes.host += stored * per_row[i].host_weights + parts.owned.size() * per_row[i].host_moments;
  }
  return bytes;
}

void check(std::span<const ParameterSpec> specs) {
  struct Elements {
    std::uint64_t begin, end;
    const std::string* name;
  };
  std::vector<Elements> random;
  for (const ParameterSpec& spec : specs) {
    const auto refuse = [&](const char* why) {
      throw error(ExitCode::internal, "parameter \"{}\" cannot be stored ({})", spec.name, why);
    };
    if (spec.shape.empty() || spec.shape.size() > 2) refuse("it has neither one axis nor two");
    if (std::any_of(spec.shape.begin(), spec.shape.end(), [](std::int64_t extent) { return extent < 1; }))
      refuse("its shape has no elements");
    if (spec.cut.axis < 0 || spec.cut.axis >= std::ssize(spec.shape)) refuse("the axis that is cut does not exist");
    if (spec.cut.over == parallel::kDataAxis) refuse("weights are complete along the data axis; cut another axis");
    if (spec.cut.unit < 1 || spec.rows() % spec.cut.unit != 0) refuse("the unit of its cut does not divide its rows");
    if (spec.partial_gradient && (spec.is_matrix() || !spec.cut.over.empty())) refuse("it is no vector without a cut");
    if (spec.columns() % segment_of(spec) != 0) refuse("its segment does not divide its columns");
    if (spec.packing != kernels::Packing::none && (!spec.is_matrix() || !spec.frozen || spec.row_multiple > 1))
      refuse("only a frozen matrix without rows of zeros may be packed");
    if (spec.row_multiple < 1 || (spec.row_multiple > 1 && (!spec.is_matrix() || !spec.group.empty())))
      refuse("only a matrix without a group may be followed by rows of zeros");
    if (spec.is_matrix() || spec.initial.kind != Initial::Kind::constant)
      random.push_back(
          {spec.first_element, spec.first_element + static_cast<std::uint64_t>(spec.elements()), &spec.name});
  }
  std::sort(random.begin(), random.end(), [](const Elements& a, const Elements& b) { return a.begin < b.begin; });
  for (std::size_t i = 1; i < random.size(); ++i)
    if (random[i].begin < random[i - 1].end)
      throw error(ExitCode::internal,
                  "parameters \"{}\" and \"{}\" share global elements (they would get the same random numbers); call "
                  "number_elements",
                  *random[i - 1].name, *random[i].name);
}

}  // namespace

std::int64_t weight_bytes(StorageType storage, std::int64_t rows, std::int64_t columns) {
  return rows * columns * kernels::bytes_of(weight_type(storage));
}

std::int64_t moment_bytes(StorageType storage, std::int64_t rows, std::int64_t columns, std::int64_t segment) {
  const std::int64_t scales = storage == StorageType::eight_bit ? scales_per_row(columns, segment) : 0;
  return 2 * rows * (columns * kernels::bytes_of(moment_type(storage)) + scales * 4);
}

std::vector<std::int64_t> ParameterSpec::stored_shape() const {
  if (is_matrix()) return {rows(), columns()};
  return {rows()};
}

void number_elements(std::span<ParameterSpec> specs) {
  std::uint64_t next = 0;
  for (ParameterSpec& spec : specs) {
    spec.first_element = next;
    next += static_cast<std::uint64_t>(spec.elements());
  }
}

std::int64_t elements_of(std::span<const ParameterSpec> specs) {
  return std::accumulate(specs.begin(), specs.end(), std::int64_t{0},
                         [](std::int64_t sum, const ParameterSpec& spec) { return sum + spec.elements(); });
}

std::int64_t trained_elements_of(std::span<const ParameterSpec> specs) {
  return std::accumulate(specs.begin(), specs.end(), std::int64_t{0}, [](std::int64_t sum, const ParameterSpec& spec) {
    return sum + (spec.frozen ? 0 : spec.elements());
  });
}

std::vector<Plane> planes_of(const ParameterSpec& spec, StorageType storage, kernels::Backend backend,
                             Moments moments) {
  storage = spec.storage.value_or(storage);
  const std::int64_t columns = spec.columns();
  std::vector<Plane> planes;
  if (spec.packing != kernels::Packing::none) {
    planes.push_back({Part::weight, "weight", Scalar::u8, kernels::packed_bytes(spec.packing, columns)});
    planes.push_back({Part::weight, "block_scales", Scalar::u8, kernels::packed_blocks(columns)});
    planes.push_back({Part::weight, "row_scales", Scalar::fp32, kernels::kRowScales});
  } else if (is_split(spec, storage, backend)) {
    planes.push_back({Part::weight, "weight", Scalar::bf16, columns});
    planes.push_back({Part::weight, "weight_rest", Scalar::i16, columns});
  } else {
    planes.push_back({Part::weight, "weight", spec.is_matrix() ? weight_type(storage) : Scalar::fp32, columns});
  }
  if (moments != Moments::none && !spec.frozen) {
    for (const char* key : {"first_moment", "second_moment"})
      planes.push_back({Part::moment, key, spec.is_matrix() ? moment_type(storage) : Scalar::fp32, columns});
    if (spec.is_matrix() && storage == StorageType::eight_bit)
      for (const char* key : {"first_scale", "second_scale"})
        planes.push_back({Part::moment, key, Scalar::fp32, scales_per_row(columns, segment_of(spec))});
  }
  for (const RowState& state : spec.row_state) planes.push_back({Part::row_state, state.name, state.type, 1});
  return planes;
}

std::vector<Plane> read_planes(const ParameterSpec& spec, StorageType storage, kernels::Backend backend,
                               GatheredWeights gathered) {
  std::vector<Plane> planes = planes_of(spec, storage, backend, Moments::none);
  const bool both = is_split(spec, storage, backend) && gathered == GatheredWeights::all;
  planes.resize(spec.packing != kernels::Packing::none ? 3 : both ? 2 : 1);
  return planes;
}

bool is_on_host(const ParameterSpec& spec, const Plane& plane, Moments moments) {
  return moments == Moments::on_host && spec.is_matrix() && (plane.part == Part::moment || plane.key == "weight_rest");
}

std::vector<checkpoint::TensorEntry> tensors_of(std::span<const ParameterSpec> specs, StorageType storage,
                                                Moments moments) {
  std::vector<checkpoint::TensorEntry> tensors;
  for (const ParameterSpec& spec : specs)
    for (const Plane& plane : planes_of(spec, storage, kernels::Backend::portable, moments))
      tensors.push_back({tensor_name(spec, plane), plane.type, tensor_shape(spec, plane)});
  return tensors;
}

std::string first_difference(std::span<const checkpoint::TensorEntry> found,
                             std::span<const checkpoint::TensorEntry> expected) {
  const auto text = [](const checkpoint::TensorEntry& tensor) {
    return fmt::format("{} [{}]", checkpoint::name_of(tensor.type), fmt::join(tensor.shape, ", "));
  };
  std::map<std::string_view, const checkpoint::TensorEntry*> by_name;
  for (const checkpoint::TensorEntry& tensor : found) by_name.emplace(tensor.name, &tensor);
  for (const checkpoint::TensorEntry& tensor : expected) {
    const auto at = by_name.find(tensor.name);
    if (at == by_name.end()) return fmt::format("{} is missing", tensor.name);
    if (at->second->type != tensor.type || at->second->shape != tensor.shape)
      return fmt::format("{} is {}, not {}", tensor.name, text(*at->second), text(tensor));
  }
  return "";
}

std::int64_t most_held_rows(const ParameterSpec& spec, const parallel::GridShape& grid) {
  return parallel::largest_part(spec.rows() / spec.cut.unit, grid.size(spec.cut.over)) * spec.cut.unit;
}

RowParts row_parts(const ParameterSpec& spec, const parallel::GridShape& grid, std::int64_t rank) {
  RowParts parts;
  const parallel::Range units =
      parallel::part(spec.rows() / spec.cut.unit, grid.size(spec.cut.over), grid.index_of(rank, spec.cut.over));
  parts.held = {units.begin * spec.cut.unit, units.end * spec.cut.unit};
  parts.owned = parts.held;
  const bool own_rows = spec.update == Update::own_rows;
  if (own_rows) {
    const parallel::Range own =
        parallel::part(parts.held.size(), grid.size(parallel::kDataAxis), grid.index_of(rank, parallel::kDataAxis));
    parts.owned = {parts.held.begin + own.begin, parts.held.begin + own.end};
  }
  for (const parallel::Axis& axis : grid.axes())
    if (axis.name != spec.cut.over && !(own_rows && axis.name == parallel::kDataAxis))
      parts.writes = parts.writes && grid.index_of(rank, axis.name) == 0;
  return parts;
}

StateBytes state_bytes(std::span<const ParameterSpec> specs, const parallel::GridShape& grid, std::int64_t rank,
                       StorageType storage, kernels::Backend backend, Moments moments, StoredWeights stored) {
  StateBytes bytes = bytes_on_rank(specs, row_bytes_of(specs, storage, backend, moments), grid, rank, stored);
  bytes.conversion = 4 * conversion_elements(specs, storage, backend);
  return bytes;
}

StateBytes largest_state_bytes(std::span<const ParameterSpec> specs, const parallel::GridShape& grid,
                               StorageType storage, kernels::Backend backend, Moments moments, StoredWeights stored) {
  const std::vector<RowBytes> per_row = row_bytes_of(specs, storage, backend, moments);
  StateBytes largest;
  for (std::int64_t rank = 0; rank < grid.ranks(); ++rank) {
    const StateBytes bytes = bytes_on_rank(specs, per_row, grid, rank, stored);
    if (bytes.total() + bytes.host > largest.total() + largest.host) largest = bytes;
  }
  largest.conversion = 4 * conversion_elements(specs, storage, backend);
  return largest;
}

std::int64_t checkpoint_bytes(std::span<const ParameterSpec> specs, StorageType storage) {
  std::vector<ParameterSpec> stored(specs.begin(), specs.end());
  for (ParameterSpec& spec : stored) spec.row_multiple = 1;
  return state_bytes(stored, {}, 0, storage, kernels::Backend::portable, Moments::held).total();
}

Parameters::Parameters(std::vector<ParameterSpec> specs, StorageType storage, const parallel::GridShape& grid,
                       std::int64_t rank, const kernels::Execution& execution, Moments moments,
                       std::vector<std::vector<std::byte*>> gathered)
    : specs_(std::move(specs)),
      storage_(storage),
      execution_(execution),
      moments_(moments),
      gathered_(std::move(gathered)) {
  check(specs_);
  for (const ParameterSpec& spec : specs_) {
    parts_.push_back(row_parts(spec, grid, rank));
    planes_.emplace_back();
    for (Plane& plane : planes_of(spec, storage, execution.backend, moments))
      planes_.back().push_back({std::move(plane), nullptr});
  }
  std::vector<std::string_view> allocated;
  for (std::size_t i = 0; i < specs_.size(); ++i) {
    const std::string_view group = specs_[i].group;
    if (group.empty()) {
      allocate(std::span(&i, 1));
    } else if (std::find(allocated.begin(), allocated.end(), group) == allocated.end()) {
      allocate(members_of(group));
      allocated.push_back(group);
    }
  }
  for (std::size_t i = 0; i < specs_.size(); ++i) views_.push_back(view_of(i));
  conversion_ = device::Buffer<float>(conversion_elements(specs_, storage, execution.backend));
  bytes_.conversion = conversion_.bytes();
}

/// Makes one allocation per plane, in which the members are contiguous.
void Parameters::allocate(std::span<const std::size_t> members) {
  const std::vector<Placed>& first = planes_[members.front()];
  for (std::size_t p = 0; p < first.size(); ++p) {
    const Part part = first[p].plane.part;
    const auto bytes_of_member = [&](std::size_t member) {
      const RowParts& parts = parts_[member];
      const bool whole = part == Part::weight && !is_gathered(member);
      return (whole ? rows_in_memory(member) : parts.owned.size()) * bytes_per_row(planes_[member][p].plane);
    };
    std::int64_t total = 0;
    for (const std::size_t member : members) {
      if (planes_[member].size() != first.size() || planes_[member][p].plane.key != first[p].plane.key ||
          planes_[member][p].plane.type != first[p].plane.type)
        throw error(ExitCode::internal, "parameters \"{}\" and \"{}\" cannot be in one group (they differ in type)",
                    specs_[members.front()].name, specs_[member].name);
      total += bytes_of_member(member);
    }
    const bool host = is_on_host(specs_[members.front()], first[p].plane, moments_);
    std::byte* at = host ? host_memory_.emplace_back(total).data() : memory_.emplace_back(total).data();
    if (!host)
      device::zero(execution_, at, total);
    else if (total > 0)
      std::memset(at, 0, static_cast<std::size_t>(total));
    (host                   ? bytes_.host
     : part == Part::weight ? bytes_.weights
     : part == Part::moment ? bytes_.moments
                            : bytes_.row_state) += total;
    for (const std::size_t member : members) {
      planes_[member][p].data = at;
      if (at != nullptr) at += bytes_of_member(member);
    }
  }
}

Parameters::View Parameters::view_of(std::size_t parameter) const {
  const ParameterSpec& spec = specs_[parameter];
  const RowParts& parts = parts_[parameter];
  const std::int64_t before = (parts.owned.begin - parts.held.begin) * spec.columns();  // elements
  const bool all_are_owned = parts.owned.size() == parts.held.size();
  const auto floats = [&](std::string_view key) { return reinterpret_cast<float*>(data(parameter, key)); };
  View view;
  if (!spec.is_matrix()) {
    view.vector.weight = {floats("weight"), parts.held.size()};
    view.owned_vector.weight = {view.vector.weight.data + before, parts.owned.size()};
    if (moments_ != Moments::none && !spec.frozen) {
      view.owned_vector.first_moment = {floats("first_moment"), parts.owned.size()};
      view.owned_vector.second_moment = {floats("second_moment"), parts.owned.size()};
    }
    if (all_are_owned) view.vector = view.owned_vector;
    return view;
  }
  ParameterRows& all = view.rows;
  const bool packed = spec.packing != kernels::Packing::none;
  all = {.storage = packed ? StorageType::bf16 : spec.storage.value_or(storage_),
         .rows = parts.held.size(),
         .columns = spec.columns(),
         .segment = segment_of(spec),
         .first_row = parts.held.begin,
         .element_base = spec.first_element,
         .weight = data(parameter, "weight"),
         .weight_rest = reinterpret_cast<std::int16_t*>(data(parameter, "weight_rest")),
         .packing = spec.packing,
         .block_scales = reinterpret_cast<std::uint8_t*>(data(parameter, "block_scales")),
         .row_scales = floats("row_scales")};
  ParameterRows& owned = view.owned_rows;
  owned = all;
  owned.rows = parts.owned.size();
  owned.first_row = parts.owned.begin;
  if (is_gathered(parameter)) {  // `all` is where they are gathered, without a plane that is not read
    all.weight = gathered_[parameter].front();
    all.weight_rest = nullptr;
    if (!packed && gathered_[parameter].size() > 1)
      all.weight_rest = reinterpret_cast<std::int16_t*>(gathered_[parameter][1]);
    if (packed) {
      all.block_scales = reinterpret_cast<std::uint8_t*>(gathered_[parameter][1]);
      all.row_scales = reinterpret_cast<float*>(gathered_[parameter][2]);
    }
  } else {
    const std::int64_t rows_before = parts.owned.begin - parts.held.begin;
    owned.weight = static_cast<std::byte*>(all.weight) + rows_before * bytes_per_row(planes_[parameter].front().plane);
    if (all.weight_rest != nullptr) owned.weight_rest += before;
    if (packed) {
      owned.block_scales += rows_before * kernels::packed_blocks(spec.columns());
      owned.row_scales += rows_before * kernels::kRowScales;
    }
  }
  owned.first_moment = data(parameter, "first_moment");
  owned.second_moment = data(parameter, "second_moment");
  owned.first_scale = floats("first_scale");
  owned.second_scale = floats("second_scale");
  if (all_are_owned && !is_gathered(parameter)) all = owned;
  return view;
}

std::vector<Parameters::Gathered> Parameters::gathered(std::size_t parameter) const {
  std::vector<Gathered> planes;
  for (std::size_t plane = 0; plane < gathered_[parameter].size(); ++plane)
    planes.push_back(
        {planes_[parameter][plane].data, gathered_[parameter][plane], bytes_per_row(planes_[parameter][plane].plane)});
  return planes;
}

std::byte* Parameters::data(std::size_t parameter, std::string_view key) const {
  for (const Placed& placed : planes_[parameter])
    if (placed.plane.key == key) return placed.data;
  return nullptr;
}

std::size_t Parameters::index(std::string_view name) const {
  for (std::size_t i = 0; i < specs_.size(); ++i)
    if (specs_[i].name == name) return i;
  throw error(ExitCode::internal, "this model has no parameter \"{}\"", name);
}

std::vector<std::size_t> Parameters::members_of(std::string_view group) const {
  std::vector<std::size_t> members;
  for (std::size_t i = 0; i < specs_.size(); ++i)
    if (specs_[i].group == group) members.push_back(i);
  if (group.empty() || members.empty())
    throw error(ExitCode::internal, "this model has no group of parameters \"{}\"", group);
  return members;
}

const kernels::ParameterRows& Parameters::matrix(std::size_t parameter) const { return views_[parameter].rows; }
const kernels::ParameterRows& Parameters::owned_matrix(std::size_t parameter) const {
  return views_[parameter].owned_rows;
}
const kernels::ParameterVector& Parameters::vector(std::size_t parameter) const { return views_[parameter].vector; }
const kernels::ParameterVector& Parameters::owned_vector(std::size_t parameter) const {
  return views_[parameter].owned_vector;
}

kernels::AnyMatrix Parameters::group(std::string_view name) const {
  const std::vector<std::size_t> members = members_of(name);
  const ParameterSpec& first = specs_[members.front()];
  const bool matrices = first.is_matrix();
  const std::int64_t columns = matrices ? first.columns() : parts_[members.front()].held.size();
  std::int64_t rows = 0;
  for (const std::size_t member : members) {
    const std::int64_t held = parts_[member].held.size();
    if (specs_[member].is_matrix() != matrices || (matrices ? specs_[member].columns() : held) != columns)
      throw error(ExitCode::internal, "group \"{}\" is no matrix (\"{}\" has another length than \"{}\")", name,
                  specs_[member].name, first.name);
    rows += matrices ? held : 1;
  }
  const Placed& weight = planes_[members.front()].front();
  return {weight.data, weight.plane.type, rows, columns, columns};
}

kernels::Array<std::byte> Parameters::group_state_bytes(std::string_view group, std::string_view state,
                                                        std::size_t element) const {
  const std::vector<std::size_t> members = members_of(group);
  std::int64_t total = 0;
  for (const std::size_t member : members)
    for (const RowState& each : specs_[member].row_state)
      if (each.name == state && kernels::bytes_of(each.type) == static_cast<std::int64_t>(element))
        total += parts_[member].owned.size() * kernels::bytes_of(each.type);
  return {data(members.front(), state), total};
}

void Parameters::initialise(std::uint64_t seed) {
  for (std::size_t i = 0; i < specs_.size(); ++i) {
    note_progress();
    const Initial& initial = specs_[i].initial;
    if (initial.kind == Initial::Kind::uniform && specs_[i].is_matrix() &&
        specs_[i].packing == kernels::Packing::none) {
      kernels::initialise_uniform(execution_, stored_matrix(i), static_cast<float>(initial.value), seed,
                                  initial.purpose);
    } else if (initial.kind == Initial::Kind::constant && initial.value == 0) {
      for (const Placed& placed : planes_[i]) {
        if (placed.plane.part != Part::weight) continue;
        const std::int64_t bytes = stored(i).size() * bytes_per_row(placed.plane);
        if (!is_on_host(specs_[i], placed.plane, moments_))
          device::zero(execution_, placed.data, bytes);
        else if (bytes > 0)
          std::memset(placed.data, 0, static_cast<std::size_t>(bytes));
      }
    } else {
      fill(i, seed);
    }
  }
}

/// Fills a matrix from fp32 rows, which its storage then rounds, divides or packs.
void Parameters::fill(std::size_t parameter, std::uint64_t seed) {
  const ParameterSpec& spec = specs_[parameter];
  const parallel::Range stored = this->stored(parameter);
  const std::int64_t columns = spec.columns();
  if (stored.size() == 0) return;
  const auto element = [&](std::int64_t row) { return spec.first_element + static_cast<std::uint64_t>(row * columns); };
  if (!spec.is_matrix()) {
    kernels::initial_values(execution_, spec.initial, seed, element(stored.begin), vector(parameter).weight);
    return;
  }
  const std::int64_t elements = std::min(std::max(kPieceElements, columns), stored.size() * columns);
  const device::Buffer<float> staged(elements);
  by_pieces(stored, columns, elements, [&](std::int64_t row, std::int64_t count) {
    kernels::initial_values(execution_, spec.initial, seed, element(row), {staged.data(), count * columns});
    kernels::weights_from_float(execution_, stored_matrix(parameter), row - stored.begin,
                                staged.matrix(count, columns));
  });
  kernels::fence(execution_);  // before `staged` is freed
}

void Parameters::add_to(checkpoint::Registry& registry) const {
  for (std::size_t i = 0; i < specs_.size(); ++i) {
    const ParameterSpec& spec = specs_[i];
    const RowParts& parts = parts_[i];
    for (const Plane& plane : planes_of(spec, storage_, kernels::Backend::portable, moments_)) {
      checkpoint::Tensor tensor{.name = tensor_name(spec, plane),
                                .type = plane.type,
                                .shape = tensor_shape(spec, plane),
                                .held = plane.part == Part::weight ? stored(i) : parts.owned,
                                .owned = parts.writes ? parts.owned : parallel::Range{},
                                .data = data(i, plane.key),
                                .on_device = !is_on_host(spec, plane, moments_)};
      if (plane.part == Part::weight && is_split(spec, storage_, execution_.backend))
        add_split_weights_to(registry, i, std::move(tensor));
      else
        registry.add(std::move(tensor));
    }
  }
}

/// A checkpoint holds the joined fp32 weights.
void Parameters::add_split_weights_to(checkpoint::Registry& registry, std::size_t parameter,
                                      checkpoint::Tensor tensor) const {
  const kernels::Execution execution = execution_;
  const ParameterRows all = stored_matrix(parameter);
  const kernels::Array<float> buffer = conversion_.array();
  const auto convert = [=](parallel::Range rows, auto&& piece) {
    by_pieces(rows, all.columns, buffer.size, [&](std::int64_t row, std::int64_t count) {
      piece(row - all.first_row, kernels::Matrix<float>{buffer.data, count, all.columns, all.columns},
            4 * (row - rows.begin) * all.columns, 4 * count * all.columns);
      kernels::fence(execution);
    });
  };
  tensor.data = nullptr;
  tensor.gather = [=](parallel::Range rows, void* packed) {
    convert(rows, [&](std::int64_t row, kernels::Matrix<float> joined, std::int64_t at, std::int64_t bytes) {
      kernels::weights_to_float(execution, all, row, joined);
      device::copy(execution, static_cast<std::byte*>(packed) + at, joined.data, bytes, device::Direction::to_host);
    });
  };
  tensor.scatter = [=](parallel::Range rows, const void* packed) {
    convert(rows, [&](std::int64_t row, kernels::Matrix<float> joined, std::int64_t at, std::int64_t bytes) {
      device::copy(execution, joined.data, static_cast<const std::byte*>(packed) + at, bytes,
                   device::Direction::to_device);
      kernels::weights_from_float(execution, all, row, joined);
    });
  };
  registry.add(std::move(tensor));
}

}  // namespace weft::model
