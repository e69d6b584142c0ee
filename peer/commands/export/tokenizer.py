"""The byte-level tokenizer as a real one of the tokenizers library: a byte is its own id, 256 ends a text."""

from __future__ import annotations

from pathlib import Path

from peer.data.tokenizer import END_OF_TEXT, SEPARATOR, byte_letters


def save(folder: Path) -> None:
    """Write the files that ``AutoTokenizer`` loads."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE(vocab={letter: byte for byte, letter in enumerate(byte_letters())}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(END_OF_TEXT, special=True)])
    assert tokenizer.token_to_id(END_OF_TEXT) == SEPARATOR
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token=END_OF_TEXT, pad_token=END_OF_TEXT, clean_up_tokenization_spaces=False
    )
    fast.save_pretrained(folder)
