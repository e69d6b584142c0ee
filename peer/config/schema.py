"""The configuration's types: ``run`` is equal in the whole swarm, ``peer`` is local to this machine."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import Field, ValidationInfo, field_validator, model_validator

from peer.config.data import AnyData, StdlibData
from peer.config.fields import (
    LOCAL,
    REPOSITORY,
    Bitrate,
    Fraction,
    Hours,
    PathText,
    Port,
    Positive,
    Section,
    Sequence,
    Words,
)
from peer.config.methods import DecoupledConfig, DiLoCoConfig, LocalConfig, NoLoCoConfig
from peer.config.model import AutoModel, LlamaModel
from peer.rounds.types import Name


class InnerConfig(Section):
    """AdamW, or Muon for the matrices of hidden layers and AdamW for the rest (replica/optimizer.py). The learning rate
    warms up linearly, then a cosine takes it to ``min_lr_ratio`` of the peak, by the swarm's step.
    """

    optimizer: Literal["adamw", "muon"] = "adamw"
    learning_rate: Positive = 1e-3
    min_lr_ratio: Fraction = 0.1
    warmup_steps: int = Field(default=100, ge=0)
    weight_decay: float = Field(default=0.1, ge=0)
    beta1: Fraction = 0.9
    beta2: Fraction = 0.95
    clip_norm: Positive = 1.0


class RendezvousConfig(Section):
    """Partners are agreed during the inner steps."""

    window: Fraction = 0.5  # share of an inner phase by which the boundaries of two partners may differ
    tries: int = Field(default=8, gt=0)  # peers asked at a boundary before going on alone
    patience: Positive = 600.0  # seconds for which a group of everyone waits for its slowest member


CodecName = Literal["none", "fp16", "bf16", "int8", "int4", "int2"]
CODECS: dict[str, tuple[CodecName, ...]] = {  # by method
    "noloco": ("none", "fp16", "bf16", "int8", "int4"),
    "diloco": ("none", "fp16", "bf16", "int8", "int4", "int2"),
}


class ExchangeConfig(Section):
    """The bytes on the wire, and the bounds of one swap."""

    # the defaults are noloco's; diloco has no overlap, decoupled and local have no codec either (SwarmRunConfig)
    overlap: bool = True  # the swap runs during the next inner steps, part by part; noloco only
    codec: CodecName = "int8"  # none: fp32; int8 and int4: exchange/modulo.py, for diloco exchange/group/rounding.py
    stall: Positive = 10.0  # seconds without one byte from the partner
    max_phases: Positive = 4.0  # inner phases that a swap may take; one that would take longer is ended early
    # norm of a member's contribution over the median norm of a group of everyone
    max_norm_ratio: float = Field(default=10.0, gt=1)

    @property
    def feedback(self) -> bool:
        """What rounding loses is sent in later rounds (exchange/group/feedback.py)."""
        return self.codec == "int2"


class EvaluationConfig(Section):
    """Validation on the held-out split, and on ``sets``: each of glob patterns of text, JSON Lines or Parquet files."""

    every_rounds: int = Field(default=5, gt=0)
    batches: int = Field(default=8, gt=0)
    sets: dict[Name, Annotated[Words, Field(min_length=1)]] = Field(default={}, json_schema_extra=LOCAL)


class SwarmRunConfig(Section):
    """What all members of a swarm have in common, whatever they train. Peers compare its digest on every stream."""

    name: Name = "demo"
    dir: PathText = Field(default=Path("runs"), json_schema_extra=LOCAL)
    inner_steps: int = Field(default=50, gt=0)  # H
    inner_time: Positive | None = None  # seconds of an inner phase: a slower peer makes fewer inner steps (NoLoCo only)
    outer: Annotated[NoLoCoConfig | DiLoCoConfig | DecoupledConfig | LocalConfig, Field(discriminator="name")] = (
        NoLoCoConfig()
    )
    rendezvous: RendezvousConfig = RendezvousConfig()
    exchange: ExchangeConfig = Field(default=ExchangeConfig(), validate_default=True)
    admission: Literal["open", "invite"] = "open"  # invite: only peers with an invitation of the owner take part
    owner: str | None = Field(default=None, pattern=r"^[A-Za-z0-9+/]{43}=$")  # public key, from noloco-bootstrap invite

    @field_validator("exchange", mode="before")
    @classmethod
    def _without_overlap_and_codec(cls, value: Any, info: ValidationInfo) -> Any:
        """The defaults of the other methods. What is given stays, and :meth:`_fits` may refuse it."""
        outer = info.data.get("outer")
        if isinstance(outer, NoLoCoConfig) or not isinstance(value, dict | ExchangeConfig):
            return value
        given = value if isinstance(value, dict) else value.model_dump(exclude_unset=True)
        codecs = {} if isinstance(outer, DiLoCoConfig) else {"codec": "none"}
        return {"overlap": False, **codecs, **given}

    @model_validator(mode="after")
    def _fits(self) -> Self:
        if (self.admission == "invite") != (self.owner is not None):
            raise ValueError("admission: invite and owner: KEY belong together")
        codec, takes = self.exchange.codec, CODECS.get(self.outer.name, ("none",))
        if codec not in takes:
            raise ValueError(f"exchange.codec {codec} is not for {self.outer.name}, which takes {', '.join(takes)}")
        if self.inner_time and not isinstance(self.outer, NoLoCoConfig):
            raise ValueError(f"inner_time is for noloco, whose swaps are weighted by tokens, not for {self.outer.name}")
        if self.exchange.overlap and not isinstance(self.outer, NoLoCoConfig):
            raise ValueError(f"exchange.overlap is for noloco's swap; {self.outer.name} has none")
        return self


class RunConfig(SwarmRunConfig):
    """Equal in the whole swarm: how its members meet and what they train."""

    seed: int = Field(default=0, ge=0, lt=2**63)
    steps: int = Field(default=1000, gt=0)  # inner steps
    batch_size: int = Field(default=8, gt=0)  # sequences a peer and inner step
    model: Annotated[LlamaModel | AutoModel, Field(discriminator="name")] = LlamaModel()
    data: AnyData = StdlibData()
    inner: InnerConfig = InnerConfig()
    evaluation: EvaluationConfig = EvaluationConfig()

    @field_validator("model", mode="before")
    @classmethod
    def _llama_where_no_name_is_given(cls, value: Any) -> Any:
        return {"name": "llama", **value} if isinstance(value, dict) else value


class NetworkConfig(Section):
    """How others reach this machine. For peers of one machine only: host 127.0.0.1."""

    host: str = "0.0.0.0"
    port: Port = 0  # 0: any free one; behind a firewall choose one and open it
    # direct connections for parts (p2p/bulk): auto: the port after that one, or any free one; off: none are offered
    bulk_port: Port | Literal["auto", "off"] = "auto"
    announce: Words = ()  # multiaddrs to announce instead of the detected ones and of what a cloud says
    upnp: bool = True  # ask the router for a port mapping
    reach: Literal["auto", "public", "relay"] = "auto"  # auto: through relays when the initial peers cannot dial it
    # of all tensors and of what it relays, such as 20mbit; none: as fast as the line is
    max_upload: Bitrate | None = None
    max_download: Bitrate | None = None
    start_timeout: Positive = 60.0  # seconds for the p2p daemon to start
    join_timeout: Positive = 60.0  # seconds of trying the initial peers


class MetricsConfig(Section):
    """Prometheus endpoint of this peer."""

    host: str = "127.0.0.1"
    port: Port | None = None  # none: 9464, or any free one when that is taken
    # IPv4 address and port at which Prometheus reaches it; no name, no port below 1024 (dht_bootstrap/targets.py)
    announce: Annotated[str, Field(pattern=r"^\d{1,3}(\.\d{1,3}){3}:\d{4,5}$")] | None = None


class CheckpointConfig(Section):
    """Checkpoints are saved at boundaries and at the end."""

    every_rounds: int = Field(default=10, gt=0)
    keep: int = Field(default=2, gt=0)
    resume: bool = True


class PushConfig(Section):
    """Push this peer's weights to a model repository of the Hugging Face hub beside training (hub/beside.py)."""

    to: Annotated[str, Field(pattern=REPOSITORY)]  # OWNER/NAME; the token is from HF_TOKEN or hf auth login
    every_rounds: int = Field(default=100, gt=0)  # the first checkpoint after as many rounds, and the last one
    private: bool = True  # of a new repository; one that is there stays as it is
    max_upload: Bitrate | None = None  # of the push, besides network.max_upload; none: as fast as the line is


