// SPDX-License-Identifier: Apache-2.0
//
// The features of one layer with everything that `weft features` writes about them, on rank 0: collected activations,
// contexts of the strongest ones, norms of the decoder rows and nearest rows. One layer at a time bounds the memory.
#pragma once

#include <cstdint>
#include <filesystem>
#include <string>
#include <vector>

#include "dataset/activations/row_tokens.hpp"
#include "storage/hdf5.hpp"
#include "storage/json_file.hpp"
#include "storage/pending_output.hpp"
#include "transcoder/features/collection.hpp"
#include "transcoder/features/decoder_rows.hpp"

namespace weft::transcoder {

/// Sizes and sources of a catalogue, the same for all layers.
struct CatalogueFacts {
  std::string checkpoint, data, dataset_fingerprint, model;  ///< model: the model of the dataset; "" = unknown
  std::int64_t step = 0;
  std::int64_t tokens = 0;  ///< tokens of the dataset
  std::int64_t n_layers = 0, d_model = 0, n_features = 0;
  std::int64_t n_top = 0;    ///< strongest activations per feature
  std::int64_t context = 0;  ///< tokens before and after a token; 0 without token ids
  std::int64_t n_nearest = 0;
  bool has_tokens = false;

  std::int64_t window() const { return has_tokens ? 2 * context + 1 : 0; }
};

/// Values of the features of one layer, by feature. CatalogueFacts has the other sizes.
struct LayerCatalogue {
  std::int64_t layer = 0;
  std::int64_t targets = 0;             ///< target layers layer, layer + 1, ...
  std::vector<std::int64_t> fired;      ///< [F] number of tokens
  std::vector<double> mean;             ///< [F] mean of the activations > 0; 0 if there is none
  std::vector<std::int64_t> histogram;  ///< [F, kHistogramBins]
  std::vector<float> top_value;         ///< [F, n_top] descending; 0: fewer
  std::vector<std::int64_t> top_row;    ///< [F, n_top] row of the dataset in stored order; -1: fewer
  std::vector<std::int64_t> position;   ///< [F, n_top] of that row in its document; -1: fewer, or no token ids
  std::vector<std::int32_t> token;      ///< [F, n_top, 2 * context + 1] ids; -1 outside the document
  std::vector<double> share;            ///< [F, targets] part of the squared norm of the decoder row
  std::vector<std::int64_t> nearest;    ///< [F, n_nearest] feature of the layer; -1: fewer
  std::vector<float> cosine;            ///< [F, n_nearest]
};

/// Gathers a layer on rank 0; empty arrays elsewhere. `tokens`: null without ids. Collective. Throws a collective
/// Error(data) if `tokens` cannot be read.
LayerCatalogue gather_layer(const CatalogueFacts&, std::int64_t layer, const FeatureCollection&, const Model&,
                            dataset::RowTokens* tokens, const parallel::Grid&, const kernels::Execution&);

/// Writes features.h5 (docs/file_formats.md), layer by layer; the file appears under its name when it is complete, in
/// place of an older one. Throws Error(io).
class CatalogueFile {
 public:
  CatalogueFile(const std::filesystem::path&, const CatalogueFacts&, const dataset::Vocabulary&);
  void add(const LayerCatalogue&);
  void finish();

 private:
  storage::PendingOutput output_;
  const CatalogueFacts facts_;
  storage::Handle file_;
};

/// Converts one feature to JSON; with texts where the dataset has them.
Json to_json(const CatalogueFacts&, const LayerCatalogue&, std::int64_t feature, const dataset::Vocabulary&);

}  // namespace weft::transcoder
