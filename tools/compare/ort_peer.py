"""ONNX Runtime's WebGPU provider, with graphs made here. A node without a WebGPU kernel is an error.

SmolLM2 keeps the 4 and 8 bits of its file. A block of Q4_1 is d·q + m. MatMulNBits multiplies by
d·(q − 8), and a MatMul with the sums of the inputs' blocks adds the rest, m + 8·d.
"""

import numpy as np
import onnxruntime as ort
from onnx import TensorProto, helper, numpy_helper

import peer
import weights

BATCH = 8  # sentences; of 8, 16 and 32 it took the least time on a software driver


class Graph:
    def __init__(self):
        self.nodes, self.tensors, self.names = [], [], 0

    def tensor(self, array):
        self.names += 1
        self.tensors.append(numpy_helper.from_array(np.ascontiguousarray(array), f"t{self.names}"))
        return f"t{self.names}"

    def node(self, op, inputs, outputs=(), contrib=False, **attributes):
        """Adds a node. Arrays among its inputs are constants. Returns its first output."""
        self.names += 1
        outputs = list(outputs) or [f"t{self.names}"]
        inputs = [x if isinstance(x, str) else self.tensor(x) for x in inputs]
        domain = "com.microsoft" if contrib else ""
        self.nodes.append(helper.make_node(op, inputs, outputs, domain=domain, **attributes))
        return outputs[0]

    def session(self, inputs, outputs):
        values = [[helper.make_tensor_value_info(*v) for v in side] for side in (inputs, outputs)]
        graph = helper.make_graph(self.nodes, "graph", *values, self.tensors)
        opsets = [helper.make_opsetid("", 21), helper.make_opsetid("com.microsoft", 1)]
        model = helper.make_model(graph, opset_imports=opsets, ir_version=10)
        options = ort.SessionOptions()
        options.log_severity_level = 3
        options.add_session_config_entry("session.disable_cpu_ep_fallback", "1")
        return ort.InferenceSession(model.SerializeToString(), options, ["WebGpuExecutionProvider"])


FLOAT, INT64, INT32 = TensorProto.FLOAT, TensorProto.INT64, TensorProto.INT32


def smollm(work):
    model = weights.SmolLM(work["gguf"])
    g, context = Graph(), work["context"]

    def blocks(name, size):
        """The blocks of a tensor, and the two numbers of f16 at their start."""
        data = model.tensors[name + ".weight"].data
        data = data.reshape(len(data), -1, size)
        return data, data[..., :4].copy().view(np.float16).astype(np.float32)

    def linear(x, names):
        """The products with tensors in Q4_1, joined along their rows."""
        data, numbers = (np.concatenate(parts) for parts in zip(*(blocks(name, 20) for name in names)))
        d, m, q = numbers[..., 0], numbers[..., 1], data[..., 4:]
        q = np.concatenate([q & 15, q >> 4], -1)
        sizes = dict(N=len(d), K=32 * d.shape[1], block_size=32)
        y = g.node("MatMulNBits", [x, q[..., ::2] | q[..., 1::2] << 4, d], contrib=True, bits=4, **sizes)
        sums = g.node("ReduceSum", [g.node("Reshape", [x, np.array([1, 0, -1, 32])]), np.array([3])], keepdims=0)
        return g.node("Add", [y, g.node("MatMul", [sums, (m + 8 * d).T])])

    def norm(x, name, added=None):
        weight = model.f32(name).ravel()
        if added is None:
            return g.node("SimplifiedLayerNormalization", [x, weight], epsilon=model.epsilon, axis=-1), x
        g.names += 1
        outputs = [f"n{g.names}", "", "", f"s{g.names}"]
        y = g.node("SkipSimplifiedLayerNormalization", [x, added, weight], outputs, True, epsilon=model.epsilon)
        return y, outputs[3]

    angles = model.angles(np.arange(context)).astype(np.float32)
    cos, sin = g.tensor(np.cos(angles)), g.tensor(np.sin(angles))
    x, added = g.node("Gather", [model.f32("token_embd"), "ids"]), None
    for n in range(model.layers):
        names = lambda *parts: [f"blk.{n}.{part}" for part in parts]
        normed, x = norm(x, f"blk.{n}.attn_norm", added)
        qkv = linear(normed, names("attn_q", "attn_k", "attn_v"))
        inputs = [qkv, "", "", f"pk{n}", f"pv{n}", "before", "total", cos, sin]
        attended = g.node("GroupQueryAttention", inputs, [f"a{n}", f"k{n}", f"v{n}"], True, num_heads=model.heads,
                          kv_num_heads=model.kv_heads, do_rotary=1, rotary_interleaved=1)
        added = linear(attended, names("attn_output"))
        normed, x = norm(x, f"blk.{n}.ffn_norm", added)
        gate, up = (linear(normed, names(name)) for name in ("ffn_gate", "ffn_up"))
        inner = g.node("Mul", [g.node("Mul", [gate, g.node("Sigmoid", [gate])]), up])
        added = linear(inner, names("ffn_down"))
    last = lambda t: g.node("Slice", [t, np.array([-1]), np.array([2**31]), np.array([1])])
    normed, _ = norm(last(x), "output_norm", last(added))
    data, numbers = blocks("token_embd", 34)
    # 128 is MatMulNBits' zero for 8 bits.
    g.node("MatMulNBits", [normed, data[..., 2:] ^ 128, numbers[..., 0]], ["logits"], True, bits=8, N=len(data),
           K=model.width, block_size=32)

    shape = [1, model.kv_heads, context, model.dim]
    pairs = [(f"{s}{n}", FLOAT, shape) for n in range(model.layers) for s in "kv"]
    session = g.session(
        [("ids", INT64, [1, "rows"]), ("before", INT32, [1]), ("total", INT32, [1])]
        + [("p" + name, *rest) for name, *rest in pairs],
        [("logits", FLOAT, [1, 1, len(data)])] + pairs)
    # Keys and values stay on the device, in buffers that are inputs and outputs.
    make = Graph()
    make.node("Identity", ["a"], ["b"])
    make = make.session([("a", FLOAT, shape)], [("b", FLOAT, shape)])
    binding = session.io_binding()
    for name, _, _ in pairs:
        own = make.io_binding()
        own.bind_cpu_input("a", np.zeros(shape, np.float32))
        own.bind_output("b", "gpu")
        make.run_with_iobinding(own)
        value = own.get_outputs()[0]
        binding.bind_ortvalue_input("p" + name, value)
        binding.bind_ortvalue_output(name, value)

    def feed(tokens, had):
        binding.bind_cpu_input("ids", np.array([tokens], np.int64))
        binding.bind_cpu_input("before", np.array([had + len(tokens) - 1], np.int32))
        binding.bind_cpu_input("total", np.array([had + len(tokens)], np.int32))
        binding.bind_output("logits", "cpu")
        session.run_with_iobinding(binding)
        return binding.get_outputs()[-1].numpy().ravel()

    feed.keep = make  # It owns the memory of keys and values.
    return lambda: peer.answer(feed, work)


