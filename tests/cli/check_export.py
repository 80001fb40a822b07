"""check_export.py SOURCE.onnx TRAINED.onnx DATA.npz OUTPUTS.npz: the trained file is the user's file with other weights.

Checks it with onnx.checker, compares names, functions, metadata and opsets with the source, and its outputs in onnxruntime
with those that onnx-ddp predicted (1e-5). Prints what differs; exit 1 if anything does.
"""
import sys

import numpy as np
import onnx
import onnxruntime

source, trained = onnx.load(sys.argv[1]), onnx.load(sys.argv[2])
data, outputs = np.load(sys.argv[3]), np.load(sys.argv[4])
onnx.checker.check_model(trained, full_check=True)


def facts(model):
    graph = model.graph
    return {
        "opsets": sorted((o.domain, o.version) for o in model.opset_import),
        "metadata": sorted((p.key, p.value) for p in model.metadata_props),
        "producer": (model.producer_name, model.producer_version, model.doc_string),
        "functions": [(f.domain, f.name, f.overload) for f in model.functions],
        "inputs": [i.name for i in graph.input],
        "outputs": [o.name for o in graph.output],
        "initializers": [(i.name, list(i.dims), i.data_type) for i in graph.initializer],
        # Dropout loses its training_mode input, and with it the Constant that nothing else reads.
        "nodes": [(n.op_type, n.domain, n.name, list(n.input)[: 2 if n.op_type == "Dropout" else None])
                  for n in graph.node if n.op_type != "Constant"],
        "graph": graph.name,
    }


problems = [f"{key} differ: {a} {b}" for (key, a), b in zip(facts(source).items(), facts(trained).values()) if a != b]
for node in trained.graph.node:
    if node.op_type == "BatchNormalization":
        mode = [a.i for a in node.attribute if a.name == "training_mode"]
        if mode not in ([], [0]) or len([o for o in node.output if o]) != 1:
            problems.append(f"batch norm '{node.name}' is not in inference form")
same = [i.name for i, j in zip(source.graph.initializer, trained.graph.initializer) if i.SerializeToString() == j.SerializeToString()]
if len(same) == len(source.graph.initializer):
    problems.append("no weight has changed")
session = onnxruntime.InferenceSession(trained.SerializeToString(), providers=["CPUExecutionProvider"])
feeds = {i.name: data[i.name] for i in session.get_inputs()}
if session.get_inputs()[0].shape[0] == 1:  # a fixed batch stays in the user's file
    feeds = {name: array[:1] for name, array in feeds.items()}
for output, value in zip(session.get_outputs(), session.run(None, feeds)):
    ours = outputs[output.name][: len(value)]
    worst = float(np.max(np.abs(value - ours)))
    if not worst <= 1e-5 * max(1.0, float(np.max(np.abs(value)))):
        problems.append(f"output {output.name} differs by {worst}")
print("\n".join(problems) or "equal")
sys.exit(1 if problems else 0)
