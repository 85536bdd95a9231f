"""Writes cases with the parameters of Flash Linear Attention's tests: python fla_cases.py FOLDER.

The outputs are those of its plain PyTorch functions, `fla/ops/*/naive.py`, and gradients are those of PyTorch. The
convolution and the norms have no such function, and are PyTorch's. The functions convert to f32, which is f64 for
`f64.NAME`.
"""

import importlib.util
import math
import os
import sys
import types
from importlib.metadata import version

import torch
import torch.nn.functional as F

from torch_cases import DTYPES, PYTORCH, each_sequence, main, pairwise

FLA = os.path.join(importlib.util.find_spec("fla").submodule_search_locations[0], "ops")
PACKAGE = f"fla-core {version('fla-core')}, {PYTORCH}"


def mean_pooling(x, size, starts=None):
    return torch.stack([block.mean(1) for block in x.split(size, 1)], 1)


def window_attention(q, k, v, causal, window_size):
    """The window branch of NSA, for which the package calls FlashAttention."""
    group = q.shape[2] // k.shape[2]
    k, v = (x.repeat_interleave(group, 2) for x in (k, v))
    i = torch.arange(q.shape[1])
    seen = (i[:, None] >= i) & (i[:, None] - i <= window_size[0])
    scores = torch.einsum("bqhd,bkhd->bhqk", q, k) * q.shape[-1] ** -0.5
    return torch.einsum("bhqk,bkhd->bqhd", scores.masked_fill(~seen, -math.inf).softmax(-1), v)


def naive(name):
    """Loads the plain functions of an operator. The package itself needs Triton."""
    for module in ("fla.ops.utils", "fla.ops.utils.pooling"):
        sys.modules.setdefault(module, types.ModuleType(module))
    sys.modules["fla.ops.utils"].prepare_chunk_offsets = None
    sys.modules["fla.ops.utils.pooling"].mean_pooling = mean_pooling
    spec = importlib.util.spec_from_file_location(name, os.path.join(FLA, name, "naive.py"))
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


gated_delta_rule, kda, delta_rule, gla, simple_gla, retention, linear_attn, nsa, dsa, attn, forgetting_attn = map(
    naive,
    [
        "gated_delta_rule",
        "kda",
        "delta_rule",
        "gla",
        "simple_gla",
        "retention",
        "linear_attn",
        "nsa",
        "dsa",
        "attn",
        "forgetting_attn",
    ],
)
nsa.flash_attn_func = window_attention


