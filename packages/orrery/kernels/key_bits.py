"""Compare the sparse-attention keys of an inference engine with the trainer's keys.

T queries, K chosen keys per query, B bytes per query. Bit j of byte b is set if key 8·b + j of the
query's document was chosen. Instead of bits, an engine may send S random keys of the K.
"""

# mypy: disable-error-code="no-untyped-def"
import torch
from torch import Tensor

CHUNK_ELEMENTS = 2**24  # bits unpacked at a time: 128 MiB as int64


def engine_keys(
    bits_TB: Tensor, own_TK: Tensor, first_T: Tensor, last_T: Tensor
) -> tuple[Tensor, Tensor]:
    """Return each query's keys, i32 [T, K], and two counts, i64 [2].

    `bits` are the engine's keys, `own` the trainer's keys (i32 indices or −1). Query t may attend
    to keys first_t to last_t. A query is valid if this range has more than K keys, and the engine
    set exactly K bits, all in the range. Valid queries get the engine's keys, others keep `own`.
    Count valid queries, and their engine keys that `own` lacks.
    """
    return torch.ops.orrery.engine_keys(bits_TB, own_TK, first_T, last_T)


@torch.library.custom_op("orrery::engine_keys", mutates_args=())
def _engine_keys(bits: Tensor, own: Tensor, first: Tensor, last: Tensor) -> tuple[Tensor, Tensor]:
    keys, counts = torch.empty_like(own), torch.zeros(2, dtype=torch.int64, device=own.device)
    step = max(1, CHUNK_ELEMENTS // (8 * bits.shape[1]))
    for start in range(0, len(own), step):
        rows = slice(start, start + step)
        keys[rows], found = _chunk(bits[rows], own[rows], first[rows], last[rows])
        counts += found
    return keys, counts


def _chunk(bits: Tensor, own: Tensor, first: Tensor, last: Tensor) -> tuple[Tensor, Tensor]:
    num_keys = own.shape[1]
    shift_8 = torch.arange(8, dtype=torch.uint8, device=own.device)
    is_set_TL = ((bits[..., None] >> shift_8) & 1).flatten(1).bool()
    position_L = torch.arange(is_set_TL.shape[1], dtype=torch.int32, device=own.device)
    own_position_TK = own - first[:, None]
    max_T = last - first
    is_seen_TL = position_L <= max_T[:, None]
    is_known_T = is_set_TL.sum(dim=1) == num_keys
    is_known_T &= ((is_set_TL & is_seen_TL) == is_set_TL).all(dim=1) & (max_T >= num_keys)
    place_TL = torch.where(is_set_TL, is_set_TL.cumsum(dim=1) - 1, num_keys).clamp_(max=num_keys)
    chosen_TK = own.new_empty(len(own), num_keys + 1)  # the last column collects unset bits
    chosen_TK.scatter_(1, place_TL, first[:, None].int() + position_L)
    inside_TK = own_position_TK.clamp(0, is_set_TL.shape[1] - 1).long()
    is_same_TK = is_set_TL.gather(1, inside_TK) & (own >= 0) & (own_position_TK == inside_TK)
    num_known = is_known_T.sum()
    num_same = (is_same_TK & is_known_T[:, None]).sum()
    keys_TK = torch.where(is_known_T[:, None], chosen_TK[:, :num_keys], own)
    return keys_TK, torch.stack((num_known, num_known * num_keys - num_same))


@_engine_keys.register_fake
def _(bits, own, first, last):
    return torch.empty_like(own), own.new_empty(2, dtype=torch.int64)


def compare_sample(sample_TS: Tensor, own_TK: Tensor, first_T: Tensor, last_T: Tensor) -> Tensor:
    """Return i64 [2]: number of valid queries, estimated number of engine keys that `own` lacks.

    `sample` holds engine keys as i32 positions in the query's document. `engine_keys` explains the
    other arguments. A query is valid if its range has more than K keys, and its sample S different
    keys, all in the range. Each sampled key that `own` lacks counts K / S times.
    """
    return torch.ops.orrery.compare_sample(sample_TS, own_TK, first_T, last_T)


@torch.library.custom_op("orrery::compare_sample", mutates_args=())
def _compare_sample(sample: Tensor, own: Tensor, first: Tensor, last: Tensor) -> Tensor:
    (num_queries, num_samples), num_keys = sample.shape, own.shape[1]
    counts = torch.zeros(2, dtype=torch.int64, device=own.device)
    step = max(1, CHUNK_ELEMENTS // (num_keys * num_samples))
    for start in range(0, num_queries, step):
        rows = slice(start, start + step)
        sample_TS, max_T1 = sample[rows], (last[rows] - first[rows])[:, None]
        is_key_TS = (sample_TS >= 0) & (sample_TS <= max_T1) & (max_T1 >= num_keys)
        num_equal_T = (sample_TS[:, None] == sample_TS[..., None]).sum(dim=(1, 2))
        is_valid_T = is_key_TS.all(dim=1) & (num_equal_T == num_samples)
        key_TS = sample_TS + first[rows, None]
        is_there_TS = (own[rows, None] == key_TS[..., None]).any(dim=2)
        missing = (~is_there_TS & is_valid_T[:, None]).sum()
        counts += torch.stack((is_valid_T.sum(), missing))
    counts[1] = counts[1] * num_keys // num_samples
    return counts


@_compare_sample.register_fake
def _(sample, own, first, last):
    return own.new_empty(2, dtype=torch.int64)