def minilm(work):
    w = weights.minilm(work["minilm"])
    g = Graph()

    def linear(x, name, bias=True):
        y = g.node("MatMul", [x, w[name + ".weight"].T])
        return g.node("Add", [y, w[name + ".bias"]]) if bias else y

    def norm(x, added, name):
        inputs = [x, added, w[name + ".LayerNorm.weight"], w[name + ".LayerNorm.bias"]]
        return g.node("SkipLayerNormalization", inputs, contrib=True, epsilon=1e-12)

    x = g.node("Gather", [w["embeddings.word_embeddings.weight"], "ids"])
    table = w["embeddings.position_embeddings.weight"] + w["embeddings.token_type_embeddings.weight"][0]
    x = norm(x, g.node("Gather", [table, "positions"]), "embeddings")
    for n in range(weights.LAYERS):
        layer = f"encoder.layer.{n}."
        q, k, v = (linear(x, f"{layer}attention.self.{s}") for s in ("query", "key", "value"))
        attended = g.node("MultiHeadAttention", [q, k, v, "", "", "bias"], contrib=True, num_heads=weights.HEADS)
        x = norm(x, linear(attended, f"{layer}attention.output.dense"), f"{layer}attention.output")
        up = linear(x, f"{layer}intermediate.dense", bias=False)
        up = g.node("BiasGelu", [up, w[f"{layer}intermediate.dense.bias"]], contrib=True)
        x = norm(x, linear(up, f"{layer}output.dense"), f"{layer}output")
    total = g.node("ReduceSum", [g.node("Mul", [x, "real"]), np.array([1])], keepdims=0)
    square = g.node("ReduceSum", [g.node("Mul", [total, total]), np.array([1])], keepdims=1)
    g.node("Div", [total, g.node("Sqrt", [square])], ["vectors"])
    session = g.session(
        [("ids", INT64, ["n", "s"]), ("positions", INT64, ["n", "s"]), ("real", FLOAT, ["n", "s", 1]),
         ("bias", FLOAT, ["n", 1, "s", "s"])], [("vectors", FLOAT, ["n", 384])])

    def vectors(sentences):
        order = sorted(range(len(sentences)), key=lambda n: -len(sentences[n]))
        found = np.empty((len(sentences), 384), np.float32)
        for start in range(0, len(order), BATCH):
            now = order[start : start + BATCH]
            longest = len(sentences[now[0]])
            real = np.array([[n < len(sentences[s]) for n in range(longest)] for s in now])
            ids = np.array([sentences[s] + [0] * (longest - len(sentences[s])) for s in now], np.int64)
            hidden = np.where(real, 0, -1e4).astype(np.float32)[:, None, None]
            bias = np.ascontiguousarray(np.broadcast_to(hidden, (len(now), 1, longest, longest)))
            positions = np.ascontiguousarray(np.broadcast_to(np.arange(longest), ids.shape))
            inputs = {"ids": ids, "positions": positions, "real": real[..., None].astype(np.float32), "bias": bias}
            found[now] = session.run(None, inputs)[0]
        return found

    return lambda: peer.embed(vectors, work)


peer.serve({"smollm": smollm, "minilm": minilm})
