"""Corrects a fault in the wheel onnxruntime-webgpu 1.27.0, in the environment that runs this program.

Its compiler of WGSL moves the zero of a variable without an initial value out of the loop that
declares the variable. ONNX Runtime's attention kernel has such variables, and computes wrong
results on Vulkan. This program gives them an initial value, in the same number of bytes.
"""

import glob
import os

import onnxruntime

folder = os.path.join(os.path.dirname(onnxruntime.__file__), "capi")
for path in glob.glob(folder + "/*onnxruntime*.so*"):
    with open(path, "rb") as file:
        old = new = file.read()
    for i in b"1234":
        new = new.replace(b"var qk_%c : vec4<q_element_t>;" % i, b"var qk_%c=vec4<q_element_t>();" % i)
    if new != old:
        # A new file, because the library may be in use.
        os.remove(path)
        with open(path, "wb") as file:
            file.write(new)
        os.chmod(path, 0o755)
