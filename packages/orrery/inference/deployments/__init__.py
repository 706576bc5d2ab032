"""Render a run's engines for a Kubernetes cluster with another router. Imports no vLLM.

- In: a manifest and a `Place`. Out: documents by file name.
- The patches of `registry.correct_server` are missing there.
- Each engine is a component or Deployment, because engines differ by seed and part.
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
