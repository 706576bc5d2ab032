"""Deployments: what a Kubernetes cluster with another router is given to serve a run's engines. Renders; applies nothing, imports no vLLM.

- In: a manifest, and where it is served (`Place`): images and the volume with the weights, which no manifest says. Out: documents by file.
- An engine's flags are those of the launcher's command (`assemble.server_arguments`), its variables those of vLLM's settings; addresses a
  pod learns when it starts. What a run corrects in the API server before vLLM starts (`releases.correct`) is not there.
- One component or Deployment an engine, not replicas of one: engines differ by seed, and by their part where prefill is apart.
- The router's policy becomes what the other router calls it.
"""

from collections.abc import Callable

from orrery.inference.deployments import dynamo, llm_d
from orrery.inference.deployments.engine import Place
from orrery.manifest.schema import Manifest

Documents = dict[str, list[dict[str, object]]]
KINDS: dict[str, Callable[[Manifest, Place], Documents]] = {
    "dynamo": dynamo.render,
    "llm_d": llm_d.render,
}
