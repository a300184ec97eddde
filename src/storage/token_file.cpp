// SPDX-License-Identifier: Apache-2.0
#include "storage/token_file.hpp"

#include <sys/stat.h>

#include <vector>

#include "base/error.hpp"
#include "base/file.hpp"
#include "base/text.hpp"
#include "storage/hdf5.hpp"
#include "storage/stored_array.hpp"

namespace weft::storage {
namespace {

using kernels::Scalar;

constexpr const char* kFormat = "weft-tokens";
// Files in which some tokens do not count have version 2: a program that does not know them would count all.
constexpr std::int64_t kAllCount = 1, kFormatVersion = 2;
constexpr std::int64_t kLargestVocabulary = (std::int64_t{1} << 31) - 1;  // targets are int32

std::int64_t size_of(const std::string& path) {
  const Descriptor file = open_regular(path, ExitCode::data);
  struct stat status {};
  if (::fstat(file, &status) != 0) fail_with_errno(path, "reading the size");
  return status.st_size;
}

std::int64_t integer(hid_t file, const std::string& path, const char* name, std::int64_t least, std::int64_t most) {
  if (!has_attribute(file, name))
    throw error(ExitCode::data, "{}: attribute {} is missing; was the file written completely?", path, name);
  const std::int64_t value = read_integer_attribute(file, name);
  if (value < least || value > most)
    throw error(ExitCode::data, "{}: attribute {} is {} ({} to {} are accepted); is the file damaged?", path, name,
                value, least, most);
  return value;
}

std::string read_tokenizer(hid_t file, const std::string& path, std::int64_t file_bytes) {
  if (H5Lexists(file, "tokenizer", H5P_DEFAULT) <= 0) return "";
  const StoredArray array = locate_array(file, path, "tokenizer", file_bytes, {Scalar::u8}, "uint8");
  if (array.count > kLargestTokenizer)
    throw error(ExitCode::data, "{}: /tokenizer has {} bytes (at most {} are accepted)", path, array.count,
                kLargestTokenizer);
  std::string text(static_cast<std::size_t>(array.count), '\0');
  const Handle dataset = open_array(file, path, "tokenizer");
  check(H5Dread(dataset, H5T_NATIVE_UINT8, H5S_ALL, H5S_ALL, H5P_DEFAULT, text.data()), path + ": reading /tokenizer");
  return text;
}

}  // namespace

TokenHeader read_token_header(const std::filesystem::path& path_of_file) {
  const std::string path = path_of_file.string();
  const std::int64_t bytes = size_of(path);
  const Lock lock;
  const Handle file = open_data_file(path_of_file);
  return with_damage_as_data_error(path, [&] {
    const Handle creation(H5Fget_create_plist(file), H5Pclose, path + ": reading the file's properties");
    hsize_t user_block = 0;
    check(H5Pget_userblock(creation, &user_block), path + ": reading the file's properties");
    if (user_block != 0) throw error(ExitCode::data, "{}: has a user block (not supported); remove it", path);
    const std::string format = has_attribute(file, "format") ? read_text_attribute(file, "format") : "";
    if (format != kFormat)
      throw error(ExitCode::data,
                  "{}: is not a token file (attribute format is \"{}\", not \"{}\"); write one with weft lm tokenize",
                  path, printable(format), kFormat);
    if (const std::int64_t version = integer(file, path, "format_version", 0, 1'000'000);
        version < kAllCount || version > kFormatVersion)
      throw error(
          ExitCode::data,
          "{}: format_version is {} (this program reads up to {}); use the Weft version that wrote it or a newer one",
          path, version, kFormatVersion);
    TokenHeader header;
    header.vocabulary = integer(file, path, "vocabulary", 1, kLargestVocabulary);
    header.text_bytes = integer(file, path, "text_bytes", 0, std::int64_t{1} << 60);
    header.tokens = locate_array(file, path, "tokens", bytes, {Scalar::u16, Scalar::u32}, "uint16 or uint32");
    header.documents = locate_array(file, path, "documents", bytes, {Scalar::i64}, "int64");
    if (header.documents.count > header.tokens.count)
      throw error(ExitCode::data, "{}: /documents has {} entries for {} tokens; is the file damaged?", path,
                  header.documents.count, header.tokens.count);
    if (H5Lexists(file, "counted", H5P_DEFAULT) > 0) {
      header.counted = locate_array(file, path, "counted", bytes, {Scalar::u8}, "uint8");
      if (header.counted.count != header.tokens.count)
        throw error(ExitCode::data, "{}: /counted has {} entries for {} tokens; is the file damaged?", path,
                    header.counted.count, header.tokens.count);
    }
    header.tokenizer = read_tokenizer(file, path, bytes);
    return header;
  });
}

void write_token_file(const std::filesystem::path& path, std::span<const std::uint32_t> ids,
                      std::span<const std::int64_t> documents, std::int64_t vocabulary, std::int64_t text_bytes,
                      std::string_view tokenizer, std::span<const std::uint8_t> counted) {
  const std::string name = path.string();
  const auto count = static_cast<std::int64_t>(ids.size());
  const Lock lock;
  Handle file = create_file(path);
  write_attribute(file, "format", kFormat);
  write_attribute(file, "format_version", counted.empty() ? kAllCount : kFormatVersion);
  write_attribute(file, "vocabulary", vocabulary);
  write_attribute(file, "text_bytes", text_bytes);
  write_array(file, name, "documents", Scalar::i64, static_cast<std::int64_t>(documents.size()), documents.data());
  if (!counted.empty())
    write_array(file, name, "counted", Scalar::u8, static_cast<std::int64_t>(counted.size()), counted.data());
  if (!tokenizer.empty())
    write_array(file, name, "tokenizer", Scalar::u8, static_cast<std::int64_t>(tokenizer.size()), tokenizer.data());
  if (vocabulary <= 65536) {
    const std::vector<std::uint16_t> narrow(ids.begin(), ids.end());
    write_array(file, name, "tokens", Scalar::u16, count, narrow.data());
  } else {
    write_array(file, name, "tokens", Scalar::u32, count, ids.data());
  }
  file.close();
}

}  // namespace weft::storage
