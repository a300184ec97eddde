# SPDX-License-Identifier: Apache-2.0
"""weft serve DIR: a local server for browsing features. weft serve DIR --export FILE: a page of chosen features in one file."""
import re
import signal
import sys
from pathlib import Path

from weft.errors import IO, USAGE, Output, Parser, WeftError, require_page_path, run, write_atomically
from weft.serve.catalogue import Catalogue, find_features
from weft.serve.server import LOOPBACK, Server, features_page
from weft.text import grouped

DESCRIPTION = """Shows the features of a transcoder in a browser: a table that is sorted, searched and filtered by the server, and the details
of a feature. DIR is what weft features wrote. The server answers this machine only; parts of features.h5 are read when they are shown. With
--export it writes a page of some features, which needs no server."""
MOST_EXPORTED = 20_000      # browsers become slow beyond a few tens of MB
DEFAULT_EXPORTED = 2000
PORT = 8765


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


def serve(arguments):
    parser = Parser("serve", description=DESCRIPTION)
    parser.add_argument("directory", metavar="DIR", nargs="?", help="the directory of features.h5, or a run that has it in features/")
    parser.add_argument("--port", type=int, default=PORT, metavar="N", help=f"port of the server (default {PORT}; 0 takes a free one)")
    parser.add_argument("--host", default="127.0.0.1", metavar="ADDRESS",
                        help="address to listen on (default 127.0.0.1: this machine only; there is no password)")
    parser.add_argument("--export", metavar="FILE", help="write a page instead, with the features of --features")
    parser.add_argument("--features", action="append", default=[], metavar="LAYER:INDEX,…",
                        help="features of the page, as 0:12,3:55 or 0:10-20 (default: of each layer those that fired on most tokens, together "
                        f"at most {DEFAULT_EXPORTED})")
    Output.add_options(parser)
    given = parser.parse_args(arguments)
    output = Output(given.json, given.quiet)
    if not given.directory:
        parser.error("weft serve needs its DIR")
    if given.features and not given.export:
        parser.error("--features chooses what --export writes (the server shows all); give --export FILE")
    if not 0 <= given.port < 65536:
        parser.error(f"--port {given.port} is out of range (from 0 to 65535)")
    if given.export:
        require_page_path(given.export)
    catalogue = Catalogue(find_features(given.directory))
    if given.export:
        chosen = chosen_features(given.features, catalogue) if given.features else catalogue.most_active(DEFAULT_EXPORTED)
        write_atomically(given.export, features_page(catalogue, chosen))
        output.written(f"{Path(given.export)}: {grouped(len(chosen))} features; open it in a browser",
                       {"page": given.export, "features": len(chosen)})
        return
    try:
        server = Server(catalogue, given.host, given.port)
    except OSError as failure:
        raise WeftError(IO, f"port {given.port} of {given.host}: cannot be used ({failure.strerror}); --port 0 takes a free one") from None
    if given.host not in LOOPBACK:
        output.warning(f"{given.host}: every program that reaches this address can read the features; there is no password")
    output.written(f"{catalogue.path}: {grouped(len(catalogue.fired))} features at {server.url} (Ctrl-C ends)", {"url": server.url})

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
