"""Writes cases over the parameters of flashinfer's tests: python flashinfer_cases.py FOLDER.

The parameters are those of tests/attention. JAX computes the outputs. Log-sum-exps are natural logarithms.
"""

import math
import sys

import jax.numpy as jnp
import numpy as np

from case_files import pairwise
from jax_attention import DTYPES, Suite, attend, in_both_types, rotate


def normal(rng, dtype, *shape):
    return rng.standard_normal(shape).astype(DTYPES[dtype])


def name_of(group, n, row, *names):
    words = ["x".join(map(str, v)) if isinstance(v, tuple) else str(v) for v in (row[name] for name in names)]
    return "_".join([group, f"{n:02}", *words])


def limits(row, *names):
    """flashinfer's tolerances: of f16, and of bf16."""
    limit = 1e-3 if row.get("dtype", "f16") == "f16" else 1e-2
    return {n: {"each": [limit, limit]} for n in names}


def window(q_len, total, kv_len, causal, left):
    """The pairs that are seen. The last query of a sequence is at the last of its `total` keys."""
    i = np.arange(q_len).reshape(1, 1, -1, 1) + (np.asarray(total) - q_len).reshape(-1, 1, 1, 1)
    j = np.arange(kv_len).reshape(1, 1, 1, -1)
    seen = np.broadcast_to(j < np.asarray(total).reshape(-1, 1, 1, 1), np.broadcast_shapes(i.shape, j.shape)).copy()
    if causal:
        seen &= j <= i
    if left >= 0:
        seen &= j >= i - left
    return seen


def llama_angles(positions, dim):
    """Cosines and sines of Llama's rotation."""
    angles = positions[..., None] * 1e4 ** (-np.arange(0, dim, 2) / dim)
    return jnp.asarray(np.cos(angles)), jnp.asarray(np.sin(angles))


def paged(suite, operator, name, row, rng):
    """Attention to a cache of pages."""
    dtype, (heads, kv_heads), dim = row["dtype"], row["heads"], row["dim"]
    q_len, kv_len = row["q_len"], row["kv_len"]
    total = np.array([kv_len, max(q_len, kv_len - 5)])
    left, causal, rope = row.get("left", -1), row.get("causal", False), row.get("rope", False)
    inputs = {
        "q": normal(rng, dtype, 2, q_len, heads, dim),
        "k_cache": normal(rng, dtype, 2, kv_len, kv_heads, dim),
        "v_cache": normal(rng, dtype, 2, kv_len, kv_heads, dim),
        "cache_seqlens": total.astype(np.int64),
    }
    seen = window(q_len, total, kv_len, causal, left)

    def function(x):
        q, k = x["q"], x["k_cache"]
        if rope:
            q = rotate(q, *llama_angles((total - q_len)[:, None] + np.arange(q_len)[None], dim), False)
            k = rotate(k, *llama_angles(np.broadcast_to(np.arange(kv_len), (2, kv_len)), dim), False)
        out, lse = attend(q, k, x["v_cache"], seen=seen, softcap=row.get("softcap", 0))
        return {"out": out, "lse": lse}

    attributes = {"causal": int(causal), "left": left, "page": row["page"], "rope": int(rope)}
    attributes |= {"layout": row.get("layout", "NHD"), "softcap": row.get("softcap", 0)}
    outputs = in_both_types(function, inputs)
    if attributes["layout"] == "HND":
        inputs |= {n: inputs[n].transpose(0, 2, 1, 3) for n in ("k_cache", "v_cache")}
    suite.write(name, operator, attributes, inputs, outputs, limits(row, "out", "lse"))


def prefill(suite, rng):
    grid = {
        "dtype": ["f16", "bf16"],
        "kv_len": [54, 97, 512],
        "q_len": [17, 37, 127],
        "page": [16],
        "heads": [(4, 4), (32, 4)],
        "dim": [64, 128, 256],
        "causal": [False, True],
        "rope": [False, True],
        "layout": ["NHD", "HND"],
        "softcap": [0, 30],
    }
    rows = pairwise(grid, seed=1, allowed=lambda row: row["q_len"] <= row["kv_len"])
    # Pages of other sizes.
    rows += [rows[0] | {"page": page} for page in (1, 5)]
    for n, row in enumerate(rows):
        name = name_of("prefill", n, row, "dtype", "heads", "q_len", "kv_len", "dim", "page")
        paged(suite, "paged prefill", name, row, rng)


