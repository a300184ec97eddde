// SPDX-License-Identifier: Apache-2.0
//
// Each kind of damage is rejected with the correct exit code and a message with file and dataset. Input files are never
// changed.
#include <sys/stat.h>

#include <cstring>

#include "base/error.hpp"
#include "dataset/activations/statistics.hpp"
#include "tests/dataset/activations/foreign_files.hpp"
#include "tests/test.hpp"

namespace weft::dataset {
namespace {

using kernels::Scalar;
using storage::Handle;
using namespace testing;

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

TEST_CASE("both formats of index.bin are accepted, and rejected if inconsistent") {
  const Foreign foreign{3, 8, {Scalar::fp16, 16, 0, false, ""}, {}};
  const Scratch directory;
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
  const Scratch directory;
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
    const Scratch directory;
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
  };
  for (const bool gzip : {false, true})
    for (const Damage& damage : damages) {
      CAPTURE(damage.what);
      const Scratch directory;
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
  const Scratch directory;
  write_foreign(directory / "train", {3, 8, {Scalar::u16, 16, 0, false, ""}, {}}, "bfloat16");
  check_rejected(directory / "train", {"chunk_0.hdf5: /layer_0/inputs holds unsigned 16-bit integers"});
  Settings settings;
  settings.stored_as = "bf16";
  CHECK(describe(testing::world(), directory / "train", settings).dtype == Scalar::bf16);
  settings.stored_as = "bf17";
  CHECK(rejection(directory / "train", settings, ExitCode::usage).find("bf17") != std::string::npos);
}

TEST_CASE(
    "no negative value: rejected in unsigned integers, which a writer with a defect produced, rectified elsewhere") {
  for (const Scalar type : {Scalar::u16, Scalar::fp16, Scalar::bf16}) {
    const Scratch directory;
    Foreign foreign{3, 8, {type, 16, 0, false, type == Scalar::u16 ? "bf16" : ""}, {}};
    foreign.change = [](auto layer, auto target, auto&, auto&, auto&, auto& raw) {
      if (layer == 1 && target)
        for (std::size_t i = 0; i < raw.size(); i += 2)
          if ((std::to_integer<int>(raw[i + 1]) & 0x80) != 0) raw[i] = raw[i + 1] = std::byte{0};
      return true;
    };
    write_foreign(directory / "train", foreign, type == Scalar::fp16 ? "float16" : "bfloat16");
    if (type == Scalar::u16)
      check_rejected(directory / "train", {"chunk_0.hdf5: /layer_1/targets has no negative value", "known defect"});
    else
      CHECK(rejection(directory / "train") == "");
  }
}

TEST_CASE("files that are truncated, missing, duplicated, unwritten or not HDF5 are rejected") {
  const Foreign foreign{3, 8, {Scalar::fp16, 16, 0, false, ""}, {}};
  {
    const Scratch directory;
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
    const Scratch directory;
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
    const Scratch directory;
    check_rejected(directory.path.string(), {"no file chunk_*.hdf5"});
    CHECK_THROWS_AS(describe(testing::world(), directory / "nowhere", {}), Error);
  }
}

TEST_CASE("a compressed dataset whose header claims more than its bytes can contain is rejected without allocation") {
  const Scratch directory;
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
  const Scratch directory;
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
  const Scratch directory;
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
  const Scratch directory;
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

TEST_CASE("a FIFO in place of a chunk or a small file is refused at once") {
  for (const char* name : {"chunk_1.h5", "metadata.json", "index.bin"}) {
    CAPTURE(name);
    const Scratch directory;
    const std::string data = directory / "train";
    write_foreign(data, {2, 8, {Scalar::fp16, 0, 0, false, ""}, {}}, "float16");
    std::filesystem::remove(data + "/" + name);
    REQUIRE(mkfifo((data + "/" + name).c_str(), 0600) == 0);
    check_rejected(data, {name, "is a FIFO"});
  }
}

TEST_CASE("text of the files does not reach messages as it is") {
  const Scratch directory;
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

}  // namespace weft::dataset
