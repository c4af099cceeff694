"""The few massive channels of hidden states, which hide what happens in all others: found on a sample of rows.

pick_outliers(channel_mean_square(states))             # (5, 1000): their numbers
"""

import numpy as np
import torch
from numpy.typing import NDArray

MAX_OUTLIERS = 8
OUTLIER_TIMES = 6.0
"""A channel is massive where its rms exceeds this many medians: ordinary hidden channels stay within
about 3 of the median, massive activations are 100 to 10,000 (Sun et al. 2024, arXiv 2402.17762)."""
SAMPLE_ROWS = 64


def channel_mean_square(states: torch.Tensor, rows: int = SAMPLE_ROWS) -> NDArray[np.float64]:
    """[channels] mean square of evenly spaced rows of [tokens, channels]; what is not finite counts as 0.

    Added up row by row: one order of sums on every machine, and no copy of the sample.
    """
    step, count = max(1, states.shape[0] // rows), 0
    total = torch.zeros(states.shape[1], dtype=torch.float64, device=states.device)
    for row in states[::step][:rows]:
        value, count = row.to(torch.float64), count + 1
        total += torch.where(torch.isfinite(value), value, 0.0).square()
    return np.asarray((total / max(1, count)).cpu().numpy())


def pick_outliers(mean_square: NDArray[np.float64]) -> tuple[int, ...]:
    """The massive channels: rms above OUTLIER_TIMES the median, the largest first, at most MAX_OUTLIERS and
    at most one in 16 channels; returned in channel order."""
    rms = np.sqrt(mean_square)
    above = np.flatnonzero(rms > OUTLIER_TIMES * np.median(rms)) if np.median(rms) > 0 else np.array([], int)
    largest = above[np.argsort(-rms[above], kind="stable")][: min(MAX_OUTLIERS, rms.size // 16)]
    return tuple(sorted(int(channel) for channel in largest))
