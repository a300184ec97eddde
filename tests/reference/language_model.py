# SPDX-License-Identifier: Apache-2.0
"""A decoder-only transformer, its gradients and AdamW, directly by the formulas: NumPy, float64, no code shared with Weft.

Written from the mathematics alone, as the reference of the program. Slow and simple on purpose: the whole matrix of
attention scores is formed.

Shapes. B sequences of T tokens, width C, H query heads and K key heads of size d, MLP width D, vocabulary V.
A matrix W [out, in] maps rows: y = x Wᵀ + b. Block l of L, with f an attention or an MLP:

  norm_position pre    h = h + f(norm(h))                (GPT-2, Llama)
                post   h = h + norm(f(h))                (OLMo 2)
                both   h = h + norm(f(norm(h)))          (Gemma 2)

Every operation returns its result and a function that maps the gradient of the result to that of its input; gradients of
parameters are added up in Pass.gradients.
"""
from dataclasses import dataclass, field

import numpy as np

IGNORED = -1      # a target that is not counted


@dataclass
class Settings:
    """The keys of table [language_model] that affect the mathematics, under their names in the file."""
    layers: int
    heads: int
    d_model: int
    d_mlp: int
    kv_heads: int = 0                  # 0: heads
    norm: str = "layer"                # layer | rms
    norm_position: str = "pre"         # pre | post | both
    norm_epsilon: float = 1e-5
    mlp: str = "gelu"                  # gelu | swiglu | geglu | relu2
    position: str = "learned"          # learned | rope
    rope_base: float = 10000.0
    qk_norm: str = "none"              # none | head | width | scaled
    tied: bool = True
    bias: bool = True
    logit_softcap: float = 0.0         # 0: none
    attention_softcap: float = 0.0     # 0: none
    window: int = 0                    # 0: all earlier tokens
    full_every: int = 0                # every such block has no window
    head_size: int = 0                 # 0: d_model / heads
    attention_scale: float = 0.0       # 0: 1 / sqrt(head_size)
    embedding_scale: float = 1.0
    rope_factor: float = 1.0           # of long wavelengths
    rope_length: int = 0               # 0: all are long
    rope_low: float = 1.0
    rope_high: float = 4.0

    def __post_init__(self):
        self.kv_heads = self.kv_heads or self.heads
        self.head_size = self.head_size or self.d_model // self.heads
        self.attention_scale = self.attention_scale or self.head_size ** -0.5


def shapes(s, vocabulary, sequence):
    """Shape of every parameter by name, in the order of the model."""
    width, queries, keys = s.d_model, s.heads * s.head_size, s.kv_heads * s.head_size
    result = {}

    def linear(name, outputs, inputs, bias=s.bias):
        result[f"{name}/weight"] = (outputs, inputs)
        if bias:
            result[f"{name}/bias"] = (outputs,)

    def norm(name):
        result[f"{name}/weight"] = (width,)
        if s.norm == "layer" and s.bias:
            result[f"{name}/bias"] = (width,)

    result["embedding/tokens"] = (vocabulary, width)
    if s.position == "learned":
        result["embedding/positions"] = (sequence, width)
    for block in (f"block_{layer}" for layer in range(s.layers)):
        for part in ("attention", "mlp"):
            if s.norm_position != "post":
                norm(f"{block}/{part}_norm")
            if part == "attention":
                linear(f"{block}/attention/query", queries, width)
                linear(f"{block}/attention/key", keys, width)
                linear(f"{block}/attention/value", keys, width)
                if s.qk_norm in ("head", "width"):
                    result[f"{block}/attention/query_norm/weight"] = (s.head_size if s.qk_norm == "head" else queries,)
                    result[f"{block}/attention/key_norm/weight"] = (s.head_size if s.qk_norm == "head" else keys,)
                elif s.qk_norm == "scaled":
                    result[f"{block}/attention/temperature"] = (1,)
                linear(f"{block}/attention/output", width, queries)
            else:
                if s.mlp in ("swiglu", "geglu"):
                    linear(f"{block}/mlp/gate", s.d_mlp, width)
                linear(f"{block}/mlp/up", s.d_mlp, width)
                linear(f"{block}/mlp/down", width, s.d_mlp)
            if s.norm_position != "pre":
                norm(f"{block}/{part}_post_norm")
    norm("final_norm")
    if not s.tied:
        linear("head", vocabulary, width, bias=False)
    return result


