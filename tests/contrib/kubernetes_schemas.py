"""JSON schemas of three APIs of clusters: fields, enumerations, patterns and limits.

The schemas are from the APIs' sources. They have at least the fields that Orrery uses, and refuse
all others.

- DynamoGraphDeployment, nvidia.com/v1beta1: github.com/ai-dynamo/dynamo
  deploy/operator/api/v1beta1/{dynamographdeployment_types,
  dynamocomponentdeployment_types,common}.go (commits 0fddc01b, 006b6e10, 02911c80); its pod
  templates are Kubernetes' core/v1.
- EndpointPickerConfig, llm-d.ai/v1alpha1: github.com/llm-d/llm-d-router
  apix/config/v1alpha1/endpointpickerconfig_types.go (04433592);
  parameters of plugins from the READMEs beside them.
- Values of the chart llm-d-router-standalone: github.com/llm-d/llm-d-router
  config/charts/{routerlib/values.yaml,README.md} (17a368a5,
  0810a1da); failureMode as the CRD InferencePool has it
  (kubernetes-sigs/gateway-api-inference-extension, 0050467797).
"""

from typing import Any

TEXT: dict[str, Any] = {"type": "string"}
COUNT: dict[str, Any] = {"type": "integer", "minimum": 0}
PORT: dict[str, Any] = {"type": "integer", "minimum": 1, "maximum": 65535}
LABEL: dict[str, Any] = {
    "type": "string",
    "maxLength": 63,
    "pattern": r"^(([A-Za-z0-9][-A-Za-z0-9_.]*)?[A-Za-z0-9])?$",
}
DNS_LABEL: dict[str, Any] = {
    "type": "string",
    "minLength": 1,
    "maxLength": 63,
    "pattern": r"^[a-z0-9]([-a-z0-9]*[a-z0-9])?$",
}
LABELS: dict[str, Any] = {"type": "object", "additionalProperties": LABEL}


def record(required: str = "", **fields: Any) -> dict[str, Any]:
    """An object with these fields and no other."""
    return {
        "type": "object",
        "properties": fields,
        "required": required.split(),
        "additionalProperties": False,
    }


