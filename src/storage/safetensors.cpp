// SPDX-License-Identifier: Apache-2.0
#include "storage/safetensors.hpp"

#include <fcntl.h>
#include <fmt/ranges.h>
#include <unistd.h>

#include <algorithm>
#include <bit>
#include <cerrno>
#include <cstring>
#include <set>

#include "base/json.hpp"
#include "base/text.hpp"
#include "kernels/bf16.hpp"

namespace weft::storage {
namespace {

static_assert(std::endian::native == std::endian::little, "values are stored little-endian");

using kernels::Scalar;

constexpr std::int64_t kLengthBytes = 8;
constexpr std::size_t kMostAxes = 8;
constexpr std::string_view kMetadata = "__metadata__";
/// Elements converted at a time.
constexpr std::int64_t kConvertedPiece = std::int64_t{1} << 16;

struct TypeName {
  std::string_view name;
  std::int64_t bytes;
  std::optional<Scalar> type;
};
constexpr TypeName kTypes[] = {{"F32", 4, Scalar::fp32},
                               {"F16", 2, Scalar::fp16},
                               {"BF16", 2, Scalar::bf16},
                               {"F64", 8, Scalar::fp64},
                               {"BOOL", 1, {}},
                               {"U8", 1, {}},
                               {"I8", 1, {}},
                               {"F8_E4M3", 1, {}},
                               {"F8_E5M2", 1, {}},
                               {"U16", 2, {}},
                               {"I16", 2, {}},
                               {"U32", 4, {}},
                               {"I32", 4, {}},
                               {"U64", 8, {}},
                               {"I64", 8, {}}};

const TypeName* named_type(std::string_view name) {
  const auto at = std::find_if(std::begin(kTypes), std::end(kTypes), [&](const TypeName& t) { return t.name == name; });
  return at == std::end(kTypes) ? nullptr : at;
}

std::string_view name_of(Scalar type) {
  for (const TypeName& entry : kTypes)
    if (entry.type == type) return entry.name;
  throw error(ExitCode::internal, "a safetensors file cannot hold this type");
}

/// Events of the parser: looks for a name that occurs twice in the outermost object.
struct TopLevelNames : nlohmann::json_sax<SortedJson> {
  std::set<std::string> names;
  std::optional<std::string> twice;
  int depth = 0;

