// SPDX-License-Identifier: Apache-2.0
//
// A fingerprint depends on the stored values alone, and a reader notices another file under the name.
#include "dataset/fingerprint.hpp"

#include <fstream>

#include "base/error.hpp"
#include "dataset/activations/reader.hpp"
#include "storage/activation_file.hpp"
#include "tests/dataset/activations/foreign_files.hpp"
#include "tests/test.hpp"

namespace weft::dataset {
using kernels::Scalar;
using namespace testing;

TEST_CASE("the fingerprint depends on contents, not on times or paths") {
  const Scratch directory;
  const Sample sample{2, 6, {40, 40, 7}, Scalar::bf16, Compression::none};
  testing::write_sample(directory / "a", sample);
  std::filesystem::copy(directory / "a", directory / "b", std::filesystem::copy_options::recursive);
  const std::string fingerprint = describe(testing::world(), directory / "a", {}).fingerprint;
  CHECK(describe(testing::world(), directory / "b", {}).fingerprint == fingerprint);
  // Change one value in the first chunk of the first file.
  const Description b = describe(testing::world(), directory / "b", {});
  const std::int64_t offset = storage::ActivationFile(b.file_path(0)).extents(storage::Side::inputs, 0)[0].offset;
  std::fstream file(b.file_path(0), std::ios::binary | std::ios::in | std::ios::out);
  file.seekp(offset);
  file.put('\1');
  file.close();
  CHECK(describe(testing::world(), directory / "b", {}).fingerprint != fingerprint);
}

namespace {

/// Overwrites one byte of every stored value of rows [begin, end) of a dataset; size and headers stay.
void rewrite_rows(const Description& d, std::int64_t number, storage::Side side, std::int64_t layer, std::int64_t begin,
                  std::int64_t end) {
  const std::string path = d.file_path(number);
  const std::vector<storage::Extent> extents = storage::ActivationFile(path).extents(side, layer);
  std::fstream file(path, std::ios::binary | std::ios::in | std::ios::out);
  const std::int64_t bytes = kernels::bytes_of(d.dtype), row_bytes = d.d_model * bytes;
  for (const storage::Extent& extent : extents)
    for (std::int64_t row = std::max(begin, extent.row_begin); row < std::min(end, extent.row_begin + extent.rows);
         ++row)
      for (std::int64_t column = 0; column < d.d_model; ++column) {
        file.seekp(extent.offset + (row - extent.row_begin) * row_bytes + column * bytes);
        file.put('\x5a');
      }
}

}  // namespace

TEST_CASE("the fingerprint sees rows that were rewritten inside any file and dataset, without a new size or header") {
  // Neither the first and last chunks nor layer_0/inputs and the last targets are touched.
  for (const std::int64_t layers : {2, 13})
    for (const std::int64_t number : {0, 1}) {
      const Scratch directory;
      testing::write_sample(directory / "train", {layers, 6, {1024, 1024, 7}, Scalar::fp32, Compression::none});
      const Description before = describe(testing::world(), directory / "train", {});
      rewrite_rows(before, number, storage::Side::targets, 0, 400, 500);
      const Description after = describe(testing::world(), directory / "train", {});
      CHECK(after.files[static_cast<std::size_t>(number)].bytes ==
            before.files[static_cast<std::size_t>(number)].bytes);
      CHECK(!same_data(after.fingerprint, before.fingerprint));
      // That of earlier versions did not change.
      CHECK(after.fingerprint.substr(0, 69) == before.fingerprint.substr(0, 69));
    }
  // Compressed chunks, and layouts whose rows cannot be located, are sampled too.
  for (const Form& form : {Form{Scalar::fp32, 512, 0, true, ""}, Form{Scalar::fp32, 512, 4, false, ""}}) {
    const Scratch directory;
    std::string fingerprint;
    for (const bool changed : {false, true}) {
      std::filesystem::create_directories(directory / "train");
      Foreign foreign{2, 8, form, {}};
      if (changed)
        foreign.change = [](auto layer, auto target, auto&, auto&, auto& columns, auto& raw) {
          if (layer == 0 && target)
            for (std::int64_t row = 1500; row < 2500; ++row)
              std::swap(raw[static_cast<std::size_t>(row * columns * 4)],
                        raw[static_cast<std::size_t>(row * columns * 4 + 3)]);
          return true;
        };
      write_foreign_file(directory / "train/chunk_0.h5", foreign, 4096, 0);
      const std::string found = describe(testing::world(), directory / "train", {}).fingerprint;
      CHECK(found.substr(69) != fingerprint);
      fingerprint = found.substr(69);
    }
  }
}

TEST_CASE("fingerprints are compared by the digests that both have") {
  CHECK(same_data("f00d", "f00d"));
  CHECK(!same_data("f00d", "beef"));
  CHECK(same_data("f00d", "ends:f00d,rows:1"));  // written by an earlier version
  CHECK(same_data("ends:f00d,rows:1", "f00d"));
  CHECK(!same_data("beef", "ends:f00d,rows:1"));
  CHECK(same_data("ends:f00d,rows:1", "ends:f00d,rows:1"));
  CHECK(!same_data("ends:f00d,rows:1", "ends:f00d,rows:2"));
  CHECK(!same_data("other:1", "ends:1"));
  CHECK(!same_data("", ""));
}

TEST_CASE("a reader refuses a file that is not the one that was described") {
  for (const Compression compression : {Compression::none, Compression::gzip}) {
    const Scratch directory;
    const Sample sample{2, 6, {40, 40, 7}, Scalar::fp32, compression};
    testing::write_sample(directory / "train", sample);
    const Description description = describe(testing::world(), directory / "train", {});
    // chunk_1 takes the place of chunk_0: the same shape, other rows.
    std::filesystem::copy(directory / "train/chunk_1.hdf5", directory / "train/chunk_0.hdf5",
                          std::filesystem::copy_options::overwrite_existing);
    Reader reader(description, 1);
    std::vector<std::byte> row(static_cast<std::size_t>(description.row_bytes()));
    try {
      reader.read(std::vector<RowRead>{{0, 3, 1, row.data(), nullptr}});
      FAIL("no error");
    } catch (const Error& failure) {
      CHECK(failure.code() == ExitCode::data);
      CHECK(std::string(failure.what()).find("chunk_0.hdf5 on host ") != std::string::npos);
    }
  }
}

}  // namespace weft::dataset
