"""What is compared, and what one run of a generator saw of it."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Side:
    """One of the things compared: where to send requests, and the processes that pass them on (none: Triton itself)."""

    name: str
    http: str
    grpc: str
    pids: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Measured:
    """What one run saw. Latencies in seconds."""

    requests: int
    failures: int
    seconds: float
    p50_seconds: float
    p99_seconds: float

    @property
    def per_second(self) -> float:
        return self.requests / self.seconds


def percentiles(latencies: list[float]) -> tuple[float, float]:
    """The 50th and the 99th percentile; sorts in place. Zeros when there is nothing."""
    latencies.sort()
    if not latencies:
        return 0.0, 0.0
    return latencies[len(latencies) // 2], latencies[min(len(latencies) - 1, int(len(latencies) * 0.99))]
