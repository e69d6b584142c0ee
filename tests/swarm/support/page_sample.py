"""Answers of GET /swarm.json for the page's tests: deterministic, and growing with ``now``."""

from __future__ import annotations

import math
import random
from typing import Any

Json = dict[str, Any]
PERIOD = 12.0  # seconds per round
STEPS = 50  # per round
POINTS = 240
HOSTILE = [
    "<script>document.title='owned'</script>",
    "<img src=x onerror=alert(1)>",
    "\u202eevil\u202d \u2066right to left",
    "דג שוחה בים" * 5,
    "z" + "\u0301" * 63,
    "\u200b\u2060",
    "W" * 64,
    "👩‍👩‍👧‍👦 naïve &amp; \"quoted\" 'peer'",
]


def peer_id(i: int) -> str:
    letters = random.Random(i).choices("123456789ABCDEFGHJKLMNPQRSTUVWXYZabcdefghijkmnopqrstuvwxyz", k=44)
    return "Qm" + "".join(letters)


def swarm(runs: list[Json], now: float) -> Json:
    """The answer of a bootstrap node that listens on a public and a local address."""
    me = peer_id(10_000)
    return {
        "now": now,
        "version": "0.1.0",
        "peer_id": me,
        "addresses": [f"/ip4/127.0.0.1/tcp/31337/p2p/{me}", f"/ip4/203.0.113.7/tcp/31337/p2p/{me}"],
        "connected_peers": sum(run["members"] for run in runs),
        "read_age": 1.2,
        "read_seconds": 0.05,
        "invited": False,
        "runs": runs,
        "contributors": [_given(run) for run in runs if run["peers"]],
    }


def _given(run: Json) -> Json:
    rows = [
        {
            "peer_id": peer["peer_id"],
            "name": peer["name"],
            "tokens": 3 * peer["tokens"],
            "merges": 2 * peer["round"],
            "since_age": 90_000.0,
            "age": peer["age"],
        }
        for peer in run["peers"]
    ]
    rows.sort(key=lambda it: -int(it["tokens"]))
    return {"run": run["run"], "tokens": sum(it["tokens"] for it in rows), "count": len(rows), "peers": rows[:100]}


def ended(it: Json, age: float) -> Json:
    """The same run after its end, ``age`` seconds ago."""
    for peer in it["peers"]:
        peer.update(state="left", age=age + peer["age"])
    it["ended_age"] = age
    return it


def run(name: str, n: int, now: float, began: float, names: list[str] | None = None) -> Json:
    """A healthy run of ``n`` peers that began at ``began``."""
    peers = [_peer(i, n, now, began) for i in range(n)]
    for peer, given in zip(peers, names or [], strict=False):
        peer["name"] = given
    return {
        "run": name,
        "ended_age": None,
        "members": n,
        "step": max((it["step"] for it in peers), default=0),
        "tokens": sum(it["tokens"] for it in peers),
        "tokens_per_second": sum(it["tokens_per_second"] for it in peers),
        "idle_share": sum(it["idle_share"] for it in peers) / n if n else None,
        "peers": peers,
        "meetings": _meetings(n, now, began),
        "events": [
            {"at": began + 0.4 * i, "event": "joined", "name": it["name"], "peer_id": it["peer_id"]}
            for i, it in enumerate(peers)
        ][-50:],
        "warnings": [],
        "configuration": configuration({"name": name, "admission": "open"}, n),
    }


def configuration(run: Json | None, agreeing: int, *, own_program: bool = False) -> Json:
    """What a bootstrap node has read of a run."""
    return {"digest": "0123456789abcdef", "agreeing": agreeing, "run": run, "why": "", "own_program": own_program}


def _peer(i: int, n: int, now: float, began: float) -> Json:
    noise = random.Random(i)
    speed = STEPS / PERIOD * noise.uniform(0.75, 1.1)  # steps a second
    every = max(1.0, (now - began) / POINTS)
    history, at = [], began + noise.uniform(0, 3)
    while at <= now:
        step = int(speed * (at - began))
        wiggle = 0.35 * math.sin(at / 40 + i) + noise.gauss(0, 0.3)
        idle = min(1.0, max(0.0005, 0.02 + 0.008 * wiggle + (0.12 * math.exp(-(at - began) / 20))))
        loss = 2.15 + 3.3 * math.exp(-step / 550) + noise.gauss(0, 0.03) if step else None
        history.append([round(at, 1), step, loss and round(loss, 4), round(idle, 4)])
        at += every
    last: list[Any] = history[-1] if history else [now, 0, None, None]
    rounds = last[1] // STEPS
    return {
        "peer_id": peer_id(i),
        "name": f"peer-{i}",
        "state": "training",
        "step": last[1],
        "round": rounds,
        "tokens": last[1] * 512,
        "tokens_per_second": round(speed * 512, 1),
        "train_loss": last[2],
        "val_loss": round(last[2] + 0.06, 4) if last[2] else None,
        "idle_share": last[3],
        "age": round(noise.uniform(0.2, 5), 1),
        "members": n,
        "version": "0.1.0",
        "config": "3f9a01c2",
        "partners": [peer_id(noise.choice([j for j in range(n) if j != i])) for _ in range(min(6, rounds))]
        if n > 1
        else [],
        "merged_age": round(noise.uniform(0, PERIOD), 1) if rounds and n > 1 else None,
        "refused": 0,
        "history": history,
    }


def _meetings(n: int, now: float, began: float) -> list[Json]:
    draw, pairs = random.Random(7), dict[tuple[int, int], Json]()
    for back in range(int(min(600.0, now - began) / PERIOD)):
        order = draw.sample(range(n), n)
        for one, other in zip(order[::2], order[1::2], strict=False):
            pair = (min(one, other), max(one, other))
            met = pairs.setdefault(
                pair,
                {
                    "a": peer_id(pair[0]),
                    "b": peer_id(pair[1]),
                    "age": round(back * PERIOD + draw.uniform(0, 9), 1),
                    "count": 0,
                },
            )
            met["count"] += 1
    return list(pairs.values())


def with_warnings(it: Json) -> Json:
    """The same run with one slow, one lost and one refused peer."""
    slow, lost, bad = it["peers"][1], it["peers"][2], it["peers"][3]
    slow["tokens_per_second"], slow["idle_share"] = 310.0, 0.34
    for k, point in enumerate(slow["history"][-60:]):
        point[3] = round(0.05 + 0.29 * k / 60, 4)
    lost.update(state="lost", age=48.0)
    bad["refused"] = 12
    it["members"] -= 1
    it["events"].append(
        {"at": lost["history"][-1][0], "event": "lost", "name": lost["name"], "peer_id": lost["peer_id"]}
    )
    it["warnings"] = [
        {
            "kind": "straggler",
            "peer": slow["name"],
            "text": f"{slow['name']} trains at 310 tokens/s, the median is 2,148; "
            "let it do fewer steps a round with run.inner_time.",
        },
        {
            "kind": "refused",
            "peer": bad["name"],
            "text": f"Others refused 12 contributions of {bad['name']}; look at its memory and its peer.log.",
        },
        {
            "kind": "split",
            "peer": None,
            "text": "Two groups of peers do not see each other (3 and 1); start the smaller one again "
            "with --initial-peers of the larger.",
        },
    ]
    return it
