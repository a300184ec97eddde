# SPDX-License-Identifier: Apache-2.0
"""What the page shows of a transcoder: validation by layer, the writes between layers, recovery of planted features."""
import math

import numpy as np

from weft import charts, checkpoints
from weft.page import Section
from weft.reader import Checkpoint, Transcoder
from weft.report.family import MOST_ROWS, CurveStyle, FamilyPart
from weft.report.privacy import privacy_sections
from weft.text import fixed, joined, member, number, numbers, percent, short_number, text_of, whole

NMSE_CAPTION = "Squared error over squared target, each dimension divided by its standard deviation on the training set."
MOST_LAYERS = 256
PIECE = 16 << 20    # bytes of decoder rows that are read at a time


class Validation:
    """Measures on validation data: the run's own, else those of evaluation.json."""

    def __init__(self, facts):
        self.measures, self.source = None, ""
        own, later = facts.of("result", "validation"), member(facts.evaluation, "validation")
        if isinstance(own, dict):
            self.measures, self.source = own, "measured by the run after its last step"
        elif isinstance(later, dict) and member(facts.evaluation, "replacement") is None:     # with it, those of a language model
            self.measures = later
            self.source = (f"from evaluation.json (checkpoint {text_of(facts.evaluation.get('checkpoint'))}, "
                           f"data {text_of(facts.evaluation.get('data'))})")
        recoveries = (facts.of("result", "recovery"), member(facts.evaluation, "recovery"))
        self.recovery = next((one for one in recoveries if isinstance(one, dict)), None)

        self.replacement = member(facts.evaluation, "replacement")      # of weft lm evaluate --transcoder

    def of(self, key):
        return number(member(self.measures, key))

    def by_layer(self, key):
        return numbers(member(self.measures, key))


def _curves(facts, validation):
    window = whole(facts.number("input", "transcoder", "dead_window"))
    return [
        CurveStyle("loss", "Training loss", "loss", "Sum over layers of the mean squared error in the normalised space, as logged."),
        CurveStyle("nmse_standardised", "Normalised error", "NMSE (standardised)", NMSE_CAPTION, "training mean", "best to worst layer",
                   level=value if (value := validation.of("nmse_standardised_mean")) >= 0 else -1, level_name="validation"),
        CurveStyle("validation.nmse_standardised", "Validation error", "NMSE (standardised)",
                   "Mean over layers on the validation data (log.evaluate_every)."),
        CurveStyle("l0", "L0", "active features per token and layer", "How many features are active for a token in one layer.",
                   "mean over layers", "fewest to most", from_zero=True),
        CurveStyle("validation.l0", "Validation: L0", "active features per token and layer", "Mean over layers on the validation data.",
                   from_zero=True),
        CurveStyle("dead_fraction", "Dead features", "dead features, %",
                   f"Features that did not fire within {window} tokens (transcoder.dead_window).", factor=100, from_zero=True)]


def _tiles(facts, validation):
    tiles = [(validation.of("nmse_standardised_mean"), short_number, "validation NMSE (standardised)"),
             (validation.of("explained_variance_mean"), percent, "explained variance"),
             (validation.of("l0_mean"), short_number, "active per token and layer"),
             (validation.of("dead_fraction_mean"), percent, "features dead on validation data")]
    tiles.append((number(member(validation.replacement, "all_layers", "recovered_from_mean")), percent, "loss recovered, all MLPs replaced"))
    if validation.measures is None:
        tiles.append((facts.number("result", "train", "nmse_standardised"), short_number, "training NMSE (standardised)"))
    tiles.append((number(member(validation.recovery, "fraction")), percent, "planted features recovered"))
    return [(shown(value), name) for value, shown, name in tiles if math.isfinite(value)]


def _density(validation):
    """(names of bins, features in each in % of all features, features of all layers); None when it was not recorded."""
    bins, histogram = member(validation.measures, "density_bins"), member(validation.measures, "density_histogram")
    if not isinstance(bins, list) or not isinstance(histogram, list) or not 0 < len(bins) <= 64:
        return None
    counts = [0.0] * len(bins)
    for layer in histogram:
        for i, count in enumerate(numbers(layer)[:len(bins)]):
            counts[i] += count if count >= 0 else 0
    total = sum(counts)
    return [text_of(one) for one in bins], [100 * count / total if total > 0 else 0 for count in counts], total


