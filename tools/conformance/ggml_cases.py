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

import numpy as np

from case_files import pairwise, write

PACKAGE = "llama_cpp_python 0.3.36"
TYPES = {"f32": 0, "f16": 1, "bf16": 30, "q8_0": 8, "q4_0": 2, "q4_1": 3, "q5_0": 6, "q5_1": 7, "iq4_nl": 20}
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

        With `swapped`, the second and third axes are in the other order in memory. With `view`, each row of the
        third axis in memory is followed by NaN, once all rows are there.
        """
        turn = (lambda axes: [axes[0], axes[2], axes[1]]) if swapped else list
        shape = [1] * (4 - x.ndim) + list(x.shape)
        rows = stored(x.reshape(shape).swapaxes(1, 2) if swapped else x.reshape(shape), kind)
        outer = turn(shape[:3])
        base = self.new_tensor_4d(self.context, TYPES[kind], shape[3], outer[2] * (1 + view), outer[1], outer[0])
        memory = self.bytes_of(base).reshape(outer[0], outer[1], -1, rows.shape[-1])
        memory[:] = 255
        memory[:, :, : outer[2]] = rows
        axes, steps = shape[2::-1], turn(memory.strides[:3])[::-1]
        return [self.view_4d(self.context, base, n, *axes, *steps, 0) for n in columns]

    def tensor(self, x, kind="f32", swapped=False, view=False):
        return self.views(x, kind, swapped, view, x.shape[-1:])[0]

    def compute(self, tensor):
        """Returns the elements of a tensor of f32 after computing it, in one thread."""
        graph = self.new_graph(self.context)
        self.build_forward_expand(graph, tensor)
        assert not self.graph_compute_with_ctx(self.context, graph, 1)
        return self.bytes_of(tensor).view(np.float32).copy()


def stored(x, kind):
    """Returns the bytes of rows of f32 in a type of ggml."""
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
    suites = [
        ("FLASH_ATTN_EXT", flash_attention, 5e-4, pairwise(FLASH, flash_allowed)),
        ("GATED_DELTA_NET", gated_delta, 1e-7, pairwise(DELTA, lambda c: c["snapshots"] == 1 or c["tokens"] <= 16)),
    ]
    for operator, compute, limit, cases in suites:
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
                "rules": {n: {"nmse": limit} for n in outputs},
            }
            write(os.path.join(folder, f"{name}.safetensors"), tensors, metadata)


if __name__ == "__main__":
    main(*sys.argv[1:])
