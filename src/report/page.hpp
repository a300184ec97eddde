// SPDX-License-Identifier: Apache-2.0
//
// An HTML page as data: a title, tiles with the main figures, sections of paragraphs, figures and tables. The only
// place that writes HTML; the skeleton and the style are page.html, pictures come from report/chart.hpp.
//
// The page is self-contained (inline style and SVG, nothing fetched; no script but those of `application`) and also
// well-formed XML. All texts are escaped here, so they may come from files.
#pragma once

#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "report/json.hpp"

namespace weft::report {

/// bad: something failed or is damaged; missing: explains why a part of the page is absent.
enum class Tone { plain, faint, bad, missing };

/// columns: short lines, in as many columns as fit the page.
enum class Listing { plain, columns };

class Section {
 public:
  explicit Section(std::string title) : title_(std::move(title)) {}

  void paragraph(std::string_view text, Tone tone = Tone::plain);
  /// `svg` is a picture from report/chart.hpp.
  void figure(std::string_view title, std::string_view svg, std::string_view caption);
  /// An empty `head` makes a table without one. Columns from `numbers_from` on are aligned right.
  void table(const std::vector<std::string>& head, const std::vector<std::vector<std::string>>& rows,
             std::size_t numbers_from);
  /// Text with its line breaks, in a fixed-width font.
  void listing(std::string_view text, Listing form = Listing::plain);

  /// A part that `script` draws (JavaScript without "]]>"): it finds the data in `data` and its element in `root`.
  void application(const Json& data, std::string_view script);

  /// Blocks between the two calls stand side by side where the window is wide enough.
  void begin_columns();
  /// Blocks between the two calls form one block of the columns.
  void begin_block();
  void end_block();
  void end_columns();

  const std::string& title() const { return title_; }
  const std::string& body() const { return body_; }

 private:
  std::string title_, body_;
};

struct Tile {
  std::string value, name;
};

struct Page {
  std::string title;
  std::string subtitle = {};                                   ///< what it is about, also in the title of the window
  std::string kind = "weft report";                            ///< in the title of the window
  std::string source = "from the files of the run directory";  ///< what the page was written from
  std::string state, state_detail;  ///< how the run ended: a short statement and what follows it
  bool state_is_bad = false;
  std::vector<Tile> tiles;
  std::vector<std::string> notes;  ///< problems with the page's sources
  std::vector<Section> sections;
};

/// The whole document.
std::string to_html(const Page&);

}  // namespace weft::report
