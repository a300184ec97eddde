// SPDX-License-Identifier: Apache-2.0
//
// Token ids and documents of a dataset are read as written, across files; damage is refused with file and dataset; old
// datasets have none.
#include "dataset/activations/row_tokens.hpp"

#include <fstream>
#include <functional>

#include "base/error.hpp"
#include "dataset/activations/activation_writer.hpp"
#include "storage/activation_file.hpp"
#include "storage/hdf5.hpp"
#include "tests/dataset/activations/samples.hpp"
#include "tests/scratch.hpp"

namespace weft::dataset {
namespace {

using testing::Sample;
using testing::Scratch;

constexpr std::int64_t kRows = 25, kRowsPerFile = 10;
const std::vector<std::int64_t> kDocuments = {3, 10, 14, 21};  // rows of the dataset at which a document begins

/// 25 rows in three files, appended in pieces that cross their borders; id of row n: 7 n mod 50.
void write_tokens(const std::string& path, Vocabulary vocabulary = {}) {
  const Sample sample;
  WriterSettings settings;
  settings.path = path;
  settings.n_layers = sample.layers;
  settings.d_model = sample.d_model;
  settings.dtype = sample.dtype;
  settings.rows_per_file = kRowsPerFile;
  settings.tokens = true;
  settings.vocabulary = std::move(vocabulary);
  ActivationWriter writer(settings);
  for (std::int64_t begin = 0; begin < kRows; begin += 8) {
    std::vector<std::byte> x, y;
    std::vector<std::int32_t> ids;
    std::vector<std::int64_t> documents;
    const std::int64_t end = std::min(begin + 8, kRows);
    for (std::int64_t row = begin; row < end; ++row) {
      for (const bool target : {false, true}) {
        const std::vector<std::byte> raw = testing::sample_row(sample, row, target);
        (target ? y : x).insert((target ? y : x).end(), raw.begin(), raw.end());
      }
      ids.push_back(static_cast<std::int32_t>(7 * row % 50));
    }
    for (const std::int64_t row : kDocuments)
      if (row >= begin && row < end) documents.push_back(row - begin);
    writer.append(end - begin, x.data(), y.data(), ids, documents);
  }
  writer.finish();
}

bool contains(const std::string& text, const std::string& part) {
  CAPTURE(text);
  CAPTURE(part);
  return text.find(part) != std::string::npos;
}

/// Replaces a dataset of a file by another one.
void replace(const std::string& path, const char* name, kernels::Scalar type, std::int64_t count, const void* data) {
  const storage::Lock lock;
  storage::Handle file(H5Fopen(path.c_str(), H5F_ACC_RDWR, H5P_DEFAULT), H5Fclose, "opening");
  storage::check(H5Ldelete(file, name, H5P_DEFAULT), "deleting");
  if (data != nullptr) storage::write_array(file, path, name, type, count, data);
  file.close();
}

}  // namespace

TEST_CASE("ids and documents are those that were written; no document extends over two files") {
  const Scratch directory;
  write_tokens(directory / "data", {"a", "\xc3\xa9", "c\n"});
  const Description description = describe(directory / "data", {});
  CHECK(description.has_tokens);
  CHECK(description.has_vocabulary);
  CHECK(description.n_documents == 6);  // 0 3 | 0 4 | 0 1
  CHECK(read_vocabulary(description) == Vocabulary{"a", "\xc3\xa9", "c\n"});
  CHECK(contains(summary(description), "6 documents"));
  const Description copy = description_from_text(to_text(description));
  CHECK(copy.n_documents == 6);

  RowTokens tokens(copy);
  const auto of_row = [&](std::int64_t row) {
    const auto [file, at] = tokens.place(row);
    std::int32_t id = -1;
    tokens.read(file, at, std::span(&id, 1));
    const parallel::Range document = tokens.document(file, at);
    return std::vector<std::int64_t>{id, file * kRowsPerFile + document.begin, file * kRowsPerFile + document.end};
  };
  for (const std::int64_t row : {0, 24, 2, 3, 9, 10, 13, 14, 19, 20, 21}) {  // files in any order
    std::int64_t begin = row / kRowsPerFile * kRowsPerFile, end = std::min(begin + kRowsPerFile, kRows);
    for (const std::int64_t start : kDocuments) {
      if (start <= row) begin = std::max(begin, start);
      if (start > row) end = std::min(end, start);
    }
    CHECK(of_row(row) == std::vector<std::int64_t>{7 * row % 50, begin, end});
  }
  // The largest id has no text.
  CHECK(contains(testing::refusal(ExitCode::data, [&] { check_tokens(description); }), "chunk_0.hdf5: /tokens row"));
}

TEST_CASE("datasets without ids are as before") {
  const Scratch directory;
  testing::write_sample(directory / "data", {});
  const Description description = describe(directory / "data", {});
  CHECK_FALSE(description.has_tokens);
  CHECK(storage::ActivationFile(description.file_path(0)).header().format_version == 1);
  CHECK(contains(summary(description), "tokens        not stored"));
}

TEST_CASE("damaged ids and documents are refused with file and dataset") {
  const Scratch directory;
  write_tokens(directory / "data");
  const std::string file = directory / "data/chunk_1.hdf5";
  const auto describing = [&] { return testing::refusal(ExitCode::data, [&] { describe(directory / "data", {}); }); };
  const auto checking = [&] {
    return testing::refusal(ExitCode::data, [&] { check_tokens(describe(directory / "data", {})); });
  };
  CHECK(contains(check_tokens(describe(directory / "data", {})), "ids 0 to 49, no texts"));

  std::vector<std::int32_t> ids(kRowsPerFile, 1);
  ids[4] = -1;
  replace(file, "tokens", kernels::Scalar::i32, kRowsPerFile, ids.data());
  CHECK(contains(checking(), "chunk_1.hdf5: /tokens row 4 is -1"));
  replace(file, "tokens", kernels::Scalar::i32, kRowsPerFile - 1, ids.data());
  CHECK(contains(describing(), "chunk_1.hdf5: /tokens has 9 values, /layer_0/inputs has 10 rows"));
  replace(file, "tokens", kernels::Scalar::u16, kRowsPerFile, ids.data());
  CHECK(contains(describing(), "chunk_1.hdf5: /tokens is uint16 (expected: int32)"));
  ids[4] = 1;
  replace(file, "tokens", kernels::Scalar::i32, kRowsPerFile, ids.data());
  CHECK(contains(check_tokens(describe(directory / "data", {})), "ids 0 to"));

  for (const std::vector<std::int64_t>& documents :
       {std::vector<std::int64_t>{1, 4}, {0, 4, 4}, {0, 5, 4}, {0, 10}, {0, -3}, {-1}}) {
    replace(file, "documents", kernels::Scalar::i64, static_cast<std::int64_t>(documents.size()), documents.data());
    CHECK(contains(checking(), "chunk_1.hdf5: /documents entry"));
  }
  const std::vector<std::int64_t> many(kRowsPerFile + 1, 0);
  replace(file, "documents", kernels::Scalar::i64, kRowsPerFile + 1, many.data());
  CHECK(contains(describing(), "chunk_1.hdf5: /documents has 11 entries for 10 rows"));
  replace(file, "documents", kernels::Scalar::i64, 0, nullptr);
  CHECK(contains(describing(), "chunk_1.hdf5: /documents is missing"));
}

TEST_CASE("a damaged vocabulary is refused") {
  const std::string head = R"({"format": "weft-vocabulary", "format_version": 1, "texts": )";
  CHECK(vocabulary_from_text("v", head + R"(["a", ""]})") == Vocabulary{"a", ""});
  for (const auto& [text, why] : {std::pair<std::string, const char*>{"[", "not a JSON object"},
                                  {"{}", "not a JSON object with format"},
                                  {R"({"format": "weft-vocabulary", "texts": []})", "format_version is not 1"},
                                  {head + "{}}", "\"texts\" is not a list"},
                                  {head + R"(["a", 3]})", "text of id 1 is not a string"},
                                  {head + "[\"\xff\"]}", "not a JSON object"}})
    CHECK(contains(testing::refusal(ExitCode::data, [&] { vocabulary_from_text("v", text); }), why));
}

}  // namespace weft::dataset
