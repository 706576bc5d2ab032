"""Deployments: what a Kubernetes cluster with another router is given to serve a run's engines. Renders; applies nothing, imports no vLLM.

- In: a manifest, and where it is served (`Place`): images and the volume with the weights, which no manifest says. Out: documents by file.
- An engine's flags are those of the launcher's command (`assemble.server_arguments`), so an engine here is the engine of a run; its
  variables too, but for addresses, which a pod learns when it starts.
- One component or Deployment an engine, not replicas of one: engines differ by seed, and by their part where prefill is apart.
- The router's policy becomes what the other router calls it.
"""

from collections.abc import Callable

from orrery.inference.deployments import dynamo, llm_d
from orrery.inference.deployments.engine import Place
from orrery.manifest.schema import Manifest

Documents = dict[str, list[dict[str, object]]]
KINDS: dict[str, Callable[[Manifest, Place], Documents]] = {"dynamo": dynamo.render, "llm_d": llm_d.render}
