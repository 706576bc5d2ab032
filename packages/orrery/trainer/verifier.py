"""Recompute log-probs on the CPU: `python -m orrery.trainer.verifier MANIFEST`.

Answer `Recompute` messages from stdin with `Recomputed` on stdout.
"""

import os
import sys
from collections import OrderedDict
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F

from orrery.kernels.attention import prefer
from orrery.manifest.errors import OrreryError
from orrery.manifest.identity import load
from orrery.manifest.schema import Manifest
from orrery.models import build
from orrery.models.causal_lm import CausalLm
from orrery.models.placement import slices
from orrery.models.weights import named_hf_slices
from orrery.wire.recompute import Recompute, Recomputed, frame, read_frame
from orrery.wire.weight_wire import read_weights
from orrery.wire.weight_wire.fp8_blocks import decoded

NUM_NETWORKS = 2
ROWS = 64  # tokens with logits in memory


class Networks:
    def __init__(self, manifest: Manifest) -> None:
        self._manifest = manifest
        self._dtype = getattr(torch, manifest.trainer.compute_dtype)
        self._loaded: OrderedDict[str, CausalLm] = OrderedDict()
        prefer("auto")

    def at(self, folder: str) -> CausalLm:
        if folder not in self._loaded:
            while len(self._loaded) >= NUM_NETWORKS:
                self._loaded.popitem(last=False)
            network = build(self._manifest.model, self._dtype)
            with torch.no_grad():
                tensors = dict(decoded(read_weights(folder)))
                for hf, box, local in named_hf_slices(network):
                    local.copy_(tensors[hf.name][slices(box)])
            self._loaded[folder] = network
        self._loaded.move_to_end(folder)
        return self._loaded[folder]


@torch.inference_mode()
def recompute(network: CausalLm, request: Recompute) -> Recomputed:
    prompt, sampled = (
        torch.from_numpy(np.frombuffer(each, np.int32).astype(np.int64))
        for each in (request.prompt, request.token_ids)
    )
    tokens = torch.cat([prompt, sampled])
    ends = torch.tensor([0, len(tokens)], dtype=torch.int32)
    hidden_TD = network(tokens, torch.arange(len(tokens)), ends)
    hidden_MD = hidden_TD[len(prompt) - 1 : -1].float()
    weight_VD = network.lm_head_weight.float()
    parts = []
    for begin in range(0, len(sampled), ROWS):
        logits = F.linear(hidden_MD[begin : begin + ROWS], weight_VD) / request.temperature
        logp = logits.log_softmax(1)
        p, chosen = logp.exp(), sampled[begin : begin + ROWS, None]
        entropy = -(p * logp).sum(1)
        variance = (p * (logp + entropy[:, None]).square()).sum(1)
        parts.append(torch.stack([logp.gather(1, chosen)[:, 0], entropy, variance]))
    return Recomputed(*(row.numpy().tobytes() for row in torch.cat(parts, 1)))


def _answer(networks: Networks, request: Recompute) -> Recomputed:
    folder = Path(request.folder)
    try:
        # `read_weights` would wait for a missing folder.
        return recompute(networks.at(request.folder), request) if folder.is_dir() else Recomputed()
    except OrreryError:
        if folder.is_dir():
            raise
        return Recomputed()


def main() -> None:
    torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // 2))
    answers, sys.stdout = sys.stdout.buffer, sys.stderr
    networks = Networks(load(Path(sys.argv[1])))
    while (request := read_frame(sys.stdin.buffer, Recompute)) is not None:
        answers.write(frame(_answer(networks, request)))
        answers.flush()


if __name__ == "__main__":
    main()
