"""Writes ONNX's node cases of some operators as safetensors files: python onnx_cases.py FOLDER.

A file has the inputs (`in.NAME`), the outputs that ONNX expects (`out.NAME`), and the outputs of ONNX's
reference implementation in f64 (`f64.NAME`). Its metadata has the operator, attributes, names in order and ONNX's rule.
"""

import os
import sys
import warnings

import numpy as np

warnings.simplefilter("ignore")
import onnx
from onnx.backend.test.case.node import collect_testcases
from onnx.reference import ReferenceEvaluator

from case_files import write

OPERATORS = {
    "Attention",
    "CausalConvWithState",
    "FlexAttention",
    "Gelu",
    "LayerNormalization",
    "LinearAttention",
    "RMSNormalization",
    "RotaryEmbedding",
    "Softmax",
    "Swish",
    "TensorScatter",
}


def attribute(a):
    value = onnx.helper.get_attribute_value(a)
    if isinstance(value, bytes):
        return value.decode()
    if isinstance(value, onnx.GraphProto):
        # A function of FlexAttention. Its name tells which it is, and its numbers are constants in it.
        constants = [onnx.numpy_helper.to_array(t) for t in value.initializer]
        for node in value.node:
            for a in node.attribute if node.op_type == "Constant" else []:
                constants.append(onnx.numpy_helper.to_array(onnx.helper.get_attribute_value(a)))
        numbers = [float(x.item()) for x in constants if x.size == 1]
        return {"name": value.name, "constants": [x for x in numbers if np.isfinite(x)]}
    return value


def in_f64(model, names, inputs):
    """Returns the outputs of the reference implementation for inputs in f64, or None if it takes none."""
    wide = [x.astype(np.float64) if "float" in str(x.dtype) else x for x in inputs]
    try:
        return ReferenceEvaluator(model).run(None, dict(zip(names, wide)))
    except Exception as error:
        print(f"{model.graph.name}: no f64: {error}", file=sys.stderr)
        return None


def main(folder):
    for case in collect_testcases(None):
        graph = case.model.graph
        if len(graph.node) != 1 or graph.node[0].op_type not in OPERATORS:
            continue
        node = graph.node[0]
        inputs, outputs = case.data_sets[0]
        ins = [name for name in node.input if name]
        outs = [name for name in node.output if name]
        tensors = [(f"in.{n}", x) for n, x in zip(ins, inputs)]
        tensors += [(f"out.{n}", x) for n, x in zip(outs, outputs)]
        wide = in_f64(case.model, ins, inputs)
        if wide is not None:
            tensors += [(f"f64.{n}", np.asarray(x).astype(np.float64)) for n, x in zip(outs, wide)]
        metadata = {
            "package": f"onnx {onnx.__version__}",
            "operator": node.op_type,
            "attributes": {a.name: attribute(a) for a in node.attribute},
            # Inputs that are left out are empty.
            "inputs": list(node.input),
            "outputs": outs,
            "rules": {n: {"each": [case.rtol, case.atol]} for n in outs},
        }
        name = case.name.removeprefix("test_")
        write(os.path.join(folder, f"{name}.safetensors"), tensors, metadata)


main(sys.argv[1])
