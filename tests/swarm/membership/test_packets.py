"""A stranger's packets to the DHT of an open swarm end nobody, and members go on finding each other."""

from __future__ import annotations

from tests.swarm.support.harness import Swarm, wait_for


def test_no_packet_of_a_stranger_ends_or_blinds_anybody(swarm: Swarm) -> None:
    """Nested extension types ended by SIGSEGV whoever received or read them."""
    bootstrap, address = swarm.bootstrap()
    peers = {name: swarm.peer(name, "run.steps=1000000", address=address) for name in ("a", "b")}
    for name in peers:
        swarm.wait_for_rounds(name, 3)
    addresses = [peers[name].line(r"(/ip4/127\.0\.0\.1/tcp/\d+/p2p/\w+)").group(1) for name in peers]
    stranger = swarm.start("stranger", ["-m", "tests.swarm.programs.packets", address, *addresses])
    assert stranger.exit_code(120) == 0, stranger.output()
    said = stranger.output().splitlines()
    assert said.count("refused") > 50 and "stored" not in said, stranger.output()

    newcomer = swarm.peer("newcomer", "run.steps=1000000", address=address)
    since = {name: len(swarm.rounds(name)) for name in peers}
    swarm.wait_for_rounds("newcomer", 3)
    for name, process in {**peers, "newcomer": newcomer, "bootstrap": bootstrap}.items():
        assert process.popen.poll() is None, process.output()
        assert "Traceback" not in process.output()
        if name in since:
            swarm.wait_for_rounds(name, since[name] + 5)
    wait_for(lambda: any(row["outcome"] == "merged" for row in swarm.rounds("newcomer")), 60, newcomer.output)
