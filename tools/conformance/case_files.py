"""Files of cases and samples of grids, for the programs that make them."""

import itertools
import json
import os
import random

import numpy as np

TYPES = {
    "float64": "F64",
    "float32": "F32",
    "float16": "F16",
    "bfloat16": "BF16",
    "int64": "I64",
    "bool": "BOOL",
}


def write(path, tensors, metadata):
    """Writes named tensors as a safetensors file. Values of `metadata` that are not strings become JSON."""
    text = {key: x if isinstance(x, str) else json.dumps(x) for key, x in metadata.items()}
    head, blobs, at = {"__metadata__": text}, [], 0
    for name, x in tensors:
        data = np.ascontiguousarray(x).tobytes()
        head[name] = {"dtype": TYPES[str(x.dtype)], "shape": list(x.shape), "data_offsets": [at, at + len(data)]}
        blobs.append(data)
        at += len(data)
    text = json.dumps(head).encode()
    text += b" " * (-len(text) % 8)
    os.makedirs(os.path.dirname(path), exist_ok=True)
    with open(path, "wb") as file:
        file.write(len(text).to_bytes(8, "little") + text + b"".join(blobs))


def pairwise(axes, allowed=lambda case: True, seed=0, drawn=10000):
    """Chooses cases of a grid. Each pair of values of two axes occurs that occurs in `drawn` random cases.

    `axes` has the values of each axis. Each step takes the case with the most pairs that are still missing.
    """
    rng = random.Random(seed)
    cases = ({name: rng.choice(values) for name, values in axes.items()} for _ in itertools.repeat(None))
    cases = list(itertools.islice(filter(allowed, cases), drawn))
    pairs = [frozenset(itertools.combinations(case.items(), 2)) for case in cases]
    missing, chosen = set().union(*pairs), []
    while missing:
        best = max(range(drawn), key=lambda n: len(pairs[n] & missing))
        missing -= pairs[best]
        chosen.append(cases[best])
    return chosen
