// SPDX-License-Identifier: Apache-2.0
//
// features.html: one self-contained page for browsing features: a table, searched by layer and index and sorted, and
// details of a chosen feature. The data are in the page as JSON, the table is drawn by browser.js.
#pragma once

#include <set>
#include <string>

#include "report/page.hpp"
#include "transcoder/features/catalogue.hpp"

namespace weft::transcoder {

/// Most features of a page, and most examples of each: browsers become slow beyond a few tens of MB.
inline constexpr std::int64_t kMostOnPage = 20'000;
inline constexpr std::int64_t kMostExamples = 8;

class CataloguePage {
 public:
  CataloguePage(const CatalogueFacts&, const dataset::Vocabulary&);
  /// Takes all features of the layer, or, if the layers together have more than kMostOnPage, an equal number of each
  /// layer: those that fired on most tokens.
  void add(const LayerCatalogue&);
  std::string html() const;

 private:
  const CatalogueFacts facts_;
  const dataset::Vocabulary& vocabulary_;
  report::Json features_ = report::Json::array();
  std::set<std::int32_t> ids_;                    // that have a text on the page
  std::vector<std::vector<std::string>> layers_;  // rows of the table of layers
  std::int64_t fired_ = 0;                        // features that fired
};

}  // namespace weft::transcoder
