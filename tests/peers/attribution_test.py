# SPDX-License-Identifier: Apache-2.0
"""weft attribute against circuit-tracer: nodes, effects, scores and pruned graphs of the same models, transcoders and prompts.

launch.py transformers4 attribution_test.py WEFT
"""
import json

import h5py
import numpy as np
import torch
from circuit_tracer import ReplacementModel, attribute
from circuit_tracer.frontend.graph_models import Model
from circuit_tracer.graph import compute_graph_scores, compute_node_influence, prune_graph
from circuit_tracer.utils.create_graph_files import create_nodes, create_used_nodes_and_edges
from transformer_lens import loading_from_pretrained

import common
import models

import program

PROMPT = "In the beginning God created the heaven and the earth. And the earth was without form"
CASES = (("gpt2", "cross_layer", "jumprelu", "none"), ("gpt2", "per_layer", "relu", "linear"), ("llama", "cross_layer", "relu", "none"),
         ("llama", "per_layer", "jumprelu", "linear"), ("qwen3", "tied", "jumprelu", "none"))


def traced(weft, name, directory, max_nodes=None):
    """The graph of circuit-tracer of the prompt, of a model that Weft has written."""
    # It knows Llama models by their published names, others by config.json: the path must not contain "llama".
    written = weft.folder / f"written_{name[0]}"
    if not written.exists():
        weft.run("lm", "export", weft.folder / name, "--output", written)
        loading_from_pretrained.OFFICIAL_MODEL_NAMES.append(str(written))
    model = ReplacementModel.from_pretrained(str(written), str(directory), backend="transformerlens", device=torch.device("cpu"),
                                             dtype=torch.float32)
    ids = torch.tensor(models.ids(weft.folder / name, PROMPT))
    return attribute(ids, model, batch_size=128, verbose=False, max_feature_nodes=max_nodes)


def logit_weights(graph):
    weights = torch.zeros(len(graph.adjacency_matrix))
    weights[-len(graph.logit_targets):] = graph.logit_probabilities
    return weights


def read(path):
    with h5py.File(path) as file:
        return {name: file[name][()] for name in file}


def same_graph(name, found, graph):
    """Nodes equal, effects within rounding of fp32 of a whole model."""
    features = graph.active_features[graph.selected_features].numpy()
    assert (found["features"][:, [0, 1, 2]] == features).all(), name
    assert (found["tokens"] == graph.input_tokens.numpy()).all() and (found["logits"] == graph.logit_token_ids.numpy()).all(), name
    assert np.allclose(found["probabilities"], graph.logit_probabilities.numpy(), rtol=1e-4), name
    n, logits = len(features), len(found["logits"])
    expected = graph.adjacency_matrix.numpy()
    assert not expected[n:-logits].any() and not expected[:, -logits:].any(), name
    expected = np.concatenate([expected[:n], expected[-logits:]])[:, :-logits]
    difference = common.error(found["effects"], expected)
    rows = np.linalg.norm(found["effects"] - expected, axis=1) / np.linalg.norm(expected, axis=1).clip(1e-30)
    print(name, "features", n, "effects", difference, "worst row", rows.max())
    assert difference < 1e-5 and rows.max() < 1e-4, (name, difference, rows.max())
    scores = compute_graph_scores(graph)
    assert np.allclose(found["scores"], scores, atol=1e-4), (name, found["scores"], scores)


def same_json(name, path, graph):
    """The nodes and edges that are left, but for those whose influence is that of the threshold within rounding."""
    document = json.loads(path.read_text())
    node_mask, edge_mask, cumulative = prune_graph(graph)
    nodes = create_nodes(graph, node_mask, None, cumulative)
    nodes, edges = create_used_nodes_and_edges(graph, nodes, edge_mask)
    Model(**document)
    found = {node["node_id"].removesuffix("_error") + node["feature_type"]: node for node in document["nodes"]}
    expected = {node.node_id + node.feature_type: node.model_dump() for node in nodes}
    assert len(found) == len(document["nodes"])
    differ = set(found) ^ set(expected)
    assert len(differ) <= 0.01 * len(expected), (name, differ)
    for node in set(found) & set(expected):
        for key, value in expected[node].items():
            if isinstance(value, float):
                assert abs(found[node][key] - value) < 1e-3 * max(1, abs(value)), (name, node, key, found[node][key], value)
            elif key not in ("node_id", "clerp"):
                assert found[node][key] == value, (name, node, key, found[node][key], value)
    def link(edge):
        return edge["source"].removesuffix("_error"), edge["target"].removesuffix("_error")
    found, expected = {link(edge) for edge in document["links"]}, {link(edge) for edge in edges}
    print(name, "nodes", len(nodes), "edges", len(expected), "differ", len(found ^ expected))
    assert len(found ^ expected) <= 0.01 * len(expected), (name, len(found ^ expected), len(expected))


def test(weft):
    torch.manual_seed(0)
    for name, decoder, activation, skip in CASES:
        if not (weft.folder / name).exists():
            models.add_begin(models.save(weft, name))      # circuit-tracer begins every prompt so
            for split, size in (("train", 4096), ("validation", 512)):
                weft.run("lm", "harvest", name, "--text", models.TEXT, "--tokens", size, "--set", "data.sequence=64",
                         "--output", weft.folder / f"{name}_data/{split}")
        case = f"{name}_{decoder}_{activation}_{skip}"
        run = common.train_transcoder(weft, weft.folder / f"{name}_data", case, activation=activation, decoder=decoder, skip=skip)
        directory = weft.folder / f"{case}_exported"
        weft.run("export", run, directory, "--to", "circuit-tracer", "--type", "fp32", "--model", name)
        print(weft.run("attribute", name, "--transcoder", run, "--prompt", PROMPT, "--output", f"{case}.json", "--matrix"))
        graph = traced(weft, name, directory)
        same_graph(case, read(weft.folder / f"{case}.h5"), graph)
        same_json(case, weft.folder / f"{case}.json", graph)
    # Features of the last layer reach the logits from the last token alone: of those without influence the order is free.
    n = int((compute_node_influence(graph.adjacency_matrix, logit_weights(graph))[:len(graph.selected_features)] > 0).sum()) // 2
    weft.run("attribute", name, "--transcoder", run, "--prompt", PROMPT, "--output", "fewer.json", "--matrix", "--max-nodes", n)
    same_graph("fewer", read(weft.folder / "fewer.h5"), traced(weft, name, directory, n))


if __name__ == "__main__":
    program.main(test)