def decode(suite, rng):
    grid = {
        "dtype": ["f16", "bf16"],
        "kv_len": [54, 97, 512, 2048],
        "q_len": [1],
        "page": [16],
        "heads": [(4, 4), (32, 4)],
        "dim": [128, 256, 512],
        "rope": [False, True],
        "layout": ["NHD", "HND"],
    }
    rows = pairwise(grid, seed=2)
    rows += [rows[0] | {"page": page} for page in (1, 8)]
    for n, row in enumerate(rows):
        name = name_of("decode", n, row, "dtype", "heads", "kv_len", "dim", "page")
        paged(suite, "paged decoding", name, row, rng)


def sliding(suite, rng):
    grid = {
        "dtype": ["f16"],
        "kv_len": [1, 19, 199, 397],
        "q_len": [1, 37, 47],
        "left": [3, 33, 43, 233],
        "page": [0, 16],
        "heads": [(4, 1), (4, 4), (8, 1), (8, 4)],
        "dim": [64, 128, 256, 512],
        "causal": [True],
    }
    for n, row in enumerate(pairwise(grid, seed=3, allowed=lambda row: row["q_len"] <= row["kv_len"])):
        name = name_of("sliding", n, row, "heads", "q_len", "kv_len", "dim", "left", "page")
        paged(suite, "sliding windows", name, row, rng)


def single(suite, operator, name, row, rng, attributes, extra, options):
    """Attention to tensors of one or more sequences. `options` makes the options from the inputs."""
    dtype, (heads, kv_heads), dim = row["dtype"], row["heads"], row["dim"]
    batch = row.get("batch", 1)
    inputs = {
        "q": normal(rng, dtype, batch, row["q_len"], heads, dim),
        "k": normal(rng, dtype, batch, row["kv_len"], kv_heads, dim),
        "v": normal(rng, dtype, batch, row["kv_len"], kv_heads, dim),
    } | extra
    function = lambda x: dict(zip(("out", "lse"), attend(x["q"], x["k"], x["v"], **options(x))))
    suite.write(name, operator, attributes, inputs, in_both_types(function, inputs), limits(row, "out", "lse"))


def logits_cap(suite, rng):
    grid = {
        "dtype": ["f16"],
        "q_len": [1, 17, 81],
        "kv_len": [1, 17, 81, 987],
        "heads": [(4, 4), (8, 8), (32, 32)],
        "dim": [128, 256],
        "softcap": [1, 30, 50],
    }
    for n, row in enumerate(pairwise(grid, seed=4)):
        name = name_of("softcap", n, row, "heads", "q_len", "kv_len", "dim", "softcap")
        options = {"softcap": row["softcap"]}
        single(suite, "softcaps", name, row, rng, options, {}, lambda x: options)


def alibi(suite, rng):
    grid = {
        "dtype": ["f16"],
        "q_len": [1, 17, 81],
        "kv_len": [1, 9, 81, 729],
        "heads": [(4, 4), (8, 8), (32, 32)],
        "dim": [128, 256],
        "causal": [False, True],
    }
    for n, row in enumerate(pairwise(grid, seed=5, allowed=lambda row: row["q_len"] <= row["kv_len"])):
        q_len, kv_len, (heads, _) = row["q_len"], row["kv_len"], row["heads"]
        slopes = (2.0 ** (-8 / heads * np.arange(1, heads + 1))).astype(np.float32)[None]
        distance = np.arange(kv_len)[None, :] - (np.arange(q_len)[:, None] + kv_len - q_len)
        seen = window(q_len, [kv_len], kv_len, row["causal"], -1)
        options = lambda x: {"seen": seen, "bias": x["linear_slopes"][:, :, None, None] * distance}
        name = name_of("alibi", n, row, "heads", "q_len", "kv_len", "dim")
        single(suite, "ALiBi", name, row, rng, {"causal": int(row["causal"])}, {"linear_slopes": slopes}, options)