def unit(x, heads):
    return F.normalize(x.repeat_interleave(heads // x.shape[2], 2), p=2, dim=-1)


@each_sequence
def of_gated_delta_rule(x, a):
    q, k = (unit(x[name], x["v"].shape[2]) for name in "qk")
    o, ht = gated_delta_rule.naive_recurrent_gated_delta_rule(
        q, k, x["v"], x["beta"], x["g"], a["scale"], x.get("h0"), True
    )
    return {"o": o.to(q.dtype), "ht": ht}


@each_sequence
def of_kda(x, a):
    q, k = (F.normalize(x[name], p=2, dim=-1) for name in "qk")
    o, ht = kda.naive_recurrent_kda(q, k, x["v"], x["g"], x["beta"], a["scale"], x.get("h0"), True)
    return {"o": o, "ht": ht}


@each_sequence
def of_delta_rule(x, a):
    # The function has the default scale only.
    factor = a["scale"] * x["q"].shape[-1] ** 0.5
    q, k = (F.normalize(x[name], p=2, dim=-1) for name in "qk")
    head_first = [t.transpose(1, 2) for t in (q.float() * factor, k, x["v"], x["beta"])]
    o, ht = delta_rule.delta_rule_recurrence(*head_first, x.get("h0"))
    return {"o": o.transpose(1, 2).to(q.dtype), "ht": ht}


@each_sequence
def of_gla(x, a):
    o, ht = gla.naive_recurrent_gla(x["q"], x["k"], x["v"], x["g"], x.get("h0"), True)
    return {"o": o, "ht": ht}


@each_sequence
def of_simple_gla(x, a):
    o, ht = simple_gla.naive_recurrent_simple_gla(x["q"], x["k"], x["v"], x["g"], a["scale"], x.get("h0"), True)
    return {"o": o, "ht": ht}


def of_retention(x, a):
    return {"o": retention.naive_retention(*(x[name].transpose(1, 2) for name in "qkv")).transpose(1, 2)}


def of_linear_attention(x, a):
    o, ht = linear_attn.naive_recurrent_linear_attn(
        x["q"], x["k"], x["v"], a.get("scale"), x.get("h0"), not a["normalize"], a["normalize"]
    )
    return {"o": o} | ({} if a["normalize"] else {"ht": ht})


def of_nsa(x, a):
    g = x["g"].unbind(-1)
    return {"o": nsa.naive_nsa(x["q"], x["k"], x["v"], *g, None, a["count"], a["block"], a["window"])}


def of_nsa_selection(x, a):
    return {"o": nsa.naive_nsa_selection(x["q"], x["k"], x["v"], x["indices"], a["block"], a["scale"])}


def of_dsa(x, a):
    return {"o": dsa.naive_dsa(x["q"], x["k"], x["v"], x["q_idx"], x["k_idx"], x["w_idx"], topk=a["count"])}


def of_attention(x, a):
    window = a["window"] or None
    o, _ = attn.naive_parallel_attn(x["q"], x["k"], x["v"], a["scale"], window, sink_bias=x.get("sinks"))
    return {"o": o}


def of_forgetting_attention(x, a):
    o = forgetting_attn.naive_forgetting_attn(x["q"], x["k"], x["v"], x["g"], a["scale"], a["window"] or None)
    return {"o": o.to(x["q"].dtype)}


def of_convolution(x, a):
    dtype, width = x["x"].dtype, x["weight"].shape[1]

    def one(t, h0):
        t = torch.cat([h0, t.transpose(1, 2)], -1).float()
        o = F.conv1d(t, x["weight"].float()[:, None], x["bias"].float() if "bias" in x else None, groups=t.shape[1])
        o = F.silu(o) if a["activation"] else o
        return o.transpose(1, 2).to(dtype), t[..., t.shape[-1] - width + 1 :].to(dtype)

    starts = a.get("starts", [0, x["x"].shape[1]])
    sequences = len(starts) - 1 if "starts" in a else x["x"].shape[0]
    h0 = x.get("h0", x["x"].new_zeros(sequences, x["x"].shape[2], width - 1))
    states = h0.split(1) if "starts" in a else [h0]
    parts = [one(x["x"][:, s:e], state) for s, e, state in zip(starts, starts[1:], states)]
    return {"o": torch.cat([o for o, _ in parts], 1), "ht": torch.cat([ht for _, ht in parts])}


def of_gated_norm(x, a):
    t, n = x["x"], x["x"].shape[-1:]
    if a["rms"]:
        t = F.rms_norm(t, n, x.get("weight"), eps=a["eps"])
    else:
        t = F.layer_norm(t, n, x.get("weight"), x.get("bias"), eps=a["eps"])
    return {"o": t * (F.silu(x["g"]) if a["activation"] == "silu" else F.sigmoid(x["g"]))}


def recurrent_inputs(decay=None, delta=False, positive=False):
    """Returns a function that makes the inputs of an operator with a state."""

    def inputs(a):
        batch = 1 if "starts" in a else a["batch"]
        length = a["starts"][-1] if "starts" in a else a["length"]
        heads, dim, dtype = a["heads"], a["dim"], DTYPES[a["dtype"]]
        value_heads, value_dim = heads * a.get("group", 1), dim * a.get("expand", 1)

        def make(heads, dim, random=torch.randn):
            t = random(batch, length, heads, dim)
            return (t.abs() + 0.01 if positive else t).to(dtype)

        x = {"q": make(heads, dim), "k": make(heads, dim), "v": make(value_heads, value_dim)}
        if decay:
            g = torch.randn(batch, length, value_heads, *([dim] if decay == "channel" else []))
            g = F.logsigmoid(g) / a.get("normalizer", 1)
            x["g"] = g * (torch.rand(g.shape) >= a.get("mask_p", 0))
        if delta:
            x["beta"] = torch.randn(batch, length, value_heads).sigmoid().to(dtype)
        if a.get("state"):
            sequences = len(a["starts"]) - 1 if "starts" in a else batch
            x["h0"] = torch.randn(sequences, value_heads, dim, value_dim)
        return x

    return inputs


def attention_inputs(a):
    batch, length, dim, dtype = a["batch"], a["length"], a["dim"], DTYPES[a["dtype"]]
    heads = a["heads"] * a["group"]
    make = lambda heads: torch.randn(batch, length, heads, dim).to(dtype)
    x = {"q": make(heads), "k": make(a["heads"]), "v": make(a["heads"])}
    if a.get("sinks"):
        x["sinks"] = torch.randn(heads).to(dtype)
    if a.get("gate"):
        x["g"] = torch.empty(batch, length, heads).uniform_(-0.1, -0.01).to(dtype)
    return x


def nsa_inputs(a):
    x = attention_inputs(a)
    x["g"] = torch.randn(*x["q"].shape[:3], 3).sigmoid()
    return x


def selection_inputs(a):
    x = attention_inputs(a)
    indices = torch.full((a["batch"], a["length"], a["heads"], a["count"]), -1)
    for at in range(a["length"]):
        blocks = at // a["block"] + 1
        for b in range(a["batch"]):
            for h in range(a["heads"]):
                chosen = torch.randperm(blocks)[: a["count"]]
                indices[b, at, h, : len(chosen)] = chosen
    return x | {"indices": indices}


def dsa_inputs(a):
    x = attention_inputs(a)
    shape = (a["batch"], a["length"])
    index = {"q_idx": torch.randn(*shape, 8, 32), "k_idx": torch.randn(*shape, 32), "w_idx": torch.rand(*shape, 8)}
    return x | index


def convolution_inputs(a):
    batch = 1 if "starts" in a else a["batch"]
    length = a["starts"][-1] if "starts" in a else a["length"]
    dim, width, dtype = a["dim"], a["width"], DTYPES[a["dtype"]]
    x = {"x": torch.randn(batch, length, dim), "weight": torch.randn(dim, width)}
    if a["bias"]:
        x["bias"] = torch.randn(dim)
    if a["state"]:
        x["h0"] = torch.randn(len(a["starts"]) - 1 if "starts" in a else batch, dim, width - 1)
    return {key: t.to(dtype) for key, t in x.items()}


def norm_inputs(a):
    x = {key: torch.randn(2, 2, a["length"], a["dim"]) for key in "xg"}
    if a["affine"]:
        x["weight"] = torch.randn(a["dim"])
        if not a["rms"]:
            x["bias"] = torch.randn(a["dim"])
    return x


LENGTHS = [63, 100, 256, 600]
GRID = {"batch": [1, 2], "length": LENGTHS, "heads": [1, 2], "dim": [60, 64, 128], "state": [False, True]}
FLOATS = {"dtype": ["f32", "f16"]}
MORE_FLOATS = {"dtype": ["f32", "f16", "bf16"]}
SCALES = {"scale": [1, 0.1]}
GATES = {"normalizer": [0.1, 1, 10], "mask_p": [0, 0.5, 1]}
PACKED = {
    "starts": [(0, 130, 200, 500), (0, 1, 100, 300), (0, 0, 15)],
    "heads": [1, 2],
    "dim": [64, 100],
    "state": [False, True],
}
SELECTED = {"batch": [1, 2], "length": [63, 111, 200], "heads": [1, 2], "dim": [60, 64, 100], "group": [16]}
ATTENTION = {"batch": [1, 2], "length": [63, 111, 256], "heads": [1, 2], "dim": [60, 64, 128]}


def rms(**ratios):
    return {key: {"rms": ratio} for key, ratio in ratios.items()}


def sequences(**more):
    return pairwise(**GRID, **more) + pairwise(**PACKED, **more)


def with_states():
    """Returns, for each operator with a state, its function, inputs, choices of parameters and rules."""
    gated = rms(o=0.005, d=0.008, d_beta=0.02, d_g=0.02)
    plain = rms(o=0.005, d=0.005)
    group = {"group": [1, 2]}
    delta, channels = recurrent_inputs("head", True), recurrent_inputs("channel", True)
    return {
        "gated delta rule": (of_gated_delta_rule, delta, sequences(**FLOATS, **SCALES, **GATES, **group), gated),
        "KDA": (of_kda, channels, sequences(**MORE_FLOATS, **SCALES, **GATES, **group), gated),
        "delta rule": (
            of_delta_rule,
            recurrent_inputs(delta=True),
            sequences(**MORE_FLOATS, **SCALES),
            rms(o=0.006, d=0.008),
        ),
        "GLA": (of_gla, recurrent_inputs("channel"), sequences(**MORE_FLOATS, normalizer=[0.1, 1, 10]), plain),
        "simple GLA": (
            of_simple_gla,
            recurrent_inputs("head"),
            sequences(**FLOATS, **SCALES, normalizer=[0.1, 1, 10]),
            plain,
        ),
        "retention": (
            of_retention,
            recurrent_inputs(),
            pairwise(**GRID | {"state": [False], "expand": [1, 2]}, **FLOATS),
            plain,
        ),
        "linear attention": (
            of_linear_attention,
            recurrent_inputs(),
            pairwise(**GRID, **FLOATS, scale=[None, 1.0, 0.1], normalize=[False]),
            rms(o=0.001, d=0.001),
        ),
        "normalised linear attention": (
            of_linear_attention,
            recurrent_inputs(positive=True),
            pairwise(
                **GRID | {"length": [128, 256], "dim": [60, 64], "state": [False]}, dtype=["f32"], normalize=[True]
            ),
            plain,
        ),
    }


def without_states():
    """Returns the same for the other operators."""
    plain = rms(o=0.005, d=0.005)
    norms = pairwise(
        length=[1, 50, 512],
        dim=[50, 64, 128, 1200],
        affine=[False, True],
        activation=["silu", "sigmoid"],
        rms=[False, True],
    )
    norms = [a | {"eps": 0.0 if a["rms"] else 1e-5} for a in norms]
    filters = {
        "dim": [128, 200],
        "width": [3, 4],
        "activation": [False, True],
        "bias": [False, True],
        "state": [False, True],
    }
    return {
        "NSA": (
            of_nsa,
            nsa_inputs,
            pairwise(**SELECTED, block=[16, 32], count=[4, 6, 16], window=[32, 64, 128], dtype=["f32"]),
            plain,
        ),
        "NSA selection": (
            of_nsa_selection,
            selection_inputs,
            pairwise(**SELECTED, **FLOATS, **SCALES, block=[16, 32], count=[4, 8]),
            plain,
        ),
        "DSA": (of_dsa, dsa_inputs, pairwise(**ATTENTION, group=[1, 4], count=[16, 64], dtype=["f32"]), plain),
        "attention": (
            of_attention,
            attention_inputs,
            pairwise(**ATTENTION, **FLOATS, **SCALES, group=[1, 4], window=[0, 16, 64], sinks=[False, True]),
            rms(o=0.01, d=0.02),
        ),
        "forgetting attention": (
            of_forgetting_attention,
            attention_inputs,
            pairwise(**ATTENTION, **FLOATS, **SCALES, group=[1, 4], window=[0, 16, 64], gate=[True]),
            plain,
        ),
        "short convolution": (
            of_convolution,
            convolution_inputs,
            pairwise(batch=[1, 2], length=[2, 3, 64, 500], **filters, **FLOATS)
            + pairwise(starts=[(0, 40, 200, 350, 500), (0, 16, 17, 400, 1024)], **filters, **FLOATS),
            rms(o=0.001, d=0.001),
        ),
        "gated norm": (of_gated_norm, norm_inputs, norms, rms(o=0.001, d=0.001)),
    }


if __name__ == "__main__":
    main(PACKAGE, with_states() | without_states())
