# SPDX-License-Identifier: Apache-2.0
"""A cross-layer transcoder trained directly by the formulas: dense, float64, no code shared with Weft.

Written from the mathematics alone, as the reference of the program. Slow and simple on purpose.

Shapes. N tokens, L layers, d = d_model, F features per layer; s source layer, t >= s target layer.
  x, y          [N, L, d]             MLP inputs and outputs
  encoder_s     weight [F, d], bias [F]
  decoder_s     weight [F, (L - s) * d]    row f: decoder vectors of feature f to targets s, s + 1, ..., L - 1
                per layer: [F, d], to target s alone; tied: "tied_weight" [F, d], to every target t >= s
                tied_target: "target_weight" of target t [F, d], what feature f of every layer s <= t writes; with
                "offset_t", "scale_t" [F] of layer s it writes (a + offset) * scale where a is not 0
  decoder_bias  [L * d]                    one bias vector per target
  skip_t        weight [d, d]              with a linear skip connection: output, input

  z_s = x~_s encoder_s^T + bias_s       a = z where selected (always z > 0), else 0
  y^_t = sum over s <= t of a_s decoder_{s->t} + decoder_bias_t [+ skip_t x~_t]
  jumprelu: encoder_s threshold [F]; a = z where z exceeds it. Its gradient is a pseudo-derivative, in the form of the project
  that `pseudo_derivative` names.
  loss = sum over t of the mean over tokens and dimensions of (y^_t - y~_t)^2
"""
from dataclasses import dataclass, field, replace

import numpy as np


@dataclass
class Settings:
    """The keys of an input file that affect the mathematics, under their names in the file."""
    features: int
    activation: str = "batch_topk"     # batch_topk | topk | relu | jumprelu
    k: float = 16                      # active per token and layer
    k_initial: float = 0               # of the first step; 0: k is constant
    k_end: float = 0.5                 # fraction of the run from which k holds
    k_decline: str = "exponential"     # exponential | linear, in whole numbers
    bandwidth_initial: float = 0       # likewise of the bandwidth, linear
    bandwidth_end: float = 0.5
    threshold_gradient: str = "dense"  # how the program forms it: listed | dense, the same numbers
    ranking: str = "value"             # value | decoder_norm: z times the norm of the decoder row | z_score
    scope: str = "layer"               # layer | all_layers
    decoder: str = "cross_layer"       # cross_layer | per_layer | tied | tied_target
    decoder_affine: bool = False       # tied_target: offsets and scales
    decoder_scale_initial: float = 0.0
    skip: str = "none"                 # none | linear
    targets: str = "outputs"           # outputs | inputs
    pseudo_derivative: str = "anthropic"
    threshold: float = 0.1             # initial
    bandwidth: float = 2.0
    sparsity: float = 0.0              # coefficient of sum tanh(scale * a * nu) / N, nu: norms of decoder rows
    sparsity_form: str = "tanh"        # linear: without the tanh
    sparsity_scale: float = 4.0
    sparsity_begin: float = 0.0        # fractions of the run between which the coefficient rises from 0
    sparsity_end: float = 1.0
    preactivation_penalty: float = 0.0  # coefficient of sum q / N
    preactivation_form: str = "below_threshold"  # q = relu(theta - z) nu | negative: q = relu(-z)
    auxk: float = 0.0                  # coefficient of the auxiliary loss of dead features
    auxk_features: int = 512           # of them per token and layer
    dead_window: int = 1000000         # tokens without firing after which a feature is dead
    normalise: str = "per_dimension"   # per_dimension | scalar | none
    steps: int = 1000
    learning_rate: float = 4e-4
    beta1: float = 0.9
    beta2: float = 0.999
    epsilon: float = 1e-8
    epsilon_scale: str = "none"        # none | loss: epsilon times 2 / (batch_tokens * d_model)
    weight_decay: float = 0.0
    schedule: str = "constant"         # constant | linear | cosine | step | wsd
    warmup_steps: int = 0
    decay_begin: float = 0.8
    final_fraction: float = 0.0
    clip_norm: float = 0.0
    clip_mode: str = "exact"           # exact | previous


