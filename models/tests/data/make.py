"""Writes every_type.gguf with llama.cpp's own package: pip install gguf==0.19.0

The file has a tensor of every supported type, and after each its dequantised values as F32.
"""

import numpy
from gguf import GGMLQuantizationType as Type
from gguf import GGUFWriter
from gguf.quants import dequantize, quantize

random = numpy.random.default_rng(19)
writer = GGUFWriter("every_type.gguf", "llama")
writer.add_custom_alignment(64)
writer.add_uint8("of.u8", 200)
writer.add_int8("of.i8", -5)
writer.add_uint16("of.u16", 60000)
writer.add_int16("of.i16", -300)
writer.add_uint32("of.u32", 4_000_000_000)
writer.add_int32("of.i32", -70000)
writer.add_uint64("of.u64", 1 << 40)
writer.add_int64("of.i64", -(1 << 40))
writer.add_float32("of.f32", 0.5)
writer.add_float64("of.f64", 1e-300)
writer.add_bool("of.bool", True)
writer.add_string("of.string", "Grüße, 世界")
writer.add_array("of.strings", ["<s>", "", "Ġa"])
writer.add_array("of.numbers", [1, -2, 3])
writer.add_array("of.floats", [0.25, -1.5])
for kind in [Type.F32, Type.F16, Type.BF16, Type.Q8_0, Type.Q4_0, Type.Q4_1]:
    x = random.standard_normal((2, 3, 64)).astype(numpy.float32)
    x[0, 0, :5] = [0.0, -0.0, 1e-8, 3.0, -60000.0]
    stored = quantize(x, kind)
    writer.add_tensor(kind.name, stored, raw_dtype=kind)
    writer.add_tensor(kind.name + ".dequantised", dequantize(stored, kind).astype(numpy.float32))
writer.add_tensor("Q5_0", quantize(x, Type.Q5_0), raw_dtype=Type.Q5_0)
writer.add_tensor("vector", numpy.arange(7, dtype=numpy.float32))
writer.write_header_to_file()
writer.write_kv_data_to_file()
writer.write_tensors_to_file()
writer.close()
