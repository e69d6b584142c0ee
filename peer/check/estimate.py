"""What a peer needs of memory, roughly. Pure arithmetic.

P parameters, all in fp32 (4 bytes each):

    where the model computes: 4P weights + 4P gradients + 8P AdamW's moments + activations
    on the host:              4P slow weights φ + 4P momentum δ (not for local) + 4P a buffer for a partner's tensor
                              (not with overlap) + 2 GiB for Python, torch, the p2p daemon and the text
    activations of a token:   layers × (10 hidden + 4 intermediate) × b + 3 × vocabulary × 4
                              b bytes an element: 4, or 2 under bf16; × sequence length × sequences at once

On a CPU both halves are host memory.
"""

from __future__ import annotations

from dataclasses import dataclass

from peer.config import Run

FP32 = 4
PROCESS = 2 * 2**30  # bytes
VOCABULARY = 257  # as in corpus.py


@dataclass(frozen=True)
class Estimate:
    """Bytes."""

    training: int  # weights, gradients and AdamW's moments
    activations: int
    slow: int  # φ, δ and the buffer of a swap
    process: int = PROCESS

    def device(self) -> int:
        """Where the model computes."""
        return self.training + self.activations

    def host(self, on_cpu: bool) -> int:
        """``on_cpu``: the model computes there too."""
        return self.slow + self.process + (self.device() if on_cpu else 0)


def estimate(run: Run, parameters: int, micro_batch: int | None, bf16: bool) -> Estimate:
    """For a model of so many ``parameters``; ``micro_batch``: sequences at once, ``None``: the whole batch."""
    model, element = run.model, 2 if bf16 else FP32
    tokens = (micro_batch or run.batch_size) * run.data.sequence_length
    a_layer = 10 * model.hidden_size + 4 * model.intermediate_size
    a_token = model.layers * a_layer * element + 3 * VOCABULARY * FP32
    vectors = 1 if run.outer.name == "local" else 2 if run.exchange.overlap else 3
    return Estimate(
        training=4 * FP32 * parameters,
        activations=tokens * a_token,
        slow=vectors * FP32 * parameters,
    )
