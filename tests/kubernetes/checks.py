"""What is wrong with a document for Kubernetes: against the schemas, without a cluster."""

from collections.abc import Iterator
from typing import Any

import kubernetes_validate
from kubeflow_trainer_api.models.trainer_v1alpha1_train_job import TrainerV1alpha1TrainJob
from pydantic import ValidationError

Document = dict[str, Any]

VERSIONS = ("1.29", "1.33", "1.37")
"""Of Kubernetes: the first with all that the manifests use, one between, the last known here."""

KINDS = {
    "Job": "batch/v1",
    "PersistentVolumeClaim": "v1",
    "Service": "v1",
    "TrainJob": "trainer.kubeflow.org/v1alpha1",
}
"""Kinds of documents, each with its apiVersion: the validators let others pass."""


def problems(document: Document, version: str) -> list[str]:
    """Say what is wrong with a document, for a version of Kubernetes; one problem may hide more."""
    kind, api_version = document.get("kind"), document.get("apiVersion")
    if kind not in KINDS:
        return [f"kind: {kind!r} is none of {', '.join(KINDS)}"]
    if api_version != KINDS[kind]:
        return [f"apiVersion: {api_version!r} has no {kind}"]
    if kind == "TrainJob":
        return train_job_problems(document)
    try:
        kubernetes_validate.validate(document, version, strict=True)
    except kubernetes_validate.ValidationError as error:
        return [f"{'.'.join(map(str, error.path))}: {error.message}"]
    return []


def train_job_problems(document: Document) -> list[str]:
    """Say what the operator's own classes don't take, and what they would drop without a word."""
    try:
        read = TrainerV1alpha1TrainJob.from_dict(document)
    except ValidationError as error:
        return [
            f"{'.'.join(map(str, one['loc']))}: {one['msg']}"
            for one in error.errors(include_url=False)
        ]
    return list(differences(document, read.to_dict() if read else None))


def differences(one: Any, other: Any, path: str = "") -> Iterator[str]:
    """Name where two documents differ."""
    if isinstance(one, dict) and isinstance(other, dict):
        for key in sorted(one.keys() | other.keys()):
            yield from differences(one.get(key), other.get(key), f"{path}.{key}".lstrip("."))
    elif isinstance(one, list) and isinstance(other, list) and len(one) == len(other):
        for number, (left, right) in enumerate(zip(one, other, strict=True)):
            yield from differences(left, right, f"{path}.{number}")
    elif one != other:
        yield f"{path}: {one!r} is read as {other!r}"
