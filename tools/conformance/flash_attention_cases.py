"""Writes cases over the parameters of FlashAttention's tests: python flash_attention_cases.py FOLDER.

The parameters are those of tests/test_flash_attn.py and tests/cute. JAX computes the outputs.
Tensors are [batch, length, heads, dim], as in FlashAttention.
"""

import math
import sys
from types import SimpleNamespace

import jax.numpy as jnp
import numpy as np

from case_files import pairwise
from jax_attention import DTYPES, Suite, at, attend, in_both_types, philox_keep, rotate

# The tests of the forward pass permit twice the error of PyTorch in the same type, those of the backward pass thrice.
FORWARD = {"times": [2, 1e-5]}
BACKWARD = {"times": [3, 1e-5]}
DROPOUT = 0.17
SEED = 0x5EED_0000_0007
MASKS = {
    "full": (False, -1, -1),
    "causal": (True, -1, -1),
    "window": (False, 0.3, 0.2),
    "left": (False, 0.25, -1),
    "right": (False, -1, 0.4),
    "causal_window": (True, 0.35, -1),
}
HEADS = {"mha": (4, 4), "mqa": (4, 1), "gqa": (4, 2)}
FEW_HEADS = {"mha": (2, 2), "mqa": (2, 1), "gqa": (4, 2)}


def name_of(group, n, row, *names):
    words = ["x".join(map(str, v)) if isinstance(v, tuple) else str(v) for v in (row[name] for name in names)]
    return "_".join([group, f"{n:03}", *words])


def heads_of(row, pairs):
    return (HEADS if pairs < 256 * 512 else FEW_HEADS)[row["heads"]]


def normal(rng, dtype, *shape):
    return rng.standard_normal(shape).astype(DTYPES[dtype])


def window_of(mask, kv_len):
    """Causal, left and right of a mask. A share of the keys is a number of keys."""
    causal, left, right = MASKS[mask]
    return {"causal": int(causal)} | {
        name: -1 if share == -1 else int(share * kv_len) for name, share in (("left", left), ("right", right))
    }


def seen_by(window, position, key):
    """The pairs that a window permits. `position` is the key at which a query stands."""
    seen = np.ones(np.broadcast_shapes(position.shape, key.shape), bool)
    if window["causal"]:
        seen &= key <= position
    if window["left"] >= 0:
        seen &= key >= position - window["left"]
    if window["right"] >= 0:
        seen &= key <= position + window["right"]
    return seen


def positions(q_len, kv_len):
    """The keys at which queries stand, and the keys. Both ends are aligned."""
    return np.arange(q_len).reshape(1, 1, -1, 1) + kv_len - q_len, np.arange(kv_len).reshape(1, 1, 1, -1)


def rules(outputs):
    """The rule of each output. That of a sink's gradient adds twice the distance of the largest to the next number."""
    expected = {n.removeprefix("out."): x for n, x in outputs if n.startswith("out.")}
    found = {n: BACKWARD if n.startswith("d_") else FORWARD for n in expected}
    if "d_sink" in expected:
        largest = np.abs(expected["d_sink"]).max()
        found["d_sink"] = {"times": [3, 2 * float(np.spacing(largest))]}
    return found


