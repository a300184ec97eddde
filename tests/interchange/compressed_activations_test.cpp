// SPDX-License-Identifier: Apache-2.0
//
// A cache of CLT-Forge, written here byte by byte from its description, becomes the dataset of the values that it
// stands for, in every quantisation and compression; what is damaged is refused with file and item.
#include "interchange/compressed_activations.hpp"

#include "dataset/activations/describe.hpp"

#ifdef WEFT_HAVE_ZSTD
#include <zstd.h>
#endif
#ifdef WEFT_HAVE_LZ4
#include <lz4frame.h>
#endif

#include <cmath>
#include <cstring>
#include <fstream>

#include "base/json.hpp"
#include "dataset/activations/reader.hpp"
#include "dataset/activations/row_tokens.hpp"
#include "kernels/bf16.hpp"
#include "storage/compressed_stream.hpp"
#include "tests/scratch.hpp"

using namespace weft;
using namespace weft::interchange;
using storage::Compression;
using weft::testing::has;
using weft::testing::refusal;
using weft::testing::Scratch;
namespace fs = std::filesystem;

namespace {

constexpr std::int64_t L = 2, d = 3;  // an odd number of values per row, so that rows share bytes
constexpr float kScales[2][L] = {{0.5f, 0.03125f}, {2.0f, 0.25f}};

std::string packed(const std::string& bytes, Compression compression) {
#ifdef WEFT_HAVE_ZSTD
  if (compression == Compression::zstd) {
    std::string out(ZSTD_compressBound(bytes.size()), '\0');
    out.resize(ZSTD_compress(out.data(), out.size(), bytes.data(), bytes.size(), 3));
    return out;
  }
#endif
#ifdef WEFT_HAVE_LZ4
  if (compression == Compression::lz4) {
    std::string out(LZ4F_compressFrameBound(bytes.size(), nullptr), '\0');
    out.resize(LZ4F_compressFrame(out.data(), out.size(), bytes.data(), bytes.size(), nullptr));
    return out;
  }
#endif
  REQUIRE(compression == Compression::none);
  return bytes;
}

int largest(int bits) { return bits == 8 ? 127 : bits == 4 ? 7 : 1; }

/// The quantised value of a side, row, layer and dimension: both signs, all sizes.
int quantised(int bits, int side, std::int64_t row, std::int64_t column) {
  return static_cast<int>((row * 31 + column * 7 + side * 5) % (2 * largest(bits) + 1)) - largest(bits);
}

template <class T>
void put(std::string& to, T value) {
  to.append(reinterpret_cast<const char*>(&value), sizeof value);
}

std::string stored(int bits, int side, std::int64_t first, std::int64_t rows) {
  std::vector<int> codes;
  for (std::int64_t row = first; row < first + rows; ++row)
    for (std::int64_t column = 0; column < L * d; ++column) codes.push_back(quantised(bits, side, row, column));
  std::string bytes;
  if (bits == 8)
    for (const int code : codes) put(bytes, static_cast<signed char>(code));
  if (bits == 4) {
    codes.resize((codes.size() + 1) / 2 * 2);
    for (std::size_t i = 0; i < codes.size(); i += 2)
      put(bytes, static_cast<unsigned char>((codes[i] + 8) | (codes[i + 1] + 8) << 4));
  }
  if (bits == 2) {
    codes.resize((codes.size() + 3) / 4 * 4);
    for (std::size_t i = 0; i < codes.size(); i += 4)
      put(bytes, static_cast<unsigned char>((codes[i] + 2) << 6 | (codes[i + 1] + 2) << 4 | (codes[i + 2] + 2) << 2 |
                                            (codes[i + 3] + 2)));
  }
  return bytes;
}

struct Options {
  int bits = 8;
  Compression compression = Compression::none;
  bool per_layer = true, tokens = true, symmetric = true;
  const char* dtype = "torch.float32";
  std::int64_t claimed_rows = 0;  // 0: the true number
};

std::string cache_file(const Options& options, std::int64_t first, std::int64_t rows) {
  const std::int64_t claimed = options.claimed_rows > 0 ? options.claimed_rows : rows;
  const SortedJson scale_shape = options.per_layer ? SortedJson::array({1, L, 1}) : SortedJson::array();
  const std::string metadata = json_text(SortedJson{{"quantization", fmt::format("int{}", options.bits)},
                                                    {"compression", storage::name_of(options.compression)},
                                                    {"symmetric", options.symmetric},
                                                    {"original_shape_in", {claimed, L, d}},
                                                    {"original_shape_out", {claimed, L, d}},
                                                    {"original_dtype", options.dtype},
                                                    {"scale_shape_in", scale_shape},
                                                    {"scale_shape_out", scale_shape},
                                                    {"has_tokens", options.tokens}});
  std::string file;
  put(file, static_cast<std::uint32_t>(metadata.size()));
  file += metadata;
  put(file, static_cast<std::uint32_t>(options.tokens ? 5 : 4));
  const auto item = [&](const std::string& name, const std::string& bytes) {
    const std::string body = packed(bytes, options.compression);
    put(file, static_cast<std::uint32_t>(name.size()));
    file += name;
    put(file, static_cast<std::uint64_t>(body.size()));
    file += body;
  };
  for (int side = 0; side < 2; ++side) {
    const std::string name = side == 0 ? "act_in" : "act_out";
    std::string scales;
    for (std::int64_t layer = 0; layer < (options.per_layer ? L : 1); ++layer) put(scales, kScales[side][layer]);
    item(name + "_data", stored(options.bits, side, first, rows));
    item(name + "_scale", scales);
  }
  std::string ids;
  for (std::int64_t row = first; row < first + rows; ++row) put(ids, row * 3);
  if (options.tokens) item("tokens", ids);
  return file;
}

void write_cache(const fs::path& directory, const Options& options, const std::vector<std::int64_t>& rows) {
  fs::create_directories(directory);
  std::int64_t first = 0;
  for (std::size_t i = 0; i < rows.size(); ++i) {
    std::ofstream(directory / fmt::format("activations_ctx_4_split_{}.bin", i), std::ios::binary)
        << cache_file(options, first, rows[i]);
    first += rows[i];
  }
}

std::vector<Compression> compressions() {
  std::vector<Compression> list;
  for (const Compression each : {Compression::none, Compression::zstd, Compression::lz4})
    if (storage::can_unpack(each)) list.push_back(each);
  return list;
}

}  // namespace

