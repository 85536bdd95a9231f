"""ort.py f32|f16 QUERIES KEYS HEAD_DIM: one call of ONNX Runtime's MultiHeadAttention on WebGPU, 8 heads."""

import os
import sys

import numpy
import onnxruntime
from onnx import TensorProto, helper

dtype = sys.argv[1]
queries, keys, head_dim = map(int, sys.argv[2:])
kind, array = {"f32": (TensorProto.FLOAT, numpy.float32), "f16": (TensorProto.FLOAT16, numpy.float16)}[dtype]
shapes = {"q": [1, queries, 8 * head_dim], "k": [1, keys, 8 * head_dim], "v": [1, keys, 8 * head_dim]}
value = helper.make_tensor_value_info
node = helper.make_node("MultiHeadAttention", list(shapes), ["y"], domain="com.microsoft", num_heads=8)
graph = helper.make_graph(
    [node], "g", [value(name, kind, shape) for name, shape in shapes.items()], [value("y", kind, shapes["q"])]
)
opsets = [helper.make_opsetid("", 23), helper.make_opsetid("com.microsoft", 1)]
model = helper.make_model(graph, opset_imports=opsets, ir_version=11)
options = onnxruntime.SessionOptions()
# Not by the CPU instead, without a word.
options.add_session_config_entry("session.disable_cpu_ep_fallback", "1")
session = onnxruntime.InferenceSession(model.SerializeToString(), options, providers=["WebGpuExecutionProvider"])
session.run(None, {name: numpy.zeros(shape, array) for name, shape in shapes.items()})
sys.stdout.flush()
# Sessions that end crash.
os._exit(0)
