"""The two models' weights, and their results in f64."""

import math
import os

import gguf
import numpy as np
from safetensors.numpy import load_file, save_file

LAYERS, HEADS = 6, 12  # of all-MiniLM-L6-v2


class SmolLM:
    """SmolLM2 from its GGUF file."""

    def __init__(self, path):
        reader = gguf.GGUFReader(path)
        value = lambda name: reader.fields["llama." + name].contents()
        self.layers, self.width = value("block_count"), value("embedding_length")
        self.heads, self.kv_heads = value("attention.head_count"), value("attention.head_count_kv")
        self.dim = self.width // self.heads
        self.epsilon, self.base = value("attention.layer_norm_rms_epsilon"), value("rope.freq_base")
        self.tensors = {t.name: t for t in reader.tensors}

    def f32(self, name):
        """A tensor as `[rows, columns]`."""
        t = self.tensors[name + ".weight"]
        return gguf.quants.dequantize(t.data, t.tensor_type).reshape(t.shape[::-1])

    def save_f32(self, path):
        """Writes the weights in f32, with a column for each output. Returns what else a program has to know.

        Queries and keys have halves instead of pairs of channels, and matrices with the same inputs are joined.
        """
        order = np.r_[0 : self.dim : 2, 1 : self.dim : 2]
        halves = lambda w: w.reshape(-1, self.dim, self.width)[:, order].reshape(w.shape)
        w = {"embedding": self.f32("token_embd"), "norm": self.f32("output_norm").ravel()}
        for n in range(self.layers):
            part = lambda name: self.f32(f"blk.{n}.{name}")
            joined = [halves(part("attn_q")), halves(part("attn_k")), part("attn_v")]
            w[f"{n}.qkv"] = np.concatenate(joined).T
            w[f"{n}.gate_up"] = np.concatenate([part("ffn_gate"), part("ffn_up")]).T
            for name in ("attn_output", "ffn_down"):
                w[f"{n}.{name}"] = part(name).T
            for name in ("attn_norm", "ffn_norm"):
                w[f"{n}.{name}"] = part(name).ravel()
        save_file({name: np.ascontiguousarray(t, np.float32) for name, t in w.items()}, path)
        counts = {name: int(getattr(self, name)) for name in ("layers", "heads", "kv_heads", "dim")}
        return {"file": path, **counts, "epsilon": float(self.epsilon), "base": float(self.base)}

    def angles(self, positions):
        """The angles of rotary positions: `[positions, dim / 2]`."""
        return np.outer(positions, self.base ** (-np.arange(0, self.dim, 2) / self.dim))

    def truth(self):
        """Returns a function that appends tokens and returns the last one's logits, in f64."""
        w = {name[:-7]: self.f32(name[:-7]).astype(np.float64) for name in self.tensors}
        cache = [None] * self.layers

        def norm(x, weight):
            return x / np.sqrt((x * x).mean(-1, keepdims=True) + self.epsilon) * weight

        def rotated(x, positions):
            angles = self.angles(positions)[:, None]
            a, b = x[..., ::2], x[..., 1::2]
            turned = [a * np.cos(angles) - b * np.sin(angles), a * np.sin(angles) + b * np.cos(angles)]
            return np.stack(turned, -1).reshape(x.shape)

        def feed(tokens, had):
            at = had + np.arange(len(tokens))
            x = w["token_embd"][tokens]
            for n in range(self.layers):
                part = lambda name: w[f"blk.{n}.{name}"]
                normed = norm(x, part("attn_norm"))
                q, k, v = ((normed @ part(f"attn_{s}").T).reshape(len(tokens), -1, self.dim) for s in "qkv")
                q, k = rotated(q, at), rotated(k, at)
                if had:
                    k, v = (np.concatenate(pair) for pair in zip(cache[n], (k, v)))
                cache[n] = (k, v)
                k, v = (np.repeat(t, self.heads // self.kv_heads, 1) for t in (k, v))
                scores = np.einsum("qhd,khd->hqk", q, k) / math.sqrt(self.dim)
                scores[:, at[:, None] < np.arange(len(k))] = -np.inf
                weights = np.exp(scores - scores.max(-1, keepdims=True))
                weights /= weights.sum(-1, keepdims=True)
                x = x + np.einsum("hqk,khd->qhd", weights, v).reshape(len(tokens), -1) @ part("attn_output").T
                normed = norm(x, part("ffn_norm"))
                gate = normed @ part("ffn_gate").T
                x = x + (gate / (1 + np.exp(-gate)) * (normed @ part("ffn_up").T)) @ part("ffn_down").T
            return w["token_embd"] @ norm(x[-1], w["output_norm"])

        return feed


def minilm(folder):
    """The tensors of MiniLM."""
    return load_file(os.path.join(folder, "model.safetensors"))


def in_f32(work, folder):
    """What a program needs that reads no GGUF file: both models' weights in f32, and their sizes."""
    smollm, path = (os.path.join(folder, f"{name}.safetensors") for name in ("smollm", "minilm"))
    is_linear = lambda name, t: t.ndim == 2 and not name.startswith("embeddings")
    w = {name: t.T if is_linear(name, t) else t for name, t in minilm(work["minilm"]).items() if t.dtype == np.float32}
    save_file({name: np.ascontiguousarray(t) for name, t in w.items()}, path)
    return {
        "smollm_f32": SmolLM(work["gguf"]).save_f32(smollm),
        "minilm_f32": {"file": path, "layers": LAYERS, "heads": HEADS},
    }


def minilm_truth(folder, sentences):
    """The unit vectors of sentences, in f64."""
    w = {name: t.astype(np.float64) for name, t in minilm(folder).items() if t.dtype == np.float32}
    erf = np.vectorize(math.erf, otypes=[np.float64])

    def norm(x, name):
        x = x - x.mean(-1, keepdims=True)
        x = x / np.sqrt((x * x).mean(-1, keepdims=True) + 1e-12)
        return x * w[name + ".LayerNorm.weight"] + w[name + ".LayerNorm.bias"]

    def linear(x, name):
        return x @ w[name + ".weight"].T + w[name + ".bias"]

    vectors = []
    for tokens in sentences:
        words, table = w["embeddings.word_embeddings.weight"], w["embeddings.position_embeddings.weight"]
        x = words[tokens] + table[: len(tokens)] + w["embeddings.token_type_embeddings.weight"][0]
        x = norm(x, "embeddings")
        for n in range(LAYERS):
            layer = f"encoder.layer.{n}."
            parts = (linear(x, f"{layer}attention.self.{s}") for s in ("query", "key", "value"))
            q, k, v = (t.reshape(len(tokens), HEADS, -1) for t in parts)
            scores = np.einsum("qhd,khd->hqk", q, k) / math.sqrt(q.shape[-1])
            weights = np.exp(scores - scores.max(-1, keepdims=True))
            weights /= weights.sum(-1, keepdims=True)
            attended = np.einsum("hqk,khd->qhd", weights, v).reshape(x.shape)
            x = norm(x + linear(attended, f"{layer}attention.output.dense"), f"{layer}attention.output")
            up = linear(x, f"{layer}intermediate.dense")
            up = up * (1 + erf(up / math.sqrt(2))) / 2
            x = norm(x + linear(up, f"{layer}output.dense"), f"{layer}output")
        vectors.append(x.mean(0) / np.linalg.norm(x.mean(0)))
    return np.array(vectors)
