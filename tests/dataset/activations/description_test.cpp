// SPDX-License-Identifier: Apache-2.0
//
// Valid datasets are read bit for bit in every layout. Each kind of damage is rejected with the correct exit code and a
// message with file and dataset. Input files are never changed.
#include "dataset/activations/description.hpp"

#include <sys/stat.h>

#include <cmath>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "base/error.hpp"
#include "dataset/activations/reader.hpp"
#include "dataset/activations/statistics.hpp"
#include "dataset/fingerprint.hpp"
#include "kernels/bf16.hpp"
#include "storage/activation_file.hpp"
#include "storage/hdf5.hpp"
#include "tests/dataset/activations/samples.hpp"
#include "tests/test.hpp"

namespace weft::dataset {
namespace {

using kernels::Scalar;
using storage::Handle;
using testing::Directory;
using testing::Sample;

/// Storage of one dataset of a foreign file.
struct Form {
  Scalar type = Scalar::fp32;  // u16: bf16 patterns
  std::int64_t chunk_rows = 0;
  std::int64_t chunk_columns = 0;  // 0 = all
  bool gzip = false;
  std::string declared;
};

/// The dataset `name` of a group, [rows, columns], from raw bytes.
void put(hid_t group, const std::string& name, const Form& form, std::int64_t rows, std::int64_t columns,
         const std::byte* raw) {
  const hsize_t extent[2] = {static_cast<hsize_t>(rows), static_cast<hsize_t>(columns)};
  const Handle space(H5Screate_simple(2, extent, nullptr), H5Sclose, "space");
  const Handle creation(H5Pcreate(H5P_DATASET_CREATE), H5Pclose, "properties");
  if (form.chunk_rows > 0) {
    const hsize_t chunk[2] = {static_cast<hsize_t>(std::min(form.chunk_rows, rows)),
                              static_cast<hsize_t>(form.chunk_columns > 0 ? form.chunk_columns : columns)};
    storage::check(H5Pset_chunk(creation, 2, chunk), "chunk");
    if (form.gzip) storage::check(H5Pset_deflate(creation, 4), "gzip");
  }
  const Handle type = storage::type_of(form.type);
  Handle dataset(H5Dcreate2(group, name.c_str(), type, space, H5P_DEFAULT, creation, H5P_DEFAULT), H5Dclose, "dataset");
  if (raw != nullptr) storage::check(H5Dwrite(dataset, type, H5S_ALL, H5S_ALL, H5P_DEFAULT, raw), "write");
  if (!form.declared.empty()) storage::write_attribute(dataset, "dtype", form.declared);
  dataset.close();
}

/// A file as written by other programs: no attributes, default version bounds. `change` may alter one dataset before it
/// is written, and returns false to omit it.
struct Foreign {
  std::int64_t layers = 3, d = 8;
  Form form;
  std::function<bool(std::int64_t layer, bool target, Form&, std::int64_t& rows, std::int64_t& columns,
                     std::vector<std::byte>& raw)>
      change;
};

void write_foreign_file(const std::string& path, const Foreign& foreign, std::int64_t rows, std::int64_t first_row) {
  const storage::Lock lock;
  const Sample sample{foreign.layers,
                      foreign.d,
                      {},
                      foreign.form.type == Scalar::u16 ? Scalar::bf16 : foreign.form.type,
                      Compression::none};
  Handle file(H5Fcreate(path.c_str(), H5F_ACC_TRUNC, H5P_DEFAULT, H5P_DEFAULT), H5Fclose, "file");
  const std::int64_t width = foreign.d * kernels::bytes_of(sample.dtype);
  for (std::int64_t layer = foreign.layers; layer-- > 0;) {  // not in numeric order
    std::optional<Handle> group;
    for (const bool target : {false, true}) {
      std::vector<std::byte> raw;
      for (std::int64_t r = 0; r < rows; ++r) {
        const std::vector<std::byte> row = testing::sample_row(sample, first_row + r, target);
        raw.insert(raw.end(), row.begin() + layer * width, row.begin() + (layer + 1) * width);
      }
      Form form = foreign.form;
      std::int64_t n = rows, columns = foreign.d;
      if (foreign.change && !foreign.change(layer, target, form, n, columns, raw)) continue;
      if (!group)
        group.emplace(H5Gcreate2(file, fmt::format("layer_{}", layer).c_str(), H5P_DEFAULT, H5P_DEFAULT, H5P_DEFAULT),
                      H5Gclose, "group");
      put(*group, target ? "targets" : "inputs", form, n, columns, raw.data());
    }
  }
  file.close();
}

void write_text(const std::string& path, const std::string& text) { std::ofstream(path, std::ios::binary) << text; }

std::string words(std::initializer_list<std::pair<std::uint64_t, int>> values) {
  std::string bytes;
  for (const auto& [value, n] : values)
    for (int i = 0; i < n; ++i) bytes += static_cast<char>(value >> (8 * i) & 0xff);
  return bytes;
}

const std::vector<std::int64_t> kRows = {50, 50, 20};

/// Three files, the last one shorter, with index and metadata in the layout of crosslayer-coding.
void write_foreign(const std::string& directory, const Foreign& foreign, const std::string& dtype) {
  std::filesystem::create_directories(directory);
  std::int64_t first = 0;
  std::string index;
  for (std::size_t i = 0; i < kRows.size(); ++i) {
    write_foreign_file(directory + fmt::format("/chunk_{}.{}", i, i == 1 ? "h5" : "hdf5"), foreign, kRows[i], first);
    index += words({{i, 4}, {static_cast<std::uint64_t>(kRows[i]), 4}, {static_cast<std::uint64_t>(first), 8}});
    first += kRows[i];
  }
  write_text(directory + "/index.bin", index);
  write_text(
      directory + "/metadata.json",
      fmt::format(
          R"({{"model_name": "m", "dataset": "t", "split": "train", "num_layers": {}, "d_model": {}, "dtype": "{}", )"
          R"("total_tokens": {}, "chunk_tokens": 50, "created": "x"}})",
          foreign.layers, foreign.d, dtype, first));
}

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

/// The message of `describe`; "" if the dataset is accepted. Checks the exit code, and that no file changed.
std::string rejection(const std::string& directory, const Settings& settings = {}, ExitCode code = ExitCode::data) {
  const std::string before = testing::digest_of(directory);
  std::string message;
  try {
    describe(testing::world(), directory, settings);
  } catch (const Error& failure) {
    message = failure.what();
    CHECK(failure.code() == code);
    CHECK(failure.known_to() == KnownTo::all_ranks);
  }
  CHECK(testing::digest_of(directory) == before);
  return message;
}

/// Checks that a dataset is rejected with a message that contains all parts.
void check_rejected(const std::string& directory, std::initializer_list<std::string> parts,
                    const Settings& settings = {}) {
  const std::string message = rejection(directory, settings);
  for (const std::string& part : parts)
    CHECK_MESSAGE(message.find(part) != std::string::npos, "\"", part, "\" in: ", message);
}

}  // namespace

TEST_CASE("Weft's own layout is described and read bit for bit in every type, uncompressed and gzip") {
  for (const Scalar dtype : {Scalar::fp32, Scalar::fp16, Scalar::bf16})
    for (const Compression compression : {Compression::none, Compression::gzip}) {
      const Sample sample{3, 7, {1500, 1500, 31}, dtype, compression};
      const Directory directory;
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
    const Directory directory;
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

TEST_CASE("all finite bf16 bit patterns are preserved, including -0 and subnormals") {
  const Directory directory;
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
    const Directory directory;
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

TEST_CASE("both formats of index.bin are accepted, and rejected if inconsistent") {
  const Foreign foreign{3, 8, {Scalar::fp16, 16, 0, false, ""}, {}};
  const Directory directory;
  const std::string data = directory / "train";
  write_foreign(data, foreign, "float16");
  CHECK(rejection(data) == "");
  std::string legacy;
  for (std::size_t file = kRows.size(); file-- > 0;)  // rows may be in any order
    for (std::int64_t r = 0; r < kRows[file]; ++r) legacy += words({{file, 4}, {static_cast<std::uint64_t>(r), 4}});
  write_text(data + "/index.bin", legacy);
  CHECK(rejection(data) == "");

  std::string wrong = legacy;
  wrong[4] = 1;  // row 0 of chunk_2 becomes row 1, a duplicate
  write_text(data + "/index.bin", wrong);
  check_rejected(data, {"/index.bin: row 1 of chunk_2 is listed twice"});
  wrong[4] = 77;
  write_text(data + "/index.bin", wrong);
  check_rejected(data, {"/index.bin: record 0 says row 77 of chunk_2"});
  write_text(data + "/index.bin", legacy.substr(8));
  check_rejected(data, {"/index.bin: has 952 bytes"});
  write_text(data + "/index.bin",
             words({{0, 4}, {50, 4}, {0, 8}, {1, 4}, {50, 4}, {49, 8}, {2, 4}, {20, 4}, {100, 8}}));
  check_rejected(data, {"/index.bin: record 1 says file 1, 50 rows from row 49", "chunk_1.h5"});
  write_text(data + "/index.bin",
             words({{0, 4}, {50, 4}, {0, 8}, {2, 4}, {50, 4}, {50, 8}, {1, 4}, {20, 4}, {100, 8}}));
  check_rejected(data, {"/index.bin: record 1 says file 2"});
  write_text(data + "/index.bin", std::string(1 << 20, '\1'));
  check_rejected(data, {"/index.bin: has 1048576 bytes"});
}

TEST_CASE("metadata inconsistent with the files are rejected") {
  const Foreign foreign{3, 8, {Scalar::fp16, 16, 0, false, ""}, {}};
  const Directory directory;
  const std::string data = directory / "train";
  write_foreign(data, foreign, "float16");
  const auto with = [&](const std::string& text) { write_text(data + "/metadata.json", text); };
  with(R"({"num_layers": 4})");
  check_rejected(data, {"chunk_0.hdf5: /layer_3 is missing", "num_layers = 4"});
  with(R"({"num_layers": 2})");
  check_rejected(data, {"/metadata.json: num_layers is 2, the files have 3", "/layer_0 to /layer_2"});
  with(R"({"d_model": 16})");
  check_rejected(data, {"/metadata.json: d_model is 16, the files have 8"});
  with(R"({"total_tokens": 121})");
  check_rejected(data, {"/metadata.json: total_tokens is 121, the files have 120"});
  with(R"({"total_tokens": 18446744073709551615})");
  check_rejected(data, {"/metadata.json: total_tokens"});
  with(R"({"total_tokens": "many"})");
  check_rejected(data, {"/metadata.json: total_tokens is not an integer"});
  with(R"({"dtype": "float32"})");
  check_rejected(data, {"/metadata.json: dtype is \"float32\", the files hold fp16", "/layer_0/inputs"});
  with("{\"num_layers\": 3, ");
  check_rejected(data, {"/metadata.json: is not a JSON object of at most 64 levels", "truncated"});
  const std::string deep =
      std::string(300'000, '[') + std::string(300'000, ']');  // printing it recursively would overflow the stack
  with("{\"dtype\": " + deep + "}");
  check_rejected(data, {"/metadata.json: is not a JSON object of at most 64 levels"});
  with(std::string(2 << 20, '['));
  check_rejected(data, {"/metadata.json: has 2097152 bytes"});
  std::filesystem::remove(data + "/metadata.json");
  CHECK(rejection(data) == "");  // sizes come from the chunk files
  CHECK(describe(testing::world(), data, {}).notes.size() >= 1);
}

TEST_CASE("Weft's own layout without index or metadata is rejected as unfinished") {
  for (const char* file : {"index.bin", "metadata.json"}) {
    const Directory directory;
    testing::write_sample(directory / "train", {});
    std::filesystem::remove(directory / "train/" + file);
    check_rejected(directory / "train", {std::string("/") + file + ": is missing", "written completely"});
  }
}

TEST_CASE("each kind of damage is reported with file and dataset") {
  using Raw = std::vector<std::byte>;
  struct Damage {
    const char* what;
    std::function<bool(std::int64_t, bool, Form&, std::int64_t&, std::int64_t&, Raw&)> change;
    std::vector<std::string> parts;
  };
  const auto resize = [](Raw& raw, std::int64_t rows, std::int64_t columns) {
    raw.resize(static_cast<std::size_t>(rows * columns * 2), std::byte{0x81});
  };
  const Damage damages[] = {
      {"missing layer in the middle",
       [](auto layer, auto, auto&, auto&, auto&, auto&) { return layer != 1; },
       {"chunk_2.hdf5: /layer_1 is missing", "/layer_2 exists"}},
      {"missing last layer",
       [](auto layer, auto, auto&, auto&, auto&, auto&) { return layer != 2; },
       {"chunk_2.hdf5: /layer_2 is missing"}},
      {"no layers at all",
       [](auto, auto, auto&, auto&, auto&, auto&) { return false; },
       {"chunk_2.hdf5: /layer_0 is missing"}},
      {"missing targets",
       [](auto layer, auto target, auto&, auto&, auto&, auto&) { return !(layer == 1 && target); },
       {"chunk_2.hdf5: /layer_1/targets is missing"}},
      {"wrong d_model",
       [&](auto layer, auto target, auto&, auto& rows, auto& columns, auto& raw) {
         if (layer == 2 && !target) resize(raw, rows, columns = 9);
         return true;
       },
       {"chunk_2.hdf5: /layer_2/inputs has 9 columns", "has 8"}},
      {"ragged rows",
       [&](auto layer, auto target, auto&, auto& rows, auto& columns, auto& raw) {
         if (layer == 1 && target) resize(raw, rows = 19, columns);
         return true;
       },
       {"chunk_2.hdf5: /layer_1/targets has 19 rows, /layer_0/inputs has 20"}},
      {"other type",
       [](auto layer, auto target, auto& form, auto&, auto&, auto&) {
         if (layer == 1 && target) form.type = Scalar::bf16;
         return true;
       },
       {"chunk_2.hdf5: /layer_1/targets is bf16", "is fp16"}},
      {"integers without a declared meaning",
       [](auto layer, auto target, auto& form, auto&, auto&, auto&) {
         if (layer == 1 && target) form.type = Scalar::u16;
         return true;
       },
       {"chunk_2.hdf5: /layer_1/targets holds unsigned 16-bit integers", "data.stored_as"}},
      {"unsupported type",
       [](auto layer, auto target, auto& form, auto& rows, auto&, auto& raw) {
         if (layer == 1 && target) form.type = Scalar::i16;
         static_cast<void>(rows);
         static_cast<void>(raw);
         return true;
       },
       {"chunk_2.hdf5: /layer_1/targets is int16 (supported"}},
      {"NaN",
       [](auto layer, auto target, auto&, auto&, auto& columns, auto& raw) {
         const std::uint16_t nan = 0x7e01;
         if (layer == 2 && target) std::memcpy(raw.data() + (19 * columns + 3) * 2, &nan, 2);
         return true;
       },
       {"chunk_2.hdf5: /layer_2/targets row 19, column 3 is not finite"}},
      {"infinity",
       [](auto layer, auto target, auto&, auto&, auto&, auto& raw) {
         const std::uint16_t infinite = 0xfc00;
         if (layer == 0 && !target) std::memcpy(raw.data(), &infinite, 2);
         return true;
       },
       {"chunk_2.hdf5: /layer_0/inputs row 0, column 0 is not finite"}},
      {"clipped negatives",
       [](auto layer, auto target, auto&, auto&, auto&, auto& raw) {
         if (layer == 1 && !target)
           for (std::size_t i = 0; i < raw.size(); i += 2)
             if ((std::to_integer<int>(raw[i + 1]) & 0x80) != 0) raw[i] = raw[i + 1] = std::byte{0};
         return true;
       },
       {"chunk_2.hdf5: /layer_1/inputs has no negative value", "known defect"}},
  };
  for (const bool gzip : {false, true})
    for (const Damage& damage : damages) {
      CAPTURE(damage.what);
      const Directory directory;
      const std::string data = directory / "train";
      Foreign foreign{3, 8, {Scalar::fp16, gzip ? 32 : 0, 0, gzip, ""}, {}};
      write_foreign(data, foreign, "float16");
      REQUIRE(rejection(data) == "");
      foreign.change = damage.change;
      write_foreign_file(data + "/chunk_2.hdf5", foreign, kRows[2], 100);
      const std::string message = rejection(data);
      for (const std::string& part : damage.parts)
        CHECK_MESSAGE(message.find(part) != std::string::npos, "\"", part, "\" in: ", message);
    }
}

TEST_CASE("uint16 is bf16 if data.stored_as says so") {
  const Directory directory;
  write_foreign(directory / "train", {3, 8, {Scalar::u16, 16, 0, false, ""}, {}}, "bfloat16");
  check_rejected(directory / "train", {"chunk_0.hdf5: /layer_0/inputs holds unsigned 16-bit integers"});
  Settings settings;
  settings.stored_as = "bf16";
  CHECK(describe(testing::world(), directory / "train", settings).dtype == Scalar::bf16);
  settings.stored_as = "bf17";
  CHECK(rejection(directory / "train", settings, ExitCode::usage).find("bf17") != std::string::npos);
}

TEST_CASE("files that are truncated, missing, duplicated, unwritten or not HDF5 are rejected") {
  const Foreign foreign{3, 8, {Scalar::fp16, 16, 0, false, ""}, {}};
  {
    const Directory directory;
    const std::string data = directory / "train", file = data + "/chunk_1.h5";
    write_foreign(data, foreign, "float16");
    const auto size = static_cast<std::int64_t>(std::filesystem::file_size(file));
    for (const std::int64_t left : {size - 1, size / 2, std::int64_t{100}, std::int64_t{0}}) {
      std::filesystem::resize_file(file, static_cast<std::uintmax_t>(left));
      check_rejected(data, {"chunk_1.h5", "is the file truncated?"});
    }
    write_text(file, "this is no HDF5 file");
    check_rejected(data, {"chunk_1.h5"});
    std::filesystem::remove(file);
    check_rejected(data, {"/train: chunk_1 is missing", "chunk_2.hdf5 exists"});
    std::filesystem::copy(data + "/chunk_2.hdf5", data + "/chunk_2.h5");
    check_rejected(data, {"chunk_2.h5 and chunk_2.hdf5 are both chunk 2"});
  }
  {
    const Directory directory;
    const std::string data = directory / "train";
    write_foreign(data, foreign, "float16");
    Foreign unwritten = foreign;
    const storage::Lock lock;
    std::filesystem::remove(data + "/chunk_2.hdf5");
    Handle file = storage::create_file(data + "/chunk_2.hdf5");
    for (int layer = 0; layer < 3; ++layer) {
      const Handle group(
          H5Gcreate2(file, fmt::format("layer_{}", layer).c_str(), H5P_DEFAULT, H5P_DEFAULT, H5P_DEFAULT), H5Gclose,
          "group");
      put(group, "inputs", unwritten.form, 20, 8, nullptr);
      put(group, "targets", unwritten.form, 20, 8, nullptr);
    }
    file.close();
    check_rejected(data, {"chunk_2.hdf5: /layer_0/inputs has 0 of its 2 chunks"});
  }
  {
    const Directory directory;
    check_rejected(directory.path(), {"no file chunk_*.hdf5"});
    CHECK_THROWS_AS(describe(testing::world(), directory / "nowhere", {}), Error);
  }
}

TEST_CASE("a compressed dataset whose header claims more than its bytes can contain is rejected without allocation") {
  const Directory directory;
  const std::string data = directory / "train";
  std::filesystem::create_directories(data);
  {
    const storage::Lock lock;
    Handle file(H5Fcreate((data + "/chunk_0.hdf5").c_str(), H5F_ACC_TRUNC, H5P_DEFAULT, H5P_DEFAULT), H5Fclose, "file");
    const Handle group(H5Gcreate2(file, "layer_0", H5P_DEFAULT, H5P_DEFAULT, H5P_DEFAULT), H5Gclose, "group");
    const hsize_t extent[2] = {8192, 16384}, nowhere[2] = {0, 0};
    const Handle space(H5Screate_simple(2, extent, nullptr), H5Sclose, "space");
    const Handle creation(H5Pcreate(H5P_DATASET_CREATE), H5Pclose, "properties");
    storage::check(H5Pset_chunk(creation, 2, extent), "chunk");
    storage::check(H5Pset_deflate(creation, 4), "gzip");
    for (const char* name : {"inputs", "targets"}) {
      const Handle dataset(H5Dcreate2(group, name, H5T_IEEE_F32LE, space, H5P_DEFAULT, creation, H5P_DEFAULT), H5Dclose,
                           "dataset");
      // The one chunk of 512 MiB, "compressed" to 100 bytes.
      storage::check(H5Dwrite_chunk(dataset, H5P_DEFAULT, 0, nowhere, 100, std::string(100, 'x').data()), "chunk");
    }
    file.close();
  }
  check_rejected(data, {"chunk_0.hdf5: /layer_0/inputs claims 8192 rows of 65536 bytes in 100 stored bytes"});
}

TEST_CASE("files of different models or hook points are rejected") {
  const Directory directory;
  testing::write_sample(directory / "train", {2, 6, {40, 40, 7}, Scalar::fp32, Compression::none});
  const storage::Lock lock;
  {
    const Handle file(H5Fopen((directory / "train/chunk_1.hdf5").c_str(), H5F_ACC_RDWR, H5P_DEFAULT), H5Fclose, "open");
    storage::check(H5Adelete(file, "hook_inputs"), "delete");
    storage::write_attribute(file, "hook_inputs", "resid_mid");
  }
  check_rejected(directory / "train",
                 {"chunk_1.hdf5: attribute hook_inputs is \"resid_mid\"", "\"mlp.in\"", "chunk_0.hdf5"});
}

TEST_CASE("links to other files are not followed") {
  const Directory directory;
  const std::string data = directory / "train";
  const Foreign foreign{2, 8, {Scalar::fp16, 0, 0, false, ""}, {}};
  write_foreign(data, foreign, "float16");
  std::filesystem::rename(data + "/chunk_2.hdf5", directory / "elsewhere.hdf5");
  {
    const storage::Lock lock;
    const Handle file = storage::create_file(data + "/chunk_2.hdf5");
    for (const char* layer : {"layer_0", "layer_1"})
      storage::check(
          H5Lcreate_external((directory / "elsewhere.hdf5").c_str(), layer, file, layer, H5P_DEFAULT, H5P_DEFAULT),
          "link");
  }
  check_rejected(data, {"chunk_2.hdf5: /layer_0 is an external or soft link"});
  {
    const storage::Lock lock;
    write_foreign_file(data + "/chunk_2.hdf5", foreign, kRows[2], 100);
    const Handle file(H5Fopen((data + "/chunk_2.hdf5").c_str(), H5F_ACC_RDWR, H5P_DEFAULT), H5Fclose, "open");
    storage::check(H5Ldelete(file, "layer_1/targets", H5P_DEFAULT), "delete");
    storage::check(H5Lcreate_soft("/layer_0/targets", file, "layer_1/targets", H5P_DEFAULT, H5P_DEFAULT), "link");
  }
  check_rejected(data, {"chunk_2.hdf5: /layer_1/targets is an external or soft link"});
}

TEST_CASE("norm_stats.json is checked against the files") {
  const Directory directory;
  const std::string data = directory / "train";
  write_foreign(data, {2, 8, {Scalar::fp16, 16, 0, false, ""}, {}}, "float16");
  const Statistics computed = compute_statistics(testing::world(), describe(testing::world(), data, {}), 1);
  const auto write = [&](std::int64_t wrong_layer, double by) {
    std::string text = "{";
    for (std::int64_t layer = 0; layer < 2; ++layer) {
      text += fmt::format("{}\"{}\": {{", layer == 0 ? "" : ", ", layer);
      for (const bool target : {false, true}) {
        const SideStatistics& side = target ? computed.targets : computed.inputs;
        std::string mean, deviation;
        for (std::int64_t j = 0; j < 8; ++j) {
          const std::size_t at = static_cast<std::size_t>(layer * 8 + j);
          mean += fmt::format("{}{}", j == 0 ? "" : ", ",
                              static_cast<float>(side.mean[at] + (layer == wrong_layer && target && j == 5 ? by : 0)));
          deviation += fmt::format("{}{}", j == 0 ? "" : ", ", static_cast<float>(side.standard_deviation[at]));
        }
        text += fmt::format("{}\"{}\": {{\"mean\": [{}], \"std\": [{}]}}", target ? ", " : "",
                            target ? "targets" : "inputs", mean, deviation);
      }
      text += "}";
    }
    write_text(data + "/norm_stats.json", text + "}");
  };
  const auto message = [&] {
    const std::string before = testing::digest_of(data);
    std::string text;
    try {
      check(testing::world(), describe(testing::world(), data, {}), 1);
    } catch (const Error& failure) {
      CHECK(failure.code() == ExitCode::data);
      text = failure.what();
    }
    CHECK(testing::digest_of(data) == before);
    return text;
  };
  write(-1, 0);
  CHECK(message() == "");
  write(1, 0.5);
  CHECK(message().find("/norm_stats.json: mean[5] of /layer_1/targets is") != std::string::npos);
  write_text(data + "/norm_stats.json", "{\"0\": {\"inputs\": {\"mean\": [1, 2]}}}");
  CHECK(message().find("/norm_stats.json: mean of /layer_0/inputs is not a list of 8 numbers") != std::string::npos);
  write_text(data + "/norm_stats.json", "{\"0\": {");
  CHECK(message().find("/norm_stats.json: is not a JSON object") != std::string::npos);
  write_text(data + "/norm_stats.json", "{}");
  CHECK(message().find("/norm_stats.json: has no entry for /layer_0/inputs") != std::string::npos);
}

TEST_CASE("the fingerprint depends on contents, not on times or paths") {
  const Directory directory;
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
      const Directory directory;
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
    const Directory directory;
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
    const Directory directory;
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

TEST_CASE("a FIFO in place of a chunk or a small file is refused at once") {
  for (const char* name : {"chunk_1.h5", "metadata.json", "index.bin"}) {
    CAPTURE(name);
    const Directory directory;
    const std::string data = directory / "train";
    write_foreign(data, {2, 8, {Scalar::fp16, 0, 0, false, ""}, {}}, "float16");
    std::filesystem::remove(data + "/" + name);
    REQUIRE(mkfifo((data + "/" + name).c_str(), 0600) == 0);
    check_rejected(data, {name, "is a FIFO"});
  }
}

TEST_CASE("text of the files does not reach messages as it is") {
  const Directory directory;
  const std::string data = directory / "train", hostile = "\x1b]0;owned\a\n" + std::string(5000, 'x');
  write_foreign(data, {2, 8, {Scalar::fp16, 0, 0, false, ""}, {}}, "float16");
  {
    const storage::Lock lock;
    const Handle file(H5Fopen((data + "/chunk_0.hdf5").c_str(), H5F_ACC_RDWR, H5P_DEFAULT), H5Fclose, "open");
    storage::write_attribute(file, "model", hostile);
  }
  const std::string message = rejection(data);
  CHECK(message.find("\\x1b]0;owned\\x07\\x0axxx") != std::string::npos);
  CHECK(message.find_first_of("\x1b\a\n") == std::string::npos);
  CHECK(message.size() < 1000);
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
  const Directory directory;
  testing::write_sample(directory / "train", {});
  const std::string before = testing::digest_of(directory.path());
  WriterSettings settings;
  settings.path = directory / "train";
  settings.n_layers = settings.d_model = 1;
  CHECK_THROWS_AS(ActivationWriter{settings}, Error);
  CHECK(testing::digest_of(directory.path()) == before);
}

}  // namespace weft::dataset
