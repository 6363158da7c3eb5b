"""Writes the schemas that the manifests are checked against, from the modules that publish them.

    python3 deploy/kubernetes/schemas/make.py

Kubernetes' own OpenAPI document and KEDA's resource definition, both under the Apache License 2.0, reduced to the kinds
that are used here, without descriptions, and strict: a field that is not named is an error. Go fetches the modules;
yaml is PyYAML's.
"""
import json
import pathlib
import subprocess
import tempfile

import yaml

KUBERNETES, KEDA = "v1.34.1", "v2.17.2"
KINDS = [
    "core.v1.Namespace", "core.v1.Service", "apps.v1.Deployment", "policy.v1.PodDisruptionBudget",
    "networking.v1.NetworkPolicy"
]
HERE = pathlib.Path(__file__).parent


def module(name, version):
    with tempfile.TemporaryDirectory() as empty:
        pathlib.Path(empty, "go.mod").write_text("module fetch\n")
        out = subprocess.run(
            ["go", "mod", "download", "-json", f"{name}@{version}"], cwd=empty, check=True, capture_output=True
        )
    return pathlib.Path(json.loads(out.stdout)["Dir"])


def strict(schema, refer=lambda name: name, names=False):
    """A schema without prose; names says that the keys are names of properties, of which any may be there."""
    if isinstance(schema, list):
        return [strict(s, refer) for s in schema]
    if not isinstance(schema, dict):
        return schema
    out = {}
    for key, value in schema.items():
        if names:
            out[key] = strict(value, refer)
        elif key == "$ref":
            out[key] = "#/$defs/" + refer(value.rsplit("/", 1)[-1])
        elif key not in ("description", "default") and not key.startswith("x-"):
            out[key] = strict(value, refer, names=key == "properties")
    if not names and out.get("type") == "object" and "properties" in out:
        out.setdefault("additionalProperties", False)
    return out


def write(name, schema):
    (HERE / name).write_text(
        json.dumps({"$schema": "https://json-schema.org/draft/2020-12/schema"} | schema, indent=1, sort_keys=True)
        + "\n"
    )


def main():
    documents = {}
    for path in (module("k8s.io/kubernetes", KUBERNETES) / "api/openapi-spec/v3").glob("*_openapi.json"):
        documents |= json.loads(path.read_text()).get("components", {}).get("schemas", {})
    definitions = {}

    def refer(name):
        if name not in definitions:
            definitions[name] = None
            definitions[name] = strict(documents[name], refer)
        return name

    kinds = {kind.rsplit(".", 1)[-1]: {"$ref": "#/$defs/" + refer("io.k8s.api." + kind)} for kind in KINDS}
    write("kubernetes.json", {"$comment": f"Kubernetes {KUBERNETES}", "properties": kinds, "$defs": definitions})
    crd = yaml.safe_load(
        (module("github.com/kedacore/keda/v2", KEDA) / "config/crd/bases/keda.sh_scaledobjects.yaml").read_text()
    )
    version = next(v for v in crd["spec"]["versions"] if v["name"] == "v1alpha1")
    scaled = strict(version["schema"]["openAPIV3Schema"])
    scaled["properties"]["metadata"] = {"type": "object"}
    write("keda.json", {"$comment": f"KEDA {KEDA}", "properties": {"ScaledObject": scaled}})


if __name__ == "__main__":
    main()
