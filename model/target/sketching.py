"""Sketches of states: a norm and a 64-dimensional random projection a token, where the states are too large to keep.

    kept = sketch(states)                                  # of [tokens, width] states of any float dtype
    kept.tensors("layer.3.out")                            # what a sketch trace stores

The projection is the product with a matrix of seeded random signs: |projection(a - b)|^2 / 64 is |a - b|^2 on
average (Johnson-Lindenstrauss with signs: Achlioptas 2003), within .7 to 1.4 of it in the norm for 8,000 tokens.
Massive channels are kept apart as they are, or their rounding would hide all others. Stored beside 16-bit states in
float16 and scaled by the norm: 60 times smaller at 4,096 channels, and two differ by 2e-4 from rounding alone.
"""

from functools import lru_cache

import numpy as np
import torch
from torch import Tensor

from parity.kernel.outlier_channels import channel_mean_square, pick_outliers
from parity.tracing.sketched import TapSketch

DIMS, SEED = 64, 0
RESOLUTION = {torch.float16: 2.0**-11, torch.float32: 2.0**-23}
"""Relative error that storing two projections alone may show, by the dtype they are stored in: one eps."""
_CHUNK = 1 << 22
"""Elements that are widened at a time."""


@lru_cache(maxsize=8)
def signs(width: int, seed: int = SEED, dims: int = DIMS) -> Tensor:
    """[width, dims] of -1 and 1, float32. From Philox, whose stream numpy keeps from version to version."""
    words = np.random.Philox(key=seed).random_raw(-(-width * dims // 64))
    bits = np.unpackbits(np.asarray(words, "<u8").view(np.uint8), bitorder="little")[: width * dims]
    return torch.from_numpy(bits.astype(np.float32).reshape(width, dims) * 2 - 1)


def sketch(states: Tensor, *, seed: int = SEED, dims: int = DIMS) -> TapSketch:
    """Sketch [tokens, width] states, on their device."""
    channels = pick_outliers(channel_mean_square(states))
    narrow = states.element_size() < 4
    norms, projection, massive = project(states, channels, seed=seed, dims=dims)
    scaled = projection / torch.where(norms[:, 1:] == 0, 1.0, norms[:, 1:])
    return TapSketch(
        norms=norms.to(torch.float32),
        projection=scaled.to(torch.float16 if narrow else torch.float32),
        massive=massive.to(torch.float32),
        channels=torch.tensor(channels, dtype=torch.int32),
    )


def project(
    states: Tensor, channels: tuple[int, ...], *, seed: int, dims: int = DIMS
) -> tuple[Tensor, Tensor, Tensor]:
    """[tokens, 2] norms, [tokens, dims] projection and [tokens, k] massive channels of states, in float64.

    16-bit and 8-bit states are multiplied in float32, where every product is exact, others in float64.
    """
    work = torch.float32 if states.element_size() < 4 else torch.float64
    matrix = signs(states.shape[1], seed, dims).to(states.device, work)
    index = torch.tensor(channels, dtype=torch.int64, device=states.device)
    rows = max(1, _CHUNK // max(1, states.shape[1]))
    norms, projections, kept = [], [], []
    for at in range(0, states.shape[0], rows):
        part = states[at : at + rows].to(work, copy=True)
        massive = part[:, index].to(torch.float64)
        part[:, index] = 0
        rest = torch.linalg.vector_norm(part, dim=1, dtype=torch.float64)
        whole = (rest.square() + massive.square().sum(1)).sqrt()
        norms.append(torch.stack((whole, rest), 1))
        projections.append((part @ matrix).to(torch.float64))
        kept.append(massive)
    if not norms:
        return tuple(torch.zeros(0, n, dtype=torch.float64) for n in (2, dims, len(channels)))  # type: ignore[return-value]
    return torch.cat(norms), torch.cat(projections), torch.cat(kept)
