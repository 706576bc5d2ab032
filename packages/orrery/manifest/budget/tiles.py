"""Sizes of tiles that kernels and the memory plan share."""

SPARSE_PAIRS = 2**22  # (query, chosen key) pairs of a chunk in sparse attention's backward pass
AUTO_SHARE = 16  # an "auto" chunk takes 1/16 of memory
ALIGNMENT = 128  # slices are multiples of 128: whole tiles of products


def auto_chunk_tokens(device_bytes: int, vocab_size: int) -> int:
    """Return the tokens of an "auto" chunk. Its logits (6 bytes each) take 1/16 of GPU memory."""
    tokens = device_bytes // (AUTO_SHARE * 6 * vocab_size)
    return max(ALIGNMENT, tokens // ALIGNMENT * ALIGNMENT)


def blocks(length: int, longest: int) -> list[slice]:
    """Divide `length` into the fewest slices of at most `longest`, multiples of 128 if possible."""
    longest = max(1, longest)
    size = -(-length // max(1, -(-length // longest)))
    aligned = -(-size // ALIGNMENT) * ALIGNMENT
    size = aligned if aligned <= longest else size
    return [slice(start, min(start + size, length)) for start in range(0, length, max(1, size))]
