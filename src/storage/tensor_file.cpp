// SPDX-License-Identifier: Apache-2.0
#include "storage/tensor_file.hpp"

#include <algorithm>
#include <cstring>

#include "base/contract.hpp"
#include "base/error.hpp"
#include "storage/checksum.hpp"

namespace weft::storage {
namespace {

constexpr std::int64_t kChunkBytes = std::int64_t{1} << 20;
constexpr std::int64_t kPieceBytes = std::int64_t{4} << 20;
constexpr std::int64_t kLargestChunkRead = std::int64_t{64} << 20;

std::vector<hsize_t> chunk_of(kernels::Scalar type, const std::vector<std::int64_t>& shape) {
  std::vector<hsize_t> chunk(shape.size(), 1);
  std::int64_t left = std::max<std::int64_t>(1, kChunkBytes / kernels::bytes_of(type));  // elements
  for (std::size_t axis = shape.size(); axis-- > 0;) {
    std::int64_t extent = std::clamp<std::int64_t>(left, 1, shape[axis]);
    // Chunks of nearly equal size: the last one is stored in full, and could be mostly padding.
    const std::int64_t n_chunks = (shape[axis] + extent - 1) / extent;
    extent = (shape[axis] + n_chunks - 1) / n_chunks;
    chunk[axis] = static_cast<hsize_t>(extent);
    if (n_chunks > 1) break;  // a chunk is one contiguous run of elements
    left /= extent;
  }
  return chunk;
}

std::vector<hsize_t> to_hsize(const std::vector<std::int64_t>& shape) { return {shape.begin(), shape.end()}; }

std::string text_of(const std::vector<std::int64_t>& shape) {
  std::string text;
  for (const std::int64_t extent : shape) text += (text.empty() ? "[" : ", ") + std::to_string(extent);
  return text + "]";
}

/// Access without a chunk cache: the call that writes a chunk then reports its errors.
Handle uncached() {
  Handle access(H5Pcreate(H5P_DATASET_ACCESS), H5Pclose, "creating dataset access properties");
  check(H5Pset_chunk_cache(access, 0, 0, 1.0), "disabling the chunk cache");
  return access;
}

/// Memory and file selections of rows [begin, begin + count).
struct Selection {
  Selection(hid_t dataset, std::int64_t begin, std::int64_t count)
      : file(H5Dget_space(dataset), H5Sclose, "reading a dataset's shape") {
    const int rank = H5Sget_simple_extent_ndims(file);
    check(rank, "reading a dataset's shape");
    std::vector<hsize_t> extent(static_cast<std::size_t>(rank)), start(static_cast<std::size_t>(rank), 0);
    check(H5Sget_simple_extent_dims(file, extent.data(), nullptr), "reading a dataset's shape");
    if (rank < 1 || begin < 0 || count < 0 || begin + count > static_cast<std::int64_t>(extent[0]))
      throw error(ExitCode::internal, "rows {} to {} are outside a dataset", begin, begin + count);
    start[0] = static_cast<hsize_t>(begin);
    extent[0] = static_cast<hsize_t>(count);
    check(H5Sselect_hyperslab(file, H5S_SELECT_SET, start.data(), nullptr, extent.data(), nullptr), "selecting rows");
    memory = Handle(H5Screate_simple(rank, extent.data(), nullptr), H5Sclose, "creating a memory dataspace");
  }
  Handle file, memory;
};

}  // namespace

std::int64_t piece_rows(kernels::Scalar type, const std::vector<std::int64_t>& shape) {
  std::int64_t chunk_rows_bytes = kernels::bytes_of(type);
  for (std::size_t axis = 1; axis < shape.size(); ++axis) chunk_rows_bytes *= shape[axis];
  const std::int64_t chunk_rows = static_cast<std::int64_t>(chunk_of(type, shape)[0]);
  chunk_rows_bytes *= chunk_rows;
  return chunk_rows * std::max<std::int64_t>(1, kPieceBytes / std::max<std::int64_t>(1, chunk_rows_bytes));
}

std::int64_t metadata_bytes(kernels::Scalar type, const std::vector<std::int64_t>& shape) {
  constexpr std::int64_t kHeader = 2048, kIndexEntry = 24;
  const std::vector<hsize_t> chunk = chunk_of(type, shape);
  std::int64_t n_chunks = 1;
  for (std::size_t axis = 0; axis < shape.size(); ++axis) {
    const auto extent = static_cast<std::int64_t>(chunk[axis]);
    n_chunks *= (shape[axis] + extent - 1) / extent;
  }
  return kHeader + n_chunks * kIndexEntry;
}

namespace {

/// Creates the groups of the path `name`. Intermediate groups created by HDF5 would have time stamps.
void make_groups(hid_t file, const std::string& name) {
  const Handle properties(H5Pcreate(H5P_GROUP_CREATE), H5Pclose, "creating group properties");
  check(H5Pset_obj_track_times(properties, false), "disabling time stamps");
  for (std::size_t slash = name.find('/'); slash != std::string::npos; slash = name.find('/', slash + 1)) {
    const std::string group = name.substr(0, slash);
    if (H5Lexists(file, group.c_str(), H5P_DEFAULT) > 0) continue;
    const Handle made(H5Gcreate2(file, group.c_str(), H5P_DEFAULT, properties, H5P_DEFAULT), H5Gclose,
                      "creating group " + group);
  }
}

}  // namespace

Handle create_dataset(hid_t file, const std::string& name, kernels::Scalar type,
                      const std::vector<std::int64_t>& shape) {
  const Lock lock;
  const Handle stored = type_of(type);
  const std::vector<hsize_t> extent = to_hsize(shape), chunk = chunk_of(type, shape);
  const int rank = static_cast<int>(shape.size());
  const Handle space(H5Screate_simple(rank, extent.data(), nullptr), H5Sclose, "creating the dataspace of " + name);
  make_groups(file, name);
  const Handle create(H5Pcreate(H5P_DATASET_CREATE), H5Pclose, "creating dataset properties");
  check(H5Pset_chunk(create, rank, chunk.data()), "setting the chunks of " + name);
  check(H5Pset_fletcher32(create), "setting the checksum of " + name);
  // Zero the part of the last chunk beyond the dataset, so that files of the same state are identical.
  check(H5Pset_fill_time(create, H5D_FILL_TIME_ALLOC), "setting the fill time of " + name);
  check(H5Pset_obj_track_times(create, false), "setting the time stamps of " + name);
  const Handle access = uncached();
  return Handle(H5Dcreate2(file, name.c_str(), stored, space, H5P_DEFAULT, create, access), H5Dclose,
                "creating dataset " + name);
}

Handle open_dataset(hid_t file, const std::string& name, kernels::Scalar type, const std::vector<std::int64_t>& shape) {
  const Lock lock;
  // H5Lexists requires that all parent groups exist.
  for (std::size_t slash = name.find('/');; slash = name.find('/', slash + 1)) {
    const std::string path = name.substr(0, slash);
    if (H5Lexists(file, path.c_str(), H5P_DEFAULT) <= 0) throw error(ExitCode::io, "dataset {} is missing", name);
    if (!is_hard_link(file, path))
      throw error(ExitCode::io, "/{} is an external or soft link (links are not followed)", path);
    if (slash == std::string::npos) break;
  }
  const Handle access = uncached();
  Handle dataset(H5Dopen2(file, name.c_str(), access), H5Dclose, "opening dataset " + name);
  const Handle stored(H5Dget_type(dataset), H5Tclose, "reading the type of dataset " + name);
  kernels::Scalar found;
  if (!scalar_of(stored, found) || found != type) throw error(ExitCode::io, "dataset {} has a different type", name);
  const std::vector<std::int64_t> extent = shape_of(dataset);
  if (extent != shape)
    throw error(ExitCode::io, "dataset {} has shape {} (expected {})", name, text_of(extent), text_of(shape));
  const Handle create(H5Dget_create_plist(dataset), H5Pclose, "reading the layout of dataset " + name);
  if (H5Pget_layout(create) != H5D_CHUNKED) throw error(ExitCode::io, "dataset {} is not chunked", name);
  std::vector<hsize_t> chunk(shape.size());
  check(H5Pget_chunk(create, static_cast<int>(chunk.size()), chunk.data()), "reading the chunks of dataset " + name);
  std::int64_t left = kLargestChunkRead / kernels::bytes_of(type);  // elements; division cannot overflow
  for (const hsize_t extent_of_chunk : chunk)
    left = extent_of_chunk == 0
               ? 0
               : left / static_cast<std::int64_t>(std::min<hsize_t>(extent_of_chunk, kLargestChunkRead));
  if (left < 1) throw error(ExitCode::io, "dataset {} has chunks of more than {} bytes", name, kLargestChunkRead);
  return dataset;
}

void read_rows(hid_t dataset, std::int64_t begin, std::int64_t count, void* data) {
  std::vector<std::int64_t> shape;
  std::int64_t row_bytes = 0, piece = 0;
  Handle type;
  {
    const Lock lock;
    shape = shape_of(dataset);
    type = Handle(H5Dget_type(dataset), H5Tclose, "reading a dataset's type");
    kernels::Scalar scalar;
    if (!scalar_of(type, scalar)) throw error(ExitCode::io, "a dataset has an unsupported type");
    piece = piece_rows(scalar, shape);
    row_bytes = kernels::bytes_of(scalar);
    for (std::size_t axis = 1; axis < shape.size(); ++axis) row_bytes *= shape[axis];
  }
  auto* to = static_cast<char*>(data);
  for (const std::int64_t end = begin + count; begin < end;) {
    const std::int64_t next = std::min(end, (begin / piece + 1) * piece);
    const Lock lock;
    const Selection rows(dataset, begin, next - begin);
    check(H5Dread(dataset, type, rows.memory, rows.file, H5P_DEFAULT, to), "reading rows");
    to += (next - begin) * row_bytes;
    begin = next;
  }
}

namespace {

/// The chunks of `create_dataset`: each one is a contiguous run of elements. Axes before `axis` have chunk size 1,
/// those after it are not divided.
struct Runs {
  std::vector<std::int64_t> shape;
  std::vector<hsize_t> chunk;
  std::size_t axis = 0;
  std::int64_t element = 0;  ///< bytes

