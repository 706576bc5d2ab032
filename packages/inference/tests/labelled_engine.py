"""An engine whose answers have our own account of versions, the one for vLLM 0.26, in place of its own: `python -m labelled_engine`."""

from typing import Any

from orrery.inference import __main__, releases

correct = releases.correct


def correct_and_label(manifest: Any) -> None:
    correct(manifest)
    from orrery.inference.patches import vllm_0_26

    vllm_0_26.keep_account()


if __name__ == "__main__":
    releases.correct = correct_and_label
    __main__.main()
