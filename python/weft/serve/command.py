# SPDX-License-Identifier: Apache-2.0
"""weft serve DIR: a local server for browsing features and graphs. weft serve DIR --export FILE: a page in one file."""
import re
import signal
import sys
from pathlib import Path

from weft.errors import IO, USAGE, Output, Parser, WeftError, require_page_path, run, write_atomically
from weft.serve.catalogue import Catalogue, find_features
from weft.serve.graphs import Graph, find_graphs
from weft.serve.picture import MOST_PICTURED, graph_picture
from weft.serve.server import LOOPBACK, Server, features_page, graph_page
from weft.text import grouped, plural

DESCRIPTION = """Shows the features of a transcoder and attribution graphs in a browser: a table of features that is sorted, searched and
filtered by the server, the details of a feature, and graphs whose nodes are moved, pinned, grouped and labelled. DIR is what weft features
and weft attribute wrote. The server answers this machine only; files are read when they are shown. With --export it writes a page of some
features or of a graph, which needs no server."""
EXAMPLES = """examples:
  weft serve runs/features runs/graphs
  weft serve runs/features --export some.html --features 0:12,2:0-20
  weft serve runs/features graph.json --export graph.html --graph graph.json"""
MOST_EXPORTED = 20_000      # browsers become slow beyond a few tens of MB
DEFAULT_EXPORTED = 2000
PORT = 8765
PICTURED = 40


def chosen_features(texts, catalogue):
    """[(layer, index)] of "0:12,3:55" and "0:10-20"."""
    chosen = {}
    for text in ",".join(texts).split(","):
        match = re.fullmatch(r"\s*([0-9]{1,3}):([0-9]{1,9})(?:-([0-9]{1,9}))?\s*", text)
        layer, first, last = (int(match[1]), int(match[2]), int(match[3] or match[2])) if match else (-1, 0, 0)
        if not (0 <= layer < catalogue.n_layers and first <= last < catalogue.n_features):
            raise WeftError(USAGE, f"--features {text}: not features of {catalogue.path} (LAYER:INDEX or LAYER:FIRST-LAST, layers 0 to "
                            f"{catalogue.n_layers - 1}, features 0 to {catalogue.n_features - 1})")
        if len(chosen) + last - first >= MOST_EXPORTED:
            raise WeftError(USAGE, f"--features: more than {grouped(MOST_EXPORTED)} (the page would be too large for a browser); choose fewer, or "
                            "leave out --export to have all served")
        chosen.update(dict.fromkeys((layer, index) for index in range(first, last + 1)))
    return list(chosen)


def find(paths):
    """(catalogue of features or None, {name: file} of graphs) of directories, features.h5 and graphs."""
    catalogue, graphs = None, {}
    for text in paths:
        path, features, found = Path(text), None, {}
        if path.is_dir():
            features, found = find_features(path), find_graphs(path)
            if features is None and not found:
                raise WeftError(USAGE, f"{path}: has no features.h5 and no graph; write them with weft features CHECKPOINT --output {path} and weft "
                                f"attribute --output {path / 'graph.json'}")
        elif not path.is_file():
            raise WeftError(USAGE, f"{path}: no such file or directory; name the directory that weft features wrote (--output), or a graph")
        elif path.suffix == ".json":
            Graph(path)
            found = {path.name: path}
        else:
            features = path
        if features is not None and catalogue is not None:
            raise WeftError(USAGE, f"{features}: a second file of features ({catalogue.path} is the first); name one")
        if features is not None:
            catalogue = Catalogue(features)
        for name, file in found.items():
            graphs[name if name not in graphs else str(file)] = file
    return catalogue, graphs


