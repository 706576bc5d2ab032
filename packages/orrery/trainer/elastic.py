"""Connect a learner to the outer loop of several sites (`orrery.elastic`)."""

from collections.abc import Iterator

import torch

from orrery.elastic.outer import Floats
from orrery.models.placement import local_tensor
from orrery.trainer.learner import Learner


class LearnerWeights:
    """This rank's shard of the trained weights, as f32[n] in the order of their names."""

    def __init__(self, learner: Learner) -> None:
        named = sorted(learner.weights.items())
        self._weights = [(name, local_tensor(weight.detach())) for name, weight in named]
        self.sizes = {name: weight.numel() for name, weight in self._weights}
        self.num_parameters = sum(self.sizes.values())

    def parts(self) -> Iterator[tuple[slice, Floats]]:
        begin = 0
        for _, weight in self._weights:
            values = weight.float().cpu().reshape(-1).numpy()
            yield slice(begin, begin := begin + values.size), values

    def read(self, out: Floats) -> None:
        for part, values in self.parts():
            out[part] = values

    @torch.no_grad()
    def write(self, values: Floats) -> None:
        begin = 0
        for _, weight in self._weights:
            part = values[begin : (begin := begin + weight.numel())]
            weight.copy_(torch.from_numpy(part).view(weight.shape))
