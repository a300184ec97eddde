// SPDX-License-Identifier: Apache-2.0
#include "transcoder/features/encoded_files.hpp"

#include <algorithm>
#include <limits>
#include <optional>
#include <vector>

#include "parallel/failure.hpp"
#include "storage/json_file.hpp"
#include "storage/pending_output.hpp"
#include "storage/sparse_file.hpp"

namespace weft::transcoder {
namespace {

constexpr const char* kFormat = "weft-encoded";
constexpr std::int64_t kFormatVersion = 1;

/// Gathers the pieces of all ranks on rank 0, in rank order; empty elsewhere. `counts`: values per rank.
template <class T>
std::vector<T> on_rank_0(const parallel::Communicator& ranks, const std::vector<T>& mine,
                         const std::vector<std::int64_t>& counts) {
  std::vector<std::int64_t> send(counts.size(), 0), receive(counts.size(), 0);
  send[0] = static_cast<std::int64_t>(mine.size() * sizeof(T));
  std::vector<T> all;
  if (ranks.rank() == 0) {
    std::int64_t total = 0;
    for (std::size_t g = 0; g < counts.size(); ++g) {
      receive[g] = counts[g] * static_cast<std::int64_t>(sizeof(T));
      total += counts[g];
    }
    all.resize(static_cast<std::size_t>(total));
  }
  ranks.all_to_all(mine.data(), send, all.data(), receive);
  return all;
}

}  // namespace

struct EncodedFiles::State {
  std::string checkpoint;
  std::int64_t step;
  dataset::Description description;
  Shape shape;
  const parallel::Grid& grid;

  // Members that only rank 0 uses.
  std::optional<storage::PendingOutput> output = {};
  std::optional<storage::SparseFileWriter> file = {};
  std::size_t n_files = 0;  // number of files begun
  std::int64_t entries = 0, first_row = 0;
  Json files = Json::array();

  std::string name(std::size_t i) const { return fmt::format("encoded_{}.h5", i); }

  void open_file() {
    const std::string source = description.files[n_files].name;
    file.emplace(output->place() / name(n_files),
                 std::map<std::string, std::string>{{"format", kFormat},
                                                    {"checkpoint", checkpoint},
                                                    {"data", description.path},
                                                    {"source", source},
                                                    {"dataset_fingerprint", description.fingerprint}},
                 std::map<std::string, std::int64_t>{{"format_version", kFormatVersion},
                                                     {"step", step},
                                                     {"n_layers", shape.n_layers},
                                                     {"n_features", shape.n_features},
                                                     {"first_row", first_row}});
    ++n_files;
  }

  void close_file() {
    file->close();
    files.push_back({{"name", name(n_files - 1)},
                     {"source", description.files[n_files - 1].name},
                     {"first_row", first_row},
                     {"rows", file->rows()},
                     {"entries", file->entries()}});
    first_row += file->rows();
    entries += file->entries();
    file.reset();
  }