def export(given, catalogue, graphs, output):
    """A page or picture of the graph that is named by --graph, or the only one where there are no features; else a page of features."""
    if given.graph or (catalogue is None and len(graphs) == 1):
        name = given.graph or next(iter(graphs))
        if name not in graphs:
            raise WeftError(USAGE, f"--graph {name}: no such graph; there are: {', '.join(graphs) or 'none'}")
        graph = Graph(graphs[name])
        picture = Path(given.export).suffix == ".svg"
        write_atomically(given.export, graph_picture(graph, catalogue, given.nodes) if picture else graph_page(graph, catalogue, True))
        output.written(f"{Path(given.export)}: the graph {name}; open it in a browser", {"page": given.export, "graph": name})
        return
    if catalogue is None:
        raise WeftError(USAGE, f"--export: there are {len(graphs)} graphs; choose one with --graph: {', '.join(graphs)}")
    chosen = chosen_features(given.features, catalogue) if given.features else catalogue.most_active(DEFAULT_EXPORTED)
    write_atomically(given.export, features_page(catalogue, chosen))
    output.written(f"{Path(given.export)}: {grouped(len(chosen))} features; open it in a browser",
                   {"page": given.export, "features": len(chosen)})


def serve(arguments):
    parser = Parser("serve", description=DESCRIPTION, epilog=EXAMPLES)
    parser.add_argument("paths", metavar="DIR", nargs="*", help="a directory with features.h5, graphs or both, also in its folders features/ and "
                        "graphs/; or one of these files")
    parser.add_argument("--port", type=int, default=PORT, metavar="N", help=f"port of the server (default {PORT}; 0 takes a free one)")
    parser.add_argument("--host", default="127.0.0.1", metavar="ADDRESS",
                        help="address to listen on (default 127.0.0.1: this machine only; there is no password)")
    parser.add_argument("--export", metavar="FILE", help="write a page instead, with the features of --features or one graph; FILE.svg: a picture "
                        "of the graph")
    parser.add_argument("--features", action="append", default=[], metavar="LAYER:INDEX,…",
                        help="features of the page, such as 0:12,3:55 or 0:10-20 (default: of each layer those that fired on most tokens, together "
                        f"at most {DEFAULT_EXPORTED})")
    parser.add_argument("--graph", metavar="NAME", help="the graph that --export writes, by the name in the list of graphs (default: the only one, "
                        "if there are no features)")
    parser.add_argument("--nodes", type=int, default=PICTURED, metavar="N", help=f"features in a picture, the strongest (default {PICTURED})")
    Output.add_options(parser)
    given = parser.parse_args(arguments)
    output = Output(given.json, given.quiet)
    if not given.paths:
        parser.error("weft serve needs its DIR")
    if given.features and not given.export:
        parser.error("--features chooses what --export writes (the server shows all); give --export FILE")
    if given.graph and not given.export:
        parser.error("--graph chooses what --export writes (the server shows all); give --export FILE")
    if not 0 <= given.port < 65536:
        parser.error(f"--port {given.port} is out of range (from 0 to 65535)")
    if not 0 <= given.nodes <= MOST_PICTURED:
        parser.error(f"--nodes {given.nodes} is out of range (from 0 to {MOST_PICTURED})")
    if given.export:
        require_page_path(given.export)
    catalogue, graphs = find(given.paths)
    if given.export:
        export(given, catalogue, graphs, output)
        return
    try:
        server = Server(catalogue, graphs, given.host, given.port)
    except OSError as failure:
        raise WeftError(IO, f"port {given.port} of {given.host}: cannot be used ({failure.strerror}); --port 0 takes a free one") from None
    if given.host not in LOOPBACK:
        output.warning(f"{given.host}: every program that reaches this address can read what is served; there is no password")
    served = [*([f"{grouped(len(catalogue.fired))} features"] if catalogue is not None else []), *([plural(len(graphs), "graph")] if graphs else [])]
    output.written(f"{catalogue.path if catalogue is not None else ', '.join(given.paths)}: {' and '.join(served)} at {server.url} (Ctrl-C ends)",
                   {"url": server.url})

    def stop(*_):
        raise KeyboardInterrupt

    signal.signal(signal.SIGTERM, stop)
    try:
        server.serve_forever()
    except KeyboardInterrupt:
        pass
    finally:
        server.server_close()


def main(arguments=None):
    return run(serve, arguments)


if __name__ == "__main__":
    sys.exit(main())
