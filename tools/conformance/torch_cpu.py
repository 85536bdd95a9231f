"""Lets PyTorch's CUDA wheel work without CUDA libraries, on a CPU: python torch_cpu.py FOLDER/torch/lib.

Each library that PyTorch needs becomes an empty one, in which every function returns an error. It needs a C compiler,
`nm` and `readelf`, and spares 5 GB.
"""

import pathlib
import re
import subprocess
import sys

PREFIXES = "(?:cu(?!da)|nccl|nvrtc|nvshmem)"


def output(*command):
    return subprocess.run(command, capture_output=True, check=True, text=True).stdout


def main(folder):
    files = sorted(map(str, folder.glob("*.so")))
    needed = set(re.findall(rf"\[(lib{PREFIXES}\w*\.so\.\d+)\]", output("readelf", "-dW", *files)))
    versions = dict(re.findall(r"File: (\S+) .*\n.* Name: (\S+)", output("readelf", "-VW", *files)))
    symbols = set(re.findall(rf" U (_*{PREFIXES}\w*)(?:@(\S+))?$", output("nm", "-Du", *files), re.M | re.I))
    for library in needed:
        version = versions.get(library, "")
        names = sorted({name for name, of in symbols if of in ("", version)})
        source = "".join(f"int {name}(void) {{ return 1; }}\n" for name in names)
        script = folder / f"{library}.map"
        script.write_text(f"{version} {{ global: *; }};")
        flags = ["-shared", "-fPIC", "-fno-builtin", "-w", f"-Wl,-soname,{library},--version-script,{script}"]
        subprocess.run(["cc", *flags, "-o", folder / library, "-xc", "-"], input=source, check=True, text=True)


main(pathlib.Path(sys.argv[1]))