def initial_weights(s, vocabulary, sequence, generator):
    """normal(0, 0.02), the outputs of attention and MLP divided by sqrt(2 L); biases 0, gains and temperatures 1."""
    weights = {}
    for name, shape in shapes(s, vocabulary, sequence).items():
        if len(shape) == 2:
            output = name.endswith(("attention/output/weight", "mlp/down/weight"))
            deviation = 0.02 / np.sqrt(2 * s.layers if output else 1)
            weights[name] = generator.normal(0, deviation, shape)
        else:
            weights[name] = np.zeros(shape) if name.endswith("/bias") else np.ones(shape)
    return weights


# --- Functions of single elements or rows, with their derivatives -----------------------------------------------------------


def gelu(x):
    """(value, derivative) of x/2 (1 + tanh(c (x + 0.044715 x³))), c = sqrt(2 / pi)."""
    c = np.sqrt(2 / np.pi)
    t = np.tanh(c * (x + 0.044715 * x ** 3))
    return 0.5 * x * (1 + t), 0.5 * (1 + t) + 0.5 * x * (1 - t * t) * c * (1 + 3 * 0.044715 * x * x)


def silu(x):
    """(value, derivative) of x sigmoid(x)."""
    sigmoid = 1 / (1 + np.exp(-x))
    return x * sigmoid, sigmoid * (1 + x * (1 - sigmoid))


def relu2(x):
    """(value, derivative) of max(x, 0)²."""
    return np.maximum(x, 0) ** 2, 2 * np.maximum(x, 0)


def softcap(x, cap):
    """(value, derivative) of cap tanh(x / cap); cap 0: x."""
    if cap == 0:
        return x, np.ones_like(x)
    t = np.tanh(x / cap)
    return cap * t, 1 - t * t


def normalise(x, epsilon, centred=False):
    """xhat = (x - mu) r with r = (mean((x - mu)²) + epsilon)^-1/2 along the last axis; mu = 0 unless centred."""
    h = x - x.mean(-1, keepdims=True) if centred else x
    r = 1 / np.sqrt((h * h).mean(-1, keepdims=True) + epsilon)
    xhat = h * r

    def backward(a):
        mean = a.mean(-1, keepdims=True) if centred else 0.0
        return r * (a - mean - xhat * (a * xhat).mean(-1, keepdims=True))

    return xhat, backward


def rotate(x, angle):
    """Pairs (j, j + d/2) of the last axis rotated by angle [..., d/2]. The backward pass rotates by -angle."""
    first, second = np.split(x, 2, axis=-1)
    cosine, sine = np.cos(angle), np.sin(angle)
    return np.concatenate([first * cosine - second * sine, second * cosine + first * sine], axis=-1)