@dataclass
class State:
    """Parameters and both moments by tensor name, steps taken, and the last step's gradient norm (clip_mode previous)."""
    weights: dict
    first: dict
    second: dict
    step: int = 0
    previous_norm: float = 0.0
    silent: list = None    # by layer, tokens since each feature fired


# --- Data -----------------------------------------------------------------------------------------------------------------


@dataclass
class Statistics:
    """Statistics of one side (inputs or targets) of a training set: mean and standard deviation [L, d], mean Euclidean norm [L]."""
    mean: np.ndarray
    deviation: np.ndarray    # divided by n - 1
    mean_norm: np.ndarray


def statistics(rows):
    """Two passes over rows [N, L, d]."""
    rows = rows.astype(np.float64)
    mean = rows.mean(axis=0)
    deviation = np.sqrt(((rows - mean) ** 2).sum(axis=0) / (len(rows) - 1))
    return Statistics(mean, deviation, np.sqrt((rows ** 2).sum(axis=2)).mean(axis=0))


def normalisation(mode, stats):
    """(mean, scale), both [L, d]: normalised = (raw - mean) * scale."""
    n_layers, width = stats.mean.shape
    if mode == "per_dimension":
        return stats.mean, 1.0 / (stats.deviation + 1e-6)
    if mode == "scalar":
        return np.zeros_like(stats.mean), np.repeat((np.sqrt(width) / stats.mean_norm)[:, None], width, axis=1)
    return np.zeros((n_layers, width)), np.ones((n_layers, width))


# --- Selection ------------------------------------------------------------------------------------------------------------


def largest(values, budget):
    """Mask of the min(budget, number of positive) largest positive values of a flat array; ties go to the lowest index."""
    mask = np.zeros(values.shape, dtype=bool)
    order = np.argsort(-values, kind="stable")[:budget]
    mask[order] = values[order] > 0
    return mask


def select(settings, pre_activations, thresholds=None):
    """Masks [N, F] per layer. Order inside a group: token, then layer, then feature. thresholds: of jumprelu, by layer."""
    if settings.activation == "jumprelu":
        return [(z >= theta if settings.pseudo_derivative == "crosslayer-coding" else z > theta) & (z > 0)
                for z, theta in zip(pre_activations, thresholds)]
    z = np.stack(pre_activations, axis=1)                       # [N, L, F]
    n, n_layers, _ = z.shape
    together = settings.scope == "all_layers"
    if settings.activation == "relu":
        mask = z > 0
    elif settings.activation == "batch_topk" and together:
        mask = largest(z.ravel(), round_half_up(settings.k * n * n_layers)).reshape(z.shape)
    elif settings.activation == "batch_topk":
        budget = round_half_up(settings.k * n)
        mask = np.stack([largest(z[:, s].ravel(), budget).reshape(n, -1) for s in range(n_layers)], axis=1)
    elif together:
        budget = round_half_up(settings.k * n_layers)
        mask = np.stack([largest(z[i].ravel(), budget).reshape(z[i].shape) for i in range(n)])
    else:
        budget = round_half_up(settings.k)
        mask = np.stack([np.stack([largest(z[i, s], budget) for s in range(n_layers)]) for i in range(n)])
    return [mask[:, s] for s in range(n_layers)]


def ranked(settings, weights, pre_activations):
    """What the largest of are active: of the sign of z."""
    if settings.ranking == "value":
        return pre_activations
    if settings.ranking == "z_score":    # of the batch, deviation over n - 1; negative z and those below the mean take no part
        return [np.where(z > 0, (z - z.mean(axis=0)) / (z.std(axis=0, ddof=1) + 1e-6), -1.0) for z in pre_activations]
    return [z * decoder_norms(weights, s) for s, z in enumerate(pre_activations)]