def sinks(suite, rng):
    grid = {
        "dtype": ["f16", "bf16"],
        "batch": [1, 2],
        "q_len": [1, 4, 16, 128],
        "kv_len": [128, 256],
        "heads": [(32, 8), (32, 32)],
        "dim": [64, 128],
        "left": [-1, 128],
        "causal": [False, True],
    }
    for n, row in enumerate(pairwise(grid, seed=6)):
        seen = window(row["q_len"], [row["kv_len"]], row["kv_len"], row["causal"], row["left"])
        attributes = {"causal": int(row["causal"]), "left": row["left"]}
        extra = {"sink": (rng.random(row["heads"][0]) * 5).astype(np.float32)}
        options = lambda x: {"seen": seen, "sink": x["sink"]}
        name = name_of("sink", n, row, "dtype", "heads", "q_len", "kv_len", "dim")
        single(suite, "sinks", name, row, rng, attributes, extra, options)


def custom_masks(suite, rng):
    grid = {
        "dtype": ["f16"],
        "q_len": [17, 37, 127],
        "kv_len": [54, 97, 512],
        "heads": [(4, 4), (32, 4)],
        "dim": [128, 256],
        "softcap": [0, 30],
    }
    for n, row in enumerate(pairwise(grid, seed=7)):
        seen = rng.random((1, 1, row["q_len"], row["kv_len"])) < 0.5
        options = lambda x: {"seen": x["attn_mask"], "softcap": row["softcap"]}
        name = name_of("custom", n, row, "heads", "q_len", "kv_len", "dim")
        single(suite, "custom masks", name, row, rng, {"softcap": row["softcap"]}, {"attn_mask": seen}, options)


