# SPDX-License-Identifier: Apache-2.0
"""Transcoders of Weft in circuit-tracer, and of circuit-tracer in Weft.

launch.py transformers4 circuit_tracer_test.py WEFT
"""
import numpy as np
import torch
import yaml
from circuit_tracer import ReplacementModel, attribute
from circuit_tracer.transcoder.activation_functions import JumpReLU
from circuit_tracer.transcoder.cross_layer_transcoder import CrossLayerTranscoder
from circuit_tracer.transcoder.single_layer_transcoder import SingleLayerTranscoder, TranscoderSet
from circuit_tracer.utils.hf_utils import load_transcoder_from_hub
from transformer_lens import loading_from_pretrained

import common
import models
import program

CPU = torch.device("cpu")
HOOKS = dict(feature_input_hook="mlp.hook_in", feature_output_hook="mlp.hook_out")


def load(directory, lazy=False):
    """As a user loads a local directory: its absolute path in the place of a repository."""
    transcoders, config = load_transcoder_from_hub(str(directory), device=CPU, dtype=torch.float32, lazy_encoder=lazy, lazy_decoder=lazy)
    assert HOOKS.items() <= config.items(), config
    return transcoders


def computed(transcoders, x):
    """(features, reconstructions) of inputs [L, rows, d]."""
    x = torch.from_numpy(x)
    with torch.no_grad():
        features = transcoders.encode(x)
        is_set = isinstance(transcoders, TranscoderSet)
        outputs = transcoders.decode(features, x) if is_set else transcoders.decode(features.to_sparse())
    return features.numpy(), outputs.numpy()


def exports(weft, data):
    for decoder, activation, skip, kind in (("cross_layer", "jumprelu", "none", CrossLayerTranscoder),
                                            ("cross_layer", "relu", "none", CrossLayerTranscoder),
                                            ("tied", "jumprelu", "none", CrossLayerTranscoder),
                                            ("per_layer", "jumprelu", "none", TranscoderSet),
                                            ("per_layer", "relu", "linear", TranscoderSet),
                                            ("per_layer", "jumprelu", "linear", TranscoderSet)):
        name = f"{decoder}_{activation}_{skip}"
        run = common.train_transcoder(weft, data, name, activation=activation, decoder=decoder, skip=skip)
        expected = common.features_and_outputs(weft, run, data / "validation")
        x = common.inputs_of(data / "validation")
        for storage, rounding in common.STORAGE.items():
            directory = weft.folder / f"{name}_{storage}"
            weft.run("export", run, directory, "--to", "circuit-tracer", "--type", storage, "--model", "gpt2",
                     "--input-hook", "mlp.hook_in", "--output-hook", "mlp.hook_out")
            for lazy in (False, True):
                transcoders = load(directory, lazy)
                assert isinstance(transcoders, kind), (name, type(transcoders))
                common.same((name, storage, lazy), computed(transcoders, x), expected, rounding)


def skip_is_refused(weft, data):
    """circuit-tracer does not load the skip connection of a cross-layer transcoder: nothing is written that would lose it."""
    run = common.train_transcoder(weft, data, "cross_layer_skip", activation="relu", decoder="cross_layer", skip="linear")
    printed = weft.run("export", run, weft.folder / "refused", "--to", "circuit-tracer", code=2)
    assert "skip" in printed and not (weft.folder / "refused").exists(), printed


def random_cross_layer(dtype, jump):
    return CrossLayerTranscoder(common.LAYERS, common.FEATURES, common.WIDTH, activation_function="jump_relu" if jump else "relu",
                                lazy_decoder=False, device=CPU, dtype=dtype)


def random_set(dtype, jump, skip):
    activation = lambda: JumpReLU(torch.zeros(common.FEATURES, dtype=dtype), 0.1) if jump else torch.nn.functional.relu
    layers = {i: SingleLayerTranscoder(common.WIDTH, common.FEATURES, activation(), i, skip_connection=skip, device=CPU, dtype=dtype)
              for i in range(common.LAYERS)}
    return TranscoderSet(layers, *HOOKS.values())