def passing(settings, z, theta):
    """Where the gradient of the activation is that of the pre-activation."""
    if settings.pseudo_derivative == "goreg":
        return z >= 0
    return z >= theta if settings.pseudo_derivative == "crosslayer-coding" else z > theta


def threshold_factor(settings, z, theta):
    """What the gradient of the activation is multiplied by for the gradient of the trained parameter: ln theta, goreg: theta."""
    form, width, distance = settings.pseudo_derivative, settings.bandwidth, z - theta
    if form == "crosslayer-coding":
        return np.where(np.abs(distance) <= width / 2, -z / width * theta, 0.0)
    if form == "goreg":
        return np.where((distance > -width / 2) & (distance <= width / 2), -theta / width, 0.0)
    within = np.abs(distance) < width / 2
    if form == "openmoss":
        within = within & (z > 0)
    return np.where(within, -theta / width * (1.0 if form == "anthropic" else theta), 0.0)


def thresholds_of(settings, weights, n_layers):
    return [weights[f"encoder_{s}/threshold"] for s in range(n_layers)] if settings.activation == "jumprelu" else None


def round_half_up(value):
    return int(np.floor(value + 0.5))


def margin(settings, pre_activations, masks, thresholds=None):
    """Smallest relative distance between a kept and a dropped positive value of one group: the distance to a
    different mask. Infinite if no positive value was dropped. jumprelu: between a value and its threshold or, as that
    decides as well, the borders of the window."""
    if settings.activation == "jumprelu":
        half = settings.bandwidth / 2
        return min(np.abs(z - border).min() for z, theta in zip(pre_activations, thresholds)
                   for border in (theta, theta - half, theta + half, 0.0))
    z, mask = np.stack(pre_activations, axis=1), np.stack(masks, axis=1)
    axes = {("batch_topk", "layer"): (0, 2), ("batch_topk", "all_layers"): (0, 1, 2),
            ("topk", "layer"): (2,), ("topk", "all_layers"): (1, 2)}.get((settings.activation, settings.scope))
    if axes is None:
        return np.inf
    kept = np.where(mask, z, np.inf).min(axis=axes)
    dropped = np.where(~mask & (z > 0), z, -np.inf).max(axis=axes)
    valid = np.isfinite(kept) & np.isfinite(dropped)
    return ((kept - dropped) / np.abs(kept))[valid].min() if valid.any() else np.inf


# --- Forward and backward -------------------------------------------------------------------------------------------------


def encode(weights, x):
    """Pre-activations [N, F] of every layer from normalised inputs [N, L, d]."""
    return [x[:, s] @ weights[f"encoder_{s}/weight"].T + weights[f"encoder_{s}/bias"] for s in range(x.shape[1])]


KINDS = ("tied_weight", "target_weight", "weight")


def decoder_name(weights, s):
    return next(name for name in (f"decoder_{s}/{kind}" for kind in KINDS) if name in weights)


def targets_of(weights, s, n_layers):
    """The layers that the features of layer s write to."""
    own_alone = f"decoder_{s}/weight" in weights and weights["decoder_0/weight"].shape[1] * n_layers == len(weights["decoder_bias"])
    return range(s, s + 1) if own_alone else range(s, n_layers)


def pair_decoder(weights, s, t, width):
    """[F, d]: what the features of layer s write to layer t, before scales."""
    if f"decoder_{t}/target_weight" in weights:
        return weights[f"decoder_{t}/target_weight"]
    if f"decoder_{s}/tied_weight" in weights:
        return weights[f"decoder_{s}/tied_weight"]
    return weights[f"decoder_{s}/weight"][:, (t - s) * width:(t - s + 1) * width]


def written(weights, s, t, a):
    """a' of activations a [N, F]: with an offset and a scale where a feature is active."""
    if f"decoder_{s}/scale_{t}" not in weights:
        return a
    return np.where(a != 0, (a + weights[f"decoder_{s}/offset_{t}"]) * weights[f"decoder_{s}/scale_{t}"], 0.0)


