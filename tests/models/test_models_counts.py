"""Parameter counts from a manifest equal the built network's counts."""

from pathlib import Path

import pytest
from replaced import replaced

from orrery.manifest.budget import parameters
from orrery.manifest.errors import OrreryError
from orrery.manifest.identity import load
from orrery.manifest.schema import Lora
from orrery.manifest.schema.trainer_constraints import block_parts
from orrery.models.families import count_built

ROOT = Path(__file__).resolve().parents[2]
MODELS = {}
for path in sorted((ROOT / "manifests").glob("*.json")):
    model = load(path).model
    MODELS.setdefault((model.family, model.hidden_size, model.num_layers), (path.stem, model))


@pytest.mark.parametrize("model", [pytest.param(m, id=name) for name, m in MODELS.values()])
@pytest.mark.parametrize("rank", [None, 3])
def test_the_formulas_count_what_the_network_has(model, rank):
    lora = None
    if rank is not None:
        lora = Lora(rank=rank, alpha=1.0, targets=tuple(block_parts(model)) or (), seed=1)
    assert parameters.count_parameters(model, lora) == count_built(model, lora)


@pytest.mark.parametrize("types", [None, ["full", "shared", "full"]])
def test_layers_with_shared_choices_of_keys_have_no_indexer(types):
    model = next(model for _, model in MODELS.values() if model.family == "glm5")
    model = model.model_copy(deep=True, update={"num_layers": 3, "moe": model.moe})
    model = replaced(model, "mla.indexer", types=types)
    model = model.model_copy(update={"attention_bias": False})
    assert parameters.count_parameters(model, None) == count_built(model, None)


def test_equal_layers_are_distinct_units():
    model = next(model for _, model in MODELS.values() if model.num_layers > 1)
    first, second, *_ = parameters.count_parameters(model, None).layers
    assert first == second and first is not second


def test_a_network_of_transformers_has_no_formula():
    model = next(model for _, model in MODELS.values())
    other = model.model_copy(update={"family": "hugging_face"})
    with pytest.raises(OrreryError, match="hugging_face"):
        parameters.count_parameters(other, None)
