// SPDX-License-Identifier: Apache-2.0
//
// Valid datasets are read bit for bit in every layout.
#include <cstdlib>
#include <cstring>

#include "base/error.hpp"
#include "dataset/activations/describe.hpp"
#include "dataset/activations/reader.hpp"
#include "dataset/activations/statistics.hpp"
#include "dataset/activations/unpacked_chunks.hpp"
#include "kernels/bf16.hpp"
#include "tests/dataset/activations/foreign_files.hpp"
#include "tests/test.hpp"

namespace weft::dataset {
namespace {

using kernels::Scalar;
using namespace testing;

/// Reads all rows and compares them with what was written.
bool reads_back(const Description& description, const Sample& sample) {
  Reader reader(description, 2);
  std::int64_t first = 0;
  for (std::size_t file = 0; file < description.files.size(); ++file) {
    const std::int64_t rows = description.files[file].rows;
    std::vector<std::byte> inputs(static_cast<std::size_t>(rows * description.row_bytes())), targets(inputs.size());
    // Two reads whose ranges cross chunks.
    const std::int64_t cut = rows / 3;
    reader.read(std::vector<RowRead>{
        {static_cast<std::int64_t>(file), cut, rows - cut, inputs.data() + cut * description.row_bytes(),
         targets.data() + cut * description.row_bytes()},
        {static_cast<std::int64_t>(file), 0, cut, inputs.data(), targets.data()}});
    for (std::int64_t r = 0; r < rows; ++r)
      for (const bool target : {false, true}) {
        const std::vector<std::byte> row = testing::sample_row(sample, first + r, target);
        if (std::memcmp((target ? targets : inputs).data() + r * description.row_bytes(), row.data(), row.size()) != 0)
          return false;
      }
    first += rows;
  }
  return true;
}

}  // namespace

TEST_CASE("Weft's own layout is described and read bit for bit in every type, uncompressed and gzip") {
  for (const Scalar dtype : {Scalar::fp32, Scalar::fp16, Scalar::bf16})
    for (const Compression compression : {Compression::none, Compression::gzip}) {
      const Sample sample{3, 7, {1500, 1500, 31}, dtype, compression};
      const Scratch directory;
      testing::write_sample(directory / "train", sample);
      const Description d = describe(testing::world(), directory / "train/", {});
      CHECK(d.own_layout);
      CHECK(d.path == directory / "train");
      CHECK(d.model == "test/model");
      CHECK(d.hook_inputs == "mlp.in");
      CHECK(d.hook_targets == "mlp.out");
      CHECK(d.n_layers == 3);
      CHECK(d.d_model == 7);
      CHECK(d.n_rows == 3031);
      CHECK(d.dtype == dtype);
      CHECK(d.files[0].compressed == (compression == Compression::gzip));
      CHECK(reads_back(d, sample));
      CHECK(to_text(description_from_text(to_text(d))) == to_text(d));
      CHECK(summary(d).find("3 layers, d_model 7, 3031 rows") != std::string::npos);
    }
}

TEST_CASE("the layout of crosslayer-coding: contiguous, chunked, narrow chunks, gzip, uint16 declared as bf16") {
  const std::pair<Form, std::string> forms[] = {
      {{Scalar::fp32, 0, 0, false, ""}, "float32"},  {{Scalar::fp16, 16, 0, false, ""}, "float16"},
      {{Scalar::fp16, 16, 3, false, ""}, "float16"}, {{Scalar::fp32, 16, 0, true, ""}, "float32"},
      {{Scalar::fp16, 7, 3, true, ""}, "float16"},   {{Scalar::u16, 16, 0, false, "bf16"}, "bfloat16"},
      {{Scalar::bf16, 64, 0, false, ""}, "bfloat16"}};
  for (const auto& [form, dtype] : forms) {
    const Scratch directory;
    const Foreign foreign{12, 5, form, {}};  // HDF5 lists layer_10 and layer_11 before layer_2
    write_foreign(directory / "train", foreign, dtype);
    const Description d = describe(testing::world(), directory / "train", {});
    CHECK(!d.own_layout);
    CHECK(d.model == "m");
    CHECK(d.n_layers == 12);
    CHECK(d.n_rows == 120);
    CHECK(d.files[1].name == "chunk_1.h5");
    CHECK(reads_back(d, {12, 5, {}, form.type == Scalar::u16 ? Scalar::bf16 : form.type, Compression::none}));
  }
}

TEST_CASE("a chunk that is larger than the blocks is unpacked once, not for every block") {
  static std::int64_t unpacked;
  constexpr H5Z_filter_t kCounting = 300;
  const H5Z_class2_t counting{
      H5Z_CLASS_T_VERS,
      kCounting,
      1,
      1,
      "counting",
      nullptr,
      nullptr,
      [](unsigned flags, std::size_t, const unsigned*, std::size_t bytes, std::size_t*, void**) {
        if ((flags & H5Z_FLAG_REVERSE) != 0) ++unpacked;
        return bytes;
      }};
  {
    const storage::Lock lock;
    storage::check(H5Zregister(&counting), "registering a filter");
  }
  const Scratch directory;
  write_foreign(directory / "train", {3, 8, {Scalar::fp32, 50, 0, false, "", kCounting}, {}}, "float32");
  const Description d = describe(testing::world(), directory / "train", {});
  Reader reader(d, 2);
  std::vector<std::byte> inputs(static_cast<std::size_t>(120 * d.row_bytes())), targets(inputs.size());
  unpacked = 0;
  // Blocks of 7 rows in another order than that of the files, as a shuffled epoch reads them.
  std::int64_t blocks = 0;
  for (std::int64_t block = 0, first = 0; block < 18; ++block) {
    const std::int64_t begin = (block * 5) % 18 * 7;
    for (std::int64_t row = begin; row < std::min<std::int64_t>(begin + 7, 120); row += first) {
      const std::int64_t file = row / 50, in_file = row % 50;
      first = std::min({7 - (row - begin), 50 - in_file, 120 - row});
      reader.read(std::vector<RowRead>{
          {file, in_file, first, inputs.data() + row * d.row_bytes(), targets.data() + row * d.row_bytes()}});
      ++blocks;
    }
  }
  CHECK(blocks > 18);
  CHECK(unpacked == 3 * 2 * 3);  // files, sides, layers
  const Sample sample{3, 8, {}, Scalar::fp32, Compression::none};
  for (std::int64_t row = 0; row < 120; ++row)
    CHECK(std::memcmp(targets.data() + row * d.row_bytes(), testing::sample_row(sample, row, true).data(),
                      static_cast<std::size_t>(d.row_bytes())) == 0);
}

TEST_CASE("unpacked chunks: other bands go first, and what does not fit is not kept") {
  UnpackedChunks chunks(100);
  CHECK(chunks.insert({0, 0, 0}, 40) != nullptr);
  CHECK(chunks.insert({0, 0, 1}, 40) != nullptr);
  // Larger than what is left of the same band: the others stay.
  CHECK(chunks.insert({0, 0, 2}, 40) == nullptr);
  CHECK(chunks.find({0, 0, 0}) != nullptr);
  CHECK(chunks.insert({0, 50, 0}, 101) == nullptr);
  CHECK(chunks.insert({0, 0, 0}, 40) != nullptr);
  CHECK(chunks.find({0, 0, 1}) == nullptr);
  // Another band takes the place of the one used least recently.
  CHECK(chunks.insert({1, 0, 0}, 50) != nullptr);
  CHECK(chunks.insert({2, 0, 0}, 50) != nullptr);
  CHECK(chunks.find({0, 0, 0}) == nullptr);
  CHECK(chunks.find({1, 0, 0}) != nullptr);
  CHECK(chunks.bytes() <= 100);
}

TEST_CASE("all finite bf16 bit patterns are preserved, including -0 and subnormals") {
  const Scratch directory;
  WriterSettings settings;
  settings.path = directory / "train";
  settings.n_layers = 2;
  settings.d_model = 64;
  settings.dtype = Scalar::bf16;
  settings.rows_per_file = 300;
  ActivationWriter writer(settings);
  std::vector<std::uint16_t> patterns;
  for (std::uint32_t bits = 0; bits < 0x10000; ++bits)
    patterns.push_back(static_cast<std::uint16_t>((bits & 0x7f80u) == 0x7f80u ? 0x8000u : bits));
  const std::int64_t rows = 65536 / 128;
  const std::byte* raw = reinterpret_cast<const std::byte*>(patterns.data());
  writer.append(rows, raw, raw);
  writer.finish();
  Settings accepted;
  const Description d = describe(testing::world(), directory / "train", accepted);
  Reader reader(d, 1);
  std::vector<std::uint16_t> inputs(65536), targets(65536);
  reader.read(std::vector<RowRead>{
      {0, 0, 300, reinterpret_cast<std::byte*>(inputs.data()), reinterpret_cast<std::byte*>(targets.data())},
      {1, 0, 212, reinterpret_cast<std::byte*>(inputs.data() + 300 * 128),
       reinterpret_cast<std::byte*>(targets.data() + 300 * 128)}});
  CHECK(inputs == patterns);
  CHECK(targets == patterns);
}

TEST_CASE("NaN patterns: the reader returns the raw bits, find_non_finite locates them") {
  for (const Compression compression : {Compression::none, Compression::gzip}) {
    const Scratch directory;
    Sample sample{2, 8, {1}, Scalar::bf16, compression};
    WriterSettings settings;
    settings.path = directory / "train";
    settings.n_layers = 2;
    settings.d_model = 8;
    settings.compression = compression;
    ActivationWriter writer(settings);
    const std::uint16_t nan = 0xffa5;
    for (std::int64_t r = 0; r < 400; ++r) {
      std::vector<std::byte> x = testing::sample_row(sample, r, false), y = testing::sample_row(sample, r, true);
      if (r == 150) std::memcpy(y.data() + 2 * 9, &nan, 2);
      writer.append(1, x.data(), y.data());
    }
    writer.finish();
    const Description d = describe(testing::world(), directory / "train", {});  // row 150 is not in the sample
    Reader reader(d, 1);
    std::vector<std::byte> y(2 * 16);
    reader.read(std::vector<RowRead>{{0, 150, 1, nullptr, y.data()}});
    CHECK(std::memcmp(y.data() + 18, &nan, 2) == 0);
    CHECK(find_non_finite(d, std::vector<RowRange>{{0, 0, 10}, {0, 20, 400}}) ==
          directory / "train/chunk_0.hdf5: /layer_1/targets row 150, column 1 is not finite");
    CHECK(find_non_finite(d, std::vector<RowRange>{{0, 0, 150}, {0, 151, 400}}) == "");
  }
}

TEST_CASE("store_as rounds to nearest even") {
  const float values[] = {1.0f,       65519.0f,   65520.0f, 0x1p-24f,     0x1.8p-24f,  0x1p-25f,
                          0x1.002p0f, 0x1.006p0f, -0.0f,    0x1.ffep-15f, 0x1.fffp-15f};
  const std::uint16_t halves[] = {0x3c00, 0x7bff, 0x7c00, 0x0001, 0x0002, 0x0000,
                                  0x3c00, 0x3c02, 0x8000, 0x0400, 0x0400};
  for (std::size_t i = 0; i < std::size(values); ++i) {
    std::uint16_t bits;
    store_as(Scalar::fp16, &values[i], 1, reinterpret_cast<std::byte*>(&bits));
    CHECK_MESSAGE(bits == halves[i], i);
  }
  // Conversion of every half to fp32 and back is exact.
  for (std::uint32_t bits = 0; bits < 0x10000; ++bits) {
    if ((bits & 0x7c00u) == 0x7c00u && (bits & 0x3ffu) != 0) continue;
    const float value = kernels::half{static_cast<std::uint16_t>(bits)};
    std::uint16_t back;
    store_as(Scalar::fp16, &value, 1, reinterpret_cast<std::byte*>(&back));
    REQUIRE(back == bits);
  }
}

TEST_CASE("expand_environment replaces variables and rejects undefined ones") {
  setenv("WEFT_TEST_PATH", "/some/where", 1);
  unsetenv("WEFT_TEST_NOTHING");
  CHECK(expand_environment("${WEFT_TEST_PATH}/train") == "/some/where/train");
  CHECK(expand_environment("$WEFT_TEST_PATH/train") == "/some/where/train");
  CHECK(expand_environment("plain") == "plain");
  CHECK_THROWS_AS(expand_environment("${WEFT_TEST_NOTHING}/x"), Error);
  CHECK_THROWS_AS(expand_environment("${WEFT_TEST_PATH"), Error);
  CHECK_THROWS_AS(expand_environment("a$"), Error);
}

TEST_CASE("a writer does not modify an existing dataset") {
  const Scratch directory;
  testing::write_sample(directory / "train", {});
  const std::string before = testing::digest_of(directory.path.string());
  WriterSettings settings;
  settings.path = directory / "train";
  settings.n_layers = settings.d_model = 1;
  CHECK_THROWS_AS(ActivationWriter{settings}, Error);
  CHECK(testing::digest_of(directory.path.string()) == before);
}

}  // namespace weft::dataset