def decoder_backward(weights, s, a, rows, gradients):
    """Gradient by the activations a [N, F] of layer s, active or not, from gradient rows [N, L, d]; adds those of the
    decoder's tensors to `gradients`."""
    n, n_layers, width = rows.shape
    alpha = np.zeros_like(a)
    for t in targets_of(weights, s, n_layers):
        matrix, g = pair_decoder(weights, s, t, width), rows[:, t]
        delta = g @ matrix.T
        if f"decoder_{s}/scale_{t}" in weights:
            scale, active = weights[f"decoder_{s}/scale_{t}"], a != 0
            gradients[f"decoder_{s}/offset_{t}"] += (active * delta).sum(axis=0) * scale
            gradients[f"decoder_{s}/scale_{t}"] += (active * (a + weights[f"decoder_{s}/offset_{t}"]) * delta).sum(axis=0)
            alpha += scale * delta
        else:
            alpha += delta
        pair_decoder(gradients, s, t, width)[...] += written(weights, s, t, a).T @ g
    return alpha


def decoder_norms(weights, s):
    """A vector tied per source counts once; scales do not count."""
    if f"decoder_{s}/target_weight" in weights:
        squares = [(w ** 2).sum(axis=1) for name, w in weights.items() if name.endswith("/target_weight") and int(name[8:].split("/")[0]) >= s]
        return np.sqrt(sum(squares))
    return np.linalg.norm(weights[decoder_name(weights, s)], axis=1)


def norms_backward(weights, s, of_norm, gradients, n_layers):
    """Adds the gradients of the decoder's tensors by those of decoder_norms [F]."""
    norm = decoder_norms(weights, s)
    factor = (of_norm / np.where(norm > 0, norm, 1))[:, None]
    for name in ([f"decoder_{t}/target_weight" for t in range(s, n_layers)] if f"decoder_{s}/target_weight" in weights
                 else [decoder_name(weights, s)]):
        gradients[name] += factor * weights[name]


def decode(weights, activations, x):
    """Normalised reconstructions [N, L, d]; x [N, L, d] normalised, for the skip connection."""
    n, n_layers, width = x.shape
    bias = weights["decoder_bias"].reshape(n_layers, width)
    out = np.repeat(bias[None], n, axis=0)
    for s in range(n_layers):
        for t in targets_of(weights, s, n_layers):
            out[:, t] += written(weights, s, t, activations[s]) @ pair_decoder(weights, s, t, width)
        if f"skip_{s}/weight" in weights:
            out[:, s] += x[:, s] @ weights[f"skip_{s}/weight"].T
    return out


def loss_of(weights, x, y, masks, settings=None, step=0):
    """The loss, with the penalties of the settings, at a given mask: for finite differences."""
    pre_activations = encode(weights, x)
    activations = [np.where(m, z, 0.0) for m, z in zip(masks, pre_activations)]
    error = decode(weights, activations, x) - y
    loss = (error ** 2).mean(axis=(0, 2)).sum()
    if settings is None:
        return loss
    for s, (z, a) in enumerate(zip(pre_activations, activations)):
        norm = decoder_norms(weights, s)
        loss += sparsity_coefficient(settings, step) * penalty_of(settings, a * norm)[0].sum() / len(x)
        if settings.preactivation_penalty > 0:
            below = (np.maximum(-z, 0) if settings.preactivation_form == "negative"
                     else np.maximum(weights[f"encoder_{s}/threshold"] - z, 0) * norm)
            loss += settings.preactivation_penalty * below.sum() / len(x)
    return loss


def largest_dead(settings, pre_activations, dead):
    """Activations [N, F] by layer of the dead features (masks [F] by layer) with the largest positive values of each token."""
    out = []
    for z, mask in zip(pre_activations, dead):
        of_dead = np.where(mask, z, -np.inf)
        out.append(np.where([largest(row, settings.auxk_features) for row in of_dead], z, 0.0))
    return out


