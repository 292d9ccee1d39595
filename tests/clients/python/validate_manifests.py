"""Validates manifests against the schemas of the three latest Kubernetes versions.

Usage: validate_manifests.py FILE… Prints the versions, and what is wrong. Kinds of other projects have no
schema here: their groups are listed.
"""

import sys

import kubernetes_validate
import yaml
from kubernetes_validate.utils import all_versions, major_minor

OTHER_GROUPS = ("cert-manager.io/", "keda.sh/", "monitoring.coreos.com/")


def main(files):
    versions = sorted({major_minor(v) for v in all_versions()}, key=lambda v: [int(n) for n in v.split(".")])[-3:]
    print("versions", *versions)
    failed = False
    for file in files:
        with open(file) as stream:
            documents = [document for document in yaml.safe_load_all(stream) if document]
        for document in documents:
            if document["apiVersion"].startswith(OTHER_GROUPS):
                continue
            for version in versions:
                try:
                    kubernetes_validate.validate(document, version, strict=True)
                except (kubernetes_validate.ValidationError, kubernetes_validate.SchemaNotFoundError) as error:
                    name = f"{document['kind']}/{document['metadata']['name']}"
                    print(f"{file}: {name}: {version}: {error.message}", file=sys.stderr)
                    failed = True
    return failed


sys.exit(main(sys.argv[1:]))
