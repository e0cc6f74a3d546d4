"""A module whose gradients are given, and what compression should make of them: the formula, in torch operations."""

from __future__ import annotations

import dataclasses
import hashlib

import torch
from torch import Tensor, nn

from ringdp.compression.partition import bounds, owner_offset_of
from ringdp.compression.protocol import Compressor, Info
from tests.registries import CODEC_COMPRESSORS

COMPRESSORS: dict[str, Compressor] = {
    codec: dataclasses.replace(one, error_feedback=False) for codec, one in CODEC_COMPRESSORS.items()
}


class Given(nn.Module):
    """Parameters of these shapes; the gradient of each is what forward is given for it."""

    def __init__(self, shapes: dict[str, tuple[int, ...]], dtypes: dict[str, torch.dtype] | None = None) -> None:
        super().__init__()
        for name, shape in shapes.items():
            dtype = (dtypes or {}).get(name, torch.float32)
            self.register_parameter(name, nn.Parameter(torch.zeros(shape, dtype=dtype)))

    def forward(self, gradients: dict[str, Tensor]) -> Tensor:
        terms = [(self.get_parameter(name) * gradient).sum() for name, gradient in gradients.items()]
        return torch.stack([term.double() for term in terms]).sum()


def noise(shapes: dict[str, tuple[int, ...]], rank: int, step: int) -> dict[str, Tensor]:
    """The gradients of that rank in that step."""
    draw = torch.Generator().manual_seed(1000 * step + rank)
    return {name: torch.randn(shape, generator=draw) for name, shape in shapes.items()}


class Formula:
    """The all-reduce by a codec: every rank encodes once for each owner, every owner encodes the mean once."""

    def __init__(self, codec: str, ranks: int, feedback: bool) -> None:
        self.compressor = COMPRESSORS[codec]
        self.ranks = ranks
        self.feedback = feedback
        self.residuals: list[dict[str, Tensor]] = [{} for _ in range(ranks)]

    def mean(self, name: str, gradients: list[Tensor], factor: float = 1.0, divisor: int | None = None) -> Tensor:
        """float32 ``[numel]``, of each rank's gradient; the residuals are renewed."""
        flat = [gradient.reshape(-1).float() for gradient in gradients]
        numel = flat[0].numel()
        edges = bounds(numel, self.ranks, owner_offset_of(name))
        before = [self.residuals[rank].get(name, torch.zeros(numel)) for rank in range(self.ranks)]
        after = [residual.clone() for residual in before]
        result = torch.empty(numel)
        for owner in range(self.ranks):
            part = slice(edges[owner], edges[owner + 1])
            total = None
            for rank in range(self.ranks):
                term = flat[rank][part]
                if rank != owner:
                    term, after[rank][part] = self._coded(term, before[rank][part], factor)
                total = term if total is None else total + term
            assert total is not None
            mean = total / torch.tensor(float(divisor or self.ranks))
            result[part], after[owner][part] = self._coded(mean, before[owner][part], factor)
        for rank in range(self.ranks):
            self.residuals[rank][name] = after[rank]
        return result

    def _coded(self, x: Tensor, residual: Tensor, factor: float) -> tuple[Tensor, Tensor]:
        """What `x` decodes to, and what that left out."""
        if self.feedback:
            x = x + factor * residual
        info = Info(name="", shape=(x.numel(),), numel=x.numel())
        decoded = self.compressor.decompress(self.compressor.compress(x.contiguous(), info), info)
        return decoded, (x - decoded) / factor


def hash_of(tensors: dict[str, Tensor]) -> str:
    """Of all bits, to be compared between ranks."""
    digest = hashlib.sha256()
    for name, tensor in sorted(tensors.items()):
        digest.update(name.encode())
        digest.update(tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()
