"""The LM head's tiles, for the kernel that computes them and for the memory plan."""

AUTO_SHARE = 16  # of the device's memory
ALIGNMENT = 128  # of blocks, for whole tiles of the products


def auto_chunk_tokens(device_bytes: int, vocab_size: int) -> int:
    """Return a GPU's "auto" chunk: 1/16 of its memory at 6 bytes a logit."""
    tokens = device_bytes // (AUTO_SHARE * 6 * vocab_size)
    return max(ALIGNMENT, tokens // ALIGNMENT * ALIGNMENT)


def blocks(length: int, longest: int) -> list[slice]:
    """Divide `length` into the fewest slices of at most `longest`, multiples of 128 if possible."""
    longest = max(1, longest)
    size = -(-length // max(1, -(-length // longest)))
    aligned = -(-size // ALIGNMENT) * ALIGNMENT
    size = aligned if aligned <= longest else size
    return [slice(start, min(start + size, length)) for start in range(0, length, max(1, size))]
