"""Files of cases, for the programs that make them."""

import json
import os

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
