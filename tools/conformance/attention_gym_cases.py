"""Writes cases of attention-gym's masks, score functions and references: python attention_gym_cases.py FOLDER.

A mask or a score function becomes the attention that FlexAttention defines: it is called for every pair.
"""

import functools
import itertools
import math
from importlib.metadata import version

import torch
import torch.nn.functional as F
from attn_gym import masks, mods
from attn_gym.linear._delta_rule.reference import reference_delta_rule
from attn_gym.linear.gdn.impl.reference import recurrent_forward
from attn_gym.linear.kda.naive import naive_recurrent_kda
from attn_gym.mods.activation import generate_activation_score_mod
from attn_gym.mods.graphormer import (
    generate_graphormer_edge_bias,
    generate_graphormer_spatial_bias,
    shortest_path_distances,
    shortest_path_edge_types,
)
from attn_gym.mods.latent_attention import generate_mla_rope_score_mod
from attn_gym.mods.sandwich import generate_sandwich_bias
from attn_gym.sparse.gather_attn.impl.reference import gather_attn
from attn_gym.sparse.indexer.impl.reference import launch

from torch_cases import DTYPES, PYTORCH, main, pairwise

PACKAGE = f"attn_gym {version('attn_gym')}, {PYTORCH}"


def for_pairs(function, shape, *scores):
    """Calls a function for each batch entry, head, query and key, as FlexAttention does."""
    for axis in reversed(range(4)):
        index = [0 if n == axis else None for n in range(4)]
        function = torch.vmap(function, in_dims=(*[0] * len(scores), *index))
    return function(*scores, *map(torch.arange, shape))


