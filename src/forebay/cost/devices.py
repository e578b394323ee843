"""How many of n devices should run the target and how many the drafter, and at what rate (DFLASH.md).

Costs are FLOPs per item divided by the fraction of peak that the role achieves; a rate is items per second.
Pure arithmetic. Called by `forebay plan` and the simulator's studies.
"""

from __future__ import annotations

from dataclasses import dataclass

from forebay.errors import UsageError


@dataclass(frozen=True)
class Split:
    """An integer split of n devices, beside the ideal one."""

    targets: int
    drafters: int
    rate: float  # items per second of the integer split
    ideal_targets: float
    ideal_rate: float  # of a fractional split; sharing every device between the roles gives the same

    @property
    def share_of_ideal(self) -> float:
        return self.rate / self.ideal_rate


def ideal_targets(devices: int, target_cost: float, drafter_cost: float) -> float:
    """n * c_t / (c_t + c_d)."""
    return devices * target_cost / (target_cost + drafter_cost)


def shared_rate(devices: int, target_cost: float, drafter_cost: float, peak: float) -> float:
    """n * P / (c_t + c_d)."""
    return devices * peak / (target_cost + drafter_cost)


def split_rate(targets: int, drafters: int, target_cost: float, drafter_cost: float, peak: float) -> float:
    """min(n_t * P / c_t, n_d * P / c_d)."""
    return min(targets * peak / target_cost, drafters * peak / drafter_cost)


def best_split(devices: int, target_cost: float, drafter_cost: float, peak: float) -> Split:
    """The integer split of highest rate. Raises UsageError below two devices: one device shares its roles."""
    if devices < 2:
        raise UsageError(f"{devices} device cannot be split between target and drafter: list it in both roles instead")
    targets = max(range(1, devices), key=lambda n: split_rate(n, devices - n, target_cost, drafter_cost, peak))
    return Split(
        targets,
        devices - targets,
        split_rate(targets, devices - targets, target_cost, drafter_cost, peak),
        ideal_targets(devices, target_cost, drafter_cost),
        shared_rate(devices, target_cost, drafter_cost, peak),
    )