def rotary_frequencies(s):
    """Of the pairs of a head. Those with fewer than rope_low periods in rope_length tokens are divided by rope_factor."""
    f = s.rope_base ** (-2.0 * np.arange(s.head_size // 2) / s.head_size)
    share = np.clip((s.rope_length * f / (2 * np.pi) - s.rope_low) / (s.rope_high - s.rope_low), 0, 1)
    return f * ((1 - share) / s.rope_factor + share)


# --- The model --------------------------------------------------------------------------------------------------------------


@dataclass
class Batch:
    """ids, targets [B, T]. first_key [B, T]: first row of the token's document in its sequence; None: one document.
    positions [B, T]; None: counted from the start of the document."""
    ids: np.ndarray
    targets: np.ndarray
    first_key: np.ndarray = None
    positions: np.ndarray = None

    def __post_init__(self):
        rows = np.arange(self.ids.shape[1])[None, :]
        if self.first_key is None:
            self.first_key = np.zeros_like(self.ids)
        if self.positions is None:
            self.positions = rows - self.first_key


@dataclass
class Pass:
    """One forward and backward pass."""
    settings: Settings
    weights: dict
    gradients: dict = field(default_factory=dict)
    loss: float = 0.0
    logits: np.ndarray = None

    def add(self, name, gradient):
        self.gradients[name] = self.gradients.get(name, 0.0) + gradient

    def linear(self, name, x):
        w, bias = self.weights[f"{name}/weight"], self.weights.get(f"{name}/bias")

        def backward(dy):
            rows = dy.reshape(-1, dy.shape[-1])
            self.add(f"{name}/weight", rows.T @ x.reshape(-1, x.shape[-1]))
            if bias is not None:
                self.add(f"{name}/bias", rows.sum(0))
            return dy @ w

        return x @ w.T + (0.0 if bias is None else bias), backward

    def gain(self, name, xhat):
        """weight ∘ xhat + bias."""
        w, bias = self.weights[f"{name}/weight"], self.weights.get(f"{name}/bias")

        def backward(dy):
            self.add(f"{name}/weight", (dy * xhat).reshape(-1, len(w)).sum(0))
            if bias is not None:
                self.add(f"{name}/bias", dy.reshape(-1, len(w)).sum(0))
            return w * dy

        return w * xhat + (0.0 if bias is None else bias), backward

    def norm(self, name, x):
        xhat, through_norm = normalise(x, self.settings.norm_epsilon, centred=self.settings.norm == "layer")
        y, through_gain = self.gain(name, xhat)
        return y, lambda dy: through_norm(through_gain(dy))

    def query_key_norm(self, block, side, x):
        """Queries or keys x [B, T, heads, d], before the rotation."""
        s, rows = self.settings, x.shape
        if s.qk_norm == "none":
            return x, lambda dy: dy
        if s.qk_norm == "scaled":
            # sqrt(d) x / |x| is the norm without epsilon; keys also times the temperature.
            xhat, through_norm = normalise(x, 0.0)
            tau = self.weights[f"{block}/attention/temperature"] if side == "key" else np.ones(1)

            def backward(dy):
                if side == "key":
                    self.add(f"{block}/attention/temperature", np.array([(dy * xhat).sum()]))
                return through_norm(tau * dy)

            return tau * xhat, backward
        flat = x if s.qk_norm == "head" else x.reshape(*rows[:2], -1)
        xhat, through_norm = normalise(flat, s.norm_epsilon)
        y, through_gain = self.gain(f"{block}/attention/{side}_norm", xhat)
        return y.reshape(rows), lambda dy: through_norm(through_gain(dy.reshape(flat.shape))).reshape(rows)

    def attention(self, block, x, batch):
        s = self.settings
        d, group = s.head_size, s.heads // s.kv_heads
        in_heads = lambda y: y.reshape(*x.shape[:2], -1, d)
        side_by_side = lambda y: y.reshape(*x.shape[:2], -1)
        q, through_query = self.linear(f"{block}/attention/query", x)
        k, through_key = self.linear(f"{block}/attention/key", x)
        v, through_value = self.linear(f"{block}/attention/value", x)
        q, k, v = in_heads(q), in_heads(k), in_heads(v)
        q, through_query_norm = self.query_key_norm(block, "query", q)
        k, through_key_norm = self.query_key_norm(block, "key", k)
        angle = batch.positions[:, :, None, None] * rotary_frequencies(s)
        if s.position == "rope":
            q, k = rotate(q, angle), rotate(k, angle)
        k_all, v_all = np.repeat(k, group, axis=2), np.repeat(v, group, axis=2)     # [B, T, H, d]

        i, j = np.arange(x.shape[1])[:, None], np.arange(x.shape[1])[None, :]
        visible = (j <= i) & (j >= batch.first_key[:, None, :, None])
        layer = int(block.removeprefix("block_"))
        if s.window and not (s.full_every and (layer + 1) % s.full_every == 0):
            visible &= i - j < s.window
        scores = np.einsum("bihd,bjhd->bhij", q, k_all) * s.attention_scale
        capped, slope = softcap(scores, s.attention_softcap)
        capped = np.where(visible, capped, -np.inf)
        p = np.exp(capped - capped.max(-1, keepdims=True))
        p /= p.sum(-1, keepdims=True)
        mixed = np.einsum("bhij,bjhd->bihd", p, v_all)
        y, through_output = self.linear(f"{block}/attention/output", side_by_side(mixed))

        def backward(dy):
            do = in_heads(through_output(dy))
            dp = np.einsum("bihd,bjhd->bhij", do, v_all)
            ds = p * (dp - (p * dp).sum(-1, keepdims=True)) * slope * s.attention_scale
            sum_group = lambda g: g.reshape(*g.shape[:2], s.kv_heads, group, d).sum(3)
            dq = np.einsum("bhij,bjhd->bihd", ds, k_all)
            dk = sum_group(np.einsum("bhij,bihd->bjhd", ds, q))
            dv = sum_group(np.einsum("bhij,bihd->bjhd", p, do))
            if s.position == "rope":
                dq, dk = rotate(dq, -angle), rotate(dk, -angle)
            dq, dk = through_query_norm(dq), through_key_norm(dk)
            return through_query(side_by_side(dq)) + through_key(side_by_side(dk)) + through_value(side_by_side(dv))

        return y, backward

    def mlp(self, block, x):
        s = self.settings
        function = {"gelu": gelu, "geglu": gelu, "swiglu": silu, "relu2": relu2}[s.mlp]
        up, through_up = self.linear(f"{block}/mlp/up", x)
        if s.mlp in ("swiglu", "geglu"):
            gate, through_gate = self.linear(f"{block}/mlp/gate", x)
            value, slope = function(gate)
            hidden, through = value * up, lambda da: through_gate(da * up * slope) + through_up(da * value)
        else:
            hidden, slope = function(up)
            through = lambda da: through_up(da * slope)
        y, through_down = self.linear(f"{block}/mlp/down", hidden)
        return y, lambda dy: through(through_down(dy))

    def sublayer(self, block, part, h, batch):
        """h plus the attention or MLP of a block."""
        s, steps, x = self.settings, [], h
        if s.norm_position != "post":
            x, through = self.norm(f"{block}/{part}_norm", x)
            steps.append(through)
        x, through = self.attention(block, x, batch) if part == "attention" else self.mlp(block, x)
        steps.append(through)
        if s.norm_position != "pre":
            x, through = self.norm(f"{block}/{part}_post_norm", x)
            steps.append(through)

        def backward(dh):
            dx = dh
            for through in reversed(steps):
                dx = through(dx)
            return dh + dx

        return h + x, backward

    def cross_entropy(self, raw, targets):
        """Mean over the counted targets of lse - z_y, in nats; sets logits (after the softcap) and loss."""
        self.logits, slope = softcap(raw, self.settings.logit_softcap)
        largest = self.logits.max(-1, keepdims=True)
        exponential = np.exp(self.logits - largest)
        total = exponential.sum(-1, keepdims=True)
        counted = targets != IGNORED
        one = np.zeros_like(raw)
        np.put_along_axis(one, np.where(counted, targets, 0)[..., None], 1.0, axis=-1)
        losses = np.log(total[..., 0]) + largest[..., 0] - (one * self.logits).sum(-1)
        self.loss = losses[counted].mean()
        return slope * (exponential / total - one) * (counted / counted.sum())[..., None]


def forward_backward(s, weights, batch):
    """A Pass with loss, logits and the gradients of all parameters."""
    there = Pass(s, weights)
    h = weights["embedding/tokens"][batch.ids]
    if s.position == "learned":
        h = h + weights["embedding/positions"][batch.positions]
    h = s.embedding_scale * h
    steps = []
    for block in (f"block_{layer}" for layer in range(s.layers)):
        for part in ("attention", "mlp"):
            h, through = there.sublayer(block, part, h, batch)
            steps.append(through)
    h, through = there.norm("final_norm", h)
    steps.append(through)
    head = "embedding/tokens" if s.tied else "head/weight"
    dz = there.cross_entropy(h @ weights[head].T, batch.targets)

    there.add(head, dz.reshape(-1, dz.shape[-1]).T @ h.reshape(-1, h.shape[-1]))
    dh = dz @ weights[head]
    for through in reversed(steps):
        dh = through(dh)
    dh = s.embedding_scale * dh
    tokens = np.zeros_like(weights["embedding/tokens"])
    np.add.at(tokens, batch.ids, dh)
    there.add("embedding/tokens", tokens)
    if s.position == "learned":
        positions = np.zeros_like(weights["embedding/positions"])
        np.add.at(positions, batch.positions, dh)
        there.add("embedding/positions", positions)
    return there


# --- AdamW ------------------------------------------------------------------------------------------------------------------


@dataclass
class Optimizer:
    """The keys of table [optimizer] under their names in the file."""
    learning_rate: float = 1e-3
    beta1: float = 0.9
    beta2: float = 0.95
    epsilon: float = 1e-8
    weight_decay: float = 0.1
    clip_norm: float = 1.0             # 0: none


@dataclass
class State:
    """Parameters and both moments by name, and the steps taken."""
    weights: dict
    first: dict
    second: dict
    step: int = 0


def initial_state(weights):
    zeros = lambda: {name: np.zeros_like(tensor) for name, tensor in weights.items()}
    return State(dict(weights), zeros(), zeros())


def gradient_norm(gradients):
    return np.sqrt(sum((g ** 2).sum() for g in gradients.values()))


def update(optimizer, state, gradients, rate):
    """One step of AdamW at learning rate `rate`, in place. Decay before the update, of matrices and embeddings alone."""
    o, norm = optimizer, gradient_norm(gradients)
    scale = o.clip_norm / norm if 0 < o.clip_norm < norm else 1.0
    state.step += 1
    for name, gradient in gradients.items():
        g, w = scale * gradient, state.weights[name]
        m = state.first[name] = o.beta1 * state.first[name] + (1 - o.beta1) * g
        v = state.second[name] = o.beta2 * state.second[name] + (1 - o.beta2) * g * g
        decayed = w * (1 - rate * o.weight_decay) if w.ndim == 2 else w
        direction = (m / (1 - o.beta1 ** state.step)) / (np.sqrt(v / (1 - o.beta2 ** state.step)) + o.epsilon)
        state.weights[name] = decayed - rate * direction
    return norm
