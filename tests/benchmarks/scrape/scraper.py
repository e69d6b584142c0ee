"""Scrapes a peer as Prometheus does, but once a second and on demand; a separate process for comparison.py.

python -m tests.benchmarks.scrape.scraper URL  reads "go" and "stop" on stdin; prints the number of answers at "stop"
"""

from __future__ import annotations

import select
import sys
import time
import urllib.request

PERIOD = 1.0  # seconds
ANSWER = 10.0
HEADERS = {"Accept-Encoding": "gzip", "Accept": "application/openmetrics-text;version=1.0.0,text/plain;q=0.5"}


def scrape(url: str) -> int:
    """The size of an answer in bytes."""
    with urllib.request.urlopen(urllib.request.Request(url, headers=HEADERS), timeout=ANSWER) as answer:
        return len(answer.read())


def main(url: str) -> None:
    """Follow the commands until stdin ends."""
    scraping, answered, due = False, 0, time.monotonic()
    while True:
        pause = max(0.0, due - time.monotonic()) if scraping else None
        if select.select([sys.stdin], [], [], pause)[0]:
            word = sys.stdin.readline().strip()
            if not word:
                return
            scraping, due = word == "go", time.monotonic()
            if not scraping:
                print(answered, flush=True)
                answered = 0
        elif scrape(url):
            answered += 1
            due += PERIOD


if __name__ == "__main__":
    main(sys.argv[1])
