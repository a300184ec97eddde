# SPDX-License-Identifier: Apache-2.0
"""A graph as an SVG picture for a document: the strongest features as boxes with their labels, and the strongest links between them;
errors are left out. One file, with colours for light and dark pages and a description for screen readers."""
from weft.serve.graphs import Layout
from weft.text import escaped

MOST_PICTURED, MOST_LOGITS = 400, 4
LINKS_PER_NODE = 3
BOX, PITCH, LETTERS = (112, 20), (120, 28), 14

STYLE = """svg { --paper: #ffffff; --card: #f6f7f8; --ink: #1c2126; --faint: #5a646e; --rule: #dde1e5; --blue: #1f6fb2; --orange: #b8560f; font: 12px system-ui, sans-serif; }
@media (prefers-color-scheme: dark) { svg { --paper: #14181c; --card: #1c2227; --ink: #e6e9ec; --faint: #a3adb7; --rule: #333b43; --blue: #6db3ea; --orange: #f0a35c; } }
.paper { fill: var(--paper); } text { fill: var(--ink); text-anchor: middle; } .row { fill: var(--faint); text-anchor: start; }
rect.node { fill: var(--card); stroke: var(--faint); } rect.feature { stroke: var(--blue); }
.edge { fill: none; stroke: var(--blue); } .negative { stroke: var(--orange); stroke-dasharray: 5 3; }
"""


def short(text, most):
    text = text.replace("\n", "↵").replace("\t", "⇥").strip()
    return text if len(text) <= most else text[:most - 1] + "…"


def graph_picture(graph, catalogue, most):
    """All tokens, the most probable logits, and the `most` strongest features. Each node has its LINKS_PER_NODE strongest inputs and outputs
    among them."""
    strongest = sorted(range(len(graph.nodes)), key=lambda one: -graph.strength[one])
    logits = sorted((i for i in strongest if graph.kinds[i] == "logit"), key=lambda one: -(graph.nodes[one].get("token_prob") or 0))
    others = [i for i in strongest if graph.kinds[i] in ("feature", "other")]
    nodes = [i for i in strongest if graph.kinds[i] == "token"] + logits[:MOST_LOGITS] + others[:most]
    layout, chosen, used = Layout(graph, nodes, PITCH, 1), set(nodes), {}
    shares, names = graph.shares(), graph.named(catalogue)[0]
    picked = []
    for i in sorted(range(len(graph.links)), key=lambda one: -shares[one]):
        source, target, _ = graph.links[i]
        if source in chosen and target in chosen:
            ends = ((source, "output"), (target, "input"))
            if any(used.get(end, 0) < LINKS_PER_NODE for end in ends):
                picked.append(i)
                for end in ends:
                    used[end] = used.get(end, 0) + 1
    parts = [f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {layout.width} {layout.height - 14}" width="{layout.width}" '
             f'height="{layout.height - 14}" role="img">\n',
             f"<title>{escaped(f'Attribution graph of {graph.prompt}')}</title>\n",
             f"<desc>{escaped(description(graph, nodes, names, picked, len(others)))}</desc>\n<style>\n{STYLE}</style>\n",
             f'<rect class="paper" width="{layout.width}" height="{layout.height}"/>\n']
    for row, y, _ in layout.rows:
        parts.append(f'<text class="row" x="4" y="{y + 4}">{escaped(graph.row_name(row))}</text>\n')
    for i in reversed(picked):
        source, target, weight = graph.links[i]
        (x, y), (u, v) = layout.places[source], layout.places[target]
        y, v = y - BOX[1] // 2, v + BOX[1] // 2
        middle = (y + v) / 2
        parts.append(f'<path class="edge{" negative" if weight < 0 else ""}" stroke-width="{0.6 + 4 * shares[i] ** 0.5:.1f}" '
                     f'stroke-opacity="{min(0.9, 0.2 + shares[i] ** 0.5):.2f}" d="M{x} {y}C{x} {middle:g} {u} {middle:g} {u} {v}"/>\n')
    for i in nodes:
        x, y = layout.places[i]
        label = names[i] if graph.kinds[i] in ("token", "logit") else graph.nodes[i].get("clerp") or names[i]
        width = BOX[0] if graph.kinds[i] not in ("token", "logit") else 8 + 7 * max(3, len(short(label, 13)))
        parts.append(f'<g><title>{escaped(where(graph, i))}</title><rect class="node {graph.kinds[i]}" x="{x - width // 2}" y="{y - BOX[1] // 2}" '
                     f'width="{width}" height="{BOX[1]}" rx="4"/><text x="{x}" y="{y + 4}">{escaped(short(label, LETTERS))}</text></g>\n')
    return "".join(parts) + "</svg>\n"


def where(graph, i):
    feature = graph.feature(i)
    return f"{'feature {}:{}'.format(*feature) if feature else graph.kinds[i]} at token {graph.nodes[i]['ctx_idx']}"


def description(graph, nodes, names, picked, n_others):
    outputs = ", ".join(short(names[i], 30) for i in nodes if graph.kinds[i] == "logit")
    count = sum(graph.kinds[i] not in ("token", "logit") for i in nodes)
    return (f"Tokens below, layers from bottom to top, outputs above: {outputs}. {count} of {n_others} features, the strongest by influence, and "
            f"{len(picked)} direct effects between them; dashed lines are negative. Errors are not drawn.")
