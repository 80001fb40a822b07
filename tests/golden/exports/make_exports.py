"""Regenerates the two exports of this folder, run inside it: eval.onnx(.data), what torch.onnx.export writes by default for a model in eval mode,
and train.onnx, by the call that `onnx-ddp check` recommends.

Needs torch 2.15, onnxscript. eval.onnx shows every loss of training form: batch fixed at 1 (also in a Reshape constant), batch norm folded into
its convolution, dropout gone, weights in a .data file beside it.
"""
import torch


class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = torch.nn.Conv2d(1, 4, 3, padding=1)
        self.bn = torch.nn.BatchNorm2d(4)
        self.drop = torch.nn.Dropout(0.25)
        self.fc = torch.nn.Linear(4 * 8 * 8, 10)

    def forward(self, x):
        h = torch.relu(self.bn(self.conv(x)))
        h = self.drop(h).view(x.shape[0], 4 * 8 * 8)
        return self.fc(h)


torch.manual_seed(0)
model = Net()
with torch.no_grad():
    model.bn.running_mean.uniform_(-0.5, 0.5)
    model.bn.running_var.uniform_(0.5, 2)
torch.onnx.export(model.eval(), (torch.randn(1, 1, 8, 8),), "eval.onnx", input_names=["x"], output_names=["y"])
torch.manual_seed(0)
x, f = torch.randn(2, 1, 8, 8), "train.onnx"
torch.onnx.export(model.train(), (x,), f, dynamo=True, optimize=False, external_data=False, dynamic_shapes=({0: torch.export.Dim("N")},))
