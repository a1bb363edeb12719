"""JSON schemas of what we render for Kubernetes: the fields that we use and no others, so that a misspelt one fails.

Names and types are facts of the OpenAPI definitions of Kubernetes (batch/v1 Job, apps/v1 Deployment, v1 Service,
ConfigMap and Pod; 1.31 to 1.37) and of JobSet's CustomResourceDefinition `jobset.x-k8s.io/v1alpha2`. The rendered
manifests were also checked once against these whole definitions.
"""

from __future__ import annotations

from typing import Any


def _object(required: str = "", **properties: Any) -> dict[str, Any]:
    return {
        "type": "object",
        "properties": {name.rstrip("_"): schema for name, schema in properties.items()},
        "required": required.split(),
        "additionalProperties": False,
    }


def _list(items: Any) -> dict[str, Any]:
    return {"type": "array", "items": items, "minItems": 1}


def _const(value: str) -> dict[str, Any]:
    return {"const": value}


TEXT = {"type": "string", "minLength": 1}
COUNT = {"type": "integer", "minimum": 0, "maximum": 2**31 - 1}
FLAG = {"type": "boolean"}
TEXTS = {"type": "object", "additionalProperties": {"type": "string"}}
QUANTITY = {"anyOf": [COUNT, {"type": "string", "pattern": r"^\d+(\.\d+)?(m|Ki|Mi|Gi|Ti)?$"}]}
QUANTITIES = {"type": "object", "additionalProperties": QUANTITY}
DNS_LABEL = {"type": "string", "pattern": r"^[a-z]([-a-z0-9]*[a-z0-9])?$", "maxLength": 63}
METADATA = _object("name", name=DNS_LABEL, annotations=TEXTS, labels=TEXTS)
SELECTOR = _object("matchLabels", matchLabels=TEXTS)

ENV = _object(
    "name",
    name={"type": "string", "pattern": "^[A-Za-z_][A-Za-z0-9_]*$"},
    value={"type": "string"},
    valueFrom=_object("secretKeyRef", secretKeyRef=_object("name key", name=DNS_LABEL, key=TEXT)),
)
CONTAINER = _object(
    "name image command",
    name=DNS_LABEL,
    image=TEXT,
    command=_list(TEXT),
    env=_list(ENV),
    ports=_list(_object("containerPort", containerPort=COUNT)),
    readinessProbe=_object("tcpSocket", tcpSocket=_object("port", port=COUNT)),
    resources=_object(requests=QUANTITIES, limits=QUANTITIES),
    securityContext=_object(privileged=FLAG),
    volumeMounts=_list(_object("name mountPath", name=DNS_LABEL, mountPath=TEXT)),
)
VOLUME = _object(
    "name",
    name=DNS_LABEL,
    configMap=_object("name", name=DNS_LABEL),
    persistentVolumeClaim=_object("claimName", claimName=TEXT),
)
TOLERATION = _object(
    "",
    key=TEXT,
    operator={"enum": ["Exists", "Equal"]},
    value=TEXT,
    effect={"enum": ["NoSchedule", "PreferNoSchedule", "NoExecute"]},
)
POD = _object(
    "containers",
    containers=_list(CONTAINER),
    initContainers=_list(CONTAINER),
    volumes=_list(VOLUME),
    nodeSelector=TEXTS,
    tolerations=_list(TOLERATION),
    restartPolicy={"enum": ["Always", "OnFailure", "Never"]},
    terminationGracePeriodSeconds=COUNT,
    hostNetwork=FLAG,
    dnsPolicy={"enum": ["ClusterFirst", "ClusterFirstWithHostNet", "Default", "None"]},
)
POD_TEMPLATE = _object("spec", metadata=_object(labels=TEXTS, annotations=TEXTS), spec=POD)

POD_FAILURE_RULE = _object(
    "action",
    action={"enum": ["FailJob", "FailIndex", "Ignore", "Count"]},
    onExitCodes=_object(
        "operator values",
        containerName=DNS_LABEL,
        operator={"enum": ["In", "NotIn"]},
        values=_list(COUNT),
    ),
    onPodConditions=_list(_object("type", type=TEXT, status={"enum": ["True", "False", "Unknown"]})),
)
JOB_SPEC = _object(
    "template",
    parallelism=COUNT,
    completions=COUNT,
    completionMode={"enum": ["Indexed", "NonIndexed"]},
    backoffLimit=COUNT,
    podFailurePolicy=_object("rules", rules=_list(POD_FAILURE_RULE)),
    template=POD_TEMPLATE,
)

JOBSET = _object(
    "apiVersion kind metadata spec",
    apiVersion=_const("jobset.x-k8s.io/v1alpha2"),
    kind=_const("JobSet"),
    metadata=METADATA,
    spec=_object(
        "replicatedJobs",
        network=_object("", enableDNSHostnames=FLAG, subdomain=DNS_LABEL, publishNotReadyAddresses=FLAG),
        failurePolicy=_object(
            "",
            maxRestarts=COUNT,
            rules=_list(
                _object(
                    "name action",
                    name={"type": "string", "pattern": "^[A-Za-z]([A-Za-z0-9_,:]*[A-Za-z0-9_])?$"},
                    action={
                        "enum": [
                            "FailJobSet",
                            "RestartJobSet",
                            "RestartJobSetAndIgnoreMaxRestarts",
                            "RestartJob",
                            "RestartJobAndIgnoreMaxRestarts",
                        ]
                    },
                    onJobFailureReasons=_list(
                        {
                            "enum": [
                                "BackoffLimitExceeded",
                                "DeadlineExceeded",
                                "FailedIndexes",
                                "MaxFailedIndexesExceeded",
                                "PodFailurePolicy",
                            ]
                        }
                    ),
                    onJobFailureMessagePatterns=_list(TEXT),
                    targetReplicatedJobs=_list(DNS_LABEL),
                )
            ),
        ),
        replicatedJobs=_list(
            _object("name template", name=DNS_LABEL, replicas=COUNT, template=_object("spec", spec=JOB_SPEC))
        ),
    ),
)
CONFIG_MAP = _object(
    "apiVersion kind metadata data", apiVersion=_const("v1"), kind=_const("ConfigMap"), metadata=METADATA, data=TEXTS
)
SERVICE = _object(
    "apiVersion kind metadata spec",
    apiVersion=_const("v1"),
    kind=_const("Service"),
    metadata=METADATA,
    spec=_object(
        "selector ports",
        selector=TEXTS,
        sessionAffinity={"enum": ["ClientIP", "None"]},
        ports=_list(_object("port", name=DNS_LABEL, port=COUNT, targetPort=COUNT)),
    ),
)
DEPLOYMENT = _object(
    "apiVersion kind metadata spec",
    apiVersion=_const("apps/v1"),
    kind=_const("Deployment"),
    metadata=METADATA,
    spec=_object("selector template", replicas=COUNT, selector=SELECTOR, template=POD_TEMPLATE),
)

BY_KIND = {"JobSet": JOBSET, "ConfigMap": CONFIG_MAP, "Service": SERVICE, "Deployment": DEPLOYMENT}
