# SPDX-License-Identifier: Apache-2.0
"""The pages of features and of graphs: served on demand, or exported in one file, features as a chosen subset."""
import json
import math
import socketserver
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import parse_qs, urlencode, urlsplit

from weft.errors import WeftError
from weft.page import Page, Section
from weft.serve.catalogue import MOST_EXAMPLES, ORDERS
from weft.serve.graphs import Graph, Layout
from weft.text import grouped, member, number, short_number, text_of

ROWS = 200      # of an answer
MOST_DETAILS = 500      # features of a graph whose examples an exported page holds
LOOPBACK = ("127.0.0.1", "localhost")


def script(*names):
    return "".join((Path(__file__).parent / name).read_text(encoding="utf-8") for name in names)


def features_page(catalogue, chosen=None, graphs=()):
    """The page. chosen: [(layer, index)] that it holds; None: it requests rows and details from the server. graphs: names of those served."""
    n_all = catalogue.n_layers * catalogue.n_features
    page = Page(f"Features of {catalogue.checkpoint}", kind="weft serve", source="from features.h5",
                state=f"Step {grouped(catalogue.step)}, on {grouped(catalogue.tokens)} tokens of {catalogue.data}.")
    fired = [int((catalogue.fired[begin:begin + catalogue.n_features] > 0).sum()) for begin in range(0, n_all, catalogue.n_features)]
    page.tiles = [(grouped(n_all), "features"), (grouped(sum(fired)), "fired"), (grouped(catalogue.n_layers), "layers"),
                  (grouped(catalogue.tokens), "tokens")]
    browse, data = Section("Features"), {"facts": catalogue.facts}
    if chosen is not None:
        data["features"] = [{"row": _rounded(catalogue.row(*one)), "details": _rounded(catalogue.feature(*one, MOST_EXAMPLES))} for one in chosen]
        if len(chosen) < n_all:
            browse.paragraph(f"The page holds {grouped(len(chosen))} of {grouped(n_all)} features. weft serve shows all; weft features "
                             "--feature LAYER:INDEX prints one.")
    if not catalogue.has_tokens:
        browse.paragraph("The dataset has no token ids: examples are rows of the dataset.", "missing")
    browse.application(data, script("feature.js", "browser.js"))
    layers = Section("Layers")
    on_page = [sum(layer == one for one, _ in chosen) for layer in range(catalogue.n_layers)] if chosen is not None else []
    layers.table(["layer", "features", "fired", *(["on this page"] if on_page else [])],
                 [[str(layer), grouped(catalogue.n_features), grouped(fired[layer]), *([grouped(on_page[layer])] if on_page else [])]
                  for layer in range(catalogue.n_layers)], 1)
    page.sections = [*graph_list(graphs), browse, layers]
    return page.html()


def graph_list(graphs):
    """The section that leads to the graphs; none without any."""
    if not graphs:
        return []
    section = Section("Graphs")
    section.links([(name, "graph?" + urlencode({"name": name})) for name in graphs])
    return [section]


def graphs_page(graphs):
    page = Page("Attribution graphs", kind="weft serve", source="from a directory of graphs",
                state="Without features: weft serve with the directory of weft features as well shows what they respond to.")
    page.sections = graph_list(graphs)
    return page.html()


def graph_page(graph, catalogue, exported):
    """exported: the page holds the details of features, and needs no server."""
    scores, info = graph.metadata.get("scores"), graph.metadata.get("info")
    page = Page(graph.name, subtitle=graph.prompt, kind="weft serve", source=f"from {graph.path.name}",
                state=f"Attribution graph of {text_of(member(info, 'model')) or 'a model'}, transcoder "
                f"{text_of(member(info, 'transcoder')) or text_of(graph.metadata.get('scan'))}.", style=script("graph.css"))
    page.tiles = [(grouped(graph.kinds.count("feature")), "features"), (grouped(len(graph.links)), "links"), (grouped(len(graph.tokens)), "tokens"),
                  *((short_number(number(member(scores, name))), name) for name in ("replacement", "completeness")
                    if math.isfinite(number(member(scores, name))))]
    names, features = graph.named(catalogue)
    layout = Layout(graph, range(len(graph.nodes)), (16, 16), 6)
    data = {"graph": {"metadata": graph.metadata, "qParams": graph.settings, "nodes": graph.nodes, "tokens": graph.tokens, "links": graph.links},
            "kinds": graph.kinds, "rows": [graph.row_name(row) for row in graph.rows], "names": names,
            "features": [f"{one[0]}:{one[1]}" if one else None for one in features], "strength": _rounded(graph.strength),
            "shares": _rounded(graph.shares()), "file": graph.path.stem,
            "layout": {"width": layout.width, "height": layout.height, "margin": layout.MARGIN, "columns": layout.columns,
                       "rows": [[graph.row_name(row), y, bottom] for row, y, bottom in layout.rows],
                       "places": [layout.places[i] for i in range(len(graph.nodes))]}}
    browse = Section("Graph")
    if catalogue is not None:
        data["facts"] = True
        if exported:
            strongest = dict.fromkeys(features[i] for i in sorted(range(len(features)), key=lambda one: -graph.strength[one])
                                      if features[i] and catalogue.has(*features[i]))
            data["details"] = {f"{layer}:{index}": _rounded(catalogue.feature(layer, index, MOST_EXAMPLES))
                               for layer, index in list(strongest)[:MOST_DETAILS]}
            if len(strongest) > MOST_DETAILS:
                browse.paragraph(f"The page holds the details of the strongest {MOST_DETAILS} of {len(strongest)} features.")
    browse.application(data, script("feature.js", "graph.js"))
    page.sections = [browse]
    if not exported:
        back = Section("Other pages")
        back.links([("features and graphs" if catalogue is not None else "graphs", "./")])
        page.sections.append(back)
    return page.html()