def auxiliary_loss(settings, weights, x, residual, activations):
    """coefficient * (sum over layers of the mean squared error) of what these activations reconstruct of a residual y - y^."""
    alone = {**weights, "decoder_bias": np.zeros_like(weights["decoder_bias"]),
             **{name: np.zeros_like(w) for name, w in weights.items() if name.startswith("skip_")}}
    error = decode(alone, activations, x) - residual
    return settings.auxk * (error ** 2).mean(axis=(0, 2)).sum(), error


def at_step(settings, step):
    """The settings with k and bandwidth of the step after `step` completed ones."""
    now = replace(settings)
    end = settings.k_end * settings.steps
    if settings.k_initial > settings.k and step < end:
        way = step / end
        k = (settings.k_initial + (settings.k - settings.k_initial) * way if settings.k_decline == "linear"
             else settings.k_initial * (settings.k / settings.k_initial) ** way)
        now.k = max(settings.k, round_half_up(k))
    end = settings.bandwidth_end * settings.steps
    if settings.bandwidth_initial > 0 and step + 1 < end:
        now.bandwidth = settings.bandwidth_initial + (settings.bandwidth - settings.bandwidth_initial) * step / (end - 1)
    return now


def penalty_of(settings, value):
    """The penalty of a nu, and its derivative."""
    inside = settings.sparsity_scale * value
    if settings.sparsity_form == "linear":
        return inside, np.full_like(inside, settings.sparsity_scale)
    return np.tanh(inside), settings.sparsity_scale * (1 - np.tanh(inside) ** 2)


def sparsity_coefficient(settings, step):
    """Of the step after `step` completed ones."""
    begin, end = settings.sparsity_begin * settings.steps, settings.sparsity_end * settings.steps
    if step + 1 >= end:
        return settings.sparsity
    return settings.sparsity * max(0.0, (step + 1 - begin) / (end - begin))


@dataclass
class Pass:
    """One forward and backward pass."""
    loss: float
    masks: list
    margin: float
    error: np.ndarray                  # [N, L, d], normalised
    gradients: dict = field(default_factory=dict)
    dead_activations: list = None      # with the auxiliary loss, [N, F] by layer
    auxiliary: float = 0.0             # that loss


def forward_backward(settings, weights, x, y, step=0, silent=None):
    """x, y normalised [N, L, d]; the step after `step` completed ones. silent: by layer, tokens since each feature fired."""
    n, n_layers, width = x.shape
    settings = at_step(settings, step)
    pre_activations = encode(weights, x)
    thresholds = thresholds_of(settings, weights, n_layers)
    values = ranked(settings, weights, pre_activations)
    masks = select(settings, values, thresholds)
    activations = [np.where(m, z, 0.0) for m, z in zip(masks, pre_activations)]
    error = decode(weights, activations, x) - y
    rows = 2.0 / (n * width) * error                            # d loss / d reconstruction
    gradients = {name: np.zeros_like(tensor) for name, tensor in weights.items()}
    gradients["decoder_bias"] = rows.sum(axis=0).ravel()
    for s in range(n_layers):
        alpha = decoder_backward(weights, s, activations[s], rows, gradients)    # d loss / d activation
        norm = decoder_norms(weights, s)
        slope = sparsity_coefficient(settings, step) / n * penalty_of(settings, activations[s] * norm)[1]
        alpha = alpha + slope * norm
        of_norm = (slope * activations[s]).sum(axis=0)
        into = np.where(masks[s], alpha, 0.0)
        if thresholds:
            z, theta = pre_activations[s], thresholds[s]
            into = np.where(passing(settings, z, theta), alpha, 0.0)
            of_threshold = (threshold_factor(settings, z, theta) * alpha).sum(axis=0)
            if settings.preactivation_form == "negative":
                into = into - settings.preactivation_penalty / n * (z < 0)
            else:
                below = settings.preactivation_penalty / n * (z < theta)
                into = into - below * norm
                of_threshold = of_threshold + below.sum(axis=0) * norm * (1 if settings.pseudo_derivative == "goreg" else theta)
                of_norm = of_norm + (below * (theta - z)).sum(axis=0)
            gradients[f"encoder_{s}/threshold"] = of_threshold
        norms_backward(weights, s, of_norm, gradients, n_layers)
        gradients[f"encoder_{s}/weight"] = into.T @ x[:, s]
        gradients[f"encoder_{s}/bias"] = into.sum(axis=0)
        if f"skip_{s}/weight" in weights:
            gradients[f"skip_{s}/weight"] = rows[:, s].T @ x[:, s]
    there = Pass((error ** 2).mean(axis=(0, 2)).sum(), masks, margin(settings, values, masks, thresholds), error,
                 gradients)
    if settings.auxk > 0 and silent is not None:
        there.dead_activations = largest_dead(settings, pre_activations, [clock >= settings.dead_window for clock in silent])
        there.auxiliary, left = auxiliary_loss(settings, weights, x, -error, there.dead_activations)
        rows = settings.auxk * 2.0 / (n * width) * left
        for s, dead in enumerate(there.dead_activations):
            into = np.where(dead > 0, decoder_backward(weights, s, dead, rows, gradients), 0.0)
            gradients[f"encoder_{s}/weight"] = gradients[f"encoder_{s}/weight"] + into.T @ x[:, s]
            gradients[f"encoder_{s}/bias"] = gradients[f"encoder_{s}/bias"] + into.sum(axis=0)
    return there


