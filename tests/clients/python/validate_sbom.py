"""Validates a CycloneDX 1.6 document against the published schema: validate_sbom.py FILE"""

import sys

from cyclonedx.schema import SchemaVersion
from cyclonedx.validation.json import JsonStrictValidator

with open(sys.argv[1]) as file:
    sys.exit(JsonStrictValidator(SchemaVersion.V1_6).validate_str(file.read()))
