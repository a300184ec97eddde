# SPDX-License-Identifier: Apache-2.0
"""Attribution graphs in JSON, as `weft attribute` and circuit-tracer write them, and where their nodes lie in a picture. The files are not
trusted: what the page uses is checked here, with a message that names the place; the rest is passed on as it is."""
import json
import math
import re
from pathlib import Path

from weft.errors import DATA, WeftError, read_bytes
from weft.text import is_finite, member

LARGEST_FILE = 256 << 20
MOST_NODES, MOST_LINKS = 5000, 400_000      # browsers become slow beyond
KINDS = {"cross layer transcoder": "feature", "mlp reconstruction error": "error", "embedding": "token", "logit": "logit"}


def _finite(text):
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(f"{text[:20]} is not finite")
    return value


def looks_like_graph(path):
    """True for a JSON file whose first member is that of a graph; the rest is read when it is shown."""
    try:
        with open(path, "rb") as file:
            return re.match(rb'\s*\{\s*"metadata"\s*:', file.read(256)) is not None
    except OSError:
        return False


def find_graphs(directory):
    """{name: file} of a directory and its folder graphs/."""
    directory = Path(directory)
    files = [*sorted(directory.glob("*.json")), *sorted((directory / "graphs").glob("*.json"))]
    return {str(file.relative_to(directory)): file for file in files if file.is_file() and looks_like_graph(file)}


class Graph:
    """nodes: as in the file; links: [[number of the source, of the target, weight]]; kind and row of each node: a row is a layer, tokens
    are below and logits above all layers."""

    def __init__(self, path):
        self.path = Path(path)
        try:
            content = json.loads(read_bytes(path, LARGEST_FILE), parse_float=_finite, parse_constant=_finite)
        except (ValueError, RecursionError) as problem:
            raise self._wrong(f"no JSON ({str(problem)[:80]})") from None
        nodes, links = member(content, "nodes"), member(content, "links")
        self.metadata, self.settings = member(content, "metadata"), member(content, "qParams") or {}
        if not isinstance(nodes, list) or not isinstance(links, list) or not isinstance(self.metadata, dict) or not isinstance(self.settings, dict):
            raise self._wrong("not a graph (metadata, nodes and links are needed)")
        self.tokens = self.metadata.get("prompt_tokens")
        if not isinstance(self.tokens, list) or not self.tokens or not all(isinstance(text, str) for text in self.tokens):
            raise self._wrong("metadata.prompt_tokens is not a list of texts")
        if len(nodes) > MOST_NODES or len(links) > MOST_LINKS:
            raise self._wrong(f"{len(nodes)} nodes and {len(links)} links (a page holds {MOST_NODES} and {MOST_LINKS}); write it with "
                              "--max-nodes or a smaller --prune", again=False)
        self.nodes, self.kinds, self.rows, numbers = nodes, [], [], {}
        for i, node in enumerate(nodes):
            self._check_node(i, node, numbers)
        self._order_rows()
        self.links = [self._link(i, link, numbers) for i, link in enumerate(links)]
        self.strength = self._strengths()
        self._check_settings(numbers)

    @property
    def name(self):
        return str(self.metadata.get("slug") or self.path.stem)

    @property
    def prompt(self):
        prompt = self.metadata.get("prompt")
        return prompt if isinstance(prompt, str) else "".join(self.tokens)

    def _wrong(self, problem, again=True):
        return WeftError(DATA, f"{self.path}: {problem}" + ("; write it again with weft attribute" if again else ""))

    def _check_node(self, i, node, numbers):
        if not isinstance(node, dict):
            raise self._wrong(f"nodes[{i}] is no object")
        name, layer, token = node.get("node_id"), node.get("layer"), node.get("ctx_idx")
        if not isinstance(name, str) or not 0 < len(name) <= 200 or name in numbers:
            raise self._wrong(f"nodes[{i}].node_id is not a text of its own")
        if isinstance(token, bool) or not isinstance(token, int) or not 0 <= token < len(self.tokens):
            raise self._wrong(f"nodes[{i}].ctx_idx is not a token of the prompt (0 to {len(self.tokens) - 1})")
        kind = KINDS.get(node.get("feature_type"), "other") if isinstance(node.get("feature_type"), str) else "other"
        text = str(layer)
        if kind != "token" and not (text.isascii() and text.isdigit() and len(text) < 5):
            raise self._wrong(f"nodes[{i}].layer is not a layer")
        for key in ("influence", "activation", "token_prob"):
            value = node.get(key)
            if value is not None and (isinstance(value, bool) or not isinstance(value, (int, float)) or abs(value) > 1e30):
                raise self._wrong(f"nodes[{i}].{key} is not a number")
        if not isinstance(node.get("clerp") or "", str):
            raise self._wrong(f"nodes[{i}].clerp is not a text")
        numbers[name] = i
        self.kinds.append(kind)
        self.rows.append(-1 if kind == "token" else int(text))

    def _order_rows(self):
        top = max([row for row, kind in zip(self.rows, self.kinds) if kind != "logit"], default=0) + 1
        self.rows = [top if kind == "logit" else row for row, kind in zip(self.rows, self.kinds)]

    def _link(self, i, link, numbers):
        source, target, weight = (member(link, key) for key in ("source", "target", "weight"))
        if not (isinstance(source, str) and source in numbers and isinstance(target, str) and target in numbers):
            raise self._wrong(f"links[{i}] does not lead from a node to a node")
        if isinstance(weight, bool) or not isinstance(weight, (int, float)) or abs(weight) > 1e30:
            raise self._wrong(f"links[{i}].weight is not a number")
        return [numbers[source], numbers[target], weight]

    def _check_settings(self, numbers):
        """Pinned nodes and groups are names of nodes; other settings belong to other programs."""
        pinned, groups = self.settings.get("pinnedIds") or [], self.settings.get("supernodes") or []
        for names in [pinned, *(group[1:] for group in groups if isinstance(group, list))] if isinstance(groups, list) else [None]:
            if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
                raise self._wrong("qParams.pinnedIds and supernodes are not lists of node names")
        self.pinned = [name for name in pinned if name in numbers]

    def _strengths(self):
        """A larger number for a more important node. The files of `weft attribute` and circuit-tracer have in `influence` what all nodes of at
        least this influence hold together; without it, effects on others are added up."""
        effects = [0.0] * len(self.nodes)
        for source, _, weight in self.links:
            effects[source] += abs(weight)
        largest = max(effects, default=0) or 1.0
        return [1 - node["influence"] if is_finite(node.get("influence")) else effects[i] / largest for i, node in enumerate(self.nodes)]

    def shares(self):
        """Of each link, its part of the magnitudes of all links to its target."""
        sums = [0.0] * len(self.nodes)
        for _, target, weight in self.links:
            sums[target] += abs(weight)
        return [abs(weight) / sums[target] if sums[target] > 0 else 0.0 for _, target, weight in self.links]

    def feature(self, i):
        """(layer, index) of a feature's node, whose name is LAYER_INDEX_TOKEN; None of others."""
        match = re.fullmatch(r"([0-9]{1,4})_([0-9]{1,9})_[0-9]{1,9}", self.nodes[i]["node_id"]) if self.kinds[i] == "feature" else None
        return (int(match[1]), int(match[2])) if match else None

    def named(self, catalogue):
        """(name of each node without a label of its own, (layer, index) of each that is a feature): tokens and logits by their text, features
        by the label or the tokens at the strongest activations in the catalogue, if there is one."""
        features, names, known = [self.feature(i) for i in range(len(self.nodes))], [], {}
        for i, node in enumerate(self.nodes):
            if self.kinds[i] == "token":
                names.append(self.tokens[node["ctx_idx"]])
            elif self.kinds[i] == "logit":
                text = re.fullmatch(r'Output "(.*)" \(p=[0-9.]*\)', node.get("clerp") or "", re.S)
                probability = node.get("token_prob")
                names.append((text[1] if text else node.get("clerp") or "output") + ("" if probability is None else f" {probability:.2g}"))
            elif features[i]:
                if features[i] not in known:
                    row = catalogue.row(*features[i]) if catalogue is not None and catalogue.has(*features[i]) else {"tokens": []}
                    known[features[i]] = (row.get("label") or ", ".join(text.strip() or repr(text) for text in row["tokens"][:3])
                                          or "{}:{}".format(*features[i]))
                names.append(known[features[i]])
            else:
                names.append(self.kinds[i])
        return names, features

    def row_name(self, row):
        return "tokens" if row < 0 else "output" if row == max(self.rows) and "logit" in self.kinds else f"layer {row}"


