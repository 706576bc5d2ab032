"""Render a run's engines for a Kubernetes cluster with another router. Applies nothing, imports no
vLLM.

- In: a manifest and a `Place`: images, and the volume with the weights. Out: documents by file
  name.
- Flags come from `assemble.server_arguments`, variables from vLLM's settings. A pod learns its
  address when it starts. The patches of `registry.correct_server` are missing there.
- Each engine is a component or Deployment, not a replica: engines differ by seed and by part
  (prefill, decode).
- The router's policy is translated to the other router's name.
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