def advance(silent, masks):
    """Tokens since each feature fired, after a batch."""
    return [np.where(mask.any(axis=0), 0, clock + len(mask)) for clock, mask in zip(silent, masks)]


# --- Optimizer ------------------------------------------------------------------------------------------------------------


def learning_rate(settings, step):
    """Learning rate of the step after `step` completed ones.

    Warm-up rises linearly and reaches the full rate at its last step. The decay runs from the fraction decay_begin of all
    steps, or the end of the warm-up if that is later, to their end, where the rate would be final_fraction of the full one.
    """
    warm = min(1.0, (step + 1) / settings.warmup_steps) if settings.warmup_steps else 1.0
    begin, final, factor = max(settings.decay_begin * settings.steps, settings.warmup_steps), settings.final_fraction, 1.0
    if settings.schedule != "constant" and step >= begin:
        way = min(1.0, (step - begin) / (settings.steps - begin)) if settings.steps > begin else 1.0
        factor = {"linear": 1 + (final - 1) * way,
                  "cosine": final + (1 - final) * 0.5 * (1 + np.cos(np.pi * way)),
                  "step": final,
                  "wsd": 1 + (final - 1) * np.sqrt(way)}[settings.schedule]
    return settings.learning_rate * warm * factor


def gradient_norm(gradients):
    return np.sqrt(sum((g ** 2).sum() for g in gradients.values()))


def update(settings, state, gradients, loss_factor=1.0):
    """One step of Adam with bias correction; decoupled weight decay on weights, not on biases. Changes `state`."""
    epsilon = settings.epsilon * (loss_factor if settings.epsilon_scale == "loss" else 1.0)
    norm = gradient_norm(gradients)
    scale = 1.0
    if settings.clip_norm > 0:
        against = norm if settings.clip_mode == "exact" else state.previous_norm
        if against > settings.clip_norm:
            scale = settings.clip_norm / against
    state.previous_norm = norm
    rate = learning_rate(settings, state.step)
    state.step += 1
    first_correction = 1.0 / (1.0 - settings.beta1 ** state.step)
    second_correction = 1.0 / (1.0 - settings.beta2 ** state.step)
    for name, gradient in gradients.items():
        g = scale * gradient
        m = state.first[name] = settings.beta1 * state.first[name] + (1 - settings.beta1) * g
        v = state.second[name] = settings.beta2 * state.second[name] + (1 - settings.beta2) * g * g
        decay = settings.weight_decay if name.endswith("weight") else 0.0
        change = m * first_correction / (np.sqrt(v * second_correction) + epsilon) + decay * state.weights[name]
        if name.endswith("/threshold") and settings.pseudo_derivative != "goreg":
            state.weights[name] = np.exp(np.log(state.weights[name]) - rate * change)
        else:
            state.weights[name] = state.weights[name] - rate * change