def attend(x, a, mask=None, score=None):
    q, k, v = (x[name].float() for name in "qkv")
    k, v = (t.repeat_interleave(q.shape[1] // k.shape[1], 1) for t in (k, v))
    scores = q @ k.transpose(-1, -2) * q.shape[-1] ** -0.5
    if score:
        scores = for_pairs(score, scores.shape, scores)
    if mask:
        scores = scores.masked_fill(~for_pairs(mask, scores.shape), -math.inf)
    # A query that sees no key has the result 0.
    empty = torch.isneginf(scores).all(-1, keepdim=True)
    return {"o": (scores.masked_fill(empty, 0).softmax(-1).masked_fill(empty, 0) @ v).to(x["q"].dtype)}


def offsets(a):
    return torch.tensor([0, *itertools.accumulate(a["lengths"])])


def globals_of(a):
    return torch.arange(a["keys"]) % a["every"] == 0


MASKS = {
    "causal": lambda a: masks.causal_mask,
    "sliding_window": lambda a: masks.generate_sliding_window(a["window"]),
    "dilated_sliding_window": lambda a: masks.generate_dilated_sliding_window(a["window"], a["dilation"]),
    "global_sliding_window": lambda a: masks.generate_global_sliding_window(a["window"], globals_of(a)),
    "batchify": lambda a: masks.batchify_mask_mod(masks.causal_mask, a["block"]),
    "prefix_lm": lambda a: masks.generate_prefix_lm_mask(a["prefix"]),
    "document": lambda a: masks.generate_doc_mask_mod(masks.causal_mask, offsets(a)),
    "packed_causal_document": lambda a: masks.generate_packed_causal_doc_mask_mod(offsets(a)),
    "shared_prefix": lambda a: masks.generate_shared_prefix_mask_mod(offsets(a), torch.tensor(a["prompts"])),
    "vision_cross_attention": lambda a: masks.generate_vision_cross_attention_mask_mod(
        torch.tensor(a["intervals"]).view(-1, 2), a["picture"]
    ),
    "block_diffusion": lambda a: masks.generate_block_diffusion_mask(a["queries"] // 2, a["block"]),
    "jetspec_tree": lambda a: masks.generate_jetspec_tree_causal_mask_mod(
        a["prefix"], masks.build_tree_ancestor_matrix(a["parents"], "cpu")
    ),
    "jetspec_training": lambda a: masks.generate_jetspec_training_mask_mod(a["prefix"], a["block"]),
    "natten": lambda a: masks.generate_natten(a["side"], a["side"], *a["kernel"]),
    "tiled_natten": lambda a: masks.generate_tiled_natten(*a["canvas"][::-1], *a["kernel"][::-1], *a["tile"][::-1]),
    "morton_natten": lambda a: masks.generate_morton_natten(a["side"], a["side"], *a["kernel"][::-1]),
    "sta_2d": lambda a: masks.generate_sta_mask_mod_2d(a["canvas"], a["kernel"], a["tile"], a["text"]),
    "sta_3d": lambda a: masks.generate_sta_mask_mod_3d(a["canvas"], a["kernel"], a["tile"], a["text"]),
    "svg_spatial": lambda a: masks.generate_spatial_head_mask_mod(
        a["prompt"], a["frames"], a["frame"], attn_sink=a["sink"], round_width=a["rounded"]
    ),
    "svg_temporal": lambda a: masks.generate_temporal_head_mask_mod(a["prompt"], a["frames"], a["frame"]),
}


def of_mask(x, a):
    return attend(x, a, MASKS[a["function"]](a))


def of_vsa(x, a):
    return attend(x, a, masks.generate_vsa_mask_mod(x["tiles"], a["tile"], x["sizes"]))


def of_score(x, a):
    heads = x["q"].shape[1]
    causal = masks.causal_mask if a.get("causal") else None
    score = {
        "alibi": lambda: mods.generate_alibi_bias(heads),
        "tanh_softcap": lambda: mods.generate_tanh_softcap(a["cap"]),
        "sandwich": lambda: generate_sandwich_bias(heads, a["keys"], a["width"]),
        "graphormer_spatial": lambda: generate_graphormer_spatial_bias(x["table"], x["distances"]),
        "graphormer_edges": lambda: generate_graphormer_edge_bias(x["table"], x["types"], x["hops"]),
        "mla_rope": lambda: generate_mla_rope_score_mod(x["q_rope"], x["k_rope"], heads, a["factor"]),
        "relu": lambda: generate_activation_score_mod(F.relu, a["offset"]),
        "sigmoid": lambda: generate_activation_score_mod(torch.sigmoid, a["offset"]),
        "gelu_tanh": lambda: generate_activation_score_mod(functools.partial(F.gelu, approximate="tanh"), a["offset"]),
    }
    return attend(x, a, causal, score[a["function"]]())


def of_gather(x, a):
    o, lse = gather_attn(
        x["q"],
        x["local"],
        x["pool"],
        x["indices"],
        x["sinks"],
        None,
        None,
        a["window"],
        a["shared"],
        scale=x["q"].shape[-1] ** -0.5,
    )
    return {"o": o, "lse": lse}


def packed(a):
    return torch.tensor(a["starts"], dtype=torch.int32) if "starts" in a else None


def of_gated_delta_rule(x, a):
    q, k = (F.normalize(x[name], p=2, dim=-1) for name in "qk")
    more = {"initial_state": x["h0"].transpose(-1, -2), "cu_seqlens": packed(a), "output_final_state": True}
    o, ht = reference_delta_rule(
        recurrent_forward, q, k, x["v"], x["g"], x["beta"], compute_dtype=q.dtype, scale=a["scale"], **more
    )
    return {"o": o, "ht": ht.transpose(-1, -2)}


def of_kda(x, a):
    q, k = (F.normalize(x[name], p=2, dim=-1) for name in "qk")
    # Its decays are powers of 2.
    g, h0 = x["g"] / math.log(2), x["h0"].transpose(-1, -2)
    o, ht = naive_recurrent_kda(q, k, x["v"], g, x["beta"], a["scale"], h0, True, packed(a))
    return {"o": o, "ht": ht.transpose(-1, -2)}


def inputs(a):
    dtype = DTYPES[a["dtype"]]
    make = lambda heads, length, dim: torch.randn(a["batch"], heads, length, dim).to(dtype)
    x = {"q": make(a["heads"], a["queries"], a["dim"])}
    x |= {name: make(a["kv_heads"], a["keys"], a["dim"]) for name in "kv"}
    function = a.get("function")
    if function == "mla_rope":
        x |= {"q_rope": make(a["heads"], a["queries"], 16), "k_rope": make(1, a["keys"], 16)}
    if function and function.startswith("graphormer"):
        nodes = a["queries"]
        edges = torch.rand(a["batch"], nodes, nodes) < 2 / nodes
        edges = edges | edges.transpose(1, 2)
        if function == "graphormer_spatial":
            x["distances"] = shortest_path_distances(edges, 5).long()
            x["table"] = torch.randn(a["heads"], 7)
        else:
            types = torch.randint(3, edges.shape)
            x["types"], x["hops"] = (t.long() for t in shortest_path_edge_types(edges, types, 4))
            x["table"] = torch.randn(a["heads"], 4, 3)
    return x


def vsa_inputs(a):
    shape = (a["time"], a["height"], a["width"])
    metadata = masks.create_vsa_tile_metadata(shape, (a["edge"],) * 3)
    a |= {"queries": metadata.padded_seq_length, "keys": metadata.padded_seq_length, "tile": metadata.tile_numel}
    x = inputs(a)
    sizes = metadata.variable_block_sizes
    tiles = masks.compute_vsa_topk_indices(
        x["q"].float(),
        x["k"].float(),
        a["tile"],
        a["count"],
        q_variable_block_sizes=sizes,
        kv_variable_block_sizes=sizes,
    )
    return x | {"tiles": tiles.long(), "sizes": sizes}


def gather_inputs(a):
    dtype, heads = DTYPES[a["dtype"]], 1 if a["shared"] else a["heads"]
    make = lambda heads, length: torch.randn(a["batch"], heads, length, a["dim"]).to(dtype)
    x = {"q": make(a["heads"], a["queries"]), "local": make(heads, a["queries"]), "pool": make(heads, a["pool"])}
    order = torch.rand(a["batch"], a["queries"], a["pool"]).argsort(-1)[..., : a["count"]]
    x["indices"] = order.masked_fill(torch.rand(order.shape) < 0.2, -1)
    return x | {"sinks": torch.randn(a["heads"])}


def recurrent_inputs(channels):
    def inputs(a):
        batch, length = (1, a["starts"][-1]) if "starts" in a else (a["batch"], a["length"])
        sequences = len(a["starts"]) - 1 if "starts" in a else batch
        heads, value_heads = a["heads"], a["heads"] * a["group"]
        dim, value_dim = a["dims"]
        x = {name: torch.randn(batch, length, heads, dim) for name in "qk"}
        x["v"] = torch.randn(batch, length, value_heads, value_dim)
        x["g"] = F.logsigmoid(torch.randn(batch, length, value_heads, *([dim] if channels else [])))
        x["beta"] = torch.randn(batch, length, value_heads).sigmoid()
        return x | {"h0": torch.randn(sequences, value_heads, dim, value_dim)}

    return inputs


def indexer_case(x, a):
    chosen = launch(x["q"], x["k"], x["w"], a["count"], a["causal"], a["ratio"])
    # Their order is that of the scores, which rounding may change.
    return {"indices": chosen.long().sort(-1).values}


def indexer_inputs(a):
    keys = a["queries"] // a["ratio"]
    shape = (a["batch"], a["queries"])
    return {
        "q": torch.randn(*shape, 8, a["dim"]),
        "k": torch.randn(a["batch"], keys, a["dim"]),
        "w": torch.rand(*shape, 8),
    }


SHAPES = {"batch": [1, 2], "heads": [1, 2], "dim": [32, 64], "dtype": ["f32", "f16"]}


def choices(functions):
    """Returns the cases of some functions, each with all its choices of numbers and a sample of shapes."""
    found = []
    for function, numbers in functions.items():
        numbers = [{"queries": 256} | n for n in numbers]
        for shape in pairwise(numbers=range(len(numbers)), **SHAPES):
            a = shape | numbers[shape.pop("numbers")] | {"function": function}
            found.append({"keys": a["queries"], "kv_heads": a["heads"]} | a)
    return found


WINDOWS = {
    "causal": [{}, {"queries": 200, "rule": True}],
    "sliding_window": [{"window": 31}, {"window": 100, "rule": True}],
    "dilated_sliding_window": [{"window": 32, "dilation": 2}, {"window": 64, "dilation": 7, "rule": True}],
    "global_sliding_window": [{"window": 16, "every": 50}, {"window": 4, "every": 128, "rule": True}],
    "batchify": [{"block": 64}, {"block": 50, "rule": True}],
}
DOCUMENTS = {
    "prefix_lm": [{"prefix": 32}, {"prefix": 100, "rule": True}],
    "document": [{"lengths": [100, 30, 1, 125]}, {"lengths": [1, 255], "rule": True}],
    "packed_causal_document": [{"lengths": [64, 64, 128]}, {"lengths": [3, 250, 3], "rule": True}],
    "shared_prefix": [
        {"lengths": [60, 40, 50, 30, 76], "prompts": [0, 0, 0, 3, 3]},
        {"lengths": [128, 64, 64], "prompts": [0, 0, 0]},
    ],
    "vision_cross_attention": [
        {"intervals": [0, 50, 50, 200, 200, 256], "picture": 32, "keys": 96},
        {"intervals": [20, 21, 21, 256], "picture": 50, "keys": 100},
    ],
}
TREE = [0, 0, 0, 1, 1, 2, 3, 3, 4, 5, 5, 6, 8, 9, 10, 10]
GENERATION = {
    "block_diffusion": [{"block": 16}, {"block": 32}],
    "jetspec_tree": [
        {"prefix": 100, "parents": TREE, "queries": 16, "keys": 116},
        {"prefix": 10, "parents": TREE, "queries": 16, "keys": 26, "rule": True},
    ],
    "jetspec_training": [
        {"prefix": 64, "block": 16, "queries": 128, "keys": 192},
        {"prefix": 100, "block": 8, "queries": 96, "keys": 196},
    ],
}
GRIDS = {
    "natten": [{"side": 16, "kernel": [5, 7]}, {"side": 16, "kernel": [13, 3]}],
    "tiled_natten": [
        {"canvas": [16, 16], "kernel": [7, 7], "tile": [8, 8]},
        {"canvas": [12, 20], "kernel": [5, 9], "tile": [4, 5], "queries": 240},
    ],
    "morton_natten": [{"side": 16, "kernel": [5, 5]}, {"side": 16, "kernel": [3, 9]}],
    "sta_2d": [
        {"canvas": [16, 16], "kernel": [8, 8], "tile": [4, 4], "text": 0},
        {"canvas": [12, 20], "kernel": [12, 12], "tile": [4, 4], "text": 20, "queries": 260},
    ],
    "sta_3d": [
        {"canvas": [4, 8, 8], "kernel": [2, 6, 6], "tile": [2, 2, 2], "text": 0},
        {"canvas": [6, 4, 8], "kernel": [6, 4, 4], "tile": [2, 2, 4], "text": 16, "queries": 208},
    ],
    "svg_spatial": [
        {"prompt": 16, "frames": 6, "frame": 40, "rounded": 16, "sink": False},
        {"prompt": 16, "frames": 6, "frame": 40, "rounded": 32, "sink": True},
    ],
    "svg_temporal": [{"prompt": 16, "frames": 6, "frame": 40}, {"prompt": 56, "frames": 4, "frame": 50}],
}
SCORES = {
    "alibi": [{"causal": True}, {"causal": False, "rule": True}],
    "tanh_softcap": [{"cap": 30}, {"cap": 2, "rule": True}],
    "sandwich": [{"width": 128, "causal": True}, {"width": 64, "causal": False}],
    "graphormer_spatial": [{"queries": n, "dtype": "f32"} for n in (50, 128)],
    "graphormer_edges": [{"queries": n, "dtype": "f32"} for n in (50, 128)],
    "mla_rope": [{"factor": x, "kv_heads": 1, "dtype": "f32"} for x in (1.0, 0.1)],
}
ACTIVATIONS = {name: [{"offset": 1.0}, {"offset": 0.5}] for name in ("relu", "sigmoid", "gelu_tanh")}
SEQUENCES = {"heads": [1, 2], "dims": [(64, 64), (32, 48)], "scale": [1.0, 0.125]}


def sequences(groups):
    more = SEQUENCES | {"group": groups}
    packed = pairwise(starts=[(0, 0, 7, 80, 300), (0, 64, 128)], **more)
    return pairwise(batch=[1, 2], length=[1, 7, 17, 100, 256], **more) + packed


def suites():
    close = {"o": {"each": [2e-3, 2e-3]}, "d": {"each": [2e-3, 2e-3]}}
    biased = {"o": {"each": [2e-3, 2e-3]}, "d": {"each": [2e-2, 2e-2]}}
    gathered = {"o": {"each": [1e-4, 1e-4]}, "d": {"each": [1e-4, 1e-4]}}
    linear = {"o": {"each": [2e-4, 2e-5]}, "d": {"each": [2e-4, 2e-5]}}
    tiles = pairwise(**SHAPES, time=[4, 5], height=[8, 6], width=[8], edge=[4], count=[1, 3])
    return {
        "windows": (of_mask, inputs, choices(WINDOWS), close),
        "documents": (of_mask, inputs, choices(DOCUMENTS), close),
        "drafts and diffusion": (of_mask, inputs, choices(GENERATION), close),
        "grids and videos": (of_mask, inputs, choices(GRIDS), close),
        "VSA": (of_vsa, vsa_inputs, [a | {"kv_heads": a["heads"]} for a in tiles], close),
        "score functions": (of_score, inputs, choices(SCORES), biased),
        "activations": (of_score, inputs, choices(ACTIVATIONS), close),
        "gather attention": (
            of_gather,
            gather_inputs,
            pairwise(
                batch=[1, 2],
                heads=[2, 4],
                dim=[32, 64],
                queries=[64, 200],
                pool=[50, 128],
                count=[8, 32],
                window=[16, 64],
                shared=[False, True],
                dtype=["f32"],
            ),
            gathered,
        ),
        "lightning indexer": (
            indexer_case,
            indexer_inputs,
            pairwise(batch=[1, 2], queries=[64, 256], dim=[32, 128], count=[8, 64], causal=[False, True], ratio=[1, 4]),
            {"o": {"each": [0, 0]}},
        ),
        "gated delta rule": (of_gated_delta_rule, recurrent_inputs(False), sequences([1, 2]), linear),
        "KDA": (of_kda, recurrent_inputs(True), sequences([1]), linear),
    }


if __name__ == "__main__":
    main(PACKAGE, suites())
