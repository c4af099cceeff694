"""Every fault and deviation that a probe, a diagnosis or a report can name: one table.

    deviation("noise-on-teacher").sentence

A name is a promise: policies, baselines and people's notes refer to it. `probes` find wiring deviations;
kinds of differences between traces are named by `parity.diagnose`, with the same table. Standard library only.
"""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class Deviation:
    """One way in which a trainer or a trace departs from what it is declared to be."""

    name: str
    probe: str
    """Which probe names it."""
    sentence: str
    """What is wrong, for a reader without the evidence."""
    do: str
    """Where to look, and what to change."""


def _rows(probe: str, *rows: tuple[str, str, str]) -> tuple[Deviation, ...]:
    return tuple(Deviation(name=name, probe=probe, sentence=sentence, do=do) for name, sentence, do in rows)


DEVIATIONS: tuple[Deviation, ...] = (
    *_rows(
        "noise",
        (
            "noise-on-teacher",
            "noise reaches the state from which labels or teacher logits are made",
            "take the teacher's slice before noise is added, and add noise to the conditioning slices only",
        ),
        (
            "noise-undeclared",
            "noise enters fc though the recipe declares none",
            "remove it, or declare it under recipe.noise",
        ),
        (
            "noise-missing",
            "the declared noise never reaches fc",
            "look for a noise transform on another key, another split, or with std 0",
        ),
        (
            "noise-std",
            "the noise has another standard deviation than declared",
            "compare the formula: a uniform noise of half-width w has a deviation of w / sqrt(3)",
        ),
        (
            "noise-kind",
            "the noise has another distribution than declared",
            "declare what is drawn under recipe.noise.kind, or draw what is declared",
        ),
        (
            "noise-slices",
            "not every conditioning slice gets the declared noise",
            "add the noise to the whole fc input, after the slices are joined",
        ),
        (
            "noise-in-evaluation",
            "noise is on in evaluation",
            "switch it off outside training: validation and drafting are then measured on what is served",
        ),
        (
            "noise-unseeded",
            "the same seed gives other noise",
            "draw from a generator that is seeded by (seed, epoch, sample)",
        ),
    ),
)
"""In the order of the probes."""

BY_NAME = {row.name: row for row in DEVIATIONS}


def deviation(name: str) -> Deviation:
    """The row of that name. Raises KeyError for a name that is not in the table."""
    return BY_NAME[name]
