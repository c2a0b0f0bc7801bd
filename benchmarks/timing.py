"""How long a call takes."""

import statistics
import time
from collections.abc import Callable


def milliseconds(function: Callable, device_type: str, *, warmup: int, rep: int) -> float:
    """Median time of a warm call: events around calls with the cache cleared before each, or on "cpu" the host's clock.

    Args:
        warmup, rep: how long the calls before and those that are timed take together, in ms; on "cpu" there are 1 and 5.
    """
    if device_type == "cpu":
        function()
        return statistics.median(_host_milliseconds(function) for _ in range(5))
    from triton.testing import do_bench

    return do_bench(function, warmup=warmup, rep=rep, return_mode="median")


def _host_milliseconds(function: Callable) -> float:
    started = time.perf_counter()
    function()
    return (time.perf_counter() - started) * 1000
