"""What the model would compute on."""

from __future__ import annotations

from collections.abc import Iterator

from peer.commands.check.finding import Finding, ok, warn
from peer.config.schema import Config


def device(config: Config, ranks: int = 1) -> Iterator[Finding]:
    """Raises :class:`peer.errors.UserError` when a device is wanted that is not there."""
    import torch

    from peer.replica.device import pick_device, wants_bf16

    own = config.peer
    found = pick_device(own.device)
    if found.type == "cuda":
        properties = torch.cuda.get_device_properties(found)
        bf16 = "bf16" if wants_bf16(own.precision, found) else "fp32"
        text = f"{properties.name}, {properties.total_memory / 2**30:.1f} GiB, computes in {bf16}"
        more = torch.cuda.device_count() - ranks
        if more > 0:
            advice = "one process uses one GPU: torchrun makes them one peer, CUDA_VISIBLE_DEVICES=1 another peer"
            yield warn("device", f"{text}; {more} more not used", advice)
        else:
            yield ok("device", text)
        return
    threads = own.threads or torch.get_num_threads()
    text = f"CPU with {threads} threads"
    if own.device == "auto":
        yield warn(
            "device", f"no GPU that torch can use; {text}", "look at nvidia-smi and the torch build if there is one"
        )
    else:
        yield ok("device", text)
