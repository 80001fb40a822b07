#!/usr/bin/env python3
"""Makes every model and data file of this folder, always with the same bytes.

    make_models.py [OUT_DIR]

Needs: numpy, onnx, scikit-learn (its copy of the digits data). OUT_DIR is this script's folder by default.
Every model: opset 18, input x, output y, batch dimension N, weights drawn as PyTorch draws them: uniform in
+-1/sqrt(fan_in) for weight and bias. Batch normalization is in inference form, as exporters write it.
"""
import os
import sys

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

SEED = 20240229
TRAIN_ROWS = 1437


class ModelBuilder:
    """Collects nodes and initializers; each layer method takes and returns a value's name."""

    def __init__(self, seed):
        self.random = np.random.Generator(np.random.PCG64(seed))
        self.nodes, self.initializers = [], []

    def tensor(self, name, array):
        self.initializers.append(numpy_helper.from_array(np.asarray(array), name))
        return name

    def uniform(self, name, shape, fan_in):
        bound = 1 / np.sqrt(fan_in)
        return self.tensor(name, self.random.uniform(-bound, bound, shape).astype(np.float32))

    def node(self, op, inputs, name, **attributes):
        self.nodes.append(helper.make_node(op, inputs, [name], name=name, **attributes))
        return name

    def linear(self, x, layer, n_in, n_out, output=None):
        weight = self.uniform(f"{layer}.weight", (n_out, n_in), n_in)
        bias = self.uniform(f"{layer}.bias", (n_out,), n_in)
        return self.node("Gemm", [x, weight, bias], output or layer, transB=1)

    def conv_bn_relu(self, x, index, n_in, n_out):
        conv, bn = f"conv{index}", f"bn{index}"
        weight = self.uniform(f"{conv}.weight", (n_out, n_in, 3, 3), n_in * 9)
        x = self.node("Conv", [x, weight], conv, kernel_shape=[3, 3], pads=[1, 1, 1, 1])
        zero, one = np.zeros(n_out, np.float32), np.ones(n_out, np.float32)
        parts = {"weight": one, "bias": zero, "running_mean": zero, "running_var": one}
        names = [self.tensor(f"{bn}.{part}", value) for part, value in parts.items()]
        x = self.node("BatchNormalization", [x, *names], bn, epsilon=1e-5, momentum=0.9)
        return self.node("Relu", [x], f"relu{index}")

    def model(self, name, in_shape, out_shape):
        x = helper.make_tensor_value_info("x", TensorProto.FLOAT, ["N", *in_shape])
        y = helper.make_tensor_value_info("y", TensorProto.FLOAT, ["N", *out_shape])
        graph = helper.make_graph(self.nodes, name, [x], [y], self.initializers)
        model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=8,
                                  producer_name="make_models.py")
        onnx.checker.check_model(model, full_check=True)
        return model


def toy():
    b = ModelBuilder(SEED)
    b.linear("x", "linear", 1, 1, output="y")
    return b.model("toy", [1], [1])


def digits_mlp():
    b = ModelBuilder(SEED + 1)
    x = b.node("Flatten", ["x"], "flatten", axis=1)
    x = b.node("Relu", [b.linear(x, "fc1", 64, 64)], "relu1")
    b.linear(x, "fc2", 64, 10, output="y")
    return b.model("digits_mlp", [1, 8, 8], [10])


def digits_cnn():
    b = ModelBuilder(SEED + 2)
    x = b.conv_bn_relu("x", 1, 1, 16)
    x = b.node("MaxPool", [x], "pool1", kernel_shape=[2, 2], strides=[2, 2])
    x = b.conv_bn_relu(x, 2, 16, 32)
    x = b.node("AveragePool", [x], "pool2", kernel_shape=[2, 2], strides=[2, 2])
    x = b.node("Flatten", [x], "flatten", axis=1)
    b.linear(x, "fc", 32 * 4, 10, output="y")
    return b.model("digits_cnn", [1, 8, 8], [10])


def digits_data():
    """The 1797 images in a seeded random order: 1437 to train on, 360 to test on."""
    from sklearn.datasets import load_digits

    raw = load_digits()
    x = (raw.data.reshape(-1, 1, 8, 8) / 16).astype(np.float32)
    y = raw.target.astype(np.int64)
    order = np.random.Generator(np.random.PCG64(SEED)).permutation(len(y))
    train, test = order[:TRAIN_ROWS], order[TRAIN_ROWS:]
    return {"x": x[train], "y": y[train]}, {"x": x[test], "y": y[test]}


def main():
    out = sys.argv[1] if len(sys.argv) > 1 else os.path.dirname(os.path.abspath(__file__))
    for build in (toy, digits_mlp, digits_cnn):
        with open(os.path.join(out, f"{build.__name__}.onnx"), "wb") as f:
            f.write(build().SerializeToString(deterministic=True))
    line = np.array([[1], [2], [3], [4]], np.float32)
    np.savez(os.path.join(out, "toy.npz"), x=line, y=line)
    train, test = digits_data()
    np.savez(os.path.join(out, "digits.npz"), **train)
    np.savez(os.path.join(out, "digits_test.npz"), **test)


if __name__ == "__main__":
    main()