def _layers_section(validation):
    section = Section("Validation, by layer")
    if validation.measures is None:
        section.paragraph("No validation measures: the run did not finish, or its input names no data.validation. weft evaluate RUN "
                          "--data DIR --output RUN adds them to this page.", "missing")
        return section
    nmse, l0 = validation.by_layer("nmse_standardised"), validation.by_layer("l0")
    raw, explained = validation.by_layer("nmse"), validation.by_layer("explained_variance")
    dead, dead_mean = [100 * value for value in validation.by_layer("dead_fraction")], 100 * validation.of("dead_fraction_mean")
    section.paragraph(f"{whole(validation.of('tokens'))} tokens, {validation.source}.")
    section.begin_columns()
    for title, y_label, values, mean, caption in (
            ("Normalised error", "NMSE (standardised)", nmse, validation.of("nmse_standardised_mean"), NMSE_CAPTION),
            ("L0", "active features per token", l0, validation.of("l0_mean"), "Features of the layer that are active for a token."),
            ("Dead features", "dead features, %", dead, dead_mean, "Features of the layer that never fired on the validation data.")):
        if values:
            level = mean if mean >= 0 else -1
            section.figure(title, charts.bar_chart("layer", y_label, [str(i) for i in range(len(values))], values, level,
                                                   f"mean {short_number(mean)}"), caption)
    if density := _density(validation):
        names, shares, total = density
        section.figure("Feature density", charts.bar_chart("part of the tokens on which a feature fires", "features of all layers, %", names,
                                                           shares), f"How often features fire: {whole(total)} features of all layers, by decades.")
    else:
        section.paragraph("No feature densities were recorded.", "missing")
    section.end_columns()

    def shown(value, decimals):
        return fixed(value, decimals) if math.isfinite(value) else "-"      # not defined

    columns = ((nmse, 4), (raw, 4), (explained, 4), (l0, 2), (dead, 1))
    rows = [[str(i), *(shown(values[i], decimals) if i < len(values) else "-" for values, decimals in columns)] for i in range(len(nmse))]
    rows.append(["mean", shown(validation.of("nmse_standardised_mean"), 4), shown(validation.of("nmse_mean"), 4),
                 shown(validation.of("explained_variance_mean"), 4), shown(validation.of("l0_mean"), 2), shown(dead_mean, 1)])
    section.table(["layer", "NMSE (standardised)", "NMSE raw", "explained variance", "L0", "dead, %"], rows, 1)
    return section


def _replacement_section(validation):
    """The loss of the language model with reconstructions in place of its MLPs; absent if it was not measured."""
    measured, layers = validation.replacement, member(validation.replacement, "layers")
    if not isinstance(measured, dict):
        return []
    section = Section("The model with its MLPs replaced")
    section.paragraph(f"Loss of the model {short_number(number(measured.get('loss_original')))} nats per token, on "
                      f"{whole(number(measured.get('tokens')))} tokens, from evaluation.json (transcoder {text_of(measured.get('transcoder'))}). "
                      "Recovered: the part of the loss between the ablated and the unchanged MLP; 1 is the unchanged one.")
    layers = layers[:MOST_LAYERS] if isinstance(layers, list) else []
    rows = []
    for name, one in [*((str(i), one) for i, one in enumerate(layers)), ("all", measured.get("all_layers"))]:
        values = [number(member(one, key)) for key in ("loss", "loss_mean_ablated", "recovered_from_mean", "recovered_from_zero")]
        rows.append([name, *(fixed(value, 4) if math.isfinite(value) else "-" for value in values)])
    section.table(["replaced layer", "loss", "loss, mean-ablated", "recovered, mean", "recovered, zero"], rows, 1)
    return [section]


