"""Names and `config.json` of a network of transformers: its own."""

from typing import Any

from orrery.manifest.schema import Model
from orrery.models.hugging_face.model import HuggingFaceLm
from orrery.models.names import Names


def names(module: HuggingFaceLm) -> Names:
    """Our parameter names to HF's."""
    return dict(module.names)


def hf_config(config: Model) -> dict[str, Any]:
    """The manifest's, without the dtype, which is the weights' own."""
    assert config.hf_config is not None  # the schema's law for this family
    return {
        name: value
        for name, value in config.hf_config.items()
        if name not in ("dtype", "torch_dtype")
    }