  /// Writes the complete rows of a batch into all files to which they belong.
  void write(const std::vector<std::int64_t>& counts, const std::vector<std::uint32_t>& feature,
             const std::vector<float>& value) {
    std::size_t row = 0, entry = 0;
    while (row < counts.size()) {
      if (!file) open_file();
      const std::int64_t left = description.files[n_files - 1].rows - file->rows();
      const std::size_t n = std::min(counts.size() - row, static_cast<std::size_t>(left));
      std::size_t n_entries = 0;
      for (std::size_t i = row; i < row + n; ++i) n_entries += static_cast<std::size_t>(counts[i]);
      file->append(std::span(counts).subspan(row, n), std::span(feature).subspan(entry, n_entries),
                   std::span(value).subspan(entry, n_entries));
      row += n;
      entry += n_entries;
      if (file->rows() == description.files[n_files - 1].rows) close_file();
    }
  }
};

EncodedFiles::EncodedFiles(const std::filesystem::path& directory, const std::string& checkpoint, std::int64_t step,
                           const dataset::Description& description, const Model& model, const parallel::Grid& grid)
    : state_(new State{checkpoint, step, description, model.shape(), grid}) {
  if (model.shape().n_layers * model.shape().n_features > std::numeric_limits<std::uint32_t>::max())
    throw collective_error(ExitCode::usage, "{} layers of {} features (indices of encoded files are below 2^32)",
                           model.shape().n_layers, model.shape().n_features);
  parallel::on_root(grid.world(), [&] {
    state_->output.emplace(directory, storage::PendingOutput::Kind::directory,
                           std::vector<std::string>{"encoded_0.h5", "metadata.json"});
  });
}

EncodedFiles::~EncodedFiles() = default;

void EncodedFiles::append(const SparseRows& rows) {
  State& state = *state_;
  const parallel::Communicator& ranks = state.grid.axis(parallel::kFeatureAxis);
  const auto n_ranks = static_cast<std::size_t>(ranks.size());
  std::vector<std::int64_t> entries_of_rank(n_ranks), offsets_of_rank(n_ranks, rows.n_tokens + 1);
  const std::int64_t mine = rows.offsets.back();
  ranks.all_gather(&mine, entries_of_rank.data(), 8);
  const std::vector<std::int64_t> offsets = on_rank_0(ranks, rows.offsets, offsets_of_rank);
  const std::vector<std::uint32_t> keys = on_rank_0(ranks, rows.key, entries_of_rank);
  const std::vector<float> values = on_rank_0(ranks, rows.value, entries_of_rank);

  parallel::on_root(state.grid.world(), [&] {
    // For each rank: position of its next entry, its end, and its features.
    struct Source {
      std::size_t at, begin;
      parallel::Range features;
    };
    std::vector<Source> sources;
    std::size_t begin = 0;
    for (std::size_t g = 0; g < n_ranks; ++g) {
      sources.push_back(
          {begin, begin, parallel::part(state.shape.n_features, ranks.size(), static_cast<std::int64_t>(g))});
      begin += static_cast<std::size_t>(entries_of_rank[g]);
    }
    std::vector<std::int64_t> counts(static_cast<std::size_t>(rows.n_tokens), 0);
    std::vector<std::uint32_t> feature;
    std::vector<float> value;
    feature.reserve(keys.size());
    value.reserve(values.size());
    for (std::int64_t token = 0; token < rows.n_tokens; ++token) {
      const std::size_t before = feature.size();
      for (std::int64_t layer = 0; layer < state.shape.n_layers; ++layer)
        for (std::size_t g = 0; g < n_ranks; ++g) {
          Source& source = sources[g];
          const std::int64_t n_local = source.features.size();
          const std::size_t end =
              source.begin +
              static_cast<std::size_t>(
                  offsets[g * static_cast<std::size_t>(rows.n_tokens + 1) + static_cast<std::size_t>(token) + 1]);
          for (; source.at < end && static_cast<std::int64_t>(keys[source.at]) < (layer + 1) * n_local; ++source.at) {
            const std::int64_t local = static_cast<std::int64_t>(keys[source.at]) - layer * n_local;
            feature.push_back(
                static_cast<std::uint32_t>(layer * state.shape.n_features + source.features.begin + local));
            value.push_back(values[source.at]);
          }
        }
      counts[static_cast<std::size_t>(token)] = static_cast<std::int64_t>(feature.size() - before);
    }
    state.write(counts, feature, value);
  });
}

void EncodedFiles::finish() {
  State& state = *state_;
  parallel::on_root(state.grid.world(), [&] {
    const Json metadata = {{"format", kFormat},
                           {"format_version", kFormatVersion},
                           {"checkpoint", state.checkpoint},
                           {"step", state.step},
                           {"data", state.description.path},
                           {"dataset_fingerprint", state.description.fingerprint},
                           {"n_layers", state.shape.n_layers},
                           {"n_features", state.shape.n_features},
                           {"rows", state.first_row},
                           {"entries", state.entries},
                           {"files", state.files}};
    storage::write_pending_json(state.output->place() / "metadata.json", metadata);
    state.output->publish();
  });
}

std::int64_t EncodedFiles::entries() const { return state_->entries; }

}  // namespace weft::transcoder