class Layout:
    """Places of nodes: tokens from left to right, layers from bottom to top; nodes of one token and layer in lines. Logits have the whole
    width. Places are the centres of cells of the size `cell`."""

    MARGIN, GAP = 70, 8     # left of the columns, for the names of rows; between rows

    def __init__(self, graph, nodes, cell, per_line):
        width, height = cell
        cells, logits = {}, []
        for i in sorted(nodes, key=lambda one: -graph.strength[one]):
            if graph.kinds[i] == "logit":
                logits.append(i)
            else:
                cells.setdefault((graph.rows[i], graph.nodes[i]["ctx_idx"]), []).append(i)
        logits.sort(key=lambda one: -(graph.nodes[one].get("token_prob") or 0))
        columns = []    # nodes in a line of each token's column
        for token in range(len(graph.tokens)):
            columns.append(min(per_line, max([len(found) for (_, of), found in cells.items() if of == token], default=1)))
        self.columns, x = [], self.MARGIN       # (left, width)
        for in_line in columns:
            self.columns.append((x, max(72, in_line * width + 12)))
            x += self.columns[-1][1]
        wide = max(96, width)
        self.width = max(x, self.MARGIN + wide * len(logits))
        self.places, self.rows, y = {}, [], self.GAP        # rows: (row, centre, lower end)
        for row in sorted({graph.rows[i] for i in nodes}, reverse=True):
            if logits and row == graph.rows[logits[0]]:
                step = (self.width - self.MARGIN) / len(logits)
                for place, i in enumerate(logits):
                    self.places[i] = (round(self.MARGIN + step * (place + 0.5)), y + height // 2)
                lines = 1
                extra = 14      # text
            else:
                lines, extra = 1, 0
                for token, in_line in enumerate(columns):
                    found = cells.get((row, token), [])
                    lines = max(lines, -(-len(found) // in_line))
                    for place, i in enumerate(found):
                        in_this = min(in_line, len(found) - place // in_line * in_line)
                        left, of = self.columns[token]
                        self.places[i] = (round(left + of / 2 + (place % in_line - (in_this - 1) / 2) * width),
                                          y + place // in_line * height + height // 2)
            self.rows.append((row, y + lines * height // 2, y + lines * height + extra + self.GAP // 2))
            y += lines * height + extra + self.GAP
        self.height = y + 20    # texts of tokens