class Dense:
    """Parameters, tensors and outputs of attention to dense tensors."""

    def __init__(self, row, rng, backward):
        self.row, self.rng, self.dtype = row, rng, row["dtype"]
        q_len, kv_len = row["lengths"]
        self.heads, self.kv_heads = heads_of(row, q_len * kv_len)
        batch = self.batch = 2 if q_len * kv_len < 256 * 512 else 1
        d, dv = row["dim"] if isinstance(row["dim"], tuple) else (row["dim"], row["dim"])
        self.q = normal(rng, self.dtype, batch, q_len, self.heads, d)
        self.k = normal(rng, self.dtype, batch, kv_len, self.kv_heads, d)
        self.v = normal(rng, self.dtype, batch, kv_len, self.kv_heads, dv)
        self.attributes = {n: row[n] for n in ("softcap", "splits", "deterministic") if row.get(n)}
        self.inputs, self.options = {}, {}
        self.cotangents = {"out": normal(rng, self.dtype, batch, q_len, self.heads, dv)} if backward else {}

    def masked(self):
        q_len, kv_len = self.row["lengths"]
        window = window_of(self.row.get("mask", "full"), kv_len)
        self.attributes |= window
        position, key = positions(q_len, kv_len)
        if self.row.get("mask", "full") != "full":
            self.options["seen"] = jnp.broadcast_to(seen_by(window, position, key), (1, 1, q_len, kv_len))
        if self.row.get("softcap"):
            self.options["softcap"] = self.row["softcap"]
        if self.row.get("alibi"):
            self.inputs["alibi_slopes"] = (self.rng.random((self.batch, self.heads)) * 0.3).astype(np.float32)
            self.distance = -np.abs(position - key)
        if self.row.get("sink"):
            self.inputs["sink"] = normal(self.rng, self.dtype, self.heads)
        self.dropped((self.batch, self.heads, q_len, kv_len))

    def dropped(self, shape):
        how = self.row.get("dropout", "none")
        if how == "none":
            return
        self.attributes["dropout"] = DROPOUT
        if how == "seeded":
            self.attributes["seed"] = SEED
            self.keep = philox_keep(SEED, DROPOUT, shape)
        else:
            self.keep = self.inputs["keep"] = self.rng.random(shape) >= DROPOUT
        self.options |= {"keep": self.keep, "dropout": DROPOUT}

    def attend(self, x):
        options = dict(self.options)
        if "alibi_slopes" in x:
            options["bias"] = x["alibi_slopes"][:, :, None, None] * self.distance
        if "sink" in x:
            options["sink"] = x["sink"]
        out, lse = attend(x["q"], x["k"], x["v"], **options)
        return {"out": out} | ({"lse": lse} if "lse" in self.cotangents else {})

    def write(self, suite, operator, name):
        inputs = {"q": self.q, "k": self.k, "v": self.v} | self.inputs
        wanted = ["q", "k", "v"] + (["sink"] if "sink" in inputs else []) if self.cotangents else []
        outputs = in_both_types(self.attend, inputs, wanted, self.cotangents)
        outputs = [(n, x) for n, x in outputs if n.split(".")[1] != "lse"]
        inputs |= {f"d_{n}": x for n, x in self.cotangents.items()}
        layout = self.row.get("layout", "separate")
        if layout == "kvpacked":
            inputs = {"kv": np.stack([inputs.pop("k"), inputs.pop("v")], axis=2)} | inputs
        elif layout == "qkvpacked":
            inputs = {"qkv": np.stack([inputs.pop(n) for n in "qkv"], axis=2)} | inputs
        suite.write(name, operator, self.attributes, inputs, outputs, rules(outputs))


DENSE = {
    "dtype": ["f16", "bf16", "f32"],
    "heads": list(HEADS),
    "mask": list(MASKS),
    "dim": [32, 40, 59, 64, 80, 96, 111, 128, 160, 192, 224, 256],
    "softcap": [0, 15, 50],
    "alibi": [False, True],
    "dropout": ["none", "given", "seeded"],
    "sink": [False, True],
    "layout": ["separate", "kvpacked", "qkvpacked"],
}


def packs(row):
    q_len, kv_len = row["lengths"]
    return row["layout"] != "qkvpacked" or (q_len == kv_len and row["heads"] == "mha")


def forward(suite, rng):
    lengths = [(1, 239), (3, 799), (127, 513), (239, 1), (97, 97)]
    grid = DENSE | {"lengths": lengths, "splits": [0, 1, 3]}
    for n, row in enumerate(pairwise(grid, seed=1, allowed=packs)):
        case = Dense(row, rng, backward=False)
        case.masked()
        case.write(suite, "forward", name_of("forward", n, row, "dtype", "heads", "lengths", "dim", "mask"))


