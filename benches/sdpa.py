#!/usr/bin/env python3
"""PyTorch's scaled_dot_product_attention on the problems of rows that benches wrote, as a yardstick.

usage: sdpa.py ROWS [--seconds N] [--cpu]

Reads the attention problems of ROWS (JSON lines), runs each with every backend of PyTorch's that takes it, and appends rows of
the same form to ROWS. The last queries of the first and the last head are compared with float64 first: what is wrong
has no time. On CUDA by events, medians; with --cpu on the processor. --seconds ends it in time, --cpu is for tests.
Needs Python's standard library and torch >= 2.5.
"""

import argparse
import json
import math
import statistics
import sys
import time
import warnings

SIZES = ("batch", "heads", "kv_heads", "q_len", "kv_len", "head_dim", "value_dim")
BENCHES = ("kernels", "matrix", "decode", "scaling")
# Exit statuses: there is nothing to run it on; the time was up, as `timeout` says it.
SKIPPED, LATE = 3, 124


def problems(path):
    """Each once, in the order of the rows: sizes, mask, dtype."""
    found = {}
    with open(path, encoding="utf-8") as rows:
        for line in filter(str.strip, rows):
            row = json.loads(line)
            if row.get("bench") in BENCHES and row.get("what") != "layer" and all(size in row for size in SIZES):
                key = tuple(row[size] for size in SIZES) + (row.get("mask", "none"), row.get("dtype", "f32"))
                found.setdefault(key, row.get("shape", ""))
    return found


def seen(torch, queries, keys, mask, device):
    """The keys that each of the last `len(queries)` may see, aligned bottom-right."""
    i = torch.arange(keys - queries, keys, device=device)[:, None]
    j = torch.arange(keys, device=device)[None]
    return j <= i if mask == "causal" else torch.ones(queries, keys, dtype=torch.bool, device=device)


