"""Writes cases of ggml as safetensors files: python ggml_cases.py FOLDER LIBGGML.

The parameters are values of ggml's tests/test-backend-ops.cpp, in samples that have every pair of them. ggml's CPU
backend computes the expected outputs. It has no f64. So numpy computes the truth in f64, from the numbers that ggml
reads: keys and values after ggml has stored them, and the mask in f16.

Arrays have ggml's memory order, so their axes are ggml's in reverse.
"""

import ctypes
import os
import sys
import zlib
from functools import partial

import numpy as np

from case_files import pairwise, write

PACKAGE = "llama_cpp_python 0.3.36"
TYPES = {"f32": 0, "f16": 1, "bf16": 30, "q8_0": 8, "q4_0": 2, "q4_1": 3, "q5_0": 6, "q5_1": 7, "iq4_nl": 20}
INTEGERS = {"int32": 26, "int64": 27}
FLOATS = ("f32", "f16", "bf16")


class Init(ctypes.Structure):
    _fields_ = [("bytes", ctypes.c_size_t), ("buffer", ctypes.c_void_p), ("no_alloc", ctypes.c_bool)]


class Ggml:
    """A context of ggml, in which one graph is computed."""

    library = None

    def __enter__(self):
        self.context = self.init(Init(1 << 30, None, False))
        return self

    def __exit__(self, *_):
        self.free(self.context)

    def __getattr__(self, name):
        """Returns a function of the library. Its result is a pointer or an integer."""
        function = getattr(self.library, f"ggml_{name}")
        function.restype = ctypes.c_void_p
        convert = {int: ctypes.c_int64, float: ctypes.c_float, np.ndarray: lambda x: ctypes.c_void_p(x.ctypes.data)}
        return lambda *args: function(*(convert.get(type(x), lambda x: x)(x) for x in args))

    def bytes_of(self, tensor):
        """Returns the memory of a tensor."""
        return np.ctypeslib.as_array((ctypes.c_uint8 * self.nbytes(tensor)).from_address(self.get_data(tensor)))

    def views(self, x, kind, swapped, view, columns):
        """Makes a tensor of a type, and returns a view of its first columns for each number of them.

        With `swapped`, the second and third axes are in the other order in memory. With `view`, the third axis in
        memory is twice as long, and the rest of it holds NaN.
        """
        turn = (lambda axes: [axes[0], axes[2], axes[1]]) if swapped else list
        shape = [1] * (4 - x.ndim) + list(x.shape)
        rows = stored(x.reshape(shape).swapaxes(1, 2) if swapped else x.reshape(shape), kind)
        outer = turn(shape[:3])
        number = INTEGERS.get(str(x.dtype), TYPES[kind])
        base = self.new_tensor_4d(self.context, number, shape[3], outer[2] * (1 + view), outer[1], outer[0])
        memory = self.bytes_of(base).reshape(outer[0], outer[1], -1, rows.shape[-1])
        memory[:] = 255
        memory[:, :, : outer[2]] = rows
        axes, steps = shape[2::-1], turn(memory.strides[:3])[::-1]
        return [self.view_4d(self.context, base, n, *axes, *steps, 0) for n in columns]

    def tensor(self, x, kind="f32", swapped=False, view=False):
        return self.views(x, kind, swapped, view, x.shape[-1:])[0]

    def compute(self, tensor, dtype=np.float32):
        """Returns the elements of a tensor after computing it, in one thread."""
        graph = self.new_graph(self.context)
        self.build_forward_expand(graph, tensor)
        assert not self.graph_compute_with_ctx(self.context, graph, 1)
        return self.bytes_of(tensor).view(dtype).copy()