def initial_state(settings, n_layers, width, generator, dtype=np.float64):
    """Encoders uniform in +-1/sqrt(F), decoders in +-1/sqrt(L d), per layer +-1/sqrt(d); biases, skip connection and
    moments zero."""
    weights = {"decoder_bias": np.zeros(n_layers * width, dtype)}
    columns = lambda s: (n_layers - s) * width if settings.decoder == "cross_layer" else width
    matrix = {"tied": "tied_weight", "tied_target": "target_weight"}.get(settings.decoder, "weight")
    for s in range(n_layers):
        encoder, decoder = 1 / np.sqrt(settings.features), 1 / np.sqrt(columns(0))
        weights[f"encoder_{s}/weight"] = generator.uniform(-encoder, encoder, (settings.features, width)).astype(dtype)
        weights[f"encoder_{s}/bias"] = np.zeros(settings.features, dtype)
        if settings.activation == "jumprelu":
            weights[f"encoder_{s}/threshold"] = np.full(settings.features, settings.threshold, dtype)
        shape = (settings.features, columns(s))
        weights[f"decoder_{s}/{matrix}"] = generator.uniform(-decoder, decoder, shape).astype(dtype)
        for t in range(s, n_layers if settings.decoder_affine else s):
            weights[f"decoder_{s}/offset_{t}"] = np.zeros(settings.features, dtype)
            weights[f"decoder_{s}/scale_{t}"] = np.full(settings.features, 1 if t == s else settings.decoder_scale_initial, dtype)
        if settings.skip == "linear":
            weights[f"skip_{s}/weight"] = np.zeros((width, width), dtype)
    zeros = {name: np.zeros_like(tensor) for name, tensor in weights.items()}
    return State(weights, dict(zeros), {name: tensor.copy() for name, tensor in zeros.items()})


# --- Metrics --------------------------------------------------------------------------------------------------------------


def evaluate(settings, weights, x, y, input_normalisation, target_normalisation, deviation, batch):
    """Metrics per layer over raw rows x, y [T, L, d], encoded `batch` consecutive rows at a time (a short last one too).

    deviation [L, d]: of the training targets; nmse_standardised divides every dimension by it first.
    """
    (x_mean, x_scale), (y_mean, y_scale) = input_normalisation, target_normalisation
    error, active = [], 0
    for begin in range(0, len(x), batch):
        x_normalised = (x[begin:begin + batch] - x_mean) * x_scale
        pre_activations = encode(weights, x_normalised)
        masks = select(settings, ranked(settings, weights, pre_activations), thresholds_of(settings, weights, x.shape[1]))
        activations = [np.where(m, z, 0.0) for m, z in zip(masks, pre_activations)]
        reconstruction = decode(weights, activations, x_normalised) / y_scale + y_mean
        error.append(reconstruction - y[begin:begin + batch])
        active = active + np.array([m.sum() for m in masks])
    error = np.concatenate(error)
    centred = y - y.mean(axis=0)
    spread = deviation + 1e-6
    return {"nmse": (error ** 2).sum(axis=(0, 2)) / (centred ** 2).sum(axis=(0, 2)),
            "nmse_standardised": ((error / spread) ** 2).sum(axis=(0, 2)) / ((centred / spread) ** 2).sum(axis=(0, 2)),
            "explained_variance": 1 - error.var(axis=0).sum(axis=1) / y.var(axis=0).sum(axis=1),
            "l0": active / len(x)}
