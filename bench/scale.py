"""What many variants or many streams take: a simulation over figures measured on one node.

``python -m bench.scale`` prints two tables in seconds. Campaigns: every variant needs a whole node for its loading and
its notebooks; nodes fail at random, and a variant that loses its node begins its unfinished notebook again elsewhere.
Streams: each client core takes so many tokens per second; none is filled beyond half, so that it reads in time.
"""

from __future__ import annotations

import argparse
import heapq
import random
import statistics

LOAD_MIN = 36.0  # half a terabyte of weights
NOTEBOOKS_MIN = (1.0, 2.0, 4.0, 25.0, 80.0, 6.0, 1.0, 1.0)  # 01 to 08 of a large variant, 05 with one relaunch
FAILURES_PER_NODE_HOUR = 1 / (24 * 14)
DETECTED_MIN = 0.5
TOK_S_PER_CORE = 100_000  # python -m bench.stream_truth, 1024 streams
BYTES_PER_TOKEN = 320


def campaign_hours(variants: int, nodes: int, rng: random.Random) -> tuple[float, int]:
    """Hours until the last variant is done, and how often a node was lost under one."""
    free = [0.0] * nodes
    lost = 0
    waiting = [(0.0, number, 0) for number in range(variants)]  # ready at, variant, first notebook to do
    ended = 0.0
    while waiting:
        ready, variant, first = heapq.heappop(waiting)
        start = max(heapq.heappop(free), ready)
        fails = start + rng.expovariate(FAILURES_PER_NODE_HOUR / 60)
        now, done = start + LOAD_MIN, first
        for minutes in NOTEBOOKS_MIN[first:]:
            if now + minutes > fails:
                break
            now, done = now + minutes, done + 1
        if done == len(NOTEBOOKS_MIN):
            ended = max(ended, now)
            heapq.heappush(free, now)
        else:
            lost += 1
            heapq.heappush(waiting, (fails + DETECTED_MIN, variant, done))
            heapq.heappush(free, fails + 60.0)  # the node comes back after an hour
    return ended / 60, lost


def main() -> None:
    """Print the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--variants", type=int, default=1000)
    parser.add_argument("--seeds", type=int, default=5)
    asked = parser.parse_args()
    alone_h = (LOAD_MIN + sum(NOTEBOOKS_MIN)) / 60
    print(f"{asked.variants} variants of {alone_h:.1f} h each, median of {asked.seeds} simulations")
    print(f"{'nodes':>6} {'hours':>8} {'x ideal':>8} {'nodes lost':>11}")
    for nodes in (1, 8, 32, 128):
        runs = [campaign_hours(asked.variants, nodes, random.Random(seed)) for seed in range(asked.seeds)]
        hours = statistics.median(run[0] for run in runs)
        ideal = alone_h * -(-asked.variants // nodes)
        print(f"{nodes:>6} {hours:>8.0f} {hours / ideal:>8.2f} {statistics.median(run[1] for run in runs):>11.0f}")
    print(f"\n{'streams':>8} {'tok/s each':>11} {'tok/s':>11} {'client cores':>13} {'GB per hour':>12}")
    for streams in (1_000, 10_000, 100_000):
        for rate in (20, 80):
            total = streams * rate
            cores = max(1, -(-2 * total // TOK_S_PER_CORE))
            stored = total * 3600 * BYTES_PER_TOKEN / 1e9
            print(f"{streams:>8} {rate:>11} {total:>11,} {cores:>13} {stored:>12,.0f}")


if __name__ == "__main__":
    main()
