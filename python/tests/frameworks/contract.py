"""The loss of a batch as the service defines it, written down once more, and random batches to compare others with."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field

from forebay._wire import Sample

WEIGHTINGS = ("rollout_mean", "turn_mean", "sample_mean", "token_mean", "constant")

LOSS_CONSTANT = 32.0


@dataclass
class Rows:
    """The rows of a batch, and a loss for each response token."""

    rows: list[Sample]
    losses: list[list[float]]
    rollouts: int
    steps: list[int] = field(default_factory=list)

    def loss(self) -> float:
        return weighted_sum(self.rows, self.losses)

    def size(self) -> float:
        """The sum of the magnitudes of all terms: what an error is relative to."""
        return weighted_sum(self.rows, [[abs(one) for one in losses] for losses in self.losses])


def weighted_sum(rows: Sequence[Sample], losses: Sequence[Sequence[float]]) -> float:
    """`sum_i loss_weight_i * sum_t loss_mask_it * l_it`."""
    return sum(
        row.loss_weight * sum(bit * one for bit, one in zip(row.loss_mask or [], of_row, strict=True))
        for row, of_row in zip(rows, losses, strict=True)
    )


def random_rows(dice: random.Random, weighting: str, *, groups: int, size: int) -> Rows:
    """A batch with rollouts of one to four segments, masked rollouts, and rows without a trained token."""
    drafts: list[list[tuple[int, list[int]]]] = []
    verdicts: list[str] = []
    for _ in range(groups * size):
        verdicts.append("masked" if dice.random() < 0.1 else "kept")
        segments = [
            (dice.randint(1, 24), [int(dice.random() < 0.7) for _ in range(dice.randint(1, 24))])
            for _ in range(dice.choice([1, 1, 1, 2, 4]))
        ]
        if verdicts[-1] == "masked":
            segments = [(prompt, [0] * len(mask)) for prompt, mask in segments]
        drafts.append(segments)
    weights = weights_of([[sum(mask) for _, mask in segments] for segments in drafts], weighting)
    rows: list[Sample] = []
    losses: list[list[float]] = []
    for place, (segments, verdict) in enumerate(zip(drafts, verdicts, strict=True)):
        advantage = dice.gauss(0, 1)
        for index, (prompt, mask) in enumerate(segments):
            rows.append(
                Sample(
                    rollout_id=f"r{place}",
                    group_id=f"g{place // size}",
                    segment=index,
                    segments=len(segments),
                    verdict=verdict,  # type: ignore[arg-type]
                    status="completed",
                    tokens=[dice.randrange(1000) for _ in range(prompt + len(mask))],
                    response_length=len(mask),
                    loss_mask=mask,
                    logprobs=[-dice.random() for _ in mask],
                    temperature=1.0,
                    top_p=1.0,
                    top_k=-1,
                    reward=dice.random(),
                    advantage=advantage,
                    loss_weight=weights[place][index],
                    policy_version=3,
                )
            )
            losses.append([dice.random() for _ in mask])
    return Rows(rows, losses, len(drafts))


def weights_of(sums: Sequence[Sequence[int]], weighting: str) -> list[list[float]]:
    """The weights of each rollout's samples, given their mask sums: the table of docs/semantics.md."""
    rollouts = len(sums)
    turns = [max(1, sum(total > 0 for total in of_rollout)) for of_rollout in sums]
    everything = max(1, sum(sum(of_rollout) for of_rollout in sums))
    return [
        [
            {
                "rollout_mean": 1 / (rollouts * max(1, sum(of_rollout))),
                "turn_mean": 1 / (rollouts * turns[place] * max(1, total)),
                "sample_mean": 1 / (sum(turns) * max(1, total)),
                "token_mean": 1 / everything,
                "constant": 1 / (rollouts * LOSS_CONSTANT),
            }[weighting]
            for total in of_rollout
        ]
        for place, of_rollout in enumerate(sums)
    ]
