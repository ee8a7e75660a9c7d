"""A series of bounded length, whatever its source's: what a chart of a long run is drawn from; it knows no subject."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Generic, TypeVar

T = TypeVar("T")
MOST_POINTS = 400


@dataclass(slots=True)
class Thinned(Generic[T]):
    """At most `MOST_POINTS` moments: when there are more, every second one goes and the stride doubles."""

    points: list[T] = field(default_factory=list)
    stride: int = 1
    seen: int = 0

    def add(self, point: T) -> None:
        """O(1) amortised."""
        if self.seen % self.stride == 0:
            self.points.append(point)
            if len(self.points) > MOST_POINTS:
                self.points, self.stride = self.points[::2], self.stride * 2
        self.seen += 1