def backward(suite, rng):
    lengths = [(113, 203), (256, 512), (512, 256), (200, 200), (1024, 1024), (1023, 1024)]
    grid = DENSE | {"dim": [40, 64, 111, 128, 192, 256], "lengths": lengths, "deterministic": [0, 1]}
    for n, row in enumerate(pairwise(grid, seed=2, allowed=packs)):
        case = Dense(row, rng, backward=True)
        case.masked()
        case.write(suite, "backward", name_of("backward", n, row, "dtype", "heads", "lengths", "dim", "mask"))


def other_dims(suite, rng):
    """Values of another width than keys, and small heads."""
    grid = {
        "dtype": ["f16", "bf16"],
        "heads": ["mha", "gqa"],
        "mask": ["full", "causal"],
        "dim": [(8, 8), (16, 16), (192, 128), (64, 256), (64, 512)],
        "lengths": [(128, 128), (113, 203)],
    }
    for n, row in enumerate(pairwise(grid, seed=3)):
        case = Dense(row, rng, backward=True)
        case.masked()
        case.write(suite, "value widths", name_of("widths", n, row, "dtype", "heads", "lengths", "dim", "mask"))


def lse_gradients(suite, rng):
    """Gradients that also come from the log-sum-exp."""
    grid = {
        "dtype": ["f16", "bf16", "f32"],
        "heads": ["mha"],
        "mask": ["full", "causal"],
        "dim": [64, 128],
        "lengths": [(128, 128)],
    }
    for n, row in enumerate(pairwise(grid, seed=4)):
        case = Dense(row, rng, backward=True)
        case.masked()
        q_len, _ = row["lengths"]
        case.cotangents["lse"] = normal(rng, "f32", case.batch, case.heads, q_len)
        case.write(suite, "gradient of lse", name_of("lse", n, row, "dtype", "lengths", "dim", "mask"))