  std::int64_t row_bytes() const { return index_bytes(0); }
  /// Bytes of one index of axis `at`.
  std::int64_t index_bytes(std::size_t at) const {
    std::int64_t bytes = element;
    while (++at < shape.size()) bytes *= shape[at];
    return bytes;
  }
  std::int64_t chunk_bytes() const { return static_cast<std::int64_t>(chunk[axis]) * index_bytes(axis); }
};

/// True if the dataset has chunks that are runs, and no filter but the checksum. Requires the lock.
bool has_runs(hid_t dataset, Runs& runs) {
  runs.shape = shape_of(dataset);
  runs.chunk.resize(runs.shape.size());
  const Handle create(H5Dget_create_plist(dataset), H5Pclose, "reading a dataset's layout");
  const Handle type(H5Dget_type(dataset), H5Tclose, "reading a dataset's type");
  runs.element = static_cast<std::int64_t>(H5Tget_size(type));
  unsigned flags = 0, configuration = 0;
  std::size_t n_values = 0;
  if (H5Pget_nfilters(create) != 1 ||
      H5Pget_filter2(create, 0, &flags, &n_values, nullptr, 0, nullptr, &configuration) != H5Z_FILTER_FLETCHER32 ||
      H5Pget_chunk(create, static_cast<int>(runs.chunk.size()), runs.chunk.data()) < 0)
    return false;
  while (runs.axis + 1 < runs.shape.size() && runs.chunk[runs.axis] == 1) ++runs.axis;
  for (std::size_t axis = runs.axis + 1; axis < runs.shape.size(); ++axis)
    if (static_cast<std::int64_t>(runs.chunk[axis]) != runs.shape[axis]) return false;
  return runs.chunk[runs.axis] > 0;
}

struct Chunk {
  std::int64_t begin, end;     ///< bytes of the tensor
  std::vector<hsize_t> where;  ///< its first element
};

/// The chunks of rows [begin, begin + count), in the order of the tensor.
std::vector<Chunk> chunks_of(const Runs& runs, std::int64_t begin, std::int64_t count) {
  if (runs.shape.empty() || begin < 0 || count < 0 || begin + count > runs.shape[0])
    throw error(ExitCode::internal, "rows {} to {} are outside a dataset", begin, begin + count);
  const std::int64_t inner = runs.index_bytes(runs.axis), rows_bytes = runs.row_bytes();
  const std::int64_t extent = runs.shape[runs.axis], step = static_cast<std::int64_t>(runs.chunk[runs.axis]);
  std::vector<Chunk> chunks;
  for (std::int64_t at = begin * rows_bytes; at < (begin + count) * rows_bytes; at = chunks.back().end) {
    const std::int64_t outer = at / (extent * inner), index = at / inner % extent / step * step;
    const std::int64_t first = (outer * extent + index) * inner;
    std::vector<hsize_t> where(runs.shape.size(), 0);
    where[runs.axis] = static_cast<hsize_t>(index);
    for (std::int64_t axis = static_cast<std::int64_t>(runs.axis) - 1, left = outer; axis >= 0; --axis) {
      where[static_cast<std::size_t>(axis)] = static_cast<hsize_t>(left % runs.shape[static_cast<std::size_t>(axis)]);
      left /= runs.shape[static_cast<std::size_t>(axis)];
    }
    chunks.push_back({first, first + std::min(step, extent - index) * inner, std::move(where)});
  }
  return chunks;
}

/// First byte of a chunk of which `bytes` bytes are used, according to the index of the file. Requires the lock.
std::int64_t located(hid_t dataset, const std::vector<hsize_t>& where, std::int64_t bytes) {
  unsigned skipped_filters = 0;
  haddr_t address = HADDR_UNDEF;
  hsize_t stored = 0;
  check(H5Dget_chunk_info_by_coord(dataset, where.data(), &skipped_filters, &address, &stored), "locating a chunk");
  if (address == HADDR_UNDEF || static_cast<std::int64_t>(stored) < bytes)
    throw error(ExitCode::io, "a chunk was never written (incomplete write)");
  return static_cast<std::int64_t>(address);
}

/// The runs of a dataset that `create_dataset` made.
Runs own_runs(hid_t dataset) {
  const Lock lock;
  Runs runs;
  if (!has_runs(dataset, runs)) throw error(ExitCode::internal, "cannot write a dataset of another layout");
  return runs;
}

/// Writes a complete chunk, with its checksum.
void write_chunk(hid_t dataset, const std::vector<hsize_t>& where, const std::vector<char>& bytes) {
  constexpr std::uint32_t kAllFiltersApplied = 0;
  check(H5Dwrite_chunk(dataset, H5P_DEFAULT, kAllFiltersApplied, where.data(), bytes.size(), bytes.data()),
        "writing rows");
}

}  // namespace

void write_rows(hid_t dataset, std::int64_t begin, std::int64_t count, const void* data) {
  const Runs runs = own_runs(dataset);
  const auto chunk_bytes = static_cast<std::size_t>(runs.chunk_bytes());
  std::vector<char> bytes(chunk_bytes + kChunkSumBytes);
  for (const Chunk& chunk : chunks_of(runs, begin, count)) {
    const std::int64_t first = chunk.begin - begin * runs.row_bytes();
    if (first < 0 || chunk.end > (begin + count) * runs.row_bytes())
      throw error(ExitCode::internal, "rows {} to {} are not complete chunks", begin, begin + count);
    const auto used = static_cast<std::size_t>(chunk.end - chunk.begin);
    std::memcpy(bytes.data(), static_cast<const char*>(data) + first, used);
    // The last chunk is zero beyond the dataset, as in files written by HDF5.
    std::memset(bytes.data() + used, 0, chunk_bytes - used);
    const std::uint32_t sum = fletcher32(bytes.data(), chunk_bytes);
    static_assert(sizeof sum == kChunkSumBytes);
    std::memcpy(bytes.data() + chunk_bytes, &sum, sizeof sum);
    const Lock lock;
    write_chunk(dataset, chunk.where, bytes);
  }
}

std::vector<StoredChunk> allocate_chunks(hid_t dataset) {
  const Runs runs = own_runs(dataset);
  const std::vector<char> unused(static_cast<std::size_t>(runs.chunk_bytes() + kChunkSumBytes));
  const auto stored = static_cast<std::int64_t>(unused.size());
  std::vector<StoredChunk> places;
  for (const Chunk& chunk : chunks_of(runs, 0, runs.shape[0])) {
    const Lock lock;
    write_chunk(dataset, chunk.where, unused);
    places.push_back({chunk.begin, chunk.end - chunk.begin, located(dataset, chunk.where, stored), stored});
  }
  return places;
}

std::vector<VerifiedFile::Part> locate_rows(hid_t dataset, std::int64_t begin, std::int64_t count, void* data) {
  const Lock lock;
  Runs runs;
  if (!has_runs(dataset, runs)) throw error(ExitCode::io, "its chunks are not those of a checkpoint");
  const std::int64_t first = begin * runs.row_bytes(), last = (begin + count) * runs.row_bytes();
  std::vector<VerifiedFile::Part> parts;
  for (const Chunk& chunk : chunks_of(runs, begin, count)) {
    const std::int64_t from = std::max(first, chunk.begin), to = std::min(last, chunk.end);
    parts.push_back({located(dataset, chunk.where, chunk.end - chunk.begin) + (from - chunk.begin), to - from,
                     static_cast<char*>(data) + (from - first)});
  }
  std::sort(parts.begin(), parts.end(), [](const auto& a, const auto& b) { return a.begin < b.begin; });
  return parts;
}

void require_complete(hid_t dataset, const std::string& name) {
  const Lock lock;
  const Handle create(H5Dget_create_plist(dataset), H5Pclose, "reading the layout of dataset " + name);
  const Handle type(H5Dget_type(dataset), H5Tclose, "reading the type of dataset " + name);
  const std::vector<std::int64_t> shape = shape_of(dataset);
  std::vector<hsize_t> chunk(shape.size());
  check(H5Pget_chunk(create, static_cast<int>(chunk.size()), chunk.data()), "reading the chunks of dataset " + name);
  hsize_t n_chunks = 1, chunk_bytes = H5Tget_size(type);
  for (std::size_t axis = 0; axis < shape.size(); ++axis) {
    n_chunks *= (static_cast<hsize_t>(shape[axis]) + chunk[axis] - 1) / chunk[axis];
    chunk_bytes *= chunk[axis];
  }
  const hsize_t expected = n_chunks * (chunk_bytes + hsize_t{kChunkSumBytes});
  const hsize_t stored = H5Dget_storage_size(dataset);
  if (stored != expected)
    throw error(ExitCode::io, "dataset {} holds {} of {} bytes (incomplete write)", name, stored, expected);
}

void write_tensor(hid_t file, const std::string& name, kernels::Scalar type, const std::vector<std::int64_t>& shape,
                  const void* data) {
  Handle dataset = create_dataset(file, name, type, shape);
  std::int64_t row_bytes = kernels::bytes_of(type);
  for (std::size_t axis = 1; axis < shape.size(); ++axis) row_bytes *= shape[axis];
  const std::int64_t piece = piece_rows(type, shape);
  for (std::int64_t begin = 0; begin < shape[0]; begin += piece)
    write_rows(dataset, begin, std::min(piece, shape[0] - begin),
               static_cast<const std::byte*>(data) + begin * row_bytes);
  dataset.close();
}

}  // namespace weft::storage
