"""Cases whose truth is PyTorch's: the same function in the case's type and in f64."""

import contextlib
import multiprocessing
import os
import sys

import ml_dtypes
import numpy as np
import torch

import case_files
from case_files import write

DTYPES = {"f32": torch.float32, "f16": torch.float16, "bf16": torch.bfloat16}
PYTORCH = f"PyTorch {torch.__version__.split('+')[0]}"


def pairwise(**axes):
    """A sample of a grid with as few cases as `case_files.pairwise` finds in 1000."""
    return case_files.pairwise(axes, drawn=1000)


@contextlib.contextmanager
def f32_is_f64():
    saved = torch.float32, torch.float, torch.Tensor.float
    torch.float32, torch.float, torch.Tensor.float = torch.float64, torch.float64, torch.Tensor.double
    torch.set_default_dtype(torch.float64)
    try:
        yield
    finally:
        torch.float32, torch.float, torch.Tensor.float = saved
        torch.set_default_dtype(torch.float32)


def each_sequence(function):
    """Calls a function for each packed sequence."""

    def packed(x, a):
        starts = a.get("starts")
        if starts is None:
            return function(x, a)
        parts = []
        for n, (start, end) in enumerate(zip(starts, starts[1:])):
            part = {key: t[n : n + 1] if key == "h0" else t[:, start:end] for key, t in x.items()}
            parts.append(function(part, a))
        o = torch.cat([part["o"] for part in parts], 1)
        return {"o": o} | ({"ht": torch.cat([part["ht"] for part in parts])} if "ht" in parts[0] else {})

    return packed


def results(function, x, a, seed):
    """Returns the outputs of a function, and the gradients of its inputs for random gradients of its outputs."""
    leaves = {key: t.detach().clone() for key, t in x.items()}
    wanted = [key for key, t in leaves.items() if t.is_floating_point() and not key.endswith("_idx")]
    for key in wanted:
        leaves[key].requires_grad_()
    out = function(leaves, a)
    torch.manual_seed(seed)
    # They are exact in bf16, so that the same numbers serve all types.
    d_out = {
        f"d_{key}": torch.randn(t.shape, dtype=torch.float64).to(torch.bfloat16).to(t.dtype) for key, t in out.items()
    }
    if not any(t.requires_grad for t in out.values()):
        return out, {}
    grads = torch.autograd.grad(list(out.values()), [leaves[key] for key in wanted], list(d_out.values()))
    return out | {f"d_{key}": grad for key, grad in zip(wanted, grads)}, d_out


def array(t):
    t = t.detach().contiguous()
    if t.dtype == torch.bfloat16:
        return t.view(torch.int16).numpy().view(ml_dtypes.bfloat16)
    return t.numpy()


def save(folder, package, operator, suite, n):
    """Writes case n of an operator. `rules` are those of the package's tests, for outputs, gradients or single names."""
    function, inputs, choices, rules = suite
    a = choices[n]
    torch.manual_seed(n)
    x = inputs(a)
    out, d_out = results(function, x, a, n)
    with f32_is_f64():
        wide = {key: t.double() if t.is_floating_point() else t for key, t in x.items()}
        exact, _ = results(function, wide, a, n)
    given = x | d_out | ({"starts": torch.tensor(a["starts"])} if "starts" in a else {})
    tensors = [(f"in.{key}", array(t)) for key, t in given.items()]
    for key, t in out.items():
        tensors += [(f"out.{key}", array(t)), (f"f64.{key}", array(exact[key]).astype(np.float64))]
    metadata = {
        "package": package,
        "operator": operator,
        "attributes": a,
        "inputs": list(given),
        "outputs": list(out),
        "rules": {key: rules.get(key, rules["d" if key.startswith("d_") else "o"]) for key in out},
    }
    name = a.get("function", operator).replace(" ", "_")
    write(os.path.join(folder, f"{name}_{n:03}.safetensors"), tensors, metadata)


SUITES = {}


def job(arguments):
    torch.set_num_threads(1)
    folder, package, operator, n = arguments
    save(folder, package, operator, SUITES[operator], n)


def main(package, suites):
    """Writes all cases of a package into the folder that is the program's argument."""
    sizes = {operator: len(suite[2]) for operator, suite in suites.items()}
    jobs = [(sys.argv[1], package, operator, n) for operator, size in sizes.items() for n in range(size)]
    with multiprocessing.Pool(2, initializer=SUITES.update, initargs=(suites,)) as pool:
        pool.map(job, jobs, chunksize=1)
