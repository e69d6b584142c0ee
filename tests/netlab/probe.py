"""Measures the laboratory from inside its hosts.

python -m tests.netlab.probe serve                            echo datagrams and count bytes, until stdin ends
python -m tests.netlab.probe ping ADDRESS COUNT               median round trip and share lost
python -m tests.netlab.probe send ADDRESS MEGABYTES           TCP goodput of the second half, so without slow start
Each prints one line of JSON. ping(8) and iperf are not used: they are not installed everywhere.
"""

from __future__ import annotations

import json
import socket
import statistics
import sys
import threading
import time

PORT = 7000
CHUNK = 1 << 16


def serve() -> None:
    datagrams = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    datagrams.bind(("0.0.0.0", PORT))
    listener = socket.create_server(("0.0.0.0", PORT))

    def echo() -> None:
        while True:
            data, sender = datagrams.recvfrom(2048)
            datagrams.sendto(data, sender)

    def count(connection: socket.socket) -> None:
        with connection:
            total = 0
            expected = int.from_bytes(connection.recv(8, socket.MSG_WAITALL), "big")
            half = None
            while total < expected and (data := connection.recv(CHUNK)):
                total += len(data)
                if half is None and 2 * total >= expected:
                    half = (total, time.perf_counter())
            assert half is not None
            rate = (total - half[0]) / (time.perf_counter() - half[1])
            connection.sendall(json.dumps({"mbit": 8e-6 * rate, "bytes": total}).encode())

    def accept() -> None:
        while True:
            threading.Thread(target=count, args=(listener.accept()[0],), daemon=True).start()

    for work in (echo, accept):
        threading.Thread(target=work, daemon=True).start()
    print(json.dumps({"serving": PORT}), flush=True)
    sys.stdin.read()


def ping(address: str, count: int) -> dict[str, float]:
    times = []
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as it:
        it.settimeout(1.0)
        for number in range(count):
            began = time.perf_counter()
            it.sendto(number.to_bytes(4, "big"), (address, PORT))
            try:
                while int.from_bytes(it.recv(2048), "big") != number:
                    pass
            except TimeoutError:
                continue
            times.append(time.perf_counter() - began)
    return {"rtt_ms": 1000 * statistics.median(times) if times else -1.0, "lost": 1 - len(times) / count}


def send(address: str, megabytes: float) -> dict[str, float]:
    total = int(1e6 * megabytes)
    block = bytes(CHUNK)
    with socket.create_connection((address, PORT), timeout=60) as it:
        it.sendall(total.to_bytes(8, "big"))
        for start in range(0, total, CHUNK):
            it.sendall(block[: min(CHUNK, total - start)])
        it.shutdown(socket.SHUT_WR)
        return dict(json.loads(it.recv(1024)))


if __name__ == "__main__":
    if sys.argv[1] == "serve":
        serve()
    elif sys.argv[1] == "ping":
        print(json.dumps(ping(sys.argv[2], int(sys.argv[3]))))
    else:
        print(json.dumps(send(sys.argv[2], float(sys.argv[3]))))