def decoder_mass(path, manifest, dead_window):
    """How strongly the features of each layer write to each later one: ([s][t] root of the mean squared norm, NaN where there is no
    block; [s][t] part of the squared norm of layer s; [s] live features; features of a layer). Live features fired within the last
    `dead_window` tokens (0: at any time). The shards must have been verified."""
    transcoder = Transcoder(Checkpoint(path))
    n_layers, n_features, d_model = transcoder.n_layers, transcoder.n_features, transcoder.d_model
    if not 1 <= n_layers <= MOST_LAYERS:
        raise ValueError(f"{path}: it has {n_layers} layers of features (1 to {MOST_LAYERS} can be drawn)")
    window = min(dead_window, manifest.tokens) if dead_window > 0 else manifest.tokens
    magnitude, share, live_features = np.full((n_layers, n_layers), np.nan), np.full((n_layers, n_layers), np.nan), []
    piece = max(1, PIECE // (4 * n_layers * d_model))
    for s in range(n_layers):
        clocks = f"encoder_{s}/tokens_since_fired"
        live = transcoder.checkpoint[clocks] < window if transcoder.checkpoint.shapes.get(clocks) == (n_features,) else np.ones(n_features, bool)
        sums = 0.0
        for begin in range(0, n_features, piece):
            part = slice(begin, min(begin + piece, n_features))
            rows = transcoder.decoder_rows(s, part)[live[part]].astype(np.float64)
            sums = sums + np.einsum("ftd,ftd->t", rows, rows)
        counted, targets = int(live.sum()), slice(s, s + len(sums))
        if counted:
            magnitude[s, targets] = np.sqrt(sums / counted)
        if sums.sum() > 0:
            share[s, targets] = sums / sums.sum()
        live_features.append(counted)
    return magnitude, share, live_features, n_features


def _decoder_section(facts):
    section = Section("Decoder")
    try:
        path, manifest = checkpoints.newest_valid(facts.path / "checkpoints")
        window = facts.number("input", "transcoder", "dead_window")
        magnitude, share, live, n_features = decoder_mass(path, manifest, int(min(window, 1e15)) if window > 0 else 0)
    except (checkpoints.Damaged, OSError, ValueError, KeyError) as failure:
        section.paragraph(f"No decoder weights: {failure.args[0] if failure.args else failure}.", "missing")
        return section
    layers = range(len(live))
    notes = [["" if np.isnan(magnitude[s, t]) else f"layer {s} to layer {t}: {short_number(magnitude[s, t])}; {percent(share[s, t])} of what "
              f"layer {s} writes" for t in layers] for s in layers]
    section.begin_columns()
    section.figure("Decoder mass, source to target",
                   charts.heat_map("target layer, written to", "source layer, read from", magnitude.tolist(), notes),
                   "Size of a feature's decoder vector from source to target layer (root of the mean squared norm, normalised space), from "
                   f"checkpoint {checkpoints.directory_name(manifest.step)}. Counted: {whole(sum(live))} of {whole(len(live) * n_features)} "
                   "features, those that fired recently.")
    section.begin_block()
    rows = [[str(s), whole(live[s]), fixed(100 * share[s, s], 1), fixed(100 * (1 - share[s, s]), 1)] for s in layers[:MOST_ROWS]]
    section.table(["source layer", "live features", "mass to its own layer, %", "to later layers, %"], rows, 1)
    section.paragraph("Mass: the squared norm of decoder vectors, summed over the layer's live features.", "state")
    section.end_block()
    section.end_columns()
    return section


def _about(facts):
    """"transcoder of gpt2, data data/train, 768 features per layer, batch_topk, k 16, learning rate 0.001"."""
    model = facts.text("data", "model")
    return joined(["transcoder" + (f" of {model}" if model else ""), facts.setting("data", "train", "data"),
                   facts.text("input", "transcoder", "features") + " features per layer", facts.text("input", "transcoder", "activation"),
                   facts.setting("transcoder", "k", "k"), facts.setting("optimizer", "learning_rate", "learning rate")])


def transcoder_part(facts, with_sections=True):
    validation = Validation(facts)
    sections = [*privacy_sections(facts), _layers_section(validation), *_replacement_section(validation), _decoder_section(facts)] if with_sections else []
    return FamilyPart(_about(facts), _curves(facts, validation), _tiles(facts, validation), sections)