TEST_CASE("every quantisation and compression: the value is the integer times the scale of its layer") {
  for (const Compression compression : compressions())
    for (const int bits : {8, 4, 2})
      for (const char* const dtype : {"torch.float32", "torch.bfloat16"}) {
        const Scratch scratch;
        write_cache(scratch.path / "cache", {.bits = bits, .compression = compression, .dtype = dtype}, {12, 8, 5});
        CHECK(is_compressed_cache(scratch.path / "cache"));
        const ConvertedActivations converted = convert_cache(scratch.path / "cache", scratch.path / "data");
        CHECK(converted.rows == 25);
        CHECK(converted.files == 3);
        const dataset::Description description = dataset::describe((scratch.path / "data").string(), {});
        REQUIRE(description.n_rows == 25);
        CHECK(description.n_layers == L);
        const bool half = std::string(dtype) == "torch.bfloat16";
        CHECK(description.dtype == (half ? kernels::Scalar::bf16 : kernels::Scalar::fp32));
        dataset::Reader reader(description, 1);
        std::vector<std::byte> raw[2];
        for (auto& side : raw) side.resize(static_cast<std::size_t>(25 * description.row_bytes()));
        reader.read(std::vector<dataset::RowRead>{{0, 0, 25, raw[0].data(), raw[1].data()}});
        for (int side = 0; side < 2; ++side)
          for (std::int64_t i = 0; i < 25 * L * d; ++i) {
            float value = 0;
            if (half) {
              kernels::bf16 narrow;
              std::memcpy(&narrow, raw[side].data() + 2 * i, 2);
              value = static_cast<float>(narrow);
            } else {
              std::memcpy(&value, raw[side].data() + 4 * i, 4);
            }
            // Powers of two times integers of 7 bits: exact in both types.
            CHECK(value ==
                  static_cast<float>(quantised(bits, side, i / (L * d), i % (L * d))) * kScales[side][i % (L * d) / d]);
          }
        dataset::RowTokens tokens(description);
        std::vector<std::int32_t> ids(25);
        tokens.read(0, 0, ids);
        CHECK(ids[24] == 72);
        CHECK(tokens.document(0, 6).begin == 4);
        CHECK(tokens.document(0, 6).end == 8);
      }
}