def block_sparse(suite, rng):
    grid = {
        "dtype": ["f16"],
        "block": [(1, 1), (1, 16), (4, 4), (16, 1), (16, 16)],
        "q_len": [64, 256],
        "kv_len": [64, 128, 256],
        "heads": [(1, 1), (4, 1), (16, 4)],
        "dim": [128, 256],
        "inside": [False, True],
    }
    for n, row in enumerate(pairwise(grid, seed=8)):
        (r, c), q_len, kv_len = row["block"], row["q_len"], row["kv_len"]
        blocks = rng.random((1, 1, q_len // r, kv_len // c)) < 0.25
        extra = {"block_mask": blocks}
        if row["inside"]:
            extra["attn_mask"] = rng.random((1, 1, q_len, kv_len)) < 0.5

        def options(x):
            seen = jnp.repeat(jnp.repeat(x["block_mask"], r, axis=2), c, axis=3)
            return {"seen": seen & x["attn_mask"] if row["inside"] else seen}

        name = name_of("blocks", n, row, "block", "heads", "q_len", "kv_len", "dim")
        single(suite, "block-sparse", name, row, rng, {}, extra, options)


def ragged(suite, rng):
    grid = {
        "dtype": ["f16"],
        "q_len": [17, 37, 127],
        "kv_len": [54, 97, 512],
        "heads": [(4, 4), (32, 4)],
        "dim": [64, 128, 256],
        "causal": [False, True],
    }
    for n, row in enumerate(pairwise(grid, seed=9, allowed=lambda row: row["q_len"] <= row["kv_len"])):
        sequences = [(row["q_len"], row["kv_len"]), (row["q_len"] - 7, row["kv_len"] - 2), (1, row["kv_len"] // 2)]
        starts = [np.concatenate([[0], np.cumsum(n)]) for n in zip(*sequences)]
        seen = np.zeros((1, 1, starts[0][-1], starts[1][-1]), bool)
        for (q_len, kv_len), i, j in zip(sequences, *starts):
            seen[:, :, i : i + q_len, j : j + kv_len] = window(q_len, [kv_len], kv_len, row["causal"], -1)
        extra = {f"cu_seqlens_{name}": s.astype(np.int64) for name, s in zip("qk", starts)}
        name = name_of("ragged", n, row, "heads", "q_len", "kv_len", "dim")
        lengths = {"q_len": int(starts[0][-1]), "kv_len": int(starts[1][-1])}
        attributes = {"causal": int(row["causal"])}
        single(suite, "ragged prefill", name, row | lengths, rng, attributes, extra, lambda x: {"seen": seen})


def shared_prefix(suite, rng):
    grid = {
        "dtype": ["f16"],
        "stage": ["decode", "append"],
        "batch": [3, 5],
        "unique": [17, 37],
        "shared": [128, 512, 2048],
        "heads": [8, 16],
        "dim": [128, 256],
        "page": [0, 16],
    }
    for n, row in enumerate(pairwise(grid, seed=10)):
        batch, heads, dim, unique = row["batch"], row["heads"], row["dim"], row["unique"]
        q_len = 1 if row["stage"] == "decode" else unique
        inputs = {
            "q": normal(rng, "f16", batch, q_len, heads, dim),
            "k_shared": normal(rng, "f16", 1, row["shared"], heads, dim),
            "v_shared": normal(rng, "f16", 1, row["shared"], heads, dim),
            "k_cache": normal(rng, "f16", batch, unique, heads, dim),
            "v_cache": normal(rng, "f16", batch, unique, heads, dim),
            "cache_seqlens": np.full(batch, unique, np.int64),
        }

        def function(x):
            both = lambda n: jnp.concatenate([jnp.repeat(x[f"{n}_shared"], batch, axis=0), x[f"{n}_cache"]], axis=1)
            return dict(zip(("out", "lse"), attend(x["q"], both("k"), both("v"))))

        name = name_of("prefix", n, row, "stage", "batch", "unique", "shared", "heads", "dim", "page")
        outputs = in_both_types(function, inputs)
        suite.write(name, "shared prefixes", {"page": row["page"]}, inputs, outputs, limits(row, "out", "lse"))


def latent(suite, rng):
    """MLA: keys of 512 latent channels and 64 rotated ones; values are the latent channels."""
    grid = {
        "dtype": ["f16"],
        "batch": [1, 3],
        "kv_len": [17, 97, 514, 1024],
        "q_len": [1, 3, 7, 17],
        "heads": [16],
        "causal": [False, True],
        "page": [0, 16, 64],
    }
    for n, row in enumerate(pairwise(grid, seed=11)):
        batch, kv_len, q_len = row["batch"], row["kv_len"], row["q_len"]
        total = np.array([max(q_len, kv_len - 7 * s) for s in range(batch)])
        inputs = {
            "q": normal(rng, "f16", batch, q_len, row["heads"], 576),
            "k_cache": normal(rng, "f16", batch, kv_len, 1, 576),
            "cache_seqlens": total.astype(np.int64),
        }
        seen = window(q_len, total, kv_len, row["causal"], -1)
        scale = 1 / math.sqrt(128 + 64)
        function = lambda x: dict(
            zip(("out", "lse"), attend(x["q"], x["k_cache"], x["k_cache"][..., :512], seen=seen, scale=scale))
        )
        attributes = {"causal": int(row["causal"]), "page": row["page"], "latent_dim": 512, "scale": scale}
        name = name_of("mla", n, row, "batch", "q_len", "kv_len", "page")
        suite.write(name, "MLA", attributes, inputs, in_both_types(function, inputs), limits(row, "out", "lse"))


def merged_states(suite, rng):
    grid = {
        "dtype": ["f16", "f32"],
        "states": [2, 3, 5, 9],
        "heads": [4, 32],
        "dim": [64, 128, 256],
        "empty": [False, True],
    }
    for n, row in enumerate(pairwise(grid, seed=12)):
        states, heads = row["states"], row["heads"]
        lse = rng.standard_normal((states, 1, heads, 17, 1)).astype(np.float32) * 10
        if row["empty"]:
            lse[rng.integers(0, states), :, :, 3:9] = -np.inf
        inputs = {"v": normal(rng, row["dtype"], states, 1, heads, 17, row["dim"]), "s": lse}

        def function(x):
            most = jnp.max(x["s"], axis=0)
            weights = jnp.exp(x["s"] - most)
            total = jnp.sum(weights, axis=0)
            out = jnp.sum(weights / total * x["v"].astype(x["s"].dtype), axis=0)
            return {"out": out.astype(x["v"].dtype), "lse": (jnp.log(total) + most)[..., 0]}

        name = name_of("merge", n, row, "dtype", "states", "heads", "dim")
        suite.write(name, "merged states", {}, inputs, in_both_types(function, inputs), limits({}, "out", "lse"))


def main(folder):
    suite = Suite(folder)
    groups = [prefill, decode, sliding, logits_cap, alibi, sinks, custom_masks, block_sparse, ragged, shared_prefix]
    for seed, group in enumerate([*groups, latent, merged_states]):
        group(suite, np.random.default_rng(seed))


if __name__ == "__main__":
    main(sys.argv[1])