def _rounded(value):
    """Four significant digits: the page is read by people. JSON has no numbers that are not finite."""
    if isinstance(value, float):
        return float(f"{value:.4g}") if math.isfinite(value) else 0.0
    if isinstance(value, dict):
        return {name: _rounded(one) for name, one in value.items()}
    return [_rounded(one) for one in value] if isinstance(value, list) else value


class Refused(Exception):
    """What is wrong with a request."""


class Handler(BaseHTTPRequestHandler):
    """GET /, /features?layer&search&order&fired&offset, /feature?layer&feature and /graph?name; nothing else, and nothing is written. Graphs
    are named as they were found at the start: a name is no path."""
    server_version, sys_version, protocol_version = "weft", "", "HTTP/1.1"
    timeout = 60

    def do_GET(self):
        # A page of another site whose name was made to resolve to this machine sends that name.
        host = self.headers.get("Host", "").rpartition(":")[0].strip("[]")
        if self.server.names and host not in self.server.names:
            self.answer(403, "text/plain", f"this server answers to {', '.join(sorted(self.server.names))} only")
            return
        try:
            url = urlsplit(self.path)
            values = {name: values[-1] for name, values in parse_qs(url.query, max_num_fields=16, keep_blank_values=True).items()}
        except ValueError as problem:
            self.answer(400, "text/plain", f"{self.path[:80]}: is no address of this server ({problem})")
            return
        catalogue = self.server.catalogue
        try:
            if url.path == "/":
                self.answer(200, "text/html", self.server.page)
            elif url.path == "/graph":
                graph = self.server.graphs.get(values.get("name", ""))
                if graph is None:
                    raise Refused("name: no graph that was here when the server started")
                self.answer(200, "text/html", graph_page(Graph(graph), catalogue, False))
            elif catalogue is None:
                self.answer(404, "text/plain", f"{url.path[:80]}: there is no such page")
            elif url.path == "/features":
                order = values.get("order", ORDERS[0])
                if order not in ORDERS:
                    raise Refused(f"order: one of {', '.join(ORDERS)}")
                layer = whole(values, "layer", catalogue.n_layers) if values.get("layer") else None
                count, rows = catalogue.select(values.get("search", ""), layer, order, bool(values.get("fired")),
                                               whole(values, "offset", 1 << 40) if values.get("offset") else 0, ROWS)
                self.answer(200, "application/json", json.dumps({"count": count, "rows": _rounded(rows)}))
            elif url.path == "/feature":
                feature = catalogue.feature(whole(values, "layer", catalogue.n_layers), whole(values, "feature", catalogue.n_features))
                self.answer(200, "application/json", json.dumps(_rounded(feature)))
            else:
                self.answer(404, "text/plain", f"{url.path[:80]}: there is no such page")
        except Refused as problem:
            self.answer(400, "text/plain", str(problem))
        except WeftError as problem:
            self.answer(500, "text/plain", str(problem))

    def answer(self, code, kind, text):
        content = text.encode("utf-8", "replace")
        self.send_response(code)
        self.send_header("Content-Type", f"{kind}; charset=utf-8")
        self.send_header("Content-Length", str(len(content)))
        self.send_header("Cache-Control", "no-store")
        self.send_header("X-Content-Type-Options", "nosniff")
        self.send_header("Content-Security-Policy", "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; "
                                                    "connect-src 'self'; frame-ancestors 'none'")
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, *_):
        pass


def whole(values, name, end):
    """A number from 0 to end - 1 of a query."""
    text = values.get(name, "")
    if not (text.isascii() and text.isdigit() and len(text) < 16 and int(text) < end):
        raise Refused(f"{name}: an integer from 0 to {end - 1}")
    return int(text)


class Server(ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self, catalogue, graphs, host, port):
        """catalogue: of features, or None; graphs: {name: file}"""
        super().__init__((host, port), Handler)
        self.catalogue, self.graphs = catalogue, graphs
        self.page = graphs_page(graphs) if catalogue is None else features_page(catalogue, graphs=graphs)
        self.names = {"localhost", "127.0.0.1"} if host in LOOPBACK else set()      # that requests may be addressed to; empty: any

    def server_bind(self):
        """Without the look-up of the machine's name, which can take seconds."""
        socketserver.TCPServer.server_bind(self)
        self.server_name, self.server_port = self.server_address[:2]

    @property
    def url(self):
        return f"http://{self.server_address[0]}:{self.server_port}/"