def rows(of: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {"type": "array", "items": of, **more}


def one_of(*values: str) -> dict[str, Any]:
    return {"enum": list(values)}


# Kubernetes, core/v1 and apps/v1
# -------------------------------------------------------------------------------------

VARIABLE = record(
    "name",
    name={"type": "string", "pattern": r"^[A-Za-z_][A-Za-z0-9_]*$"},
    value=TEXT,
    valueFrom=record(
        fieldRef=record("fieldPath", fieldPath=one_of("status.podIP", "metadata.name"))
    ),
)
QUANTITY: dict[str, Any] = {"type": "string", "pattern": r"^[0-9]+(\.[0-9]+)?(m|[KMGT]i?)?$"}
AMOUNTS = record(
    **{name: QUANTITY for name in ("cpu", "memory", "ephemeral-storage", "nvidia.com/gpu")}
)
PROBE = record(
    "httpGet",
    httpGet=record("path port", path=TEXT, port=PORT),
    periodSeconds=COUNT,
    failureThreshold=COUNT,
)
CONTAINER = record(
    "name image",
    name=DNS_LABEL,
    image={"type": "string", "minLength": 1},
    command=rows(TEXT),
    args=rows(TEXT),
    env=rows(VARIABLE),
    ports=rows(record("containerPort", name={**DNS_LABEL, "maxLength": 15}, containerPort=PORT)),
    resources=record(limits=AMOUNTS, requests=AMOUNTS),
    volumeMounts=rows(
        record("name mountPath", name=DNS_LABEL, mountPath=TEXT, readOnly={"type": "boolean"})
    ),
    startupProbe=PROBE,
    readinessProbe=PROBE,
    restartPolicy=one_of("Always"),  # of an init container that stays
)
VOLUME = record(
    "name",
    name=DNS_LABEL,
    emptyDir=record(medium=one_of("Memory")),
    secret=record("secretName", secretName=DNS_LABEL),
    persistentVolumeClaim=record("claimName", claimName=TEXT, readOnly={"type": "boolean"}),
)
POD = record(
    "spec",
    metadata=record(labels={"type": "object", "additionalProperties": LABEL}),
    spec=record(
        "containers",
        containers=rows(CONTAINER, minItems=1),
        initContainers=rows(CONTAINER),
        volumes=rows(VOLUME),
    ),
)
METADATA = record("name", name=DNS_LABEL, labels=LABELS)
DEPLOYMENT = record(
    "apiVersion kind metadata spec",
    apiVersion=one_of("apps/v1"),
    kind=one_of("Deployment"),
    metadata=METADATA,
    spec=record(
        "selector template",
        replicas=COUNT,
        strategy=record("type", type=one_of("Recreate", "RollingUpdate")),
        selector=record("matchLabels", matchLabels=LABELS),
        template=POD,
    ),
)

# Dynamo -------------------------------------------------------------------------------------------
# --------------------

COMPONENT = record(
    "name podTemplate",
    name={
        "type": "string",
        "minLength": 1,
        "maxLength": 63,
        "pattern": r"^[A-Za-z0-9]([-A-Za-z0-9]*[A-Za-z0-9])?$",
    },
    type=one_of("frontend", "worker", "prefill", "decode", "planner", "epp"),
    replicas=COUNT,
    podTemplate=POD,
)
GRAPH = record(
    "apiVersion kind metadata spec",
    apiVersion=one_of("nvidia.com/v1beta1"),
    kind=one_of("DynamoGraphDeployment"),
    metadata=METADATA,
    spec=record(
        backendFramework=one_of("sglang", "vllm", "trtllm"), components=rows(COMPONENT, maxItems=25)
    ),
)
ROUTER_MODES = ("round-robin", "random", "kv", "direct", "least-loaded", "device-aware-weighted")

# llm-d --------------------------------------------------------------------------------------------
# --------------------

SESSION = record(
    "strategy sessionIdConfig",
    strategy=one_of("session_id"),
    profileName=TEXT,
    sessionIdConfig=record(
        "sources",
        sources=rows(record(header=TEXT, attribute=TEXT), minItems=1),
        evictionTtlSeconds={"type": "number", "exclusiveMinimum": 0},
        evictionSweepSeconds={"type": "number", "exclusiveMinimum": 0},
    ),
)
PARAMETERS: dict[str, dict[str, Any]] = {  # by type of plugin
    "vllmhttp-parser": record(),
    "max-score-picker": record(),
    "queue-scorer": record(),
    "prefix-cache-scorer": record(),
    "approx-prefix-cache-producer": record(
        maxPrefixTokensToMatch=COUNT, lruCapacityPerServer=COUNT
    ),
    "always-disagg-pd-decider": record(),
    "prefill-filter": record(),
    "decode-filter": record(),
    "disagg-profile-handler": record(deciders=record(prefill=TEXT, encode=TEXT)),
    "session-affinity-filter": SESSION,
}
PLUGIN = {
    "oneOf": [
        record(
            "type" + (" parameters" if each["required"] else ""),
            name=TEXT,
            type=one_of(kind),
            parameters=each,
        )
        for kind, each in PARAMETERS.items()
    ]
}
PICKER = record(
    "apiVersion kind plugins schedulingProfiles",
    apiVersion=one_of("llm-d.ai/v1alpha1"),
    kind=one_of("EndpointPickerConfig"),
    plugins=rows(PLUGIN),
    schedulingProfiles=rows(
        record(
            "name plugins",
            name=TEXT,
            plugins=rows(record("pluginRef", pluginRef=TEXT, weight={"type": "number"})),
        ),
        minItems=1,
    ),
    requestHandler=record(parsers=rows(record("pluginRef", pluginRef=TEXT))),
)
VALUES = record(
    "router",
    router=record(
        "modelServers",
        epp=record(replicas=COUNT, pluginsConfigFile=TEXT, pluginsConfig=PICKER),
        inferencePool=record(
            create={"type": "boolean"}, failureMode=one_of("FailOpen", "FailClose")
        ),
        modelServers=record(
            "matchLabels",
            type=one_of("vllm", "sglang", "triton-tensorrt-llm", "trtllm-serve", "triton"),
            protocol=one_of("http", "grpc"),
            matchLabels=LABELS,
            targetPorts=rows(record("number", number=PORT), minItems=1),
        ),
    ),
)
PROXY_FLAGS = (
    "--port",
    "--model-server-port",
    "--kv-connector",
    "--mooncake-bootstrap-port",
    "--secure-serving",
)
PROXY_CONNECTORS = ("nixlv2", "shared-storage", "sglang", "mooncake", "offloading")
