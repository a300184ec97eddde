// SPDX-License-Identifier: Apache-2.0
//
// Activation files of CLT-Forge and crosslayer-transcoder, written here from their description, give the rows, token
// ids and texts that they hold; damage is refused with file and tensor.
#include <cstring>
#include <fstream>
#include <functional>

#include "base/error.hpp"
#include "base/json.hpp"
#include "dataset/activations/reader.hpp"
#include "dataset/activations/row_tokens.hpp"
#include "dataset/activations/statistics.hpp"
#include "kernels/bf16.hpp"
#include "storage/hdf5.hpp"
#include "tests/dataset/activations/samples.hpp"
#include "tests/scratch.hpp"

namespace weft::dataset {
namespace {

using testing::has;
using testing::refusal;
using testing::sample_value;
using testing::Scratch;
namespace fs = std::filesystem;

constexpr std::int64_t kLayers = 3, kWidth = 5, kColumns = kLayers * kWidth;

template <class T>
void put(std::string& to, T value) {
  to.append(reinterpret_cast<const char*>(&value), sizeof value);
}

/// A safetensors file: header and values as given.
void write_safetensors(const std::string& path, const SortedJson& header, const std::string& values) {
  const std::string text = json_text(header);
  std::string length;
  put(length, static_cast<std::uint64_t>(text.size()));
  std::ofstream(path, std::ios::binary) << length << text << values;
}

struct Split {
  std::int64_t first = 0, rows = 12;
  bool bf16 = false;
  std::int64_t first_id = 0;
};

/// One split; `change` may alter its header.
void write_split(const std::string& path, const Split& split, const std::function<void(SortedJson&)>& change = {}) {
  std::string values;
  for (const bool target : {false, true})
    for (std::int64_t row = split.first; row < split.first + split.rows; ++row)
      for (std::int64_t column = 0; column < kColumns; ++column) {
        const float value = sample_value(row, target, column);
        if (split.bf16)
          put(values, kernels::to_bf16(value).bits);
        else
          put(values, value);
      }
  const std::int64_t side = split.rows * kColumns * (split.bf16 ? 2 : 4);
  for (std::int64_t row = 0; row < split.rows; ++row) put(values, split.first_id + row);
  const char* const dtype = split.bf16 ? "BF16" : "F32";
  const std::vector<std::int64_t> shape = {split.rows, kLayers, kWidth};
  SortedJson header = {
      {"act_in", {{"dtype", dtype}, {"shape", shape}, {"data_offsets", {0, side}}}},
      {"act_out", {{"dtype", dtype}, {"shape", shape}, {"data_offsets", {side, 2 * side}}}},
      {"tokens", {{"dtype", "I64"}, {"shape", {split.rows}}, {"data_offsets", {2 * side, 2 * side + 8 * split.rows}}}}};
  if (change) change(header);
  write_safetensors(path, header, values);
}

/// /tensor [rows, 2, layers, width], fp32.
void write_tensor(const std::string& path, std::int64_t rows, bool chunked = false, std::int64_t sides = 2) {
  std::vector<float> values;
  for (std::int64_t row = 0; row < rows; ++row)
    for (std::int64_t side = 0; side < sides; ++side)
      for (std::int64_t column = 0; column < kColumns; ++column) values.push_back(sample_value(row, side == 1, column));
  const storage::Lock lock;
  storage::Handle file = storage::create_file(path);
  const hsize_t extent[4] = {static_cast<hsize_t>(rows), static_cast<hsize_t>(sides), kLayers, kWidth};
  const storage::Handle space(H5Screate_simple(4, extent, nullptr), H5Sclose, "space");
  const storage::Handle creation(H5Pcreate(H5P_DATASET_CREATE), H5Pclose, "properties");
  if (chunked) storage::check(H5Pset_chunk(creation, 4, extent), "chunks");
  storage::Handle data(H5Dcreate2(file, "tensor", H5T_IEEE_F32LE, space, H5P_DEFAULT, creation, H5P_DEFAULT), H5Dclose,
                       "tensor");
  storage::check(H5Dwrite(data, H5T_NATIVE_FLOAT, H5S_ALL, H5S_ALL, H5P_DEFAULT, values.data()), "writing");
  data.close();
  file.close();
}

/// All rows [row_begin, row_begin + rows) of a file, as fp32.
std::vector<float> rows_of(const Description& description, bool target, std::int64_t file, std::int64_t row_begin,
                           std::int64_t rows) {
  Reader reader(description, 2);
  std::vector<std::byte> raw(static_cast<std::size_t>(rows * description.row_bytes()));
  reader.read(
      std::vector<RowRead>{{file, row_begin, rows, target ? nullptr : raw.data(), target ? raw.data() : nullptr}});
  std::vector<float> values(static_cast<std::size_t>(rows * kColumns));
  for (std::size_t i = 0; i < values.size(); ++i) {
    if (description.dtype == kernels::Scalar::fp32) {
      std::memcpy(&values[i], raw.data() + 4 * i, 4);
    } else {
      kernels::bf16 half;
      std::memcpy(&half, raw.data() + 2 * i, 2);
      values[i] = static_cast<float>(half);
    }
  }
  return values;
}

void check_rows(const Description& description) {
  std::int64_t first = 0;
  for (std::size_t file = 0; file < description.files.size(); ++file) {
    const std::int64_t rows = description.files[file].rows;
    for (const bool target : {false, true})
      for (const std::int64_t begin : {std::int64_t{0}, rows / 2}) {
        const std::vector<float> values =
            rows_of(description, target, static_cast<std::int64_t>(file), begin, rows - begin);
        for (std::size_t i = 0; i < values.size(); ++i)
          CHECK(values[i] == sample_value(first + begin + static_cast<std::int64_t>(i) / kColumns, target,
                                          static_cast<std::int64_t>(i) % kColumns));
      }
    first += rows;
  }
}

TEST_CASE("CLT-Forge: splits in the order of their numbers, with ids and texts") {
  for (const bool bf16 : {false, true}) {
    const Scratch directory;
    const std::string data = directory / "ctx_4";
    fs::create_directories(data);
    for (std::int64_t i = 0; i < 11; ++i)
      write_split(fmt::format("{}/activations_split_{}.safetensors", data, i),
                  {.first = 12 * i, .rows = 12, .bf16 = bf16, .first_id = 100 * i});
    const Description description = describe(data, {});
    CHECK(description.layout == "clt-forge");
    CHECK(description.n_layers == kLayers);
    CHECK(description.d_model == kWidth);
    CHECK(description.n_rows == 132);
    CHECK(description.dtype == (bf16 ? kernels::Scalar::bf16 : kernels::Scalar::fp32));
    CHECK(description.n_documents == 33);
    check_rows(description);
    CHECK(description_from_text(to_text(description)).layout == "clt-forge");
    CHECK(has(summary(description), "clt-forge"));

    RowTokens tokens(description);
    std::vector<std::int32_t> ids(3);
    tokens.read(10, 2, ids);
    CHECK(ids == std::vector<std::int32_t>{1002, 1003, 1004});
    CHECK(tokens.document(2, 6).begin == 4);
    CHECK(tokens.document(2, 6).end == 8);

    // The mean of the rows, through the pass over all data.
    if (bf16) continue;
    double sum = 0;
    for (std::int64_t row = 0; row < 132; ++row) sum += static_cast<double>(sample_value(row, true, 7));
    const Description again = describe(data, {});
    CHECK(again.fingerprint == description.fingerprint);
    std::fstream file(data + "/activations_split_5.safetensors", std::ios::in | std::ios::out | std::ios::binary);
    file.seekp(-8 * 12 - 40, std::ios::end);  // of the last rows of act_out
    file.put('\x11');
    file.close();
    CHECK(describe(data, {}).fingerprint != description.fingerprint);
    CHECK(sum != 0);
  }
}

TEST_CASE("crosslayer-transcoder: inputs and targets of a row follow one another") {
  const Scratch directory;
  write_tensor(directory / "activations.h5", 37);
  const Description description = describe(directory.path.string(), {});
  CHECK(description.layout == "crosslayer-transcoder");
  CHECK(description.n_rows == 37);
  CHECK(!description.has_tokens);
  check_rows(description);
}

TEST_CASE("what is damaged or not supported is refused with file and tensor") {
  const Scratch directory;
  const std::string data = directory / "ctx_4", path = data + "/activations_split_0.safetensors";
  fs::create_directories(data);
  const auto message = [&](ExitCode code = ExitCode::data) { return refusal(code, [&] { describe(data, {}); }); };

  write_split(path, {}, [](SortedJson& header) {
    header["act_inn"] = header["act_in"];
    header.erase("act_in");
  });
  CHECK(has(message(), "\"act_in\" is missing"));
  write_split(path, {}, [](SortedJson& header) { header["act_out"]["shape"] = {12, kWidth, kLayers}; });
  CHECK(has(message(), "\"act_out\" has another shape"));
  write_split(path, {}, [](SortedJson& header) { header["act_in"]["shape"] = {1LL << 40, 1LL << 40, 1LL << 40}; });
  CHECK(has(message(), "act_in"));
  write_split(path, {}, [](SortedJson& header) { header["tokens"]["dtype"] = "F64"; });
  CHECK(has(message(), "\"tokens\""));
  write_split(path, {});
  fs::resize_file(path, fs::file_size(path) - 1);
  CHECK(has(message(), path));
  write_split(path, {});
  write_split(data + "/activations_split_2.safetensors", {});
  CHECK(has(message(), "activations_split_1 is missing"));
  fs::remove(data + "/activations_split_2.safetensors");
  write_split(data + "/activations_split_1.safetensors", {.bf16 = true});
  CHECK(has(message(), "act_in, layer 0"));
  fs::remove(data + "/activations_split_1.safetensors");

  // A value that is not finite, and an id that is not one.
  {
    std::fstream file(path, std::ios::in | std::ios::out | std::ios::binary);
    file.seekp(-8 * 12 - 4, std::ios::end);
    std::string nan;
    put(nan, std::numeric_limits<float>::quiet_NaN());
    file << nan;
  }
  CHECK(has(message(), "act_out, layer 2 row 11, column 4 is not finite"));
  write_split(path, {.first_id = -1});
  const Description description = describe(data, {});
  CHECK(has(refusal(ExitCode::data, [&] { check_tokens(description); }), "ids are not negative"));
  write_split(path, {.first_id = std::int64_t{1} << 32});
  CHECK(has(refusal(ExitCode::data, [&] { check_tokens(describe(data, {})); }), "ids are not negative"));

  fs::remove(path);
  std::ofstream(data + "/activations_ctx_4_split_0.bin") << "x";
  CHECK(has(message(ExitCode::usage), "weft import"));
  fs::remove(data + "/activations_ctx_4_split_0.bin");

  write_tensor(data + "/a.h5", 9, true);
  CHECK(has(message(), "/tensor is not stored contiguously"));
  fs::remove(data + "/a.h5");
  write_tensor(data + "/a.h5", 9, false, 3);
  CHECK(has(message(), "/tensor is not of shape"));
  fs::remove(data + "/a.h5");
  write_tensor(data + "/a.h5", 900);
  fs::resize_file(data + "/a.h5", 4096);
  CHECK(has(message(), "a.h5"));
  write_tensor(data + "/b.h5", 9);
  CHECK(has(message(), "not one HDF5 file"));
}

}  // namespace
}  // namespace weft::dataset
