// SPDX-License-Identifier: Apache-2.0
//
// Rows that a model computes when they are read: the same bits as those of a harvest, however they are read, and the
// same batches as from its files.
#include "language_model/run/text_rows.hpp"

#include <algorithm>
#include <array>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <limits>
#include <string>

#include "base/error.hpp"
#include "dataset/activations/describe.hpp"
#include "dataset/activations/loader.hpp"
#include "dataset/activations/reader.hpp"
#include "dataset/activations/statistics.hpp"
#include "language_model/run/harvester.hpp"
#include "tests/language_model/small_model.hpp"

using namespace weft;
using namespace weft::testing;

namespace {

namespace fs = std::filesystem;

// Two files of 8 and 3 windows in blocks of 3 windows: neither divides the other.
constexpr std::int64_t kLength = 8, kWidth = 32, kLayers = 2, kBlockRows = 3 * kLength;
constexpr Windows kWindows{.length = kLength, .windows = 11, .windows_per_file = 8};

TransformerSettings small() {
  TransformerSettings settings;
  ModelSettings& model = settings.architecture.model;
  model.layers = kLayers;
  model.heads = model.kv_heads = 4;
  model.d_model = kWidth;
  model.d_mlp = 48;
  settings.architecture.vocabulary = 29;
  settings.architecture.positions = kLength;
  settings.rows = kBlockRows;
  settings.length = kLength;
  settings.gradients = false;
  return settings;
}

dataset::TokenSet text() {
  std::vector<std::uint16_t> ids;
  for (std::uint16_t i = 0; i < 11 * kLength + 5; ++i) ids.push_back(static_cast<std::uint16_t>(i * i * 5 % 29));
  return dataset::TokenSet("text", std::move(ids), 29, 0);
}

/// A model, the files that a harvest of the text writes, and the same rows without files.
struct Case {
  Case() : grid(world(), single_process()), arena(execution(), grid), staging(kBlockRows, false, execution(), arena) {
    model.transformer().prepare_weights();
    std::string pattern = (fs::temp_directory_path() / "weft_text_rows_XXXXXX").string();
    if (mkdtemp(pattern.data()) == nullptr) throw Error(ExitCode::io, "no temporary directory");
    folder = pattern;
  }
  ~Case() { fs::remove_all(folder); }

  dataset::Description harvest() {
    dataset::WriterSettings writer;
    writer.path = (folder / "data").string();
    writer.n_layers = kLayers;
    writer.d_model = kWidth;
    writer.dtype = kernels::Scalar::fp32;
    writer.rows_per_file = kWindows.windows_per_file * kLength;
    writer.tokens = true;
    const dataset::ChunkFiles files(writer, {});
    HarvestSettings settings{kWindows, 3};
    Harvester harvester(settings, stream, small().architecture.model, model.transformer(), staging, execution());
    harvester.write(std::array<std::int64_t, 2>{0, 1}, files);
    dataset::write_index(writer, std::array<std::int64_t, 2>{kWindows.rows_of(0), kWindows.rows_of(1)});
    return dataset::describe(writer.path, {});
  }
  dataset::Description computed(dataset::RowSource& source) const {
    dataset::Description description = describe(kWindows, small().architecture.model, kernels::Scalar::fp32);
    description.source = &source;
    return description;
  }

  SmallModel model{small(), 3, kLength};
  parallel::Grid grid;
  model::StepArena arena;
  Staging staging;
  const TextStream stream{{text()}};
  fs::path folder;
};

std::string read(const dataset::Description& description, std::int64_t file, std::int64_t begin, std::int64_t rows) {
  dataset::Reader reader(description, 1);
  const std::int64_t bytes = rows * description.row_bytes();
  std::string both(static_cast<std::size_t>(2 * bytes), '\0');
  auto* const to = reinterpret_cast<std::byte*>(both.data());
  reader.read(std::array{dataset::RowRead{file, begin, rows, to, to + bytes}});
  return both;
}

}  // namespace

