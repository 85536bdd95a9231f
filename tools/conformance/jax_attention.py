"""Attention in JAX on the CPU: the truth of suites whose implementation needs a GPU.

An output is computed twice from the same inputs: in the case's type, and in f64.
"""

import math
import os
from types import SimpleNamespace

# Each case is compiled and runs once, so compiling fast is faster.
os.environ.setdefault("XLA_FLAGS", "--xla_backend_optimization_level=0")

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np

from case_files import write

jax.config.update("jax_enable_x64", True)

DTYPES = {"f16": np.float16, "bf16": ml_dtypes.bfloat16, "f32": np.float32}
PACKAGE = f"jax {jax.__version__}"


def attend(q, k, v, seen=None, bias=None, scale=None, softcap=0.0, keep=None, dropout=0.0, sink=None, mod=None):
    """Returns the output [batch, q_len, heads, value_dim] and the log-sum-exp [batch, heads, q_len].

    `q` is [batch, q_len, heads, head_dim]; `k` and `v` may have fewer heads. `mod` changes a score at indices that
    broadcast to [batch, heads, q_len, kv_len]. A query that sees no key gives 0 and −inf.
    """
    batch, q_len, heads, head_dim = q.shape
    kv_len, group = k.shape[1], heads // k.shape[2]
    scale = 1 / math.sqrt(head_dim) if scale is None else scale
    wide = jnp.promote_types(q.dtype, jnp.float32)
    simple = softcap == 0 and keep is None and sink is None and mod is None
    keys, values = jnp.repeat(k, group, axis=2), jnp.repeat(v, group, axis=2)
    scores = jnp.einsum("bihd,bjhd->bhij", q, keys, preferred_element_type=wide) * jnp.asarray(scale, wide)
    if mod:
        scores = mod(scores, at(batch, heads, q_len, kv_len)).astype(wide)
    if softcap:
        scores = softcap * jnp.tanh(scores / softcap)
    if bias is not None:
        scores = scores + bias.astype(wide)
    if seen is not None:
        scores = jnp.where(seen, scores, -jnp.inf)
    most = jnp.max(scores, axis=-1, keepdims=True)
    if sink is not None:
        sink = sink.astype(wide).reshape(1, heads, 1, 1)
        most = jnp.maximum(most, sink)
    most = jax.lax.stop_gradient(jnp.where(jnp.isfinite(most), most, 0))
    weights = jnp.exp(scores - most)
    total = jnp.sum(weights, axis=-1, keepdims=True)
    if sink is not None:
        total = total + jnp.exp(sink - most)
    nonzero = jnp.where(total > 0, total, 1)
    lse = jnp.where(total > 0, jnp.log(nonzero) + most, -jnp.inf)[..., 0]
    # The CPU has no such function for f16, and it rounds weights in f64 to f32.
    if simple and q.dtype in (jnp.float32, jnp.bfloat16) and v.shape == k.shape:
        out = jax.nn.dot_product_attention(q, k, v, bias=bias, mask=seen, scale=scale, implementation="xla")
        return (out if seen is None else jnp.where((total > 0).transpose(0, 2, 1, 3), out, 0)), lse
    weights = weights / nonzero
    if keep is not None:
        weights = jnp.where(keep, weights, 0) / (1 - dropout)
    return jnp.einsum("bhij,bjhd->bihd", weights.astype(v.dtype), values), lse


def at(batch, heads, q_len, kv_len):
    """The indices of a pair of query and key, as a mod receives them."""
    return SimpleNamespace(
        b=np.arange(batch).reshape(-1, 1, 1, 1),
        h=np.arange(heads).reshape(1, -1, 1, 1),
        i=np.arange(q_len).reshape(1, 1, -1, 1),
        j=np.arange(kv_len).reshape(1, 1, 1, -1),
        q_len=q_len,
        kv_len=kv_len,
    )