def truth(torch, q, k, v, mask, rows):
    """float64, for the last `rows` queries of the first and of the last head."""
    group = q.shape[1] // k.shape[1]
    parts = []
    for b, h in ((0, 0), (q.shape[0] - 1, q.shape[1] - 1)):
        q64, k64, v64 = q[b, h, -rows:].double(), k[b, h // group].double(), v[b, h // group].double()
        scores = q64 @ k64.T / math.sqrt(q.shape[3])
        scores = scores.masked_fill(~seen(torch, rows, k.shape[2], mask, q.device), float("-inf"))
        parts.append(torch.softmax(scores, -1) @ v64)
    return torch.stack(parts)


def wrong(torch, out, want, rows, dtype):
    """How far off, or None. Half precision keeps 11 bits, of weights too; without TF32 f32 keeps 24."""
    got = torch.stack([out[0, 0, -rows:], out[-1, -1, -rows:]]).double()
    error = ((got - want).abs().max() / want.abs().max()).item()
    return None if error < {"f16": 4e-3, "f32": 2e-5}[dtype] else error


def measure(torch, run, cuda, budget):
    """Median in ms. On CUDA so many calls between two events that these do not count."""
    if not cuda:
        times = []
        end = time.monotonic() + budget
        while len(times) < 3 or (len(times) < 15 and time.monotonic() < end):
            start = time.perf_counter()
            run()
            times.append((time.perf_counter() - start) * 1e3)
        return statistics.median(times)

    def timed(calls):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        for _ in range(calls):
            run()
        end.record()
        end.synchronize()
        return start.elapsed_time(end) / calls

    for _ in range(3):
        run()
    torch.cuda.synchronize()
    one = max(timed(3), 1e-4)
    calls = max(1, min(200, math.ceil(2.0 / one)))
    return statistics.median(timed(calls) for _ in range(max(3, min(15, int(budget * 1e3 / (one * calls))))))


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("rows")
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--cpu", action="store_true")
    arguments = parser.parse_args()
    deadline = time.monotonic() + arguments.seconds
    try:
        import torch
        from torch.nn.attention import SDPBackend, sdpa_kernel
        from torch.nn.attention.bias import causal_lower_right
        from torch.nn.functional import scaled_dot_product_attention
    except ImportError as error:
        print(f"sdpa: skipped: {error}")
        return SKIPPED
    warnings.simplefilter("ignore")  # PyTorch says at length why a backend refuses
    cuda = not arguments.cpu
    if cuda and not torch.cuda.is_available():
        print(f"sdpa: skipped: torch {torch.__version__} finds no CUDA device")
        return SKIPPED
    device = "cuda" if cuda else "cpu"
    name = torch.cuda.get_device_name() if cuda else "processor"
    print(f"torch {torch.__version__} on {name}")
    torch.backends.cuda.matmul.allow_tf32 = False
    torch.backends.cudnn.allow_tf32 = False
    torch.set_grad_enabled(False)
    dtypes = {"f16": torch.float16, "f32": torch.float32}
    backends = {
        "flash": SDPBackend.FLASH_ATTENTION,
        "efficient": SDPBackend.EFFICIENT_ATTENTION,
        "cudnn": getattr(SDPBackend, "CUDNN_ATTENTION", None),
        "math": SDPBackend.MATH,
    }
    failures = left_out = 0
    for key, shape in problems(arguments.rows).items():
        (batch, heads, kv_heads, q_len, kv_len, head_dim, value_dim), (mask, dtype) = key[:7], key[7:]
        title = f"{shape} {mask} {dtype}"
        if time.monotonic() > deadline:
            left_out += 1
            continue
        if mask not in ("none", "causal") or dtype not in dtypes:
            print(f"{title}: skipped: no such mask or dtype here")
            continue
        torch.manual_seed(1)
        make = lambda *size: torch.rand(size, device=device).mul_(2).sub_(1).to(dtypes[dtype])
        q = make(batch, heads, q_len, head_dim)
        k, v = make(batch, kv_heads, kv_len, head_dim), make(batch, kv_heads, kv_len, value_dim)
        options = {"enable_gqa": True} if heads != kv_heads else {}
        if mask == "causal" and q_len > 1:
            # is_causal aligns top-left, which is the same for squares and the only form that all backends know.
            options |= {"is_causal": True} if q_len == kv_len else {"attn_mask": causal_lower_right(q_len, kv_len)}
        rows = min(4, q_len)
        want = truth(torch, q, k, v, mask, rows)
        for backend, constant in backends.items():
            if constant is None or time.monotonic() > deadline:
                continue
            # The score matrix of f32, twice: beyond that it only takes time.
            if backend == "math" and 8 * batch * heads * q_len * kv_len > 16e9:
                print(f"{title}: math skipped: too large a score matrix")
                continue
            run = lambda: scaled_dot_product_attention(q, k, v, **options)
            try:
                with sdpa_kernel(constant):
                    error = wrong(torch, run(), want, rows, dtype)
                    if error is not None:
                        print(f"{title}: {backend} computes something else: off by {error:.1e}")
                        failures += 1
                        continue
                    ms = measure(torch, run, cuda, 0.3)
            except (RuntimeError, TypeError, ValueError) as refusal:
                print(f"{title}: {backend} refuses: {str(refusal).splitlines()[0][:90]}")
                continue
            row = dict(zip(SIZES, key), bench="torch", what=f"sdpa {backend}", shape=shape, mask=mask, dtype=dtype, ms=ms)
            row |= {"device": name, "driver": f"torch {torch.__version__}", "backend": device}
            print(f"{title}: {backend} {ms:.4f} ms")
            with open(arguments.rows, "a", encoding="utf-8") as file:
                file.write(json.dumps(row, ensure_ascii=False) + "\n")
    if left_out:
        print(f"sdpa: no time for {left_out} problems")
    return 1 if failures else LATE if left_out else 0


if __name__ == "__main__":
    sys.exit(main())
