// SPDX-License-Identifier: Apache-2.0
#include "storage/activation_file.hpp"

#include <sys/stat.h>

#include <algorithm>
#include <cerrno>
#include <charconv>
#include <cstring>
#include <tuple>
#include <utility>

#include "base/error.hpp"
#include "base/file.hpp"
#include "base/text.hpp"
#include "storage/safetensors.hpp"

namespace weft::storage {
namespace {

using kernels::Scalar;

// Chunks must be unpacked completely into memory.
constexpr std::int64_t kLargestChunk = std::int64_t{1} << 30;
constexpr std::int64_t kMostMembers = 4096;
constexpr std::int64_t kMostColumns = std::int64_t{1} << 24;
constexpr std::int64_t kMostRows = std::int64_t{1} << 38;
// deflate compresses at most 1032 to 1. A header that claims more is damaged, and its row count must not size memory.
constexpr std::int64_t kLargestRatio = 2048;
// HDF5 1.10 traverses the whole index to describe one chunk. Datasets with more chunks are read through HDF5.
constexpr std::int64_t kMostLocatedChunks = 4096;

/// Size, and time of modification in nanoseconds, of a regular file.
std::pair<std::int64_t, std::int64_t> state_of_file(const std::string& path) {
  const Descriptor file = open_regular(path, ExitCode::data);
  struct stat status {};
  if (::fstat(file, &status) != 0) fail_with_errno(path, "reading the size");
  return {status.st_size, status.st_mtim.tv_sec * std::int64_t{1'000'000'000} + status.st_mtim.tv_nsec};
}

/// "layer_12" -> 12; -1 for any other name.
std::int64_t layer_number(std::string_view name) {
  if (!name.starts_with("layer_")) return -1;
  name.remove_prefix(6);
  std::int64_t number = -1;
  const auto [end, status] = std::from_chars(name.data(), name.data() + name.size(), number);
  if (status != std::errc() || end != name.data() + name.size() || number < 0) return -1;
  return name == std::to_string(number) ? number : -1;
}

enum class Link { missing, hard, other };

/// `other`: a soft or external link, which is not followed.
Link link_to(hid_t parent, const std::string& name) {
  if (H5Lexists(parent, name.c_str(), H5P_DEFAULT) <= 0) return Link::missing;
  H5L_info_t info;
  if (H5Lget_info(parent, name.c_str(), &info, H5P_DEFAULT) < 0) return Link::missing;
  return info.type == H5L_TYPE_HARD ? Link::hard : Link::other;
}

constexpr const char* kLinkRefused =
    "is an external or soft link (links are not followed); copy the values into the file";

std::string text_or_empty(hid_t object, const std::string& name) {
  return has_attribute(object, name) ? read_text_attribute(object, name) : std::string();
}

std::int64_t divide_up(std::int64_t a, std::int64_t b) { return (a + b - 1) / b; }

}  // namespace

std::string dataset_name(Side side, std::int64_t layer, std::string_view layout) {
  const bool inputs = side == Side::inputs;
  if (layout == kCltForge) return fmt::format("{}, layer {}", inputs ? "act_in" : "act_out", layer);
  const char* const name = inputs ? "inputs" : "targets";
  if (layout == kCrosslayerTranscoder) return fmt::format("/tensor, {} of layer {}", name, layer);
  return fmt::format("/layer_{}/{}", layer, name);
}

bool is_crosslayer_transcoder_file(const std::filesystem::path& path) {
  if (path.extension() != ".h5" && path.extension() != ".hdf5") return false;
  try {
    const Lock lock;
    const Handle file = open_data_file(path);
    return link_to(file, "tensor") == Link::hard;
  } catch (const Error&) {  // the error is reported when the file is opened for reading
    return false;
  }
}

ActivationFile::ActivationFile(const std::filesystem::path& path) : path_(path.string()) {
  std::tie(bytes_, modified_) = state_of_file(path_);
  if (path.extension() == ".safetensors") {
    read_clt_forge();
    return;
  }
  const Lock lock;
  file_ = open_data_file(path_);
  with_damage_as_data_error(path_, [&] { read_headers(); });
}

void ActivationFile::read_headers() {
  const Handle creation(H5Fget_create_plist(file_), H5Pclose, path_ + ": reading the file's properties");
  hsize_t user_block = 0;
  check(H5Pget_userblock(creation, &user_block), path_ + ": reading the file's properties");
  user_block_ = user_block != 0;
  try {
    header_.format = text_or_empty(file_, "format");
    if (has_attribute(file_, "format_version"))
      header_.format_version = read_integer_attribute(file_, "format_version");
    header_.model = text_or_empty(file_, "model");
    header_.hook_inputs = text_or_empty(file_, "hook_inputs");
    header_.hook_targets = text_or_empty(file_, "hook_targets");
  } catch (const Error& failure) {
    throw error(ExitCode::data, "{}: {}", path_, failure.what());
  }

  if (link_to(file_, "tensor") == Link::hard && link_to(file_, "layer_0") == Link::missing)
    return read_crosslayer_transcoder();

  // HDF5 lists layer_10 before layer_2: probe names in numeric order.
  std::int64_t n_layers = 0;
  while (link_to(file_, fmt::format("layer_{}", n_layers)) == Link::hard) ++n_layers;
  H5G_info_t root;
  check(H5Gget_info(file_, &root), path_ + ": reading the root group");
  if (root.nlinks > static_cast<hsize_t>(kMostMembers))
    throw error(ExitCode::data, "{}: / has {} members (at most {} are accepted)", path_, root.nlinks, kMostMembers);
  for (hsize_t i = 0; i < root.nlinks; ++i) {
    char name[64] = "";
    if (H5Lget_name_by_idx(file_, ".", H5_INDEX_NAME, H5_ITER_INC, i, name, sizeof name, H5P_DEFAULT) < 0) continue;
    const std::int64_t number = layer_number(name);
    if (number == n_layers) throw error(ExitCode::data, "{}: /{} {}", path_, name, kLinkRefused);
    if (number > n_layers)
      throw error(ExitCode::data,
                  "{}: /layer_{} is missing (/{} exists; layers must be numbered from 0 without a gap); was the file "
                  "written completely?",
                  path_, n_layers, name);
  }
  if (n_layers == 0)
    throw error(ExitCode::data,
                "{}: /layer_0 is missing (activation files have groups layer_0, layer_1, ...); is this an activation "
                "file?",
                path_);
  for (std::int64_t layer = 0; layer < n_layers; ++layer) {
    header_.inputs.push_back(read_matrix_header(Side::inputs, layer));
    header_.targets.push_back(read_matrix_header(Side::targets, layer));
  }
  read_token_headers();
  open_name_.clear();
  dataset_ = Handle();
}

void ActivationFile::read_clt_forge() {
  const SafetensorsFile file(path_);
  const SafetensorsEntry* sides[2];
  for (int side = 0; side < 2; ++side) {
    const char* const name = side == 0 ? "act_in" : "act_out";
    const SafetensorsEntry* const entry = sides[side] = file.find(name);
    if (entry == nullptr)
      throw error(ExitCode::data, "{}: tensor \"{}\" is missing; is this an activation file of CLT-Forge?", path_,
                  name);
    if (entry->shape.size() != 3 || entry->shape != sides[0]->shape)
      throw error(
          ExitCode::data,
          "{}: tensor \"{}\" has another shape than [rows, layers, columns] of \"act_in\"; was the file written "
          "completely?",
          path_, name);
    if (entry->dtype != sides[0]->dtype || !entry->type || *entry->type == Scalar::fp64)
      throw error(ExitCode::data, "{}: tensor \"{}\" is {} (supported: both F32, F16 or BF16); convert it", path_, name,
                  printable(entry->dtype));
  }
  const std::vector<std::int64_t>& shape = sides[0]->shape;
  const std::int64_t pitch = shape[0] > 0 ? (sides[0]->end - sides[0]->begin) / shape[0] : 0;
  set_whole_rows(kCltForge, *sides[0]->type, shape[0], shape[1], shape[2],
                 {WholeRows{sides[0]->begin, pitch}, WholeRows{sides[1]->begin, pitch}});
  if (const SafetensorsEntry* const tokens = file.find("tokens")) {
    if (tokens->dtype != "I64" || tokens->shape != std::vector<std::int64_t>{shape[0]})
      throw error(ExitCode::data, "{}: tensor \"tokens\" is not a list of {} integers of 64 bits, one per row", path_,
                  shape[0]);
    header_.tokens = StoredArray{Scalar::i64, shape[0], tokens->begin};
    // Texts of equal length follow one another.
    const std::string directory = std::filesystem::path(path_).parent_path().filename().string();
    std::int64_t length = 0;
    const char* const end = directory.data() + directory.size();
    if (directory.starts_with("ctx_") && std::from_chars(directory.data() + 4, end, length).ptr == end && length > 0 &&
        shape[0] % length == 0)
      header_.context_rows = length;
  }
}

void ActivationFile::read_crosslayer_transcoder() {
  const auto refuse = [&](const std::string& why) { return error(ExitCode::data, "{}: /tensor {}", path_, why); };
  const Handle dataset(H5Dopen2(file_, "tensor", H5P_DEFAULT), H5Dclose, path_ + ": opening /tensor");
  const std::vector<std::int64_t> shape = shape_of(dataset);
  if (shape.size() != 4 || shape[1] != 2)
    throw refuse("is not of shape [rows, 2, layers, columns]; is this an activation file of crosslayer-transcoder?");
  const Handle type(H5Dget_type(dataset), H5Tclose, path_ + ": reading the type of /tensor");
  Scalar scalar = Scalar::fp32;
  if (!scalar_of(type, scalar) || (scalar != Scalar::fp32 && scalar != Scalar::fp16))
    throw refuse(fmt::format("is {} (supported: fp32 and fp16, little-endian); convert it", type_text(type)));
  const Handle creation(H5Dget_create_plist(dataset), H5Pclose, path_ + ": reading the properties of /tensor");
  if (H5Pget_layout(creation) != H5D_CONTIGUOUS || user_block_)
    throw refuse(
        "is not stored contiguously (its rows are read in place); rewrite the file: h5repack -f NONE -l tensor:CONTI "
        "IN OUT");
  if (H5Pget_external_count(creation) > 0)
    throw refuse("stores its values in external files (not supported); copy the values into the file");
  const haddr_t offset = H5Dget_offset(dataset);
  std::int64_t row_bytes = bytes_of(scalar), all = 0;
  bool fits = offset != HADDR_UNDEF && offset <= static_cast<haddr_t>(bytes_);
  for (std::size_t axis = 1; axis < 4; ++axis)
    fits = fits && !__builtin_mul_overflow(row_bytes, shape[axis], &row_bytes);
  fits = fits && !__builtin_mul_overflow(row_bytes, shape[0], &all);
  if (!fits || all > bytes_ - static_cast<std::int64_t>(offset))
    throw refuse("was never written or ends beyond the file; is it truncated?");
  const auto first = static_cast<std::int64_t>(offset);
  set_whole_rows(kCrosslayerTranscoder, scalar, shape[0], shape[2], shape[3],
                 {WholeRows{first, row_bytes}, WholeRows{first + row_bytes / 2, row_bytes}});
}

void ActivationFile::set_whole_rows(const char* layout, Scalar type, std::int64_t rows, std::int64_t layers,
                                    std::int64_t columns, const std::array<WholeRows, 2>& places) {
  if (rows < 1 || layers < 1 || columns < 1)
    throw error(ExitCode::data, "{}: has {} rows of {} layers with {} values; was the file written completely?", path_,
                rows, layers, columns);
  if (rows > kMostRows || layers > kMostMembers || columns > kMostColumns)
    throw error(ExitCode::data, "{}: has {} rows of {} layers with {} values (at most {}, {} and {} are accepted)",
                path_, rows, layers, columns, kMostRows, kMostMembers, kMostColumns);
  header_.format = layout;
  header_.whole_rows = places;
  MatrixHeader matrix;
  matrix.type = type;
  matrix.rows = rows;
  matrix.columns = columns;
  matrix.direct = true;
  header_.inputs.assign(static_cast<std::size_t>(layers), matrix);
  header_.targets = header_.inputs;
  rows_file_.emplace(path_);
}

std::int64_t ActivationFile::place_of(Side side, std::int64_t layer, std::int64_t row) const {
  const WholeRows& rows = (*header_.whole_rows)[side == Side::inputs ? 0 : 1];
  const MatrixHeader& matrix = header_.inputs[0];
  return rows.offset + row * rows.pitch + layer * matrix.columns * bytes_of(matrix.type);
}

void ActivationFile::read_token_headers() {
  if (header_.format != kActivationFormat) return;  // rows of other formats may be permuted
  const bool required = header_.format_version >= kActivationFormatWithTokens;
  if (!required && H5Lexists(file_, "tokens", H5P_DEFAULT) <= 0) return;
  if (user_block_)
    throw error(ExitCode::data, "{}: has a user block (not supported in a file with token ids); remove it", path_);
  header_.tokens = locate_array(file_, path_, "tokens", bytes_, {Scalar::i32}, "int32");
  const std::int64_t rows = header_.inputs[0].rows;
  if (header_.tokens->count != rows)
    throw error(ExitCode::data,
                "{}: /tokens has {} values, /layer_0/inputs has {} rows; was the file written completely?", path_,
                header_.tokens->count, rows);
  if (!required) return;
  header_.documents = locate_array(file_, path_, "documents", bytes_, {Scalar::i64}, "int64");
  if (header_.documents->count > rows)
    throw error(ExitCode::data, "{}: /documents has {} entries for {} rows; is the file damaged?", path_,
                header_.documents->count, rows);
}

hid_t ActivationFile::open(Side side, std::int64_t layer) {
  const std::string name = dataset_name(side, layer);
  if (name == open_name_) return dataset_;
  // Close the other dataset first: otherwise a second handle of this one would use the chunk cache of the first.
  open_name_.clear();
  dataset_ = Handle();
  const std::string group = fmt::format("layer_{}", layer);
  const std::string member = side == Side::inputs ? "inputs" : "targets";
  const Handle parent(H5Gopen2(file_, group.c_str(), H5P_DEFAULT), H5Gclose, path_ + ": opening /" + group);
  if (const Link link = link_to(parent, member); link != Link::hard)
    throw error(ExitCode::data, "{}: {} {}", path_, name,
                link == Link::other ? kLinkRefused : "is missing; was the file written completely?");
  const Handle access(H5Pcreate(H5P_DATASET_ACCESS), H5Pclose, "creating dataset access properties");
  if (static_cast<std::size_t>(layer) < header_.targets.size()) {
    // The cache holds all chunks of one row, so that reading in ascending order unpacks each chunk once.
    const MatrixHeader& header = header_.matrix(side, layer);
    const std::int64_t across = header.chunk_columns > 0 ? divide_up(header.columns, header.chunk_columns) : 1;
    const std::int64_t cache = header.chunk_rows * header.chunk_columns * across * bytes_of(header.type);
    if (!header.direct && cache > 0 && cache <= kLargestChunk)
      check(H5Pset_chunk_cache(access, static_cast<std::size_t>(across * 7 + 1), static_cast<std::size_t>(cache), 1.0),
            "setting the chunk cache");
  }
  dataset_ = Handle(H5Dopen2(parent, member.c_str(), access), H5Dclose, path_ + ": opening " + name);
  dataset_type_ = Handle(H5Dget_type(dataset_), H5Tclose, path_ + ": reading the type of " + name);
  open_name_ = name;
  return dataset_;
}

MatrixHeader ActivationFile::read_matrix_header(Side side, std::int64_t layer) {
  const std::string name = dataset_name(side, layer);
  const auto refuse = [&](const std::string& why) { return error(ExitCode::data, "{}: {} {}", path_, name, why); };
  MatrixHeader header;
  try {
    const hid_t dataset = open(side, layer);
    const std::vector<std::int64_t> shape = shape_of(dataset);
    if (shape.size() != 2) throw refuse(fmt::format("has {} dimensions (expected: rows and columns)", shape.size()));
    header.rows = shape[0];
    header.columns = shape[1];
    if (header.rows < 1) throw refuse("has no rows; was the file written completely?");
    if (header.rows > kMostRows)
      throw refuse(fmt::format("claims {} rows (at most {} are accepted)", header.rows, kMostRows));
    if (header.columns < 1 || header.columns > kMostColumns)
      throw refuse(fmt::format("has {} columns (1 to {} are accepted)", header.columns, kMostColumns));
    if (!scalar_of(dataset_type_, header.type) || (header.type != Scalar::fp32 && header.type != Scalar::fp16 &&
                                                   header.type != Scalar::bf16 && header.type != Scalar::u16))
      throw refuse(
          fmt::format("is {} (supported: fp32, fp16 and bf16, little-endian); convert it", type_text(dataset_type_)));
    header.declared = text_or_empty(dataset, "dtype");

    const std::int64_t row_bytes = header.columns * bytes_of(header.type);
    const Handle creation(H5Dget_create_plist(dataset), H5Pclose, path_ + ": reading the properties of " + name);
    const H5D_layout_t layout = H5Pget_layout(creation);
    if (layout == H5D_CONTIGUOUS) {
      if (H5Pget_external_count(creation) > 0)
        throw refuse("stores its values in external files (not supported); copy the values into the file");
      if (header.rows > bytes_ / row_bytes)
        throw refuse(fmt::format("claims {} rows of {} bytes in a file of {} bytes; is the file truncated?",
                                 header.rows, row_bytes, bytes_));
      const haddr_t offset = H5Dget_offset(dataset);
      if (offset == HADDR_UNDEF) throw refuse("was never written; was the file written completely?");
      if (offset > static_cast<haddr_t>(bytes_) || static_cast<std::int64_t>(offset) + header.rows * row_bytes > bytes_)
        throw refuse("extends beyond the end of the file; is it truncated?");
      header.direct = !user_block_;
    } else if (layout == H5D_CHUNKED) {
      hsize_t chunk[2] = {0, 0};
      if (H5Pget_chunk(creation, 2, chunk) != 2 || chunk[0] < 1 || chunk[1] < 1)
        throw refuse("has chunks of an unknown shape");
      if (chunk[0] > static_cast<hsize_t>(kLargestChunk) || chunk[1] > static_cast<hsize_t>(kMostColumns) ||
          static_cast<std::int64_t>(chunk[0] * chunk[1]) > kLargestChunk / bytes_of(header.type))
        throw refuse(
            fmt::format("has HDF5 chunks of {} x {} values (at most 1 GiB is accepted); rewrite it with smaller ones",
                        chunk[0], chunk[1]));
      header.chunk_rows = static_cast<std::int64_t>(chunk[0]);
      header.chunk_columns = static_cast<std::int64_t>(chunk[1]);
      const int n_filters = H5Pget_nfilters(creation);
      for (int i = 0; i < n_filters; ++i) {
        unsigned flags = 0, configuration = 0;
        std::size_t n_values = 0;
        char filter[64] = "";
        const H5Z_filter_t id = H5Pget_filter2(creation, static_cast<unsigned>(i), &flags, &n_values, nullptr,
                                               sizeof filter, filter, &configuration);
        if (id < 0 || H5Zfilter_avail(id) <= 0)
          throw refuse(fmt::format(
              "is compressed with filter {} (\"{}\"), which this HDF5 {} does not have; rewrite it with gzip or "
              "uncompressed",
              static_cast<int>(id), printable(filter), hdf5_version()));
      }
      const std::int64_t down = divide_up(header.rows, header.chunk_rows);
      const std::int64_t across = divide_up(header.columns, header.chunk_columns);
      // Checked before HDF5 reads the chunk index, for which it allocates memory.
      if (down > bytes_ / across)
        throw refuse(
            fmt::format("claims {} x {} chunks in a file of {} bytes; is the file truncated?", down, across, bytes_));
      // Chunks that were never written would read as zeros.
      const Handle space(H5Dget_space(dataset), H5Sclose, path_ + ": reading the shape of " + name);
      hsize_t n_chunks = 0;
      check(H5Dget_num_chunks(dataset, space, &n_chunks), path_ + ": counting the chunks of " + name);
      if (n_chunks != static_cast<hsize_t>(down * across))
        throw refuse(fmt::format("has {} of its {} chunks; was the file written completely?", n_chunks, down * across));
      const hsize_t stored = H5Dget_storage_size(dataset);
      if (stored > static_cast<hsize_t>(bytes_))
        throw refuse(
            fmt::format("claims {} stored bytes in a file of {} bytes; is the file truncated?", stored, bytes_));
      // HDF5 1.10 takes the bytes and the shape of a chunk from different places of the header. If they disagree it
      // reads out of bounds.
      const hsize_t chunk_bytes = chunk[0] * chunk[1] * static_cast<hsize_t>(bytes_of(header.type));
      if (n_filters == 0 && (stored % n_chunks != 0 || stored / n_chunks != chunk_bytes))
        throw refuse(fmt::format("has chunks of {} bytes, its shape and type require {}; is it damaged?",
                                 stored / n_chunks, chunk_bytes));
      if (header.rows > static_cast<std::int64_t>(stored) * kLargestRatio / row_bytes)
        throw refuse(fmt::format("claims {} rows of {} bytes in {} stored bytes; is it damaged?", header.rows,
                                 row_bytes, stored));
      header.filtered = n_filters > 0;
      header.direct =
          n_filters == 0 && header.chunk_columns == header.columns && !user_block_ && down <= kMostLocatedChunks;
    } else if (layout == H5D_COMPACT) {
      header.direct = false;  // stored inside the header, hence small
      const hsize_t stored = H5Dget_storage_size(dataset);
      if (stored > static_cast<hsize_t>(bytes_) || header.rows != static_cast<std::int64_t>(stored) / row_bytes)
        throw refuse(fmt::format("claims {} rows of {} bytes in {} stored bytes; is it damaged?", header.rows,
                                 row_bytes, stored));
    } else {
      throw refuse("is a virtual dataset (a missing source would read as zeros); copy the values into the file");
    }
  } catch (const SystemError&) {
    throw;
  } catch (const Error& failure) {
    if (failure.code() == ExitCode::data) throw;
    throw error(ExitCode::data, "{}: {} cannot be read ({})", path_, name, failure.what());
  }
  return header;
}

std::vector<Extent> ActivationFile::extents(Side side, std::int64_t layer) {
  if (header_.whole_rows)
    return {{0, header_.inputs[0].rows, place_of(side, layer, 0), (*header_.whole_rows)[0].pitch}};
  const Lock lock;
  return with_damage_as_data_error(path_, [&] { return locate(side, layer); });
}

std::vector<Extent> ActivationFile::locate(Side side, std::int64_t layer) {
  const MatrixHeader& header = header_.matrix(side, layer);
  const std::string name = dataset_name(side, layer);
  const std::int64_t row_bytes = header.columns * bytes_of(header.type);
  const hid_t dataset = open(side, layer);
  if (header.chunk_rows == 0) return {{0, header.rows, static_cast<std::int64_t>(H5Dget_offset(dataset))}};
  const Handle space(H5Dget_space(dataset), H5Sclose, path_ + ": reading the shape of " + name);
  std::vector<Extent> extents;
  for (std::int64_t begin = 0; begin < header.rows; begin += header.chunk_rows) {
    hsize_t at[2] = {0, 0}, stored = 0;
    unsigned mask = 0;
    haddr_t address = HADDR_UNDEF;
    if (H5Dget_chunk_info(dataset, space, static_cast<hsize_t>(begin / header.chunk_rows), at, &mask, &address,
                          &stored) < 0 ||
        address == HADDR_UNDEF || address > static_cast<haddr_t>(bytes_) ||
        static_cast<std::int64_t>(stored) != header.chunk_rows * row_bytes ||
        static_cast<std::int64_t>(address + stored) > bytes_ || at[1] != 0)
      throw error(ExitCode::data, "{}: {} has a chunk outside the file; is it damaged?", path_, name);
    const std::int64_t row = static_cast<std::int64_t>(at[0]);
    extents.push_back({row, std::min(header.chunk_rows, header.rows - row), static_cast<std::int64_t>(address)});
  }
  std::sort(extents.begin(), extents.end(), [](const Extent& a, const Extent& b) { return a.row_begin < b.row_begin; });
  for (std::size_t i = 0; i < extents.size(); ++i)
    if (extents[i].row_begin != static_cast<std::int64_t>(i) * header.chunk_rows)
      throw error(ExitCode::data, "{}: {} has two chunks for the same rows; is it damaged?", path_, name);
  return extents;
}

std::vector<StoredBytes> ActivationFile::ends(Side side, std::int64_t layer, std::int64_t at_most) {
  if (header_.whole_rows) {  // the same for all layers: of the whole tensor
    const std::int64_t begin = place_of(side, 0, 0),
                       end = place_of(side, header_.n_layers(), header_.inputs[0].rows - 1),
                       piece = std::min(end - begin, at_most);
    return {{begin, piece}, {end - piece, piece}};
  }
  const Lock lock;
  if (user_block_) return {};
  return with_damage_as_data_error(path_, [&] { return locate_ends(side, layer, at_most); });
}

std::vector<StoredBytes> ActivationFile::locate_ends(Side side, std::int64_t layer, std::int64_t at_most) {
  const MatrixHeader& header = header_.matrix(side, layer);
  const std::string name = dataset_name(side, layer);
  const hid_t dataset = open(side, layer);
  if (header.chunk_rows == 0) {
    const haddr_t offset = H5Dget_offset(dataset);
    if (offset == HADDR_UNDEF) return {};  // compact: inside the header
    const std::int64_t all = header.rows * header.columns * bytes_of(header.type);
    const std::int64_t piece = std::min(all, at_most);
    return {{static_cast<std::int64_t>(offset), piece}, {static_cast<std::int64_t>(offset) + all - piece, piece}};
  }
  const Handle space(H5Dget_space(dataset), H5Sclose, path_ + ": reading the shape of " + name);
  hsize_t n_chunks = 0;
  check(H5Dget_num_chunks(dataset, space, &n_chunks), path_ + ": counting the chunks of " + name);
  std::vector<StoredBytes> ends;
  for (const hsize_t index : {hsize_t{0}, n_chunks - 1}) {
    hsize_t at[2], stored = 0;
    unsigned mask = 0;
    haddr_t address = HADDR_UNDEF;
    if (H5Dget_chunk_info(dataset, space, index, at, &mask, &address, &stored) < 0 || address == HADDR_UNDEF ||
        address > static_cast<haddr_t>(bytes_) || stored > static_cast<hsize_t>(bytes_) ||
        static_cast<std::int64_t>(address + stored) > bytes_)
      throw error(ExitCode::data, "{}: {} has a chunk outside the file; is it damaged?", path_, name);
    ends.push_back({static_cast<std::int64_t>(address), std::min(static_cast<std::int64_t>(stored), at_most)});
  }
  return ends;
}

std::optional<StoredBytes> ActivationFile::stored_row(Side side, std::int64_t layer, std::int64_t row) {
  const MatrixHeader& matrix = header_.matrix(side, layer);
  if (header_.whole_rows) return StoredBytes{place_of(side, layer, row), matrix.columns * bytes_of(matrix.type)};
  const Lock lock;
  if (user_block_) return std::nullopt;
  return with_damage_as_data_error(path_, [&] { return locate_row(side, layer, row); });
}

std::optional<StoredBytes> ActivationFile::locate_row(Side side, std::int64_t layer, std::int64_t row) {
  const MatrixHeader& header = header_.matrix(side, layer);
  const std::int64_t row_bytes = header.columns * bytes_of(header.type);
  const hid_t dataset = open(side, layer);
  if (header.chunk_rows == 0) {
    const haddr_t offset = H5Dget_offset(dataset);
    if (offset == HADDR_UNDEF) return std::nullopt;  // compact: inside the header
    return StoredBytes{static_cast<std::int64_t>(offset) + row * row_bytes, row_bytes};
  }
  const std::int64_t n_chunks =
      divide_up(header.rows, header.chunk_rows) * divide_up(header.columns, header.chunk_columns);
  if (!(header.direct || header.filtered) || n_chunks > kMostLocatedChunks) return std::nullopt;
  const std::int64_t begin = row / header.chunk_rows * header.chunk_rows;
  const hsize_t at[2] = {static_cast<hsize_t>(begin), 0};
  hsize_t stored = 0;
  unsigned mask = 0;
  haddr_t address = HADDR_UNDEF;
  if (H5Dget_chunk_info_by_coord(dataset, at, &mask, &address, &stored) < 0 || address == HADDR_UNDEF ||
      address > static_cast<haddr_t>(bytes_) || stored > static_cast<hsize_t>(bytes_) ||
      static_cast<std::int64_t>(address + stored) > bytes_ ||
      (header.direct && static_cast<std::int64_t>(stored) != header.chunk_rows * row_bytes))
    throw error(ExitCode::data, "{}: {} has a chunk outside the file; is it damaged?", path_,
                dataset_name(side, layer));
  if (header.direct) return StoredBytes{static_cast<std::int64_t>(address) + (row - begin) * row_bytes, row_bytes};
  return StoredBytes{static_cast<std::int64_t>(address), static_cast<std::int64_t>(stored)};
}

void ActivationFile::read(Side side, std::int64_t layer, std::int64_t row_begin, std::int64_t rows, std::byte* out,
                          std::int64_t stride) {
  if (header_.whole_rows) {
    const MatrixHeader& matrix = header_.matrix(side, layer);
    for (std::int64_t i = 0; i < rows; ++i)
      rows_file_->read(out + i * stride, matrix.columns * bytes_of(matrix.type), place_of(side, layer, row_begin + i));
    return;
  }
  const Lock lock;
  with_damage_as_data_error(path_, [&] { read_locked(side, layer, row_begin, rows, out, stride); });
}

void ActivationFile::read_locked(Side side, std::int64_t layer, std::int64_t row_begin, std::int64_t rows,
                                 std::byte* out, std::int64_t stride) {
  const MatrixHeader& header = header_.matrix(side, layer);
  const std::int64_t element = bytes_of(header.type);
  const hid_t dataset = open(side, layer);
  const Handle from(H5Dget_space(dataset), H5Sclose, path_ + ": reading a shape");
  const hsize_t start[2] = {static_cast<hsize_t>(row_begin), 0};
  const hsize_t count[2] = {static_cast<hsize_t>(rows), static_cast<hsize_t>(header.columns)};
  check(H5Sselect_hyperslab(from, H5S_SELECT_SET, start, nullptr, count, nullptr), path_ + ": selecting rows");
  const hsize_t extent[2] = {static_cast<hsize_t>(rows), static_cast<hsize_t>(stride / element)};
  const Handle to(H5Screate_simple(2, extent, nullptr), H5Sclose, "describing memory");
  const hsize_t zero[2] = {0, 0};
  check(H5Sselect_hyperslab(to, H5S_SELECT_SET, zero, nullptr, count, nullptr), "describing memory");
  try {
    check(H5Dread(dataset, dataset_type_, to, from, H5P_DEFAULT, out), "reading");
  } catch (const Error& failure) {
    const std::string what = fmt::format("{}: {} rows {} to {}: {}", path_, dataset_name(side, layer), row_begin,
                                         row_begin + rows - 1, failure.what());
    if (const auto* const system = dynamic_cast<const SystemError*>(&failure))
      throw SystemError(ExitCode::io, system->number(), what);
    throw error(ExitCode::data, "{}{}", what, damage_question(failure.what()));
  }
}

}  // namespace weft::storage
