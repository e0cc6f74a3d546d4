"""What the GPU benchmarks train: ResNet-50, GPT-2, and the same parameters without a model to compute."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from benchmarks.lib.models import Gpt, Task, classify


class Bottleneck(nn.Module):
    """He et al. 2015, "Deep Residual Learning for Image Recognition", figure 5, stride in the 3 x 3 convolution."""

    def __init__(self, inputs: int, width: int, stride: int) -> None:
        super().__init__()
        outputs = 4 * width
        self.body = nn.Sequential(
            *_normed(inputs, width, 1),
            nn.ReLU(inplace=True),
            *_normed(width, width, 3, stride),
            nn.ReLU(inplace=True),
            *_normed(width, outputs, 1),
        )
        same = stride == 1 and inputs == outputs
        self.shortcut = nn.Identity() if same else nn.Sequential(*_normed(inputs, outputs, 1, stride))

    def forward(self, x: Tensor) -> Tensor:
        return functional.relu(self.body(x) + self.shortcut(x))


def _normed(inputs: int, outputs: int, size: int, stride: int = 1) -> list[nn.Module]:
    convolution = nn.Conv2d(inputs, outputs, size, stride, padding=size // 2, bias=False)
    return [convolution, nn.BatchNorm2d(outputs)]


def resnet50() -> nn.Module:
    """25.6 million parameters in 161 tensors."""
    layers: list[nn.Module] = [*_normed(3, 64, 7, 2), nn.ReLU(inplace=True), nn.MaxPool2d(3, 2, 1)]
    inputs = 64
    for stage, blocks in enumerate((3, 4, 6, 3)):
        for block in range(blocks):
            layers.append(Bottleneck(inputs, 64 << stage, stride=2 if stage > 0 and block == 0 else 1))
            inputs = 256 << stage
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(inputs, 1000))


def gpt2() -> nn.Module:
    """124 million parameters: the smallest GPT-2, whose head is its embedding."""
    module = Gpt(characters=50257, width=768, layers=12, heads=12, length=1024)
    module.head.weight = module.token.weight
    nn.init.normal_(module.token.weight, std=0.02)
    return module


MODULES = {"resnet50": resnet50, "gpt2": gpt2}


def make(name: str, device: torch.device) -> Task:
    """The same parameters and the same batch in every call."""
    torch.manual_seed(0)
    draw = torch.Generator().manual_seed(1)
    module = MODULES[name]().to(device)
    if name == "resnet50":
        batch = torch.randn(64, 3, 224, 224, generator=draw), torch.randint(1000, (64,), generator=draw)
    else:
        tokens = torch.randint(50257, (8, 513), generator=draw)
        batch = tokens[:, :-1], tokens[:, 1:].contiguous()
    return Task(module, (batch[0].to(device), batch[1].to(device)), classify, 0.01)


class _Receive(torch.autograd.Function):
    """A scalar that depends on all parameters; their gradients are given."""

    @staticmethod
    def forward(ctx: Any, gradients: Sequence[Tensor], *parameters: Tensor) -> Tensor:
        ctx.gradients = gradients
        return parameters[0].new_zeros(())

    @staticmethod
    def backward(ctx: Any, scale: Tensor) -> Any:
        return None, *ctx.gradients


class GradientsAlone(nn.Module):
    """A model's parameters, whose gradients come at once and cost nothing: what is left of a step is the wrapper's."""

    def __init__(self, name: str, device: torch.device) -> None:
        super().__init__()
        shapes = [parameter.shape for parameter in MODULES[name]().parameters()]
        self.all = nn.ParameterList(nn.Parameter(torch.zeros(shape, device=device)) for shape in shapes)
        self.gradients = [torch.full(shape, 1e-3, device=device) for shape in shapes]

    def forward(self) -> Tensor:
        loss: Tensor = _Receive.apply(self.gradients, *self.all)
        return loss
