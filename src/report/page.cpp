// SPDX-License-Identifier: Apache-2.0
#include "report/page.hpp"

#include <fmt/format.h>

#include <utility>

#include "report/build.hpp"
#include "report/chart.hpp"
#include "report/html.hpp"
#include "report/page_template.hpp"

namespace weft::report {
namespace {

const char* class_of(Tone tone) {
  switch (tone) {
    case Tone::plain:
      return "";
    case Tone::faint:
      return " class=\"state\"";
    case Tone::bad:
      return " class=\"bad\"";
    case Tone::missing:
      return " class=\"missing\"";
  }
  return "";
}

enum class Row { head, body };

/// Names in the head, as of settings, may be broken after a dot or an underscore.
std::string breakable(const std::string& text) {
  std::string out;
  for (const char c : text) out += c == '.' || c == '_' ? std::string(1, c) + "<wbr/>" : std::string(1, c);
  return out;
}

std::string table_row(const std::vector<std::string>& cells, Row row, std::size_t numbers_from) {
  std::string text = "<tr>";
  for (std::size_t i = 0; i < cells.size(); ++i)
    text += fmt::format("<{0}{1}>{2}</{0}>", row == Row::head ? "th" : "td", i >= numbers_from ? " class=\"n\"" : "",
                        row == Row::head ? breakable(escaped(cells[i])) : escaped(cells[i]));
  return text + "</tr>\n";
}

/// Replaces each {{name}} of the template once; values are not searched for further names.
std::string filled(std::string_view text, const std::vector<std::pair<std::string_view, std::string>>& values) {
  std::string out;
  while (true) {
    const std::size_t begin = text.find("{{"), end = text.find("}}", begin);
    out += text.substr(0, begin);
    if (begin == std::string_view::npos || end == std::string_view::npos) return out;
    const std::string_view name = text.substr(begin + 2, end - begin - 2);
    for (const auto& [known, value] : values)
      if (known == name) out += value;
    text.remove_prefix(end + 2);
  }
}

}  // namespace

void Section::paragraph(std::string_view text, Tone tone) {
  body_ += fmt::format("<p{}>{}</p>\n", class_of(tone), escaped(text));
}

void Section::figure(std::string_view title, std::string_view svg, std::string_view caption) {
  body_ += fmt::format("<figure>\n<h3>{}</h3>\n{}<figcaption>{}</figcaption>\n</figure>\n", escaped(title), svg,
                       escaped(caption));
}

void Section::table(const std::vector<std::string>& head, const std::vector<std::vector<std::string>>& rows,
                    std::size_t numbers_from) {
  body_ += head.empty() ? "<div class=\"wide\"><table class=\"facts\">\n" : "<div class=\"wide\"><table>\n";
  if (!head.empty()) body_ += "<thead>" + table_row(head, Row::head, numbers_from) + "</thead>\n";
  body_ += "<tbody>\n";
  for (const auto& row : rows) body_ += table_row(row, Row::body, numbers_from);
  body_ += "</tbody></table></div>\n";
}

void Section::listing(std::string_view text, Listing form) {
  body_ += fmt::format("<pre{}>{}</pre>\n", form == Listing::columns ? " class=\"columns\"" : "", escaped(text));
}

void Section::application(const Json& data, std::string_view script) {
  // Inside an element of script, HTML interprets nothing but its end tag, and XML the usual characters.
  std::string json;
  for (const char c : to_text(data))
    json += c == '<' ? "\\u003c" : c == '>' ? "\\u003e" : c == '&' ? "\\u0026" : std::string(1, c);
  body_ += fmt::format(
      "<div id=\"application\"></div>\n<script type=\"application/json\" id=\"data\">{}</script>\n"
      "<script>/*<![CDATA[*/\n(function (root, data) {{\n{}}})(document.getElementById('application'), "
      "JSON.parse(document.getElementById('data').textContent));\n/*]]>*/</script>\n",
      json, script);
}

void Section::begin_columns() { body_ += "<div class=\"figures\">\n"; }
void Section::begin_block() { body_ += "<div>\n"; }
void Section::end_block() { body_ += "</div>\n"; }
void Section::end_columns() { body_ += "</div>\n"; }

std::string to_html(const Page& page) {
  std::string tiles, notes, sections;
  for (const Tile& tile : page.tiles)
    tiles += fmt::format("<li><b>{}</b><span>{}</span></li>\n", escaped(tile.value), escaped(tile.name));
  for (const std::string& note : page.notes) notes += fmt::format("<p class=\"bad\">{}</p>\n", escaped(note));
  for (const Section& section : page.sections)
    sections += fmt::format("<section>\n<h2>{}</h2>\n{}</section>\n", escaped(section.title()), section.body());
  return filled(page_template, {{"title", escaped(page.title)},
                                {"subtitle", page.subtitle.empty() ? "" : "<p>" + escaped(page.subtitle) + "</p>\n"},
                                {"about", page.subtitle.empty() ? "" : " (" + escaped(page.subtitle) + ")"},
                                {"kind", escaped(page.kind)},
                                {"source", escaped(page.source)},
                                {"chart_style", chart_style()},
                                {"state", escaped(page.state)},
                                {"state_detail", escaped(page.state_detail)},
                                {"state_class", page.state_is_bad ? "bad" : ""},
                                {"tiles", tiles},
                                {"notes", notes},
                                {"sections", sections},
                                {"version", escaped(build_record.version)}});
}

}  // namespace weft::report