TEST_CASE("rows have the bits of a harvest, in whatever parts and order they are read") {
  Case one;
  const dataset::Description files = one.harvest();
  MlpRecorder recorder(kBlockRows, kernels::Scalar::fp32, small().architecture.model, one.model.transformer(),
                       one.staging, execution());
  TextRows source(kWindows, one.stream, kBlockRows, recorder);
  const dataset::Description computed = one.computed(source);
  REQUIRE(computed.n_rows == files.n_rows);
  REQUIRE(computed.files.size() == files.files.size());
  const auto same = [&](std::int64_t file, std::int64_t begin, std::int64_t rows) {
    CHECK_MESSAGE(read(computed, file, begin, rows) == read(files, file, begin, rows), "file ", file, ", rows ", begin,
                  " to ", begin + rows);
  };
  same(0, 0, 64);
  same(1, 0, 24);
  same(1, 23, 1);
  same(0, 5, 50);  // over three blocks, from the middle of a window
  for (const std::int64_t row : {63, 0, 24, 23, 47, 48}) same(0, row, 1);
  // A side may be left out.
  std::string targets(static_cast<std::size_t>(2 * computed.row_bytes()), '\0');
  dataset::Reader reader(computed, 1);
  reader.read(std::array{dataset::RowRead{0, 30, 2, nullptr, reinterpret_cast<std::byte*>(targets.data())}});
  CHECK(targets == read(files, 0, 30, 2).substr(targets.size()));
}

TEST_CASE("batches and statistics are those of the files, also from a position in the middle of the data") {
  Case one;
  const dataset::Description files = one.harvest();
  MlpRecorder recorder(kBlockRows, kernels::Scalar::fp32, small().architecture.model, one.model.transformer(),
                       one.staging, execution());
  TextRows source(kWindows, one.stream, kBlockRows, recorder);
  const dataset::Description computed = one.computed(source);
  dataset::Settings settings;
  settings.batch_tokens = 20;
  settings.block_rows = kBlockRows;
  settings.window_rows = 2 * kBlockRows;
  const parallel::Grid grid(world(), parallel::data_by_feature(1, 1));
  for (const dataset::Cursor start : {dataset::Cursor{0, 0}, dataset::Cursor{1, 50}}) {
    dataset::Loader from_files(files, settings, 5, world(), world().node(), grid, start, 1);
    dataset::Loader from_model(computed, settings, 5, world(), world().node(), grid, start, 1);
    for (int batch = 0; batch < 10; ++batch) {  // more than two epochs of 88 rows
      const dataset::RawBatch &expected = from_files.next(), &found = from_model.next();
      CHECK(found.end == expected.end);
      const auto same = [&](const kernels::AnyMatrix& a, const kernels::AnyMatrix& b) {
        return std::memcmp(a.data, b.data, static_cast<std::size_t>(20 * computed.row_bytes())) == 0;
      };
      CHECK_MESSAGE((same(found.inputs, expected.inputs) && same(found.targets, expected.targets)), "batch ", batch);
      from_files.release();
      from_model.release();
    }
  }
  // Of all rows, and of the first 70: all of the first file and 6 of the second.
  for (const std::int64_t rows : {0, 70}) {
    const dataset::Statistics expected = dataset::compute_statistics(world(), files, 1, rows),
                              found = dataset::compute_statistics(world(), computed, 1, rows);
    CHECK(found.n_rows == (rows == 0 ? 88 : rows));
    CHECK(found.inputs.mean == expected.inputs.mean);
    CHECK(found.targets.standard_deviation == expected.targets.standard_deviation);
  }
}

TEST_CASE("a value that is not finite ends the reading, with its layer and token") {
  Case one;
  for (std::size_t i = 0; i < one.model.parameters().size(); ++i)
    if (one.model.parameters().specs()[i].name == "block_1/mlp/down/weight")
      one.model.set(i, std::vector<float>(one.model.get(i).size(), std::numeric_limits<float>::infinity()));
  one.model.transformer().prepare_weights();
  MlpRecorder recorder(kBlockRows, kernels::Scalar::fp32, small().architecture.model, one.model.transformer(),
                       one.staging, execution());
  TextRows source(kWindows, one.stream, kBlockRows, recorder);
  const dataset::Description computed = one.computed(source);
  std::string message;
  try {
    read(computed, 0, 30, 1);
  } catch (const Error& failure) {
    CHECK(failure.code() == ExitCode::numeric);
    message = failure.what();
  }
  CHECK_MESSAGE(message.find("the output of the MLP of layer 1 at token 24") != message.npos, message);
}
