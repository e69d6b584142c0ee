"""Build the model of a run. Only this module chooses a model class."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import torch
from torch import nn

from peer.config.model import AutoModel, LlamaModel
from peer.config.schema import RunConfig
from peer.device.memory import is_out_of_memory
from peer.errors import UserError, one_line
from peer.logs import get_logger
from peer.replica.attention import without_mask
from peer.replica.model_source import locate, weight_files

log = get_logger("model")


def build(run: RunConfig) -> nn.Module:
    """fp32 weights on the CPU: fresh ones, equal on every machine for the same ``run.seed``, or those of the source.

    ``model(input_ids=[B, T]).logits`` is ``[B, T, tokens]``, with at least the tokenizer's number of tokens. The
    process's random state does not change. Raises :class:`UserError` for a model that is missing or does not fit the
    data, and :class:`peer.errors.RunError` if the hub does not answer.
    """
    if not isinstance(run.model, AutoModel):
        return untrained(run)
    if run.model.pretrained:
        network = _pretrained(run.model, _checked(run))
        for name, parameter in outline(run).named_parameters():  # transformers unfreezes what it loads
            network.get_parameter(name).requires_grad_(parameter.requires_grad)
    else:
        network = untrained(run)
    if _looks_ahead(network, run.data.tokenizer.vocabulary // 2):
        raise _sees_ahead(run.model)
    return network


def untrained(run: RunConfig, dtype: torch.dtype = torch.float32) -> nn.Module:
    """The run's model with fresh weights, also where the run starts from pre-trained ones."""
    trust = isinstance(run.model, AutoModel) and run.model.trust_remote_code
    return fresh(_checked(run), seed=run.seed, trust_remote_code=trust, dtype=dtype)


def fresh(
    config: Any, *, seed: int = 0, trust_remote_code: bool = False, dtype: torch.dtype = torch.float32
) -> nn.Module:
    """Weights drawn from ``seed`` for a transformers configuration."""
    from transformers import AutoModelForCausalLM

    with torch.random.fork_rng(devices=[]), _in_one_line(config.model_type):
        torch.default_generator.manual_seed(seed)  # weights are drawn on the CPU; torch.manual_seed reseeds all devices
        network = AutoModelForCausalLM.from_config(config, dtype=dtype, trust_remote_code=trust_remote_code)
    without_mask(network)
    return _without_padding(network, drawn=True)


def checkpoint_activations(model: nn.Module) -> None:
    """Keep only the activations between the layers, and recompute the others in the backward pass."""
    if not getattr(model, "supports_gradient_checkpointing", False):
        raise UserError("peer.gradient_checkpointing: this model does not support it; set it to false")
    how = {"use_reentrant": False}
    if hasattr(model, "activation_checkpointing_enable"):  # the name in later versions of transformers 5
        model.activation_checkpointing_enable(how)  # type: ignore[operator]
    else:
        model.gradient_checkpointing_enable(how)  # type: ignore[operator]


def parameter_count(model: nn.Module) -> int:
    """The number of trained parameters; tied ones count once."""
    return sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)


def embedding_count(model: nn.Module) -> int:
    """The number of parameters in embeddings, and in the head if it is not tied."""
    layers = (model.get_input_embeddings(), model.get_output_embeddings())  # type: ignore[operator]
    tables = {id(layer.weight): layer.weight.numel() for layer in layers if layer is not None}
    return sum(tables.values())


def outline(run: RunConfig) -> nn.Module:
    """The run's model without weights, on the meta device: layers, names, shapes and which parameters are trained."""
    from transformers import masking_utils  # noqa: F401 - it computes as it loads, which the meta device cannot

    with torch.device("meta"):
        return untrained(run)


def parameters_of(run: RunConfig) -> int:
    """:func:`parameter_count` of the run's model, which is not built."""
    return parameter_count(outline(run))


def _checked(run: RunConfig) -> Any:
    """The transformers configuration, if the run's data fits such a model."""
    settings, sequence_length, vocabulary = run.model, run.data.sequence_length, run.data.tokenizer.vocabulary
    if isinstance(settings, LlamaModel):
        tokens, positions = settings.vocabulary or vocabulary, sequence_length
        config = _llama(settings, sequence_length, tokens)
        key = "run.model.vocabulary"
    else:
        config, text = _of_source(settings)
        tokens, positions = text.vocab_size, getattr(text, "max_position_embeddings", None) or sequence_length
        key = f"run.model: the vocabulary of {settings.source}"
    if tokens < vocabulary:
        raise UserError(f"{key} has {tokens} tokens, the data's tokenizer {vocabulary}; choose ones that fit")
    if positions < sequence_length:
        raise UserError(
            f"run.data.sequence_length: {sequence_length} is more than the {positions} positions of run.model; lower it"
        )
    return config


