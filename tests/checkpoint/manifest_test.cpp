// SPDX-License-Identifier: Apache-2.0
#include "checkpoint/manifest.hpp"

#include "base/error.hpp"
#include "base/json.hpp"
#include "checkpoint/checkpoint_directory.hpp"
#include "checkpoint/registry.hpp"
#include "storage/digest.hpp"
#include "tests/checkpoint/sample.hpp"
#include "tests/test.hpp"

namespace weft::checkpoint {
namespace {

Manifest small() {
  Manifest manifest = testing::manifest_of(1200);
  manifest.world = 2;
  manifest.grid = {{"data", 1}, {"feature", 2}};
  manifest.tensors = {{"encoder_0/weight", kernels::Scalar::fp32, {5, 4}}, {"bias", kernels::Scalar::bf16, {3}}};
  const std::string digest(64, 'a');
  manifest.shards = {{"rank_00000.h5", 1000, {digest}, {{0, 2}, {0, 3}}},
                     {"rank_00001.h5", 900, {digest}, {{2, 5}, {0, 0}}}};
  return manifest;
}

/// A changed text with a matching digest, as an attacker would write it.
std::string resealed(std::string text) {
  const std::string key = "\"sha256\": \"";
  const std::size_t at = text.find(key) + key.size();
  text.replace(at, 64, 64, '0');
  return text.replace(at, 64, storage::sha256(text));
}

std::string replaced(const std::string& text, const std::string& from, const std::string& to) {
  const std::size_t at = text.find(from);
  REQUIRE(at != text.npos);
  return resealed(std::string(text).replace(at, from.size(), to));
}

}  // namespace

TEST_CASE("a manifest reads back as it was written") {
  const std::string text = to_text(small());
  CHECK(to_text(parse(text)) == text);
  CHECK(parse_json(text)["cursor"]["position"] == 0);
}

TEST_CASE("grid and cursor may have any names") {
  Manifest manifest = small();
  manifest.grid = {{"data", 1}, {"tensor", 2}};
  manifest.cursor = {{"document", 7}, {"stage", 1}, {"token", 123456789012}};
  const Manifest read = parse(to_text(manifest));
  CHECK(read.grid == manifest.grid);
  CHECK(read.cursor == manifest.cursor);
  CHECK(read.cursor_at("document") == 7);
  CHECK_THROWS_AS(read.cursor_at("epoch"), Error);
  CHECK(to_text(read.grid) == "data 1 x tensor 2");
  CHECK(to_text(read.cursor, ", ") == "document 7, stage 1, token 123456789012");
}

TEST_CASE("grid and cursor have bounded names and numbers of entries") {
  Manifest manifest = small();
  for (int i = 0; i < 64; ++i) manifest.cursor[fmt::format("n{}", i)] = i;
  manifest.cursor.erase("epoch");
  manifest.cursor.erase("position");
  CHECK(parse(to_text(manifest)).cursor.size() == 64);
  manifest.cursor["one_more"] = 0;
  CHECK_THROWS_AS(parse(to_text(manifest)), Error);
  manifest.cursor = {{std::string(64, 'a'), 1}};
  CHECK(parse(to_text(manifest)).cursor.size() == 1);
  manifest.cursor = {{std::string(65, 'a'), 1}};
  CHECK_THROWS_AS(parse(to_text(manifest)), Error);
}

TEST_CASE("format 1 has a grid of data x feature and a cursor of epoch and position") {
  Manifest old = small();
  old.format_version = 1;
  CHECK(parse(to_text(old)).cursor_at("position") == 0);
  old.grid = {{"data", 1}, {"tensor", 2}};
  CHECK_THROWS_AS(parse(to_text(old)), Error);
}

TEST_CASE("every changed byte of a manifest is detected") {
  const std::string text = to_text(small());
  for (std::size_t at = 0; at < text.size(); ++at) {
    std::string changed = text;
    changed[at] = static_cast<char>(changed[at] ^ (1 << (at % 7)));
    CHECK_THROWS_AS(parse(changed), Error);
    CHECK_THROWS_AS(parse(text.substr(0, at)), Error);
  }
}

TEST_CASE("a manifest with a valid digest and impossible content is refused") {
  const std::string text = to_text(small());
  for (const auto& [from, to] : std::vector<std::pair<std::string, std::string>>{
           {"\"step\": 1200", "\"step\": -1"},
           {"\"step\": 1200", "\"step\": 1e3"},
           {"\"step\": 1200", "\"step\": 18446744073709551615"},
           {"\"step\": 1200", "\"step\": \"1200\""},
           {"\"step\"", "\"stop\""},
           {"\"world\": 2", "\"world\": 3"},
           {"\"position\":0", "\"position\":-1"},
           {"\"position\":0", "\"../position\":0"},
           {"\"position\":0", "\"position\":\"0\""},
           {"\"feature\":2", "\"feature\":0"},
           {"{\"epoch\":120,\"position\":0}", "[120,0]"},
           {"rank_00000.h5", "../../etc/passwd"},
           {"rank_00000.h5", "rank_00001.h5"},
           {"rank_00000.h5", "manifest.json"},
           {"encoder_0/weight", "/weight"},
           {"encoder_0/weight", "a/../b"},
           {"encoder_0/weight", "bias"},
           {"fp32", "fp31"},
           {"[5,4]", "[]"},
           {"[5,4]", "[5,0]"},
           {"[5,4]", "[5,4611686018427387904]"},
           {"[5,4]", "[5,400000]"},  // more than the shards hold
           {"[5,4]", "[6,4]"},       // a row in no shard
           {"[5,4]", "[4,4]"},       // a row too many
           {"[[0,2],", "[[0,3],"},   // a row in two shards
           {"[[0,2],", "[[2,0],"},
           {"[[0,2],", "[[0,2,2],"},
           {"[[0,2],[0,3]]", "[[0,2]]"},
           {"\"bytes\":1000", "\"bytes\":100000000000"},  // more than one digest covers
           {"\"extra\": {", "\"extra\": [{}], \"other\": {"},
           {"\"extra\": {",
            "\"extra\": {\"deep\": " + std::string(300'000, '[') + std::string(300'000, ']') + "}, \"other\": {"},
           {"\"cursor\": {", "\"cursor\": 1, \"other\": {"},
           {"\"tensors\": [", "\"tensors\": 1, \"other\": ["}}) {
    CAPTURE(to);
    CHECK_THROWS_AS(parse(replaced(text, from, to)), Error);
  }
  CHECK_THROWS_AS(parse(""), Error);
  CHECK_THROWS_AS(parse("{}"), Error);
  CHECK_THROWS_AS(parse(resealed(text + std::string(100'000, '['))), Error);
}

TEST_CASE("a newer format is distinguished from a damaged manifest") {
  const std::string text = to_text(small());
  CHECK_THROWS_AS(parse(replaced(text, "\"format_version\": 2", "\"format_version\": 3")), NewerFormat);
  std::string damaged = text;
  damaged.replace(damaged.find("\"format_version\": 2"), 19, "\"format_version\": 3");
  CHECK_THROWS_AS(parse(damaged), Error);
}

TEST_CASE("only names in the format of the writer are checkpoints") {
  CHECK(step_of("step_00001200") == 1200);
  CHECK(step_of("step_123456789") == 123456789);
  for (const char* name : {"step_1200", "step_00001200.tmp", "step_", "step_0000120x", "latest", "step_-0000001",
                           "step_99999999999999999999", "step_00000001.abandoned"})
    CHECK(step_of(name) == -1);
}

TEST_CASE("tensors that could not be written or read back are refused at registration") {
  float number = 0;
  const Tensor good{"a/b", kernels::Scalar::fp32, {4}, {1, 3}, {1, 2}, &number, false, {}, {}};
  Registry registry;
  registry.add(good);
  CHECK(registry.bytes() == 4);
  CHECK(registry.held_bytes() == 8);
  const auto refused = [&](auto change) {
    Tensor tensor = good;
    tensor.name = "other";
    change(tensor);
    CHECK_THROWS_AS(registry.add(tensor), Error);
  };
  for (const char* name : {"", "/a", "a/", "a//b", "../a", "a/..", "a b", "a/b", "a", "a/b/c", ".hidden"})
    refused([&](Tensor& tensor) { tensor.name = name; });
  refused([](Tensor& tensor) { tensor.shape = {}; });
  refused([](Tensor& tensor) { tensor.shape = {4, 0}; });
  refused([](Tensor& tensor) { tensor.held = {1, 5}; });
  refused([](Tensor& tensor) { tensor.owned = {0, 2}; });
  refused([](Tensor& tensor) { tensor.data = nullptr; });
}

}  // namespace weft::checkpoint