def stored(x, kind):
    """Returns the bytes of rows in a type of ggml. Integers stay as they are."""
    if str(x.dtype) in INTEGERS:
        return np.ascontiguousarray(x).view(np.uint8)
    x = np.ascontiguousarray(x, np.float32)
    if kind == "f32":
        return x.view(np.uint8)
    ggml = Ggml()
    out = np.empty((*x.shape[:-1], ggml.row_size(TYPES[kind], x.shape[-1])), np.uint8)
    ggml.quantize_chunk(TYPES[kind], x, out, 0, x.size // x.shape[-1], x.shape[-1], None)
    return out


def rounded(x, kind):
    """Returns rows of f32 in f64, after ggml has stored them in a type."""
    with Ggml() as ggml:
        return ggml.compute(ggml.cast(ggml.context, ggml.tensor(x, kind), TYPES["f32"])).reshape(x.shape).astype(float)


def flash_attention(rng, case):
    (head_dim, value_dim), kv_len, q_len = case["dim"], case["kv"], case["q"]
    block = lambda n, kind: n if case[kind] in FLOATS else -(-n // 32) * 32
    scale = float(np.float32(head_dim**-0.5))
    head_dim, value_dim = block(head_dim, "k_type"), block(value_dim, "v_type")
    batch, kv_heads, heads = case["batch"], case["kv_heads"], case["kv_heads"] * case["group"]
    normal = lambda *shape: rng.standard_normal(shape, np.float32)
    # Scores have a deviation of 2, so that the softcap matters. ggml's have one of a third.
    q = 2 * normal(batch, heads, q_len, head_dim)
    k = normal(batch, kv_heads, kv_len, head_dim)
    v = k[..., :value_dim] if case["latent"] else normal(batch, kv_heads, kv_len, value_dim)
    mask = rng.uniform(-1, 1, (batch, 1, q_len, kv_len)).astype(np.float16)
    for row in mask.reshape(-1, kv_len):
        # Some ranges of keys are hidden, and in some nothing is added.
        for value in -np.inf, 0:
            first, count = rng.integers(kv_len), rng.integers(kv_len // 3)
            row[first : first + count] = value
    sinks = rng.uniform(-10, 10, heads).astype(np.float32) if case["sinks"] else None
    mask = mask if case["mask"] else None
    bias = 8.0 if case["mask"] == "alibi" else 0.0

    with Ggml() as ggml:
        place = lambda x, kind, *columns: ggml.views(x, kind, case["swapped"], case["view"], columns)
        if case["latent"]:
            k_at, v_at = place(k, case["k_type"], head_dim, value_dim)
        else:
            k_at, v_at = *place(k, case["k_type"], head_dim), *place(v, case["v_type"], value_dim)
        mask_at = None if mask is None else ggml.tensor(mask, "f16")
        q_at = ggml.tensor(q, swapped=case["swapped"])
        out = ggml.flash_attn_ext(ggml.context, q_at, k_at, v_at, mask_at, scale, bias, case["softcap"])
        if sinks is not None:
            ggml.flash_attn_ext_add_sinks(out, ggml.tensor(sinks))
        got = ggml.compute(out).reshape(batch, q_len, heads, value_dim)
    repeat = lambda x, kind: np.repeat(rounded(x, kind), case["group"], 1)
    keys = repeat(k, case["k_type"])
    values = keys[..., :value_dim] if case["latent"] else repeat(v, case["v_type"])
    truth = attention(q, keys, values, mask, sinks, scale, bias, case["softcap"])
    memory = lambda x: x.swapaxes(1, 2) if case["swapped"] else x
    tensors = {"q": memory(q), "k": memory(k)} | ({} if case["latent"] else {"v": memory(v)})
    tensors |= {name: x for name, x in {"mask": mask, "sinks": sinks}.items() if x is not None}
    attributes = {name: case[name] for name in ("k_type", "v_type", "latent", "swapped", "view")}
    attributes |= {"scale": scale, "max_bias": bias, "softcap": case["softcap"], "value_dim": value_dim}
    return tensors, {"out": (got, truth.transpose(0, 2, 1, 3))}, attributes


def attention(q, k, v, mask, sinks, scale, max_bias, softcap):
    """Computes attention in f64."""
    scores = scale * (q.astype(float) @ k.swapaxes(2, 3))
    if softcap:
        scores = softcap * np.tanh(scores / softcap)
    if mask is not None:
        scores = scores + slopes(q.shape[1], max_bias)[:, None, None] * mask.astype(float)
    if sinks is not None:
        sinks = np.broadcast_to(sinks[:, None, None], (*scores.shape[:3], 1))
        scores = np.concatenate([scores, sinks], 3)
    weights = np.exp(scores - scores.max(3, keepdims=True))
    weights /= weights.sum(3, keepdims=True)
    return weights[..., : k.shape[2]] @ v


def slopes(heads, max_bias):
    """Returns the factors of the mask of each head: those of ALiBi, or 1."""
    if not max_bias:
        return np.ones(heads)
    power = 1 << (heads.bit_length() - 1)
    first = 2.0 ** (-max_bias / power * np.arange(1, power + 1))
    rest = 2.0 ** (-max_bias / 2 / power * np.arange(1, 2 * (heads - power), 2))
    return np.concatenate([first, rest])


FLASH = {
    "dim": [
        *((n, n) for n in (40, 64, 72, 80, 96, 112, 128, 192, 256, 512)),
        *((96, 64), (192, 128), (320, 256), (576, 512), (64, 72), (65, 67)),
    ],
    "k_type": ["f32", "f16", "bf16", "q8_0", "q4_0"],
    "v_type": ["f32", "f16", "bf16", "q8_0", "q4_0"],
    "kv": [113, 512, 1024],
    "q": [1, 3, 32, 75],
    "kv_heads": [1, 4],
    "group": [1, 4, 12],
    "batch": [1, 3],
    "mask": ["", "mask", "alibi"],
    "softcap": [0.0, 10.0],
    "sinks": [False, True],
    "swapped": [False, True],
    "view": [False, True],
    "latent": [False, True],
}


def flash_allowed(case):
    (head_dim, value_dim), kv_heads = case["dim"], case["kv_heads"] * case["batch"]
    if case["latent"] and (case["k_type"] != case["v_type"] or value_dim > head_dim):
        return False
    # A bound of the size of a file.
    keys = kv_heads * case["kv"] * (head_dim + value_dim)
    return max(keys, kv_heads * case["group"] * case["q"] * (head_dim + 3 * value_dim)) < 1.2e6


def other_formats():
    """Returns a case for each format of ggml that the library does not have."""
    plain = {name: values[0] for name, values in FLASH.items()} | {"dim": (64, 64), "mask": "mask"}
    return [plain | {"k_type": kind, "v_type": kind} for kind in ("q4_1", "q5_0", "q5_1", "iq4_nl")]


def set_rows(rng, case):
    """Overwrites rows of a cache. Only this operator shows how keys are rounded."""
    shape = case["batch"], case["heads"], case["kv"], case["dim"]
    kind, source = case["type"], case["source"]
    old = rng.uniform(-1, 1, shape).astype(np.float32)
    new = rng.uniform(-1, 1, (*shape[:2], case["rows"], case["dim"]))
    new = new.astype(np.float16 if source == "f16" else np.float32)
    at = np.stack([rng.permutation(case["kv"])[: case["rows"]] for _ in range(case["batch"])])
    with Ggml() as ggml:
        rows = ggml.tensor(new, source, view=case["view"])
        out = ggml.set_rows(ggml.context, ggml.tensor(old, kind), rows, ggml.tensor(at[:, None]))
        got = ggml.compute(ggml.cast(ggml.context, out, TYPES["f32"])).reshape(shape)
    truth = rounded(old, kind)
    for n, places in enumerate(at):
        truth[n][:, places] = rounded(new[n], kind)
    return {"old": old, "new": new, "at": at}, {"k": (got, truth)}, {"type": kind}


def set_rows_limit(case):
    """Returns ggml's limit: one integer of those that are set may differ by one."""
    if case["type"] in FLOATS:
        return 1e-7
    step = 1 / 64 if case["type"] == "q8_0" else 1 / 8
    step *= 4 if case["source"] == "f16" else 1
    return step**2 / (case["dim"] * case["rows"] * case["heads"] * case["batch"] / 4)


SET_ROWS = {
    "type": ["f32", "f16", "bf16", "q8_0", "q4_0"],
    "source": ["f32", "f16"],
    "dim": [31, 33, 96, 256],
    "kv": [8, 11],
    "rows": [1, 2, 7],
    "heads": [1, 7],
    "batch": [1, 3],
    "view": [False, True],
}


def set_rows_allowed(case):
    return case["type"] in FLOATS or case["dim"] % 32 == 0


def gated_delta(rng, case):
    dim, heads, tokens, batch = case["dim"], case["heads"], case["tokens"], case["batch"]
    value_heads, snapshots = heads * case["repeat"], case["snapshots"]
    uniform = lambda low, high, *shape: rng.uniform(low, high, shape).astype(np.float32)
    q, k = (uniform(-1, 1, batch, tokens, heads, dim) for _ in range(2))
    q, k = (x / np.linalg.norm(x, axis=3, keepdims=True) for x in (q, k))
    v = uniform(-0.3, 5, batch, tokens, value_heads, dim)
    # Logarithms of decays, from -20 to -1e-4. Unlike ggml's, many of them are small.
    g = -np.exp(uniform(np.log(1e-4), np.log(20), batch, tokens, value_heads, dim if case["kda"] else 1))
    beta = uniform(0, 1, batch, tokens, value_heads, 1)
    state = uniform(-1, 1, batch, value_heads, dim, dim)
    with Ggml() as ggml:
        rows = [ggml.tensor(x, swapped=case["swapped"]) for x in (q, k, v)]
        rest = [ggml.tensor(x) for x in (g, beta, state)]
        flat = ggml.compute(ggml.gated_delta_net(ggml.context, *rows, *rest, snapshots))
    out, states = flat[: v.size].reshape(v.shape), flat[v.size :].reshape(snapshots, *state.shape)

    # Value head h reads query and key head h % heads.
    repeated = [np.tile(x.astype(float), (1, 1, case["repeat"], 1)) for x in (q, k)]
    truth, truths = delta_rule(*repeated, v, g, beta, state)
    memory = lambda x: x.swapaxes(1, 2) if case["swapped"] else x
    inputs = {"q": memory(q), "k": memory(k), "v": memory(v), "g": g, "beta": beta, "state": state}
    # The state after the last token comes first.
    outputs = {"out": (out, truth), "states": (states[:tokens], truths[: -snapshots - 1 : -1])}
    return inputs, outputs, {"swapped": case["swapped"]}


def delta_rule(q, k, v, g, beta, state):
    """Computes outputs and all states in f64. States have an axis of values, then one of keys."""
    out, states = np.empty(v.shape), []
    for t in range(v.shape[1]):
        state = state * np.exp(g[:, t].astype(float))[:, :, None]
        error = v[:, t] - np.einsum("bhvk,bhk->bhv", state, k[:, t])
        state = state + np.einsum("bhv,bhk->bhvk", beta[:, t] * error, k[:, t])
        out[:, t] = np.einsum("bhvk,bhk->bhv", state, q[:, t]) * q.shape[3] ** -0.5
        states.append(state)
    return out, np.stack(states)


DELTA = {
    "dim": [16, 32, 64, 128],
    "heads": [2, 4],
    "tokens": [1, 4, 8, 16, 33, 64, 100, 127, 256],
    "batch": [1, 2],
    "repeat": [1, 2],
    "swapped": [False, True],
    "kda": [False, True],
    "snapshots": [1, 2, 3, 4],
}


def short_convolution(rng, case):
    width, channels, tokens, batch = case["width"], case["channels"], case["tokens"], case["batch"]
    uniform = lambda *shape: rng.uniform(-1, 1, shape).astype(np.float32)
    x, weight = uniform(batch, channels, width - 1 + tokens), uniform(channels, width)
    bias = uniform(channels) if case["bias"] else None
    with Ggml() as ggml:
        out = ggml.ssm_conv(ggml.context, ggml.tensor(x), ggml.tensor(weight))
        if bias is not None:
            out = ggml.add(ggml.context, out, ggml.tensor(bias))
        if case["silu"]:
            out = ggml.silu(ggml.context, out)
        got = ggml.compute(out).reshape(batch, tokens, channels)
    windows = np.lib.stride_tricks.sliding_window_view(x.astype(float), width, 2)
    truth = np.einsum("bctw,cw->btc", windows, weight.astype(float))
    truth = truth if bias is None else truth + bias
    truth = truth / (1 + np.exp(-truth)) if case["silu"] else truth
    inputs = {"x": x, "weight": weight} | ({} if bias is None else {"bias": bias})
    return inputs, {"out": (got, truth)}, {"silu": case["silu"]}


CONVOLUTION = {
    "width": [3, 4, 9],
    "channels": [1024, 1536, 2048],
    "tokens": [1, 5, 64],
    "batch": [1, 4],
    "bias": [False, True],
    "silu": [False, True],
}


def selective_scan(rng, case):
    (dim, value_dim), (heads, groups), tokens, batch = case["dim"], case["heads"], case["tokens"], case["batch"]
    snapshots = case["snapshots"]
    uniform = lambda low, high, *shape: rng.uniform(low, high, shape).astype(np.float32)
    x, dt = uniform(-1, 1, batch, tokens, heads, value_dim), uniform(-1, 1, batch, tokens, heads)
    b, c = (uniform(-1, 1, batch, tokens, groups, dim) for _ in range(2))
    # Mamba-1 has heads of one channel, and a decay of each channel of the state.
    bounds = (-0.02, -0.005) if case["weak"] else (-1, -0.5)
    a = uniform(*bounds, heads, 1 if value_dim > 1 else dim)
    state, slots = uniform(-1, 1, batch, heads, value_dim, dim), rng.permutation(batch)
    with Ggml() as ggml:
        inputs = [*map(ggml.tensor, (state, x, dt, a, b, c)), ggml.tensor(slots.astype(np.int32))]
        flat = ggml.compute(ggml.ssm_scan(ggml.context, *inputs, snapshots))
    out, states = flat[: x.size].reshape(x.shape), flat[x.size :].reshape(snapshots, *state.shape)

    step = np.logaddexp(0, dt.astype(float))[..., None]
    s, truth, truths = state[slots].astype(float), np.empty(x.shape), []
    for t in range(tokens):
        keys, queries = (np.repeat(y[:, t].astype(float), heads // groups, 1)[:, :, None] for y in (b, c))
        s = s * np.exp(step[:, t] * a)[:, :, None] + (step[:, t] * x[:, t])[..., None] * keys
        truth[:, t] = (s * queries).sum(3)
        truths.append(s)
    inputs = {"x": x, "dt": dt, "a": a, "b": b, "c": c, "state": state, "slots": slots.astype(np.int64)}
    outputs = {"out": (out, truth), "states": (states[:tokens], np.stack(truths[: -snapshots - 1 : -1]))}
    return inputs, outputs, {}


SCAN = {
    # The channels of a state, and of the values of a head.
    "dim": [(16, 1), (96, 64), (128, 64), (128, 80), (128, 128), (256, 64)],
    "heads": [(4, 4), (8, 2), (8, 1), (16, 8)],
    "tokens": [1, 4, 8, 32, 65, 128, 300],
    "batch": [1, 2, 4],
    "snapshots": [1, 3, 4],
    "weak": [False, True],
}


def scan_allowed(case):
    states = case["dim"][0] * case["dim"][1] * case["heads"][0] * case["batch"] * case["snapshots"]
    return states < 3e5 and (case["snapshots"] == 1 or case["dim"][1] > 1 and case["tokens"] <= 16)


def linear_attention(rng, case):
    heads, dim, tokens, batch = case["heads"], case["dim"], case["tokens"], case["batch"]
    uniform = lambda low, *shape: rng.uniform(low, 1, shape).astype(np.float32)
    q, k, v = (uniform(-1, batch, tokens, heads, dim) for _ in range(3))
    # ggml's test also has negative factors of the state. They have no logarithm.
    g, state = uniform(0.2, batch, tokens, heads, dim), uniform(-1, batch, heads, dim, dim)
    rows = lambda x: x.reshape(batch * tokens, heads, dim)
    with Ggml() as ggml:
        inputs = [ggml.tensor(x) for x in (*map(rows, (k, v, q, g)), state.reshape(batch, -1))]
        flat = ggml.compute(ggml.gated_linear_attn(ggml.context, *inputs, dim**-0.5))
    s, truth = state.astype(float), np.empty(v.shape)
    for t in range(tokens):
        s = s * g[:, t, :, :, None] + k[:, t, :, :, None].astype(float) * v[:, t, :, None]
        truth[:, t] = np.einsum("bhk,bhkv->bhv", q[:, t], s) * dim**-0.5
    outputs = {"out": (flat[: v.size].reshape(v.shape), truth), "state": (flat[v.size :].reshape(state.shape), s)}
    return {"q": q, "k": k, "v": v, "g": g, "state": state}, outputs, {}


LINEAR = {"heads": [2, 8], "dim": [64, 128], "tokens": [1, 32, 128], "batch": [1, 4]}


def indexer(rng, case):
    heads, kv_len, q_len, (batch, masks) = case["heads"], case["kv"], case["q"], case["batch"]
    uniform = lambda *shape: rng.uniform(-1, 1, shape).astype(np.float32)
    q, k = uniform(batch, q_len, heads, 128), uniform(batch, kv_len, 1, 128)
    w, mask = uniform(batch, 1, q_len, heads), uniform(masks, 1, q_len, kv_len).astype(np.float16)
    mask[rng.uniform(size=mask.shape) < 0.2] = -np.inf
    with Ggml() as ggml:
        inputs = ggml.tensor(q), ggml.tensor(k, case["k_type"]), ggml.tensor(w), ggml.tensor(mask, "f16")
        got = ggml.compute(ggml.lightning_indexer(ggml.context, *inputs)).reshape(batch, 1, q_len, kv_len)
    keys = rounded(k, case["k_type"])
    scores = np.maximum(np.einsum("bqhd,bkod->bqhk", q.astype(float), keys), 0)
    truth = np.einsum("bqhk,boqh->boqk", scores, w.astype(float)) + mask
    inputs = {"q": q, "k": keys.astype(np.float32), "w": w, "mask": mask}
    if case["k_type"] not in FLOATS:
        # Integers and their scales, in blocks of 32 that begin with the scale.
        blocks = stored(k, case["k_type"]).reshape(k.size // 32, -1)
        scales = blocks[:, :2].copy().view(np.float16)
        integers = np.rint(keys.reshape(-1, 32) / scales).reshape(k.shape)
        inputs |= {"k": integers.astype(np.float32), "k_scales": scales.reshape(*k.shape[:3], 4)}
    return inputs, {"out": (got, truth)}, {"k_type": case["k_type"]}


INDEXER = {
    "heads": [32, 64],
    "kv": [1, 7, 64, 65, 256],
    "q": [1, 32, 512],
    "batch": [(1, 1), (4, 4), (4, 1)],
    "k_type": ["f32", "f16", "bf16", "q8_0", "q4_0"],
}


def indexer_allowed(case):
    return case["heads"] * case["q"] * case["batch"][0] <= 32 * 512


def norm(rng, case, layer=True):
    n = case["columns"]
    uniform = lambda *shape: rng.uniform(-10, 10, shape).astype(np.float32)
    x = uniform(3, 4, 5, n)
    weight, bias = (uniform(n) if case["affine"] else None for _ in range(2))
    with Ggml() as ggml:
        out = (ggml.norm if layer else ggml.rms_norm)(ggml.context, ggml.tensor(x, view=case["view"]), case["eps"])
        if weight is not None:
            out = ggml.add(ggml.context, ggml.mul(ggml.context, out, ggml.tensor(weight)), ggml.tensor(bias))
        got = ggml.compute(out).reshape(x.shape)
    truth = x.astype(float)
    truth -= truth.mean(3, keepdims=True) if layer else 0
    truth /= np.sqrt((truth**2).mean(3, keepdims=True) + np.float32(case["eps"]))
    inputs = {"x": x} | ({} if weight is None else {"weight": weight, "bias": bias})
    truth = truth if weight is None else truth * weight + bias
    return inputs, {"out": (got, truth)}, {"eps": case["eps"]}


NORM = {
    "columns": [33, 64, 132, 260, 1025],
    "eps": [0.0, 1e-6, 1e-4, 1e-1, 10.0],
    "affine": [False, True],
    "view": [False, True],
}


def rotation(rng, case):
    (dim, rotary), mode, kind, scaling = case["dim"], case["mode"], case["type"], case["scaling"]
    shape = case["batch"], case["tokens"], case["heads"], dim
    multi, pairs = mode in ("mrope", "imrope"), np.arange(rotary // 2)
    x = rng.uniform(-1, 1, shape).astype(np.float16 if kind == "f16" else np.float32)
    positions = rng.integers(512, size=(4 if multi else 1, case["tokens"]))
    factors = rng.uniform(0.9, 1.1, pairs.size).astype(np.float32) if case["factors"] else None
    sections = [rotary // 3] * 3
    with Ggml() as ggml:
        inputs = [ggml.tensor(x, kind, view=case["view"]), ggml.tensor(positions.reshape(-1).astype(np.int32))]
        inputs += [None if factors is None else ggml.tensor(factors), rotary]
        inputs += [np.array([*sections, 0], np.int32)] if multi else []
        compute = getattr(ggml, ("rope_multi" if multi else "rope_ext") + "_back" * case["back"])
        out = compute(ggml.context, *inputs, MODES[mode], TRAINED, BASE, *SCALINGS[scaling], 32.0, 1.0)
        got = ggml.compute(out, x.dtype).reshape(shape)

    # The sections reach past the last pair.
    axis = {"mrope": pairs // sections[0], "imrope": pairs % 3}.get(mode, 0 * pairs)
    angles = positions[axis].T * BASE ** (-2 * pairs / rotary) / (1 if factors is None else factors)
    scale, extrapolation, amplitude = map(np.float32, SCALINGS[scaling])
    turn = lambda turns: rotary * np.log(TRAINED / (turns * 2 * np.pi)) / (2 * np.log(BASE))
    first, last = max(0, np.floor(turn(32))), min(rotary - 1, np.ceil(turn(1)))
    ramp = extrapolation * (1 - np.clip((pairs - first) / (last - first), 0, 1))
    angles = angles * (scale * (1 - ramp) + ramp)
    amplitude = amplitude * (1 - 0.1 * np.log(scale) if extrapolation else 1)
    cos, sin = amplitude * np.cos(angles), amplitude * np.sin(angles)
    turned = cos - 1j * sin if case["back"] else cos + 1j * sin
    truth = x.astype(float)
    half = [slice(0, rotary, 2), slice(1, rotary, 2)]
    half = half if mode == "normal" else [slice(0, rotary // 2), slice(rotary // 2, rotary)]
    pair = truth[..., half[0]] + 1j * truth[..., half[1]]
    pair *= turned[:, None]
    truth[..., half[0]], truth[..., half[1]] = pair.real, pair.imag
    inputs = {"x": x, "positions": positions[:3]}
    if factors is not None or scaling == "other":
        # The library has no such scaling, and takes tables.
        inputs |= {"cos": cos.astype(np.float32), "sin": sin.astype(np.float32)}
    attributes = {"mode": mode, "scaling": scaling, "rotary": rotary, "back": case["back"]}
    return inputs, {"out": (got, truth)}, attributes


BASE, TRAINED = 10000.0, 4096
MODES = {"normal": 0, "neox": 2, "mrope": 8, "imrope": 40}
# The factor of frequencies, the share of YaRN, the factor of cosines and sines.
SCALINGS = {
    "none": (1.0, 0.0, 1.0),
    "linear": (0.25, 0.0, 1.0),
    "yarn": (0.25, 1.0, 1.0),
    "other": (1.4245, 0.7465, 1.4245),
}
ROPE = {
    "dim": [(128, 128), (64, 64), (80, 20), (80, 32), (256, 64)],
    "mode": list(MODES),
    "scaling": list(SCALINGS),
    "type": ["f32", "f16"],
    "tokens": [2, 512],
    "heads": [1, 12],
    "batch": [1, 3],
    "factors": [False, True],
    "back": [False, True],
    "view": [False, True],
}


def name_of(prefix, case):
    """Makes a name of the parameters. Those that are off are left out."""
    words = [prefix]
    for axis, value in case.items():
        if isinstance(value, bool) or axis in ("mask", "softcap"):
            words += [value if axis == "mask" else axis] if value else []
        elif isinstance(value, str):
            words += [value]
        else:
            words += [axis.replace("_", "") + ("x".join(map(str, value)) if isinstance(value, tuple) else str(value))]
    return "_".join(words)


def main(folder, library):
    Ggml.library = ctypes.CDLL(library)
    Ggml().cpu_init()
    operators = [
        ("FLASH_ATTN_EXT", flash_attention, 5e-4, pairwise(FLASH, flash_allowed) + other_formats()),
        ("GATED_DELTA_NET", gated_delta, 1e-7, pairwise(DELTA, lambda c: c["snapshots"] == 1 or c["tokens"] <= 16)),
        ("GATED_LINEAR_ATTN", linear_attention, 1e-7, pairwise(LINEAR)),
        ("LIGHTNING_INDEXER", indexer, 1e-6, pairwise(INDEXER, indexer_allowed)),
        ("NORM", norm, 1e-7, pairwise(NORM)),
        ("RMS_NORM", partial(norm, layer=False), 1e-7, pairwise(NORM)),
        ("ROPE", rotation, 1e-7, pairwise(ROPE, lambda c: c["tokens"] * c["heads"] * c["batch"] < 7000)),
        ("SET_ROWS", set_rows, set_rows_limit, pairwise(SET_ROWS, set_rows_allowed)),
        ("SSM_CONV", short_convolution, 1e-7, pairwise(CONVOLUTION)),
        ("SSM_SCAN", selective_scan, 1e-7, pairwise(SCAN, scan_allowed)),
    ]
    for operator, compute, limit, cases in operators:
        for case in cases:
            name = name_of(operator.lower(), case)
            inputs, outputs, attributes = compute(np.random.default_rng(zlib.crc32(name.encode())), case)
            tensors = [(f"in.{n}", x) for n, x in inputs.items()]
            for n, (got, truth) in outputs.items():
                tensors += [(f"out.{n}", got), (f"f64.{n}", truth)]
            metadata = {
                "package": PACKAGE,
                "operator": operator,
                "attributes": {n: int(x) if isinstance(x, bool) else x for n, x in attributes.items()},
                "inputs": list(inputs),
                "outputs": list(outputs),
                "rules": {n: {"nmse": limit(case) if callable(limit) else limit} for n in outputs},
            }
            write(os.path.join(folder, f"{name}.safetensors"), tensors, metadata)


if __name__ == "__main__":
    main(*sys.argv[1:])
