"""What several ranks agree on: one set of numbers, one set of findings, one who writes.

Every rank calls alike and gets the same answer back, so that all of them stop at the same step. Without a process group
there is one rank and nothing is exchanged.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TypeVar

from parity.reports.record import WORST_FIRST, Finding, Value

Numbers = Sequence[tuple[str, Value]]
Gathered = TypeVar("Gathered")


def rank_and_world() -> tuple[int, int]:
    """This process's rank and how many there are; (0, 1) where no group is joined."""
    import torch.distributed as dist

    if not (dist.is_available() and dist.is_initialized()):
        return 0, 1
    return dist.get_rank(), dist.get_world_size()


def is_first() -> bool:
    """Whether this rank is the one that writes and prints."""
    return rank_and_world()[0] == 0


def gather_from_ranks(value: Gathered) -> list[Gathered]:
    """Every rank's value, in the order of ranks."""
    _, world = rank_and_world()
    if world == 1:
        return [value]
    import torch.distributed as dist

    found = [value] * world  # each place is written by its rank
    dist.all_gather_object(found, value)
    return found


def merge_ranks(
    numbers: Numbers, sizes: Mapping[str, int], findings: Sequence[Finding]
) -> tuple[list[tuple[str, Value]], list[Finding]]:
    """The same numbers and findings on every rank; every rank has to call this.

    Args:
        numbers: this rank's, by dotted name.
        sizes: name -> values of each tensor whose mean and std are among the numbers.
        findings: this rank's.
    """
    if rank_and_world()[1] == 1:
        return list(numbers), list(findings)
    parts = gather_from_ranks((list(numbers), dict(sizes), list(findings)))
    return _merged_numbers([(each[0], each[1]) for each in parts]), _merged_findings(
        [each[2] for each in parts]
    )


def _merged_numbers(parts: Sequence[tuple[Numbers, Mapping[str, int]]]) -> list[tuple[str, Value]]:
    """The numbers of all ranks as one.

    A float is the mean of those that several ranks have; a tensor's mean and std are those of all ranks' values
    together. What is no float, and what only one rank has, stays as the first rank has it.
    """
    ranks = [(dict(numbers), sizes) for numbers, sizes in parts]
    names = list(dict.fromkeys(name for numbers, _ in ranks for name in numbers))
    merged = []
    for name in names:
        holders = [(numbers, sizes) for numbers, sizes in ranks if name in numbers]
        values = [numbers[name] for numbers, _ in holders]
        if not all(isinstance(value, float) for value in values):
            merged.append((name, values[0]))
            continue
        tensor, _, moment = name.rpartition(".")
        weights = [sizes.get(tensor, 1) for _, sizes in holders]
        # The variance of all values is the mean of squares less the square of the mean.
        if moment == "std" and all(tensor in sizes for _, sizes in holders):
            means = [_number(numbers[f"{tensor}.mean"]) for numbers, _ in holders]
            squares = _mean([_number(s) ** 2 + m**2 for s, m in zip(values, means, strict=True)], weights)
            merged.append((name, math.sqrt(max(0.0, squares - _mean(means, weights) ** 2))))
        else:
            merged.append((name, _mean([_number(value) for value in values], weights)))
    return merged


def _number(value: Value) -> float:
    assert isinstance(value, float)
    return value


def _mean(values: Sequence[float], weights: Sequence[int]) -> float:
    total = sum(weights)
    return sum(value * weight for value, weight in zip(values, weights, strict=True)) / max(1, total)


def _merged_findings(parts: Sequence[Sequence[Finding]]) -> list[Finding]:
    """Each name once, as the rank with the worst outcome has it; the sentence names a rank but the first."""
    names = list(dict.fromkeys(finding.name for part in parts for finding in part))
    merged = []
    for name in names:
        own = [(rank, f) for rank, part in enumerate(parts) for f in part if f.name == name]
        rank, worst = min(own, key=lambda each: WORST_FIRST.index(each[1].outcome))
        bad = worst.outcome not in ("pass", "skipped")
        if rank and bad:
            worst = replace(worst, sentence=f"rank {rank}: {worst.sentence}")
        merged.append(worst if bad else own[0][1])
    return merged
