// SPDX-License-Identifier: Apache-2.0
#include "storage/safetensors.hpp"

#include <algorithm>
#include <cstring>
#include <ctime>
#include <fstream>

#include "kernels/bf16.hpp"
#include "tests/scratch.hpp"

using namespace weft;
using namespace weft::storage;
using weft::testing::has;
using weft::testing::refusal;
using weft::testing::Scratch;

namespace {

/// A file with this header and `bytes` bytes of values, all zero.
std::string file_with(const Scratch& scratch, const std::string& header, std::size_t bytes, std::uint64_t length) {
  const std::string path = (scratch.path / "file.safetensors").string();
  std::string text(8, '\0');
  std::memcpy(text.data(), &length, 8);
  std::ofstream(path, std::ios::binary) << text + header + std::string(bytes, '\0');
  return path;
}
std::string file_with(const Scratch& scratch, const std::string& header, std::size_t bytes) {
  return file_with(scratch, header, bytes, header.size());
}

}  // namespace

TEST_CASE("what is written in parts, in any order, is read in parts") {
  const Scratch scratch;
  const std::filesystem::path path = scratch.path / "file.safetensors";
  std::vector<float> matrix, vector;
  for (int i = 0; i < 70'000; ++i) matrix.push_back(0.1f * static_cast<float>(i) - 3);
  for (int i = 0; i < 5; ++i) vector.push_back(static_cast<float>(i) / 3);
  {
    SafetensorsWriter writer(
        path, {{"b", kernels::Scalar::fp32, {5}}, {"W", kernels::Scalar::bf16, {7, 10'000}}, {"none", {}, {0, 3}}},
        {{"format", "pt"}});
    writer.write(1, 50'000, std::span(matrix).subspan(50'000));
    writer.write(0, 0, vector);
    CHECK(has(refusal(ExitCode::internal, [&] { writer.finish(); }), "W was not written completely"));
    writer.write(1, 0, std::span(matrix).first(50'000));
    writer.finish();
  }
  const SafetensorsFile file(path.string());
  CHECK(file.metadata().at("format") == "pt");
  REQUIRE(file.entries().size() == 3);
  CHECK(file.find("nothing") == nullptr);
  const SafetensorsEntry& w = *file.find("W");
  CHECK(w.begin % 4 == 0);
  CHECK(w.shape == std::vector<std::int64_t>{7, 10'000});
  std::vector<float> read(69'990);
  file.read(w, 7, 69'990, read.data());
  bool same = true;
  for (std::size_t i = 0; i < read.size(); ++i) same = same && read[i] == float(kernels::to_bf16(matrix[i + 7]));
  CHECK(same);
  std::vector<float> two(2);
  file.read(*file.find("b"), 3, 2, two.data());
  CHECK(two == std::vector<float>{vector[3], vector[4]});
}

TEST_CASE("fp16 and fp64 are converted, integers are not read as numbers") {
  const Scratch scratch;
  const std::string header =
      R"({"h":{"dtype":"F16","shape":[2],"data_offsets":[0,4]},"d":{"dtype":"F64","shape":[1],"data_offsets":[4,12]},)"
      R"("i":{"dtype":"I64","shape":[1],"data_offsets":[12,20]}})";
  const std::string path = file_with(scratch, header, 20);
  {
    std::fstream values(path, std::ios::in | std::ios::out | std::ios::binary);
    values.seekp(static_cast<std::streamoff>(8 + header.size()));
    const std::uint16_t half[] = {0x3c00, 0xb800};  // 1, -0.5
    const double wide = 0.1;
    values.write(reinterpret_cast<const char*>(half), 4).write(reinterpret_cast<const char*>(&wide), 8);
  }
  const SafetensorsFile file(path);
  float values[2];
  file.read(*file.find("h"), 0, 2, values);
  CHECK(values[0] == 1.0f);
  CHECK(values[1] == -0.5f);
  file.read(*file.find("d"), 0, 1, values);
  CHECK(values[0] == 0.1f);
  CHECK(has(refusal(ExitCode::data, [&] { file.read(*file.find("i"), 0, 1, values); }), "\"i\" has dtype I64"));
}

TEST_CASE("the time to read a header grows with the number of tensors, not with its square") {
  const Scratch scratch;
  const auto processor_time = [&](int tensors) {
    std::string header = "{";
    for (int i = 0; i < tensors; ++i)
      header += fmt::format(R"({}"t{}":{{"dtype":"F32","shape":[0],"data_offsets":[0,0]}})", i == 0 ? "" : ",", i);
    const std::string path = file_with(scratch, header + "}", 0);
    std::clock_t least = 0;  // of three: other processes take the caches
    for (int attempt = 0; attempt < 3; ++attempt) {
      const std::clock_t begin = std::clock();
      const SafetensorsFile file(path);
      const std::clock_t time = std::clock() - begin;
      CHECK(file.entries().size() == static_cast<std::size_t>(tensors));
      CHECK(file.find("t9999") != nullptr);
      least = attempt == 0 ? time : std::min(least, time);
    }
    return static_cast<double>(least);
  };
  // A square gives 16.
  const double ratio = processor_time(40'000) / processor_time(10'000);
  CAPTURE(ratio);
  CHECK(ratio < 8);
}

TEST_CASE("a header that contradicts the file is refused with file and tensor") {
  const Scratch scratch;
  const auto refused = [&](const std::string& path) {
    const std::string message = refusal(ExitCode::data, [&] { SafetensorsFile{path}; });
    CHECK(message.starts_with(path));
    return message;
  };
  const auto of = [&](const std::string& header, std::size_t bytes = 12) {
    return refused(file_with(scratch, header, bytes));
  };
  CHECK(has(refused(file_with(scratch, "{}", 0, std::uint64_t{1} << 63)),
            "claims a header of 9223372036854775808 bytes"));
  CHECK(has(refused(file_with(scratch, "{}", 0, 3)), "claims a header of 3 bytes"));
  CHECK(has(refused(file_with(scratch, "", 0, 0)), "not a JSON object"));
  CHECK(has(of("[]", 0), "not a JSON object"));
  CHECK(has(of(std::string(500, '[') + std::string(500, ']')), "nested"));
  CHECK(has(
      of(R"({"a":{"dtype":"F32","shape":[3],"data_offsets":[0,12]},"a":{"dtype":"F32","shape":[3],"data_offsets":[0,12]}})"),
      "lists tensor \"a\" twice"));
  CHECK(has(of(R"({"a":{"dtype":"F32","shape":[3],"data_offsets":[0,16]}})"), "offsets outside the file"));
  CHECK(has(of(R"({"a":{"dtype":"F32","shape":[3],"data_offsets":[12,0]}})"), "offsets outside the file"));
  CHECK(has(of(R"({"a":{"dtype":"F32","shape":[2],"data_offsets":[0,12]}})"),
            "takes 12 bytes of the file, its shape and dtype 8"));
  CHECK(has(of(R"({"a":{"dtype":"F32","shape":[-1],"data_offsets":[0,12]}})"), "unusable shape"));
  CHECK(has(of(R"({"a":{"dtype":"F32","shape":[4294967296,4294967296],"data_offsets":[0,0]}})", 0), "unusable shape"));
  CHECK(has(of(R"({"a":{"dtype":"F33","shape":[3],"data_offsets":[0,12]}})"), "unknown dtype \"F33\""));
  CHECK(has(of(R"({"a":7})"), "\"a\" has no description"));
  CHECK(has(of(R"({"__metadata__":{"a":7}})", 0), "not an object of texts"));
  CHECK(has(
      of(R"({"a":{"dtype":"F32","shape":[1],"data_offsets":[0,4]},"b":{"dtype":"F32","shape":[1],"data_offsets":[8,12]}})"),
      "\"b\" begins at byte"));
  CHECK(has(
      of(R"({"a":{"dtype":"F32","shape":[2],"data_offsets":[0,8]},"b":{"dtype":"F32","shape":[2],"data_offsets":[4,12]}})"),
      "\"b\" begins at byte"));
  CHECK(has(of(R"({"a":{"dtype":"F32","shape":[2],"data_offsets":[0,8]}})"), "was it copied completely?"));
  CHECK(has(refused(scratch.path.string()), "is a directory"));
}