class MemberConfig(Section):
    """This machine as a member of a swarm, whatever it trains."""

    name: Name | None = None  # none: <host name>-<k>, the first that is not running here
    identity: PathText | None = None  # none: <run.dir>/<peer name>/identity.key
    invitation: PathText | None = None  # the owner's file, with the identity in it; for run.admission: invite
    initial_peers: Words = ()
    start_with: int = Field(default=1, gt=0)  # members that a new swarm begins with, this one included
    start_patience: float = Field(default=60.0, ge=0)  # seconds to wait for them; then it begins with those that came
    network: NetworkConfig = NetworkConfig()
    metrics: MetricsConfig = MetricsConfig()
    # in addition to Prometheus; see telemetry/trackers.py
    trackers: Annotated[tuple[Literal["tensorboard", "wandb"], ...], Sequence] = ()

    @model_validator(mode="after")
    def _one_identity(self) -> Self:
        if self.identity is not None and self.invitation is not None:
            raise ValueError("identity: an invitation has its own, leave this out")
        return self


class PeerConfig(MemberConfig):
    """This machine only: as a member of the swarm, and how it trains."""

    device: Literal["auto", "cpu", "cuda", "mps", "xpu"] = "auto"  # cuda: of NVIDIA and of AMD
    precision: Literal["auto", "fp32", "bf16"] = "auto"  # auto: bf16 autocast where the device has it
    threads: int | None = Field(default=None, gt=0)  # CPU threads of torch; none: its choice, of ranks equal shares
    micro_batch: int | None = Field(default=None, gt=0)  # sequences at once on one device; none: the whole batch
    offload: Literal["none", "optimizer"] = "none"  # AdamW's moments and gradients on the host: slower, 4 bytes not 16
    gradient_checkpointing: bool = False  # recompute activations in the backward pass: less memory, a third slower
    compile: bool = False  # torch.compile model and loss; where that fails they are used as they are
    hours: Hours | None = None  # in which it trains, such as 20:00-08:00 of local time; else it pauses; none: always
    stream: int | None = Field(default=None, ge=0)  # data stream; none: from the identity
    checkpoint: CheckpointConfig = CheckpointConfig()
    push: PushConfig | None = None


class Config(Section):
    """A whole configuration file."""

    run: RunConfig = RunConfig()
    peer: PeerConfig = PeerConfig()

    @model_validator(mode="after")
    def _halves_fit(self) -> Config:
        batch, micro, inner = self.run.batch_size, self.peer.micro_batch, self.run.inner.optimizer
        if micro and batch % micro:
            raise ValueError(f"run.batch_size {batch} is not a multiple of peer.micro_batch {micro}")
        if self.peer.offload == "optimizer" and inner != "adamw":
            raise ValueError(f"peer.offload: optimizer is for AdamW, run.inner.optimizer is {inner}; set none")
        return self
