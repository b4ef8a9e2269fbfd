"""What a tenant may ask for: requests and bytes a second. Pure: the time is an argument."""

from wire.pools import TenantSettings

#: So much of a quota may come at once after a pause. Seconds.
_BURST_SECONDS = 1.0


class TokenBucket:
    """Fills at a rate, up to a depth. What is taken may exceed what is there if the bucket was full enough: then it
    owes, so that something larger than the bucket is not refused for ever."""

    __slots__ = ("_at", "_depth", "_rate", "_tokens")

    def __init__(self, rate: float, least_depth: float) -> None:
        """``rate`` a second; the bucket holds a second's worth, at least ``least_depth``. It starts full."""
        self._rate = rate
        self._depth = max(rate * _BURST_SECONDS, least_depth)
        self._tokens = self._depth
        self._at = 0.0

    def wait_for(self, amount: float, now: float) -> float:
        """Seconds until ``amount`` may be taken; 0 when it may be now."""
        self._tokens = min(self._depth, self._tokens + (now - self._at) * self._rate)
        self._at = now
        missing = min(amount, self._depth) - self._tokens
        return missing / self._rate if missing > 0 else 0.0

    def take(self, amount: float) -> None:
        self._tokens -= amount


class Quota:
    """One tenant's quotas."""

    __slots__ = ("_bytes", "_requests")

    def __init__(self, settings: TenantSettings) -> None:
        requests, size = settings.requests_per_second, settings.bytes_per_second
        self._requests = None if requests is None else TokenBucket(requests, 1.0)
        self._bytes = None if size is None else TokenBucket(size, 1.0)

    def wait(self, body_bytes: int, now: float) -> float:
        """Seconds until a request with a body of ``body_bytes`` is within the quotas; 0 when it is now."""
        wait = 0.0 if self._requests is None else self._requests.wait_for(1.0, now)
        return wait if self._bytes is None else max(wait, self._bytes.wait_for(body_bytes, now))

    def take(self, body_bytes: int) -> None:
        """Count a request."""
        if self._requests is not None:
            self._requests.take(1.0)
        if self._bytes is not None:
            self._bytes.take(body_bytes)
