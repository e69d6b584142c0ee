"""What the simulation models: a member without an invitation, and the lines of the network."""

from __future__ import annotations

from tests.simulated.admission import NEVER, Invitations


def test_a_member_that_goes_on_without_an_invitation_still_turns_outsiders_away() -> None:
    """It let everybody in, so the check that nobody meets an outsider found it, and no defect of the product."""
    swarm = Invitations(1)
    stubborn = swarm.authority("Qm1", expires=0.0, stubborn=True).admission
    swarm.revoke("Qm1")
    swarm.revoke("Qm2")
    assert stubborn.learn(swarm.revocations)
    assert stubborn.objection(stubborn.own, "Qm1") == ""
    assert stubborn.objection(swarm.authority("Qm2").admission.own, "Qm2") == ""  # it keeps no list of revocations
    forged = Invitations(2).authority("Qm3", NEVER).admission.own
    assert "not signed by the owner" in stubborn.objection(forged, "Qm3")
