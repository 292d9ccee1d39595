#!/usr/bin/env python3
"""Lists what is linked into the programs: `sbom.py EPOCH DIRECTORY`.

Writes codelia.cdx.json (CycloneDX 1.6) and THIRD-PARTY-NOTICES.txt, the licence texts of the crates, to the
directory. The same source gives the same files: the only time in them is EPOCH.
"""

import datetime
import json
import pathlib
import re
import subprocess
import sys
import tomllib
import uuid

TARGET = "x86_64-unknown-linux-gnu"
PROGRAMS = ("codelia-cli", "codelia-init")
LICENCE_FILES = re.compile(r"(licen[cs]e|copying|copyright|notice|unlicense)", re.IGNORECASE)


def output(*command):
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def linked_crates():
    """The name and version of each crate that is linked: neither build scripts nor macros nor tests."""
    packages = [argument for program in PROGRAMS for argument in ("--package", program)]
    tree = output(
        "cargo", "tree", "--locked", *packages, "--target", TARGET, "--edges", "normal,no-proc-macro",
        "--prefix", "none", "--format", "{p}",
    )
    return {tuple(line.split()[:2]) for line in tree.splitlines() if line}


def key(package):
    return package["name"], "v" + package["version"]


def reference(package):
    return f"pkg:cargo/{package['name']}@{package['version']}"


def licence(package):
    # Older packages separate alternatives with a slash.
    return (package["license"] or "NOASSERTION").replace("/", " OR ")


def component(package, checksums):
    described = {
        "type": "library",
        "bom-ref": reference(package),
        "name": package["name"],
        "version": package["version"],
        "licenses": [{"expression": licence(package)}],
        "purl": reference(package),
    }
    if checksum := checksums.get((package["name"], package["version"])):
        described["hashes"] = [{"alg": "SHA-256", "content": checksum}]
    if package["repository"]:
        described["externalReferences"] = [{"type": "vcs", "url": package["repository"]}]
    return described


def other_components():
    """What the compiler and the C library add."""
    rust = re.search(r"release: (\S+)", output("rustc", "-vV"))[1]
    libc = output("getconf", "GNU_LIBC_VERSION").split()[1]
    return [
        {"type": "library", "bom-ref": "rust-std", "name": "rust-std", "version": rust,
         "licenses": [{"expression": "MIT OR Apache-2.0"}]},
        {"type": "library", "bom-ref": "glibc", "name": "glibc", "version": libc,
         "description": "linked statically into codelia-init", "licenses": [{"expression": "LGPL-2.1-or-later"}]},
    ]


def edges(metadata, packages):
    """What each linked crate depends on."""
    linked = {package["id"]: package for package in packages}
    found = []
    for node in metadata["resolve"]["nodes"]:
        if node["id"] in linked:
            below = [dep["pkg"] for dep in node["deps"] if any(kind["kind"] is None for kind in dep["dep_kinds"])]
            below = sorted(reference(linked[dep]) for dep in below if dep in linked)
            found.append({"ref": reference(linked[node["id"]]), "dependsOn": below})
    return sorted(found, key=lambda edge: edge["ref"])


def bill(metadata, packages, epoch):
    with open("Cargo.lock", "rb") as file:
        locked = tomllib.load(file)["package"]
    checksums = {(package["name"], package["version"]): package.get("checksum") for package in locked}
    version = next(package["version"] for package in packages if package["name"] == PROGRAMS[0])
    components = [component(package, checksums) for package in packages] + other_components()
    roots = [reference(package) for package in packages if package["name"] in PROGRAMS] + ["rust-std", "glibc"]
    time = datetime.datetime.fromtimestamp(epoch, datetime.timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ")
    serial = uuid.uuid5(uuid.NAMESPACE_URL, json.dumps([time, components]))
    return {
        "$schema": "http://cyclonedx.org/schema/bom-1.6.schema.json",
        "bomFormat": "CycloneDX",
        "specVersion": "1.6",
        "serialNumber": f"urn:uuid:{serial}",
        "version": 1,
        "metadata": {
            "timestamp": time,
            "component": {"type": "application", "bom-ref": "codelia", "name": "codelia", "version": version,
                          "licenses": [{"expression": "Apache-2.0"}]},
        },
        "components": components,
        "dependencies": [{"ref": "codelia", "dependsOn": sorted(roots)}, *edges(metadata, packages)],
    }


def notices(packages):
    """The licence texts, each once, with the crates that have it."""
    texts, without = {}, []
    for package in packages:
        root = pathlib.Path(package["manifest_path"]).parent
        files = sorted(path for path in root.iterdir() if path.is_file() and LICENCE_FILES.match(path.name))
        label = f"{package['name']} {package['version']} ({licence(package)})"
        for path in files:
            text = path.read_text(encoding="utf-8", errors="replace").strip()
            texts.setdefault("\n".join(line.rstrip() for line in text.splitlines()), []).append(label)
        if not files:
            without.append(f"{label} {package['repository'] or ''}".rstrip())
    rule = "=" * 80
    parts = [
        "Codelia contains the software below. Each text is preceded by the packages that it is for.\n\n"
        "rust-std (MIT OR Apache-2.0), the standard library of Rust: https://www.rust-lang.org\n"
        "glibc (LGPL-2.1-or-later), linked statically into codelia-init alone: https://sourceware.org/glibc\n"
        "Build codelia-init from its source to link it with another one.\n\n"
        "These packages contain no licence text:\n" + "\n".join(without)
    ]
    for text, labels in sorted(texts.items(), key=lambda item: item[1]):
        parts.append("\n".join(sorted(set(labels))) + "\n\n" + text)
    return f"\n\n{rule}\n".join(parts) + "\n"


def main(epoch, directory):
    directory = pathlib.Path(directory)
    metadata = json.loads(output("cargo", "metadata", "--locked", "--format-version", "1", "--filter-platform", TARGET))
    linked = linked_crates()
    packages = sorted((package for package in metadata["packages"] if key(package) in linked), key=key)
    if len(packages) != len(linked):
        sys.exit("sbom: cargo tree and cargo metadata differ")
    text = json.dumps(bill(metadata, packages, int(epoch)), indent=2) + "\n"
    (directory / "codelia.cdx.json").write_text(text)
    others = [package for package in packages if package["source"]]
    (directory / "THIRD-PARTY-NOTICES.txt").write_text(notices(others))


main(*sys.argv[1:])
