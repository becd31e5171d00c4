"""Read-ahead: the cold reads of benchmarks/reading.py with and without it, in one process and in turn.

What it costs where no guess is right is a few percent, less than single runs differ. So each pair of reads is done many
times, and the medians are compared.

    python -m benchmarks.ahead SQLite [how many times]
    python -m benchmarks.ahead PostgreSQL [how many times]
"""

from __future__ import annotations

import gc
import statistics
import sys
import time

from benchmarks import reading, storages

OBJECTS, RANDOM, TIMES = 10_000, 2000, 40


def main(server: str, times: int) -> None:
    name = f'relstore {server}'
    with storages.Lab() as lab, lab.site(name) as site:
        oids = reading.fill(site, OBJECTS)
        sites = [site, lab.variant(site, f'{name}, without read-ahead')]
        for way, count in (
            (reading.iterated, OBJECTS), (reading.keys_at_random, RANDOM), (reading.oids_at_random, RANDOM)
        ):  # fmt: skip
            taken = [[], []]
            for n in range(times):
                for which in (0, 1) if n % 2 else (1, 0):
                    taken[which].append(clocked(sites[which], way, oids, count))
            for clock, what in enumerate(('time', 'CPU of this process')):
                with_it, without = (statistics.median(pair[clock] for pair in some) for some in taken)
                print(f'{way.__name__}, {what}: {with_it * 1e3:.1f} ms with read-ahead, {without * 1e3:.1f} without, '
                      f'ratio {with_it / without:.3f}')  # fmt: skip


def clocked(site: storages.Site, way, oids: list[bytes], count: int) -> tuple[float, float]:
    """Return the seconds of a cold read: by the clock, and of CPU."""
    marks: list[tuple[float, float]] = []

    def mark() -> float:
        marks.append((time.perf_counter(), time.process_time()))
        return 0.0

    gc.collect()
    gc.disable()
    try:
        reading.read(site, way, oids, count, mark)
    finally:
        gc.enable()
    (began, worked), (ended, done) = marks
    return ended - began, done - worked


if __name__ == '__main__':
    main(sys.argv[1], int(sys.argv[2]) if len(sys.argv) > 2 else TIMES)
