#!/usr/bin/env python3
"""Writes models and data that a careful program refuses: make_bad_input.py FOLDER. Needs onnx and numpy."""
import os
import struct
import sys
import zipfile

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

OUT = sys.argv[1]
F = TensorProto.FLOAT


def save(name, nodes, initializers=None, functions=(), opsets=(("", 17),), inputs=None):
    w = [numpy_helper.from_array(np.ones((1, 1), np.float32), "w")] if initializers is None else initializers
    graph = helper.make_graph(nodes, name, inputs or [helper.make_tensor_value_info("x", F, ["N", 1])],
                              [helper.make_tensor_value_info("y", F, ["N", 1])], w)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid(*o) for o in opsets], functions=list(functions), ir_version=8)
    with open(os.path.join(OUT, name + ".onnx"), "wb") as f:
        f.write(model.SerializeToString())
    return model


def matmul():
    return [helper.make_node("MatMul", ["x", "w"], ["y"])]


def external(location, length=4, offset=None):
    t = TensorProto(name="w", data_type=F, dims=[1, 1], data_location=TensorProto.EXTERNAL)
    t.external_data.add(key="location", value=location)
    t.external_data.add(key="length", value=str(length))
    if offset is not None:
        t.external_data.add(key="offset", value=str(offset))
    return [t]


def raw(dims, data):
    return [TensorProto(name="w", data_type=F, dims=dims, raw_data=data)]


save("unknown_op", [helper.make_node("Frobnicate", ["x"], ["y"])])
save("unknown_domain", [helper.make_node("Thing", ["x"], ["y"], domain="com.example")], opsets=(("", 17), ("com.example", 1)))
save("cycle", [helper.make_node("Add", ["x", "b"], ["a"]), helper.make_node("Relu", ["a"], ["b"]), helper.make_node("MatMul", ["b", "w"], ["y"])])
save("undefined_input", [helper.make_node("MatMul", ["nowhere", "w"], ["y"])])
open(os.path.join(OUT, "short.bin"), "wb").write(b"\0\0")
os.symlink("/etc/hostname", os.path.join(OUT, "link.bin"))
save("external_missing", matmul(), external("gone.bin"))
save("external_escape", matmul(), external("../../../../../../etc/passwd"))
save("external_absolute", matmul(), external("/etc/passwd"))
save("external_link", matmul(), external("link.bin"))
save("external_short", matmul(), external("short.bin"))
save("wrong_bytes", matmul(), raw([1, 1], b"\0\0\0"))
save("huge_dimension", matmul(), raw([1 << 40, 1 << 40], b"\0\0\0\0"))
save("negative_dimension", matmul(), raw([-1, 1], b"\0\0\0\0"))
save("negative_result", [helper.make_node("Reshape", ["x", "s"], ["r"]), helper.make_node("MatMul", ["r", "w"], ["y"])],
     [numpy_helper.from_array(np.array([-7, 1]), "s"), numpy_helper.from_array(np.ones((1, 1), np.float32), "w")])
save("nan_weight", matmul(), [numpy_helper.from_array(np.full((1, 1), np.nan, np.float32), "w")])
save("half_weight", [helper.make_node("Cast", ["w"], ["v"], to=F), helper.make_node("MatMul", ["x", "v"], ["y"])],
     [numpy_helper.from_array(np.ones((1, 1), np.float16), "w")])
sparse = save("sparse_weight", matmul(), [])
sparse.graph.sparse_initializer.append(helper.make_sparse_tensor(
    helper.make_tensor("w", F, [1], [1.0]), helper.make_tensor("i", TensorProto.INT64, [1], [0]), [1, 1]))
double = save("output_twice", matmul())
double.graph.output.append(double.graph.output[0])
for name, model in (("sparse_weight", sparse), ("output_twice", double)):
    with open(os.path.join(OUT, name + ".onnx"), "wb") as f:
        f.write(model.SerializeToString())
open(os.path.join(OUT, "high_bytes.onnx"), "wb").write(b"\xff" * 600)
save("recursive_function", [helper.make_node("F", ["x"], ["y"], domain="own")],
     functions=[helper.make_function("own", "F", ["a"], ["b"], [helper.make_node("F", ["a"], ["b"], domain="own")],
                                     [helper.make_opsetid("", 17), helper.make_opsetid("own", 1)])],
     opsets=(("", 17), ("own", 1)))

column = np.arange(4, dtype=np.float32).reshape(4, 1)
np.savez(os.path.join(OUT, "objects.npz"), x=np.array([None, 1, "a", 2.0], dtype=object), y=column)
np.savez(os.path.join(OUT, "strings.npz"), x=np.array(["a", "b", "c", "d"]), y=column)
np.savez(os.path.join(OUT, "whole.npz"), x=np.zeros((4000, 1), np.float32), y=np.zeros((4000, 1), np.float32))
whole = open(os.path.join(OUT, "whole.npz"), "rb").read()
open(os.path.join(OUT, "truncated.npz"), "wb").write(whole[:len(whole) // 2])
with zipfile.ZipFile(os.path.join(OUT, "empty_archive.npz"), "w"):
    pass


def header(shape):
    text = "{'descr': '<f4', 'fortran_order': False, 'shape': (%d, 1), }" % shape
    text += " " * (-(len(text) + 11) % 64) + "\n"
    return b"\x93NUMPY\x01\x00" + struct.pack("<H", len(text)) + text.encode()


with zipfile.ZipFile(os.path.join(OUT, "lying.npz"), "w") as z:  # the header promises what is not there
    z.writestr("x.npy", header(1 << 40) + b"\0" * 16)
    z.writestr("y.npy", header(1 << 40) + b"\0" * 16)
with zipfile.ZipFile(os.path.join(OUT, "bomb.npz"), "w", zipfile.ZIP_DEFLATED) as z:  # a small header before gigabytes of zeros
    for name in ("x.npy", "y.npy"):
        with z.open(name, "w", force_zip64=True) as f:
            f.write(header(4))
            for _ in range(256):
                f.write(b"\0" * (1 << 20))
