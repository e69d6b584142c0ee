"""The byte-level tokenizer as a real one of the tokenizers library: a byte is its own id, 256 ends a text."""

from __future__ import annotations

from pathlib import Path

from peer.corpus import SEPARATOR

END = "<|endoftext|>"


def save(folder: Path) -> None:
    """Write the files that ``AutoTokenizer`` loads."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE(vocab={letter: byte for byte, letter in enumerate(_letters())}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(END, special=True)])
    assert tokenizer.token_to_id(END) == SEPARATOR
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token=END, pad_token=END, clean_up_tokenization_spaces=False
    )
    fast.save_pretrained(folder)


def _letters() -> list[str]:
    """The letter by which byte-level tokenizers write each byte: itself where it can be seen, else one from 256 on."""
    seen = {*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)}
    hidden = [byte for byte in range(256) if byte not in seen]
    return [chr(byte) if byte in seen else chr(256 + hidden.index(byte)) for byte in range(256)]
