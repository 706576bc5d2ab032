"""How a rank comes to its place among others, and how it leaves."""

from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch
from trainer_cases import manifest

from orrery.manifest.errors import RunFailed
from orrery.observe.wind_down import WoundDown
from orrery.trainer import assemble
from orrery.trainer.parallel.world import World


@pytest.mark.parametrize(("error", "dissolves"), [(None, True), (WoundDown(3), True), (RunFailed("alone"), False), (SystemExit(1), False)])
def test_a_rank_that_fails_waits_for_no_other(monkeypatch, error, dissolves):
    dissolved = []
    monkeypatch.setattr(assemble, "pulse", lambda me, device: nullcontext())
    monkeypatch.setattr(assemble, "form", lambda mesh, rank, device, store: World(rank, 1, torch.device("cpu"), None))
    monkeypatch.setattr(assemble, "dissolve", dissolved.append)
    me = SimpleNamespace(
        manifest=manifest(), index=0, health=SimpleNamespace(doing=lambda what: None, waiting=lambda *_, **__: nullcontext())
    )
    with pytest.raises(type(error)) if error is not None else nullcontext(), assemble.assemble_world(me):
        if error is not None:
            raise error
    assert bool(dissolved) == dissolves