TEST_CASE("one scale for all layers; no tokens") {
  const Scratch scratch;
  write_cache(scratch.path / "cache", {.per_layer = false, .tokens = false}, {6});
  convert_cache(scratch.path / "cache", scratch.path / "data");
  const dataset::Description description = dataset::describe((scratch.path / "data").string(), {});
  CHECK(!description.has_tokens);
  dataset::Reader reader(description, 1);
  std::vector<float> values(static_cast<std::size_t>(6 * L * d));
  reader.read(std::vector<dataset::RowRead>{{0, 0, 6, reinterpret_cast<std::byte*>(values.data()), nullptr}});
  CHECK(values[d] == 0.5f * static_cast<float>(quantised(8, 0, 0, d)));
}

TEST_CASE("damaged caches are refused with file and item; nothing is left behind") {
  const auto refused = [](const Options& options, auto change, ExitCode code) {
    const Scratch scratch;
    fs::create_directories(scratch.path / "cache");
    std::string file = cache_file(options, 0, 6);
    change(file);
    std::ofstream(scratch.path / "cache/activations_ctx_4_split_0.bin", std::ios::binary) << file;
    const std::string message = refusal(code, [&] { convert_cache(scratch.path / "cache", scratch.path / "data"); });
    CHECK_MESSAGE(has(message, "activations_ctx_4_split_0.bin"), message);
    CHECK(!fs::exists(scratch.path / "data"));
    return message;
  };
  const auto unchanged = [](std::string&) {};
  for (const Compression compression : compressions()) {
    const Options more{.compression = compression, .claimed_rows = 7},
        fewer{.compression = compression, .claimed_rows = 5};
    CHECK(has(refused(more, unchanged, ExitCode::data), "act_in_data"));
    CHECK(has(refused(fewer, unchanged, ExitCode::data), "act_in_data"));
    // No memory is sized by a claim: this one is refused after the first piece.
    const Options huge{.compression = compression, .claimed_rows = std::int64_t{1} << 37};
    CHECK(has(refused(huge, unchanged, ExitCode::data), "act_in_data"));
    refused(
        {.compression = compression}, [](std::string& file) { file.pop_back(); }, ExitCode::data);
    refused(
        {.compression = compression}, [](std::string& file) { file += "x"; }, ExitCode::data);
    if (compression != Compression::none)
      CHECK(has(refused(
                    {.compression = compression},
                    [](std::string& file) { file[file.find("act_in_data") + 11 + 8 + 1] ^= 0x55; }, ExitCode::data),
                "act_in_data"));
  }
  CHECK(has(refused({.symmetric = false}, unchanged, ExitCode::usage), "asymmetric"));
  CHECK(has(refused({.dtype = "torch.float64"}, unchanged, ExitCode::data), "original_dtype"));
  refused(
      {}, [](std::string& file) { file[3] = '\x7f'; }, ExitCode::data);  // the length of the metadata
  refused(
      {}, [](std::string& file) { file[4] = '['; }, ExitCode::data);
  CHECK(has(
      refused(
          {}, [](std::string& file) { file.replace(file.find("act_out_data"), 12, "act_in_datax"); }, ExitCode::data),
      "act_out_data"));
}

TEST_CASE("a split that is missing, and caches that differ") {
  const Scratch scratch;
  write_cache(scratch.path / "gap", {}, {4, 4, 4});
  fs::remove(scratch.path / "gap/activations_ctx_4_split_1.bin");
  CHECK(has(refusal(ExitCode::data, [&] { convert_cache(scratch.path / "gap", scratch.path / "data"); }),
            "split 1 is missing"));
  write_cache(scratch.path / "mixed", {}, {4, 4});
  std::ofstream(scratch.path / "mixed/activations_ctx_4_split_1.bin", std::ios::binary)
      << cache_file({.dtype = "torch.float16"}, 4, 4);
  CHECK(has(refusal(ExitCode::data, [&] { convert_cache(scratch.path / "mixed", scratch.path / "data"); }),
            "split_1.bin"));
  CHECK(!fs::exists(scratch.path / "data"));
}