def sequence_lengths(rng, mode, length, sequences, empty):
    if mode == "full":
        lengths = np.full(sequences, length)
    else:
        least = max(1, length // 3) if mode == "third" else max(1, length - 20)
        lengths = rng.integers(least, length + 1, sequences)
    if empty:
        lengths[rng.integers(0, sequences)] = 0
    return lengths


class Packed(Dense):
    """Sequences side by side, without padding."""

    SEQUENCES = 4

    def __init__(self, row, rng):
        lengths = [
            sequence_lengths(rng, row.get("mode", "random"), n, self.SEQUENCES, empty)
            for n, empty in zip(row["lengths"], row.get("empty", (False, False)))
        ]
        self.starts = [np.concatenate([[0], np.cumsum(n)]) for n in lengths]
        super().__init__(row | {"lengths": tuple(int(n.sum()) for n in lengths)}, rng, backward=True)
        self.batch = 1
        self.q, self.k, self.v = self.q[:1], self.k[:1], self.v[:1]
        self.cotangents["out"] = self.cotangents["out"][:1]
        # The sequence, the index in it, and the difference of the lengths, for each query and key.
        (self.q_of, self.i), (self.k_of, self.j) = (self.indices(n) for n in lengths)
        self.offset = (lengths[1] - lengths[0])[self.q_of]
        self.inputs |= {f"cu_seqlens_{name}": starts.astype(np.int64) for name, starts in zip("qk", self.starts)}
        self.longest = int(lengths[1].max())

    @staticmethod
    def indices(lengths):
        return np.repeat(np.arange(len(lengths)), lengths), np.concatenate([np.arange(n) for n in lengths])

    def masked(self):
        q_len, kv_len = self.row["lengths"]
        window = window_of(self.row.get("mask", "full"), self.longest)
        self.attributes |= window
        position, key = (self.i + self.offset)[:, None], self.j[None, :]
        seen = seen_by(window, position, key) & (self.q_of[:, None] == self.k_of[None, :])
        self.options["seen"] = jnp.asarray(seen[None, None])
        if self.row.get("softcap"):
            self.options["softcap"] = self.row["softcap"]
        if self.row.get("alibi"):
            self.inputs["alibi_slopes"] = (self.rng.random((1, self.heads)) * 0.3).astype(np.float32)
            self.distance = -np.abs(position - key)
        if self.row.get("sink"):
            self.inputs["sink"] = normal(self.rng, self.dtype, self.heads)
        self.dropped((1, self.heads, q_len, kv_len))


def varlen(suite, rng):
    grid = {n: DENSE[n] for n in ("dtype", "heads", "mask", "softcap", "alibi", "dropout", "sink")} | {
        "dim": [59, 64, 128, 192],
        "lengths": [(3, 513), (113, 203), (256, 256), (211, 1)],
        "mode": ["random", "third", "full"],
        "empty": [(False, False), (True, False), (False, True), (True, True)],
        "deterministic": [0, 1],
    }
    for n, row in enumerate(pairwise(grid, seed=5)):
        case = Packed(row, rng)
        case.masked()
        case.write(suite, "packed sequences", name_of("varlen", n, row, "dtype", "heads", "lengths", "dim", "mask"))


def cached(row, rng):
    """A step with a cache: inputs, attributes, and the function of the truth."""
    dtype, (q_len, kv_len) = row["dtype"], row["lengths"]
    heads, kv_heads = heads_of(row, q_len * kv_len)
    d, dv = row["dim"] if isinstance(row["dim"], tuple) else (row["dim"], row["dim"])
    stored = 4 if row["batch_idx"] else 2
    chosen = rng.permutation(stored)[:2]
    new = 0 if row["new"] == "none" else q_len if row["new"] == "all" else int(rng.integers(1, q_len + 1))
    # A rotary dimension is a multiple of 16. Without new keys nothing is rotated.
    rotary = int(row["rotary"] * d) // 16 * 16 if new else 0
    window = window_of(row["mask"], kv_len)
    ordered = row["mask"] != "full"
    lengths = rng.integers(0 if new else 1, kv_len - (q_len if ordered and rotary else new) + 1, stored)
    pad = np.array([rng.integers(0, n) if n else 0 for n in lengths]) if row["leftpad"] else np.zeros(stored, int)
    inputs = {
        "q": normal(rng, dtype, 2, q_len, heads, d),
        "k_cache": normal(rng, dtype, stored, kv_len, kv_heads, d),
        "v_cache": normal(rng, dtype, stored, kv_len, kv_heads, dv),
        "cache_seqlens": lengths.astype(np.int64),
        "cache_batch_idx": chosen.astype(np.int64),
    }
    if row["leftpad"]:
        inputs["cache_leftpad"] = pad.astype(np.int64)
    if new:
        inputs |= {"k": normal(rng, dtype, 2, new, kv_heads, d), "v": normal(rng, dtype, 2, new, kv_heads, dv)}
    if rotary:
        angle = rng.random((kv_len, rotary // 2)) * 2 * math.pi
        inputs |= {"cos": np.cos(angle).astype(DTYPES[dtype]), "sin": np.sin(angle).astype(DTYPES[dtype])}
    if row["alibi"]:
        inputs["alibi_slopes"] = (rng.random((2, heads)) * 0.3).astype(np.float32)
    if row["sink"]:
        inputs["sink"] = normal(rng, dtype, heads)
    total = lengths[chosen] + new
    key = np.arange(kv_len).reshape(1, 1, 1, -1)
    position = np.arange(q_len).reshape(1, 1, -1, 1) + (total - q_len).reshape(-1, 1, 1, 1)
    seen = seen_by(window, position, key) & (key < total.reshape(-1, 1, 1, 1))
    seen &= key >= pad[chosen].reshape(-1, 1, 1, 1)

    def function(x):
        q, k, v = x["q"], x.get("k"), x.get("v")
        if rotary:
            rows = lambda n, step: lengths[chosen][:, None] + step * np.arange(n)[None, :]
            # Without an order of keys, all queries have the position of the first new key.
            places = rows(q_len, 1 if ordered else 0)
            q = rotate(q, x["cos"][places], x["sin"][places], row["interleaved"])
            k = rotate(k, x["cos"][rows(new, 1)], x["sin"][rows(new, 1)], row["interleaved"])
        caches = []
        for cache, fresh in ((x["k_cache"], k), (x["v_cache"], v)):
            held = (np.arange(kv_len)[None] < lengths[:, None])[..., None, None]
            cache = jnp.where(held, cache, 0)
            for s, sequence in enumerate(chosen if new else []):
                cache = cache.at[sequence, lengths[sequence] : lengths[sequence] + new].set(fresh[s])
            caches.append(cache)
        k_all, v_all = (cache[chosen] for cache in caches)
        bias = x["alibi_slopes"][:, :, None, None] * -np.abs(position - key) if row["alibi"] else None
        out, _ = attend(q, k_all, v_all, seen=seen, bias=bias, sink=x.get("sink"))
        return {"out": out} | ({"k_cache": caches[0], "v_cache": caches[1]} if new else {})

    attributes = window | {"page": row["page"], "interleaved": int(row["interleaved"]), "splits": row["splits"]}
    return inputs, attributes | {"ordered": int(ordered)}, function


def cache(suite, rng):
    grid = {
        "dtype": ["f16", "bf16", "f32"],
        "heads": list(HEADS),
        "new": ["none", "all", "some"],
        "alibi": [False, True],
        "sink": [False, True],
        "mask": list(MASKS),
        "rotary": [0.0, 0.5, 1.0],
        "interleaved": [False, True],
        "page": [0, 16, 64, 128, 256],
        "leftpad": [False, True],
        "batch_idx": [False, True],
        "splits": [0, 1, 3],
        "dim": [32, 59, 64, 128, 256],
        "lengths": [(1, 128), (1, 339), (3, 1024), (64, 800), (3, 799), (128, 128)],
    }
    rows = pairwise(grid, seed=6)
    # DeepSeek's keys of 192 channels and values of 128, in pages.
    plain = {name: values[0] for name, values in grid.items()} | {"dtype": "bf16", "mask": "causal", "dim": (192, 128)}
    rows += [plain | {"page": page, "lengths": (n, 256)} for page, n in ((16, 64), (64, 128), (256, 256))]
    # Pages of other sizes, and many keys.
    rows += [plain | {"page": page, "dim": 64, "lengths": (3, 1024)} for page in (1, 4)]
    rows.append(plain | {"heads": "mqa", "dim": 64, "lengths": (16, 20000)})
    for n, row in enumerate(rows):
        inputs, attributes, function = cached(row, rng)
        loose = 5 if row["alibi"] else 3
        # Cached rows may differ by one rounding.
        same = {"each": [1e-3, 1e-3] if row["dtype"] != "bf16" else [1e-2, 1e-2]}
        limits = {"out": {"times": [loose, 1e-5]}, "k_cache": same, "v_cache": same}
        name = name_of("paged" if row["page"] else "cache", n, row, "dtype", "heads", "lengths", "dim", "mask", "page")
        outputs = in_both_types(function, inputs)
        suite.write(name, "paged caches" if row["page"] else "caches", attributes, inputs, outputs, limits)


MASK_MODS = {
    "causal": lambda at: at.j <= at.i + at.kv_len - at.q_len,
    "block_causal": lambda at: at.j <= at.i + at.kv_len - at.q_len,
    "sliding_window": lambda at: (at.j <= at.i + at.kv_len - at.q_len) & (at.j >= at.i + at.kv_len - at.q_len - 128),
    "block_diagonal": lambda at: at.i // 128 == at.j // 128,
    "mini_causal": lambda at: at.i % 128 >= at.j % 128,
    "prefix_lm": lambda at: ((at.i < 512) & (at.j < 512)) | (at.i >= at.j),
    "dilated_sliding_window": lambda at: (at.i >= at.j) & (at.i - at.j < 256) & ((at.i - at.j) % 2 == 0),
    "document": None,
    "ima": None,
}


def mask_mods(suite, rng):
    grid = {
        "dtype": ["bf16", "f16", "f32"],
        "heads": list(HEADS),
        "mod": list(MASK_MODS),
        "dim": [64, 128],
        "blocks": [0, 1],
        "backward": [0, 1],
        "lengths": [(113, 203), (799, 3), (1024, 1024)],
    }
    for n, row in enumerate(pairwise(grid, seed=7)):
        case = Dense(row, rng, row["backward"])
        q_len, kv_len = row["lengths"]
        case.attributes |= {"mask_mod": row["mod"], "blocks": row["blocks"]}
        at_pair = at(1, 1, q_len, kv_len)
        if row["mod"] == "document":
            ids = np.sort(rng.integers(0, 5, (case.batch, case.heads, max(q_len, kv_len))), axis=-1)
            case.inputs["documents"] = ids.astype(np.int64)
            seen = ids[:, :, :q_len, None] == ids[:, :, None, :kv_len]
        elif row["mod"] == "ima":
            least = rng.integers(0, kv_len // 2 + 1, kv_len)
            case.inputs["thresholds"] = least.astype(np.int64)
            seen = np.broadcast_to(np.arange(kv_len) >= least, (1, 1, q_len, kv_len))
        else:
            seen = np.broadcast_to(MASK_MODS[row["mod"]](at_pair), (1, 1, q_len, kv_len))
        case.options["seen"] = jnp.asarray(seen)
        case.write(suite, "mask mods", name_of("mask_mod", n, row, "dtype", "heads", "lengths", "dim", "mod"))


def hidden_unless(seen, score):
    return jnp.where(seen, score, -jnp.inf)


def distance(at):
    return np.abs(at.i - at.j)


# Score functions without tensors.
SCORE_MODS = {
    "identity": lambda s, at: s,
    "causal": lambda s, at: hidden_unless(at.i >= at.j, s),
    "rel_bias": lambda s, at: s + distance(at),
    "rel_bias_x2": lambda s, at: s + 2 * distance(at),
    "rel_bias_clamped": lambda s, at: s + np.minimum(distance(at), 64),
    "times_two": lambda s, at: s * 2,
    "alibi": lambda s, at: s - np.exp2(-(at.h + 1.0)) * distance(at),
    "sliding_window": lambda s, at: hidden_unless(distance(at) <= 256, s),
    "block_diagonal": lambda s, at: hidden_unless(at.i // 64 == at.j // 64, s),
    "squared": lambda s, at: s * s,
    "softcap": lambda s, at: 20 * jnp.tanh(s / 20),
}
# Score functions with tensors: a function of the tensors, and their shapes.
CAPTURING = {
    "batch_bias": (lambda s, at, t: s + t["batch_bias"][at.b], {"batch_bias": "b"}),
    "dual_buffer": (
        lambda s, at, t: s + t["head_bias"][at.h] + t["position_bias"][at.i],
        {"head_bias": "h", "position_bias": "i"},
    ),
    "scaled_squared": (lambda s, at, t: s * s * t["key_scale"][at.j], {"key_scale": "j"}),
    "complex_arithmetic": (
        lambda s, at, t: s + 0.001 * distance(at) + t["query_bias"][at.i] * (0.001 * (at.b + 1) * (at.h + 1)),
        {"query_bias": "i"},
    ),
    "conditional_mask": (
        lambda s, at, t: hidden_unless((at.i >= at.j) & (distance(at) <= 512), s + t["key_bias"][at.j]),
        {"key_bias": "j"},
    ),
    "multi_buffer": (
        lambda s, at, t: s * t["head_scale"][at.h]
        + t["batch_bias"][at.b]
        + t["query_bias"][at.i]
        + t["key_bias"][at.j],
        {"head_scale": "h", "batch_bias": "b", "query_bias": "i", "key_bias": "j"},
    ),
    "xor_pattern": (
        lambda s, at, t: s + 0.001 * ((at.i ^ at.j) & 0xFF) + 0.1 * t["key_bias"][at.j],
        {"key_bias": "j"},
    ),
}


# The functions whose gradients FlashAttention tests.
WITH_GRADIENTS = [
    *("identity", "causal", "rel_bias", "rel_bias_clamped", "times_two", "squared", "softcap"),
    *("dual_buffer", "scaled_squared"),
]


class Scored(Dense):
    """A score function, of dense tensors."""

    def tables(self):
        q_len, kv_len = self.row["lengths"]
        self.attributes["score_mod"] = self.row["mod"]
        sizes = {"b": self.batch, "h": self.heads, "i": q_len, "j": kv_len}
        _, shapes = CAPTURING.get(self.row["mod"], (None, {}))
        self.captured = list(shapes)
        for name, axis in shapes.items():
            self.inputs[name] = normal(self.rng, self.dtype, sizes[axis])

    def attend(self, x):
        options = dict(self.options)
        if self.captured:
            function, _ = CAPTURING[self.row["mod"]]
            tables = {n: x[n].astype(jnp.promote_types(x[n].dtype, jnp.float32)) for n in self.captured}
            options["mod"] = lambda s, at: function(s, at, tables)
        else:
            options["mod"] = SCORE_MODS[self.row["mod"]]
        return {"out": attend(x["q"], x["k"], x["v"], **options)[0]}


def score_mods(suite, rng):
    grid = {
        "dtype": ["f16", "bf16", "f32"],
        "heads": list(HEADS),
        "mod": [*SCORE_MODS, *CAPTURING],
        "dim": [64, 128],
        "lengths": [(113, 203), (640, 128)],
    }
    rows = pairwise(grid, seed=8)
    rows.append({"dtype": "bf16", "heads": "gqa", "mod": "rel_bias", "dim": 128, "lengths": (1024, 1024)})
    for n, row in enumerate(rows):
        case = Scored(row, rng, row["mod"] in WITH_GRADIENTS)
        case.tables()
        case.write(suite, "score mods", name_of("score_mod", n, row, "dtype", "heads", "lengths", "dim", "mod"))


# Functions of packed sequences. Captured tensors have the rows of all sequences, and `at` counts in a sequence.
PACKED_MODS = {
    "global_kv_bias": (lambda s, at, t: s + t["key_bias"][at.key], {"key_bias": "k"}),
    "global_q_bias": (lambda s, at, t: s + t["query_bias"][at.query], {"query_bias": "q"}),
    "global_q_and_kv_bias": (
        lambda s, at, t: s + t["query_bias"][at.query] + t["key_bias"][at.key],
        {"query_bias": "q", "key_bias": "k"},
    ),
    "global_rel_plus_kv_bias": (
        lambda s, at, t: s + 0.1 * np.abs(at.i - at.j) + t["key_bias"][at.key],
        {"key_bias": "k"},
    ),
}


class PackedScored(Packed):
    def masked(self):
        super().masked()
        self.attributes["score_mod"] = self.row["mod"]
        rows = {"q": self.row["lengths"][0], "k": self.row["lengths"][1]}
        for name, axis in PACKED_MODS[self.row["mod"]][1].items():
            self.inputs[name] = normal(self.rng, self.dtype, rows[axis])
        if self.row["mod"] == "global_rel_plus_kv_bias":
            self.inputs["query_index"] = self.i.astype(np.int64)

    def attend(self, x):
        function, names = PACKED_MODS[self.row["mod"]]
        tables = {n: x[n].astype(jnp.promote_types(x[n].dtype, jnp.float32)) for n in names}
        q_len, kv_len = self.row["lengths"]
        pair = SimpleNamespace(
            i=self.i[:, None], j=self.j[None, :], query=np.arange(q_len)[:, None], key=np.arange(kv_len)[None, :]
        )
        mod = lambda s, at: function(s, pair, tables)
        return {"out": attend(x["q"], x["k"], x["v"], mod=mod, **self.options)[0]}


def packed_score_mods(suite, rng):
    grid = {
        "dtype": ["f16", "bf16"],
        "heads": ["mha", "gqa"],
        "mod": list(PACKED_MODS),
        "mask": ["full", "causal"],
        "dim": [128],
        "lengths": [(113, 203)],
    }
    for n, row in enumerate(pairwise(grid, seed=9)):
        case = PackedScored(row, rng)
        case.masked()
        name = name_of("packed_mod", n, row, "dtype", "heads", "lengths", "mod", "mask")
        case.write(suite, "score mods, packed", name)


def main(folder):
    suite = Suite(folder)
    groups = [forward, backward, other_dims, lse_gradients, varlen, cache, mask_mods, score_mods, packed_score_mods]
    for seed, group in enumerate(groups):
        group(suite, np.random.default_rng(seed))


if __name__ == "__main__":
    main(sys.argv[1])
