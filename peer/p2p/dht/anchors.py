"""Where a node asks and writes besides the nodes that are nearest to a key.

A node's place is the hash of its id, and an id costs its maker a tenth of a second: in a swarm of twenty a hundred are
enough for five that are nearer to a key than all others. These may keep nothing and name one another only. A person has
chosen the initial peers, and a swap has succeeded with those that are proven.
"""

from __future__ import annotations

from collections.abc import Sequence

from hivemind.dht.node import DHTNode
from hivemind.p2p import PeerID

from peer.p2p.addresses import owner_of
from peer.p2p.dht.join import neighbours
from peer.p2p.dial import parsed_id
from peer.rounds.backoff import Proven

MOST_INITIAL = 3
MOST_PROVEN = 2


def anchors_of(dht: DHTNode, initial_peers: Sequence[str], proven: Proven) -> list[PeerID]:
    """This node, which others may have for an initial peer, and its own initial peers (addresses) whose DHT answers;
    when none does, the nodes with which it has swapped last.
    """
    silent = dht.blacklist.ban_counter
    initial = [it for it in map(parsed_id, map(owner_of, initial_peers)) if it != dht.peer_id and not silent[it]]
    known = set() if initial else neighbours(dht)
    met = [it for it in map(parsed_id, (it for it in proven.newest_first() if it in known)) if not silent[it]]
    own = [] if dht.protocol.client_mode else [dht.peer_id]
    return [*own, *list(dict.fromkeys(initial))[:MOST_INITIAL], *met[:MOST_PROVEN]]