def imports(weft, data):
    x = common.inputs_of(data / "validation")
    for dtype, jump in ((torch.float32, False), (torch.float32, True), (torch.bfloat16, True), (torch.float16, False)):
        for name, made in (("clt", random_cross_layer(dtype, jump)), ("set", random_set(dtype, jump, False)),
                           ("set_skip", random_set(dtype, jump, True))):
            directory = weft.folder / f"own_{name}_{jump}_{str(dtype)[6:]}"
            models.fill(made).to_safetensors(str(directory))
            kind = "cross_layer_transcoder" if name == "clt" else "transcoder_set"
            (directory / "config.yaml").write_text(yaml.safe_dump(dict(model_name="gpt2", model_kind=kind, scan="gpt2", **HOOKS)))
            imported = weft.folder / f"{directory.name}_imported"
            weft.run("import", directory, "--output", imported)
            common.same(directory.name, computed(load(directory), x),
                        common.features_and_outputs(weft, imported, data / "validation"))


def traces(weft):
    """A language model of transformers, harvested and replaced by Weft, traced by circuit-tracer: the hook points are those of the data,
    and the edges of its graph are what interventions on the features do."""
    for name in ("gpt2", "llama"):
        model = models.save(weft, name)
        for split, size in (("train", 4096), ("validation", 512)):
            weft.run("lm", "harvest", model, "--text", models.TEXT, "--tokens", size, "--set", "data.sequence=64",
                     "--output", weft.folder / f"{name}_data/{split}")
        data = weft.folder / f"{name}_data"
        run = common.train_transcoder(weft, data, f"{name}_transcoder", activation="jumprelu", decoder="cross_layer")
        directory = weft.folder / f"{name}_exported"
        weft.run("export", run, directory, "--to", "circuit-tracer", "--type", "fp32", "--model", name)
        # As Weft writes it: TransformerLens reads n_ctx, which transformers itself no longer writes for GPT-2.
        # It knows Llama models by their published names, others by config.json: the path must not contain "llama".
        written = str(weft.folder / f"written_{name[0]}")
        weft.run("lm", "export", model, "--output", written)
        loading_from_pretrained.OFFICIAL_MODEL_NAMES.append(written)
        replaced = ReplacementModel.from_pretrained(written, str(directory), backend="transformerlens", device=CPU, dtype=torch.float32)
        tokens = torch.from_numpy(models.tokens(data / "validation")[:64])
        features, _ = common.features_and_outputs(weft, run, data / "validation")
        with torch.no_grad():
            _, found = replaced.get_activations(tokens)
        found = found.float().numpy()
        # circuit-tracer sets the features of the first position to 0. fp32 of a whole language model before the encoder.
        assert common.error(found[:, 1:], features[:, 1:64]) < 1e-4, (name, common.error(found[:, 1:], features[:, 1:64]))

        graph = attribute(tokens[:12], replaced, max_n_logits=3, batch_size=64, verbose=False)
        edges, active = graph.adjacency_matrix, graph.active_features
        _, before = replaced.get_activations(graph.input_tokens, apply_activation_function=False)
        active_values = lambda values: values.detach()[active[:, 0], active[:, 1], active[:, 2]]
        # An edge is the linear effect of a feature on another: exact but for fp32 of a whole model, as above.
        effects = []
        for source in np.random.default_rng(0).choice(len(active), 4, replace=False).tolist():
            layer, position, feature = active[source].tolist()
            doubled = [(layer, position, feature, 2 * before[layer, position, feature])]
            _, after = replaced.feature_intervention(graph.input_tokens, doubled, constrained_layers=range(common.LAYERS),
                                                     apply_activation_function=False)
            change = active_values(after) - active_values(before)
            effects.append((change - edges[:len(active), source]).abs().max() / active_values(before).abs().max())
        assert max(effects) < 1e-4, (name, effects)


def test(weft):
    torch.manual_seed(0)
    data = common.planted_data(weft)
    exports(weft, data)
    skip_is_refused(weft, data)
    imports(weft, data)
    traces(weft)


if __name__ == "__main__":
    program.main(test)
