"""Sizes of tiles that kernels and the memory plan share."""

SPARSE_PAIRS = 2**22  # (query, chosen key) pairs of a chunk in sparse attention's backward pass
AUTO_SHARE = 16  # logits of an "auto" chunk of the LM head take 1/16 of device memory
ALIGNMENT = 128  # sizes of slices are multiples of 128, the tile size of matrix products


def auto_chunk_tokens(device_bytes: int, vocab_size: int) -> int:
    """Return how many tokens the LM head scores at a time if `lm_head_chunk_tokens` is "auto".

    Their logits take 6 bytes each, together 1/16 of `device_bytes`.
    """
    tokens = device_bytes // (AUTO_SHARE * 6 * vocab_size)
    return max(ALIGNMENT, tokens // ALIGNMENT * ALIGNMENT)


def blocks(length: int, longest: int) -> list[slice]:
    """Divide range(length) into the fewest slices of at most `longest` elements.

    All slices except the last have a multiple of 128 elements, if `longest` allows that.
    """
    longest = max(1, longest)
    size = -(-length // max(1, -(-length // longest)))
    aligned = -(-size // ALIGNMENT) * ALIGNMENT
    size = aligned if aligned <= longest else size
    return [slice(start, min(start + size, length)) for start in range(0, length, max(1, size))]