  bool key(string_t& name) override {
    if (depth == 1 && !names.insert(name).second) twice = name;
    return true;
  }
  bool start_object(std::size_t) override { return ++depth, true; }
  bool end_object() override { return --depth, true; }
  bool start_array(std::size_t) override { return ++depth, true; }
  bool end_array() override { return --depth, true; }
  bool null() override { return true; }
  bool boolean(bool) override { return true; }
  bool number_integer(number_integer_t) override { return true; }
  bool number_unsigned(number_unsigned_t) override { return true; }
  bool number_float(number_float_t, const string_t&) override { return true; }
  bool string(string_t&) override { return true; }
  bool binary(binary_t&) override { return true; }
  bool parse_error(std::size_t, const std::string&, const nlohmann::detail::exception&) override { return false; }
};

/// A header as JSON. Names of tensors are unique, which the parsed value does not show.
SortedJson parse_unique(const std::string& path, std::string_view header) {
  if (nesting_of(header) > kDeepestJson)
    throw error(ExitCode::data, "{}: its header is nested more than {} deep; is it a safetensors file?", path,
                kDeepestJson);
  SortedJson parsed = SortedJson::parse(header, nullptr, /*allow_exceptions=*/false);
  if (parsed.is_discarded() || !parsed.is_object())
    throw error(ExitCode::data, "{}: its header is not a JSON object; is it a complete safetensors file?", path);
  // A callback of `parse` would see the names too, but with one the time grows with the square of their number.
  TopLevelNames names;
  SortedJson::sax_parse(header, &names);
  if (names.twice) throw error(ExitCode::data, "{}: lists tensor \"{}\" twice", path, printable(*names.twice));
  return parsed;
}

/// A list of integers of at least 0 and at most `most`; nothing if it is something else.
std::optional<std::vector<std::int64_t>> sizes_in(const SortedJson& entry, const char* key, std::int64_t most) {
  const auto list = entry.find(key);
  if (list == entry.end() || !list->is_array()) return std::nullopt;
  std::vector<std::int64_t> sizes;
  for (const SortedJson& value : *list) {
    if (!value.is_number_unsigned() || value.get<std::uint64_t>() > static_cast<std::uint64_t>(most))
      return std::nullopt;
    sizes.push_back(value.get<std::int64_t>());
  }
  return sizes;
}

SafetensorsEntry entry_of(const std::string& path, const std::string& name, const SortedJson& entry,
                          std::int64_t data_begin, std::int64_t file_bytes) {
  const auto refuse = [&](const std::string& why) {
    throw error(ExitCode::data, "{}: tensor \"{}\" {}; is the file damaged?", path, printable(name), why);
  };
  if (!entry.is_object()) refuse("has no description");
  const auto dtype = entry.find("dtype");
  if (dtype == entry.end() || !dtype->is_string()) refuse("has no dtype");
  SafetensorsEntry tensor{.name = name, .dtype = dtype->get<std::string>(), .type = {}, .shape = {}};
  const TypeName* const type = named_type(tensor.dtype);
  if (type == nullptr) refuse(fmt::format("has the unknown dtype \"{}\"", printable(tensor.dtype)));
  tensor.type = type->type;
  const std::int64_t data_bytes = file_bytes - data_begin;
  // No extent of a tensor that has elements exceeds the bytes of the file.
  const auto shape = sizes_in(entry, "shape", data_bytes);
  if (!shape || shape->size() > kMostAxes) refuse("has an unusable shape");
  tensor.shape = *shape;
  const auto offsets = sizes_in(entry, "data_offsets", data_bytes);
  if (!offsets || offsets->size() != 2 || (*offsets)[0] > (*offsets)[1]) refuse("has offsets outside the file");
  tensor.begin = data_begin + (*offsets)[0];
  tensor.end = data_begin + (*offsets)[1];
  std::int64_t bytes = type->bytes;
  for (const std::int64_t extent : tensor.shape)
    if (__builtin_mul_overflow(bytes, extent, &bytes)) refuse("has an unusable shape");
  if (bytes != tensor.end - tensor.begin)
    refuse(fmt::format("takes {} bytes of the file, its shape and dtype {}", tensor.end - tensor.begin, bytes));
  return tensor;
}

/// The path of a regular file. Throws Error(data).
const std::string& existing(const std::string& path) {
  open_regular(path, ExitCode::data);
  return path;
}

template <class T>
void widen(const void* from, std::int64_t count, float* to) {
  const auto* values = static_cast<const T*>(from);
  for (std::int64_t i = 0; i < count; ++i) to[i] = static_cast<float>(values[i]);
}

}  // namespace

std::int64_t SafetensorsEntry::elements() const {
  std::int64_t count = 1;
  for (const std::int64_t extent : shape) count *= extent;
  return count;
}

std::string shape_text(const std::vector<std::int64_t>& shape) { return fmt::format("[{}]", fmt::join(shape, ", ")); }

std::vector<SafetensorsEntry> parse_safetensors_header(const std::string& path, std::string_view header,
                                                       std::int64_t data_begin, std::int64_t file_bytes,
                                                       std::map<std::string, std::string>& metadata) {
  const SortedJson root = parse_unique(path, header);
  std::vector<SafetensorsEntry> entries;
  for (const auto& [name, value] : root.items()) {
    if (name != kMetadata) {
      entries.push_back(entry_of(path, name, value, data_begin, file_bytes));
      continue;
    }
    if (!value.is_object()) throw error(ExitCode::data, "{}: \"{}\" is not an object of texts", path, kMetadata);
    for (const auto& [key, text] : value.items()) {
      if (!text.is_string()) throw error(ExitCode::data, "{}: \"{}\" is not an object of texts", path, kMetadata);
      metadata[key] = text.get<std::string>();
    }
  }
  std::sort(entries.begin(), entries.end(), [](const SafetensorsEntry& a, const SafetensorsEntry& b) {
    return std::pair(a.begin, a.end) < std::pair(b.begin, b.end);
  });
  std::int64_t covered = data_begin;
  for (const SafetensorsEntry& entry : entries) {
    if (entry.begin != covered)
      throw error(ExitCode::data, "{}: tensor \"{}\" begins at byte {}, {} byte {}, where the one before it ends", path,
                  printable(entry.name), entry.begin, entry.begin < covered ? "before" : "after", covered);
    covered = entry.end;
  }
  if (covered != file_bytes)
    throw error(ExitCode::data, "{}: its tensors end at byte {}, the file has {} bytes; was it copied completely?",
                path, covered, file_bytes);
  return entries;
}

SafetensorsFile::SafetensorsFile(std::string path) : path_(std::move(path)), file_(existing(path_)) {
  std::uint64_t length = 0;
  if (file_.bytes() < kLengthBytes)
    throw error(ExitCode::data, "{}: has {} bytes; is it a safetensors file?", path_, file_.bytes());
  file_.read(&length, kLengthBytes, 0);
  if (length > static_cast<std::uint64_t>(std::min(kLargestHeader, file_.bytes() - kLengthBytes)))
    throw error(ExitCode::data,
                "{}: claims a header of {} bytes (the file has {}, at most {} are accepted); is it a complete "
                "safetensors file?",
                path_, length, file_.bytes(), kLargestHeader);
  std::string header(static_cast<std::size_t>(length), '\0');
  file_.read(header.data(), static_cast<std::int64_t>(length), kLengthBytes);
  entries_ = parse_safetensors_header(path_, header, kLengthBytes + static_cast<std::int64_t>(length), file_.bytes(),
                                      metadata_);
  for (std::size_t i = 0; i < entries_.size(); ++i) index_.emplace(entries_[i].name, i);
}

const SafetensorsEntry* SafetensorsFile::find(std::string_view name) const {
  const auto at = index_.find(name);
  return at == index_.end() ? nullptr : &entries_[at->second];
}

void SafetensorsFile::read(const SafetensorsEntry& entry, std::int64_t first, std::int64_t count, float* to) const {
  if (!entry.type)
    throw error(ExitCode::data, "{}: tensor \"{}\" has dtype {} (floating-point values are needed)", path_,
                printable(entry.name), entry.dtype);
  if (first < 0 || count < 0 || first + count > entry.elements())
    throw error(ExitCode::internal, "elements {} to {} are outside tensor {}", first, first + count, entry.name);
  const std::int64_t size = kernels::bytes_of(*entry.type);
  if (*entry.type == Scalar::fp32) return file_.read(to, count * size, entry.begin + first * size);
  std::vector<std::byte> stored(static_cast<std::size_t>(std::min(count, kConvertedPiece) * size));
  for (std::int64_t done = 0; done < count; done += kConvertedPiece) {
    const std::int64_t n = std::min(kConvertedPiece, count - done);
    file_.read(stored.data(), n * size, entry.begin + (first + done) * size);
    if (*entry.type == Scalar::bf16)
      widen<kernels::bf16>(stored.data(), n, to + done);
    else if (*entry.type == Scalar::fp16)
      widen<kernels::half>(stored.data(), n, to + done);
    else
      widen<double>(stored.data(), n, to + done);
  }
}

SafetensorsWriter::SafetensorsWriter(std::filesystem::path path, std::vector<Tensor> tensors,
                                     const std::map<std::string, std::string>& metadata)
    : path_(std::move(path)), tensors_(std::move(tensors)), file_(create_own(path_)) {
  Json header = Json::object();
  if (!metadata.empty()) header[std::string(kMetadata)] = metadata;
  std::int64_t at = 0;
  for (const Tensor& tensor : tensors_) {
    std::int64_t elements = 1;
    for (const std::int64_t extent : tensor.shape) elements *= extent;
    const std::int64_t end = at + elements * kernels::bytes_of(tensor.type);
    header[tensor.name] = {{"dtype", name_of(tensor.type)}, {"shape", tensor.shape}, {"data_offsets", {at, end}}};
    begin_.push_back(at);
    left_.push_back(elements);
    at = end;
  }
  std::string text = json_text(header);
  text.resize((text.size() + kLengthBytes - 1) / kLengthBytes * kLengthBytes, ' ');  // aligns the values
  const std::uint64_t length = text.size();
  std::string head(sizeof length, '\0');
  std::memcpy(head.data(), &length, sizeof length);
  write_all(file_, head + text, path_);
  for (std::int64_t& begin : begin_) begin += kLengthBytes + static_cast<std::int64_t>(length);
}

void SafetensorsWriter::write(std::size_t tensor, std::int64_t first, std::span<const float> values) {
  const Scalar type = tensors_[tensor].type;
  const void* from = values.data();
  if (type == Scalar::bf16) {
    packed_.resize(values.size());
    for (std::size_t i = 0; i < values.size(); ++i) packed_[i] = kernels::to_bf16(values[i]).bits;
    from = packed_.data();
  }
  const std::int64_t element = kernels::bytes_of(type);
  write_at(file_, from, std::ssize(values) * element, begin_[tensor] + first * element, path_);
  left_[tensor] -= static_cast<std::int64_t>(values.size());
}

void SafetensorsWriter::finish() {
  for (std::size_t i = 0; i < tensors_.size(); ++i)
    if (left_[i] != 0)
      throw error(ExitCode::internal, "{}: {} was not written completely", path_.string(), tensors_[i].name);
  if (::fsync(file_) != 0) fail_with_errno(path_, "fsync");
  if (!file_.close()) fail_with_errno(path_, "closing");
}

}  // namespace weft::storage