def rotate(x, cos, sin, interleaved):
    """Rotates the first channels of x [batch, length, heads, dim]; cos and sin are [batch, length, pairs]."""
    wide = jnp.promote_types(x.dtype, jnp.float32)
    cos, sin = (t.astype(wide)[:, :, None, :] for t in (cos, sin))
    pairs = cos.shape[-1]
    turned, rest = x[..., : 2 * pairs].astype(wide), x[..., 2 * pairs :]
    a, b = (turned[..., 0::2], turned[..., 1::2]) if interleaved else (turned[..., :pairs], turned[..., pairs:])
    parts = [a * cos - b * sin, a * sin + b * cos]
    turned = jnp.stack(parts, axis=-1).reshape(turned.shape) if interleaved else jnp.concatenate(parts, axis=-1)
    return jnp.concatenate([turned.astype(x.dtype), rest], axis=-1)


def philox_keep(seed, p, shape):
    """The weights that dropout by a seed keeps: Philox 4x32-10, as `Dropout::Seeded` documents it."""
    batch, heads, q_len, kv_len = shape
    bh, i, j = np.meshgrid(np.arange(batch * heads), np.arange(q_len), np.arange((kv_len + 3) // 4), indexing="ij")
    low = np.uint64(0xFFFFFFFF)
    c = [x.astype(np.uint64) for x in (j, i, bh, 0 * j)]
    key = [seed & 0xFFFFFFFF, seed >> 32]
    for _ in range(10):
        first, second = c[0] * np.uint64(0xD2511F53), c[2] * np.uint64(0xCD9E8D57)
        c = [
            (second >> np.uint64(32)) ^ c[1] ^ np.uint64(key[0]),
            second & low,
            (first >> np.uint64(32)) ^ c[3] ^ np.uint64(key[1]),
            first & low,
        ]
        key = [(key[0] + 0x9E3779B9) & 0xFFFFFFFF, (key[1] + 0xBB67AE85) & 0xFFFFFFFF]
    words = np.stack(c, axis=-1).reshape(batch, heads, q_len, -1)[..., :kv_len]
    return words >= np.uint64(int(p * 2**32))


def in_both_types(function, inputs, gradients_of=(), cotangents=None):
    """Computes `function` in the inputs' types and in f64, and returns the tensors of a file.

    `function` takes a dictionary and returns a dictionary. `cotangents` are gradients of some of its outputs.
    """
    cotangents = cotangents or {}

    def run(x, d):
        if not gradients_of:
            return function(x)
        out, pull = jax.vjp(lambda y: function({**x, **y}), {n: x[n] for n in gradients_of})
        (gradients,) = pull({n: d.get(n, jnp.zeros_like(y)) for n, y in out.items()})
        return out | {f"d_{n}": g for n, g in gradients.items()}

    def computed(change):
        x, d = ({n: change(t) for n, t in group.items()} for group in (inputs, cotangents))
        return {n: np.asarray(y) for n, y in jax.jit(run)(x, d).items()}

    floats = ("float16", "bfloat16", "float32")
    expected = computed(lambda t: t)
    truth = computed(lambda t: t.astype(np.float64) if t.dtype.name in floats else t)
    # The truth of 16-bit outputs needs no more than f32, which makes files smaller.
    rounded = {n: y.astype(np.float32) if expected[n].itemsize == 2 else y for n, y in truth.items()}
    return [(f"out.{n}", y) for n, y in expected.items()] + [(f"f64.{n}", y) for n, y in rounded.items()]


class Suite:
    """A folder of cases."""

    def __init__(self, folder):
        self.folder = folder

    def write(self, name, operator, attributes, inputs, outputs, rules):
        """Writes a case. `outputs` are the tensors of `in_both_types`."""
        names = [n.removeprefix("out.") for n, _ in outputs if n.startswith("out.")]
        metadata = {
            "package": PACKAGE,
            "operator": operator,
            "attributes": attributes,
            "inputs": list(inputs),
            "outputs": names,
            "rules": {n: rules[n] for n in names},
        }
        tensors = [(f"in.{n}", x) for n, x in inputs.items()] + outputs
        write(os.path.join(self.folder, f"{name}.safetensors"), tensors, metadata)
