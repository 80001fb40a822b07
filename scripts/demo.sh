#!/usr/bin/env bash
# Trains the digits model on two ranks with synchronised batch norm, evaluates it on images it has not seen, exports it and lets onnxruntime check the result.
# Fails if less than 97 % of the test images are read correctly, or if the two programs disagree.
set -euo pipefail
cd "$(dirname "$0")/.."
export HOME=${HOME:-~}

scripts/deps.sh
cmake --preset release >/dev/null
cmake --build --preset release -j "$(nproc)"

run=build/demo
python=${ONNXDDP_DEPS:-$HOME/.cache/onnx-ddp}/python/bin/python
program=build/release/onnx-ddp

# Shows a command and runs it.
step() {
  printf '\n$ onnx-ddp %s\n' "$*" >&2
  "$program" "$@"
}

rm -rf "$run"
step train models/digits_cnn.onnx --data models/digits.npz --nproc-per-node 2 --sync-bn --epochs 15 --lr 3e-3 --out "$run"
result=$(step eval "$run" --data models/digits_test.npz)
printf '%s\n' "$result"
step export "$run" -o "$run/digits.onnx"

accuracy=$(sed -nE 's/.*\baccuracy: *([0-9.]+).*/\1/p' <<<"$result" | tail -n 1)
if [ -z "$accuracy" ]; then
  echo "demo: the evaluation printed no accuracy" >&2
  exit 1
fi

printf '\n$ onnxruntime: %s on models/digits_test.npz\n' "$run/digits.onnx" >&2
"$python" - "$run/digits.onnx" models/digits_test.npz "$accuracy" <<'END'
import sys

import numpy as np
import onnx
import onnxruntime

model, data, accuracy = sys.argv[1], np.load(sys.argv[2]), float(sys.argv[3])
onnx.checker.check_model(model, full_check=True)
session = onnxruntime.InferenceSession(model, providers=["CPUExecutionProvider"])
(scores,) = session.run(None, {"x": data["x"]})
ours, theirs = f"{100 * accuracy:.2f}", f"{100 * np.mean(scores.argmax(axis=1) == data['y']):.2f}"
print(f"test accuracy: {ours} % (onnxruntime: {theirs} %)")
if ours != theirs:
    sys.exit("demo: onnxruntime counts another accuracy for the exported model")
if float(ours) < 97:
    sys.exit("demo: the accuracy is below 97 %")
END