def _of_source(settings: AutoModel) -> tuple[Any, Any]:
    """The source's configuration, and the part of it for text."""
    from transformers import AutoConfig

    folder, trust = locate(settings), settings.trust_remote_code
    with _in_one_line(settings.source):
        config = AutoConfig.from_pretrained(folder, trust_remote_code=trust, use_cache=False)
        text = config.get_text_config()
    if not isinstance(getattr(text, "vocab_size", None), int):
        raise UserError(f"run.model: {settings.source} has no whole number as vocab_size; choose a text model")
    if _is_encoder(config):
        raise _sees_ahead(settings)
    return config, text


def _is_encoder(config: Any) -> bool:
    """As BERT: transformers has it for masked tokens too, and is_decoder is false. Known without weights."""
    from transformers import MODEL_FOR_MASKED_LM_MAPPING

    masked = type(config) in MODEL_FOR_MASKED_LM_MAPPING and not config.is_encoder_decoder
    return masked and getattr(config, "is_decoder", None) is False


def _looks_ahead(network: nn.Module, word: int) -> bool:
    """Whether logits depend on later tokens. By its class one cannot know it: transformers has many such models.

    ``word``: a token that is none for padding.
    """
    text, was = torch.tensor([[word, word, word], [word, word, word + 1]]), network.training
    try:
        with torch.no_grad(), torch.random.fork_rng(devices=[]):
            logits = network.eval()(input_ids=text).logits.float()
    except Exception as error:  # noqa: BLE001 - its code may need an accelerator
        log.info("not known whether the model sees later tokens: %s", one_line(error))
        return False
    finally:
        network.train(was)
    apart = (logits[0, :2] - logits[1, :2]).abs().max()  # rounding: 2e-7 of the largest; encoders: above 2e-4
    return bool(apart > 1e-5 * logits.abs().max())


def _sees_ahead(settings: AutoModel) -> UserError:
    return UserError(
        f"run.model: {settings.source} sees the tokens that it has to predict; set is_decoder: true in its "
        "config.json, or choose a decoder"
    )


def _llama(settings: LlamaModel, sequence_length: int, tokens: int) -> Any:
    from transformers import LlamaConfig

    return LlamaConfig(
        vocab_size=tokens,
        hidden_size=settings.hidden_size,
        intermediate_size=settings.intermediate_size,
        num_hidden_layers=settings.layers,
        num_attention_heads=settings.heads,
        num_key_value_heads=settings.kv_heads or settings.heads,
        max_position_embeddings=sequence_length,
        tie_word_embeddings=settings.tie_embeddings,
        bos_token_id=None,
        eos_token_id=None,
        use_cache=False,
    )


def _pretrained(settings: AutoModel, config: Any) -> nn.Module:
    from transformers import AutoModelForCausalLM

    folder = locate(settings)
    weight_files(folder, settings)  # raises UserError if there are none
    with torch.random.fork_rng(devices=[]), _in_one_line(settings.source):
        model, report = AutoModelForCausalLM.from_pretrained(
            folder,
            config=config,
            dtype=torch.float32,
            use_safetensors=True,
            trust_remote_code=settings.trust_remote_code,
            output_loading_info=True,
        )
    if report["missing_keys"]:
        first = sorted(report["missing_keys"])[0]
        raise UserError(
            f"run.model: the weights of {settings.source} lack {first}; choose a model for text generation, "
            "or run.model.pretrained: false"
        )
    without_mask(model)
    return _without_padding(model, drawn=False)


def _without_padding(network: Any, *, drawn: bool) -> nn.Module:
    """``network`` without a padding token. No batch has padding, and the data may have the token, as the end of a text:
    torch gives its row of the input embeddings no gradient, and transformers draws zeros for it.
    """
    table = None
    with suppress(NotImplementedError):  # a class of its own need not say which its input embeddings are
        table = network.get_input_embeddings()
    padding = getattr(table, "padding_idx", None)
    if table is not None and padding is not None:
        table.padding_idx = None
        if drawn:
            with torch.no_grad():  # the row before it, backwards: as random, and equal on every machine
                table.weight[padding] = table.weight[padding - 1].flip(0)
    return network


@contextmanager
def _in_one_line(name: str) -> Iterator[None]:
    """Turn errors of transformers into one line."""
    try:
        yield
    except Exception as error:  # its checks of config.json have types of their own, which are no ValueError
        if is_out_of_memory(error):
            raise
        if "trust_remote_code" in str(error):
            reason = "it contains Python code; read the code, then set run.model.trust_remote_code: true"
        elif "Unrecognized configuration class" in str(error):
            reason = "it is not a causal language model"
        elif isinstance(error, ZeroDivisionError):
            reason = "a size or a number of heads in its config.json is 0"
        else:
            reason = one_line(error, 200)
        raise UserError(f"run.model: {name} cannot be used: {reason}") from None
