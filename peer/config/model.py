"""``run.model``: a Llama by its sizes, or any causal language model that transformers knows."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, model_validator

from peer.config.fields import LOCAL, Section


class LlamaModel(Section):
    """A transformers ``LlamaForCausalLM`` with fresh weights, drawn from ``run.seed``."""

    name: Literal["llama"] = "llama"
    hidden_size: int = Field(default=128, gt=0)
    intermediate_size: int = Field(default=344, gt=0)
    layers: int = Field(default=5, gt=0)
    heads: int = Field(default=4, gt=0)
    kv_heads: int | None = Field(default=None, gt=0)
    tie_embeddings: bool = True
    vocabulary: int | None = Field(default=None, gt=0)  # none: as many tokens as the data's tokenizer has

    @model_validator(mode="after")
    def _divides(self) -> LlamaModel:
        if self.hidden_size % self.heads:
            raise ValueError(f"hidden_size {self.hidden_size} is not a multiple of heads {self.heads}")
        if self.hidden_size // self.heads % 2:  # positions turn pairs of a head's elements (rotary embedding)
            raise ValueError(f"hidden_size {self.hidden_size} over heads {self.heads} is odd; it must be even")
        if self.kv_heads and self.heads % self.kv_heads:
            raise ValueError(f"heads {self.heads} is not a multiple of kv_heads {self.kv_heads}")
        return self


class AutoModel(Section):
    """Any causal language model of transformers, by its ``config.json``.

    Where the files come from is local to each machine. Their content is not: its digest is part of the run's digest.
    """

    name: Literal["auto"]
    # a folder with config.json, or a name on the Hugging Face hub (with HF_TOKEN from the environment)
    source: str = Field(min_length=1, json_schema_extra=LOCAL)
    revision: str | None = Field(default=None, json_schema_extra=LOCAL)  # branch, tag or commit on the hub
    trust_remote_code: bool = Field(default=False, json_schema_extra=LOCAL)  # run the Python code of the source
    pretrained: bool = False  # begin with the source's weights; false: with fresh ones, drawn from run.seed
    digest: str | None = Field(default=None, pattern=r"^[0-9a-f]{32}$")  # of the files; none: taken when a peer starts
