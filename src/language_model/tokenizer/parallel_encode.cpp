// SPDX-License-Identifier: Apache-2.0
#include "language_model/tokenizer/parallel_encode.hpp"

#include "base/progress.hpp"
#include "dataset/activations/workers.hpp"

namespace weft::language_model {

std::vector<std::vector<std::uint32_t>> encode_parallel(const Tokenizer& tokenizer, std::string_view text,
                                                        std::span<const std::string_view> documents,
                                                        std::string_view source, int n_threads,
                                                        std::size_t part_bytes) {
  struct Part {
    std::size_t document;
    std::string_view text;
    std::vector<std::uint32_t> ids;
  };
  std::vector<Part> parts;
  for (std::size_t i = 0; i < documents.size(); ++i)
    for (const std::string_view part : tokenizer.parts(documents[i], part_bytes)) parts.push_back({i, part, {}});

  dataset::Workers workers(n_threads);
  workers.run(static_cast<std::int64_t>(parts.size()), [&](std::int64_t i) {
    Part& part = parts[static_cast<std::size_t>(i)];
    part.ids = tokenizer.encode(part.text, source, static_cast<std::size_t>(part.text.data() - text.data()));
    note_progress();
  });

  std::vector<std::vector<std::uint32_t>> ids(documents.size());
  for (Part& part : parts) {
    std::vector<std::uint32_t>& whole = ids[part.document];
    if (whole.empty())
      whole = std::move(part.ids);
    else
      whole.insert(whole.end(), part.ids.begin(), part.ids.end());
    part.ids = {};
  }
  return ids;
}

}  // namespace weft::language_model
