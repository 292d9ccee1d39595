"""Writes static indexes with one package for pip, npm, git, go and cargo: packages.py DIRECTORY."""

import base64
import hashlib
import io
import json
import os
import subprocess
import sys
import tarfile
import zipfile

HOST = "https://allowed.example.com"
os.chdir(sys.argv[1])


def write(path, content):
    os.makedirs(os.path.dirname(path) or ".", exist_ok=True)
    with open(path, "wb") as file:
        file.write(content if isinstance(content, bytes) else content.encode())


def wheel():
    data = io.BytesIO()
    with zipfile.ZipFile(data, "w") as archive:
        archive.writestr("demo.py", "")
        archive.writestr("demo-1.0.dist-info/METADATA", "Metadata-Version: 2.1\nName: demo\nVersion: 1.0\n")
        archive.writestr("demo-1.0.dist-info/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr("demo-1.0.dist-info/RECORD", "")
    return data.getvalue()


def tarball():
    data = io.BytesIO()
    with tarfile.open(fileobj=data, mode="w:gz") as archive:
        for name, content in [("package.json", '{"name":"demo","version":"1.0.0"}'), ("index.js", "")]:
            info = tarfile.TarInfo("package/" + name)
            info.size = len(content)
            archive.addfile(info, io.BytesIO(content.encode()))
    return data.getvalue()


def crate():
    data = io.BytesIO()
    manifest = '[package]\nname = "demo"\nversion = "1.0.0"\nedition = "2021"\n'
    source = 'pub fn word() -> &\'static str { "built" }\n'
    with tarfile.open(fileobj=data, mode="w:gz") as archive:
        for name, content in [("Cargo.toml", manifest), ("src/lib.rs", source)]:
            info = tarfile.TarInfo("demo-1.0.0/" + name)
            info.size = len(content)
            archive.addfile(info, io.BytesIO(content.encode()))
    return data.getvalue()


def projects():
    """A project for npm and one for cargo, with what pins the package."""
    integrity = "sha512-" + base64.b64encode(hashlib.sha512(TARBALL).digest()).decode()
    package = {"name": "app", "version": "1.0.0", "dependencies": {"demo": "1.0.0"}}
    demo = {"version": "1.0.0", "resolved": HOST + "/files/demo-1.0.0.tgz", "integrity": integrity}
    lock = {"name": "app", "version": "1.0.0", "lockfileVersion": 3, "packages": {"": package, "node_modules/demo": demo}}
    write("projects/package.json", json.dumps(package))
    write("projects/package-lock.json", json.dumps(lock))
    registry = f"sparse+{HOST}/index/"
    write("projects/config.toml", f'[source.crates-io]\nreplace-with = "local"\n[source.local]\nregistry = "{registry}"\n')
    source = "registry+https://github.com/rust-lang/crates.io-index"
    write(
        "projects/Cargo.lock",
        f'version = 4\n\n[[package]]\nname = "demo"\nversion = "1.0.0"\nsource = "{source}"\nchecksum = "{CHECKSUM}"\n\n'
        '[[package]]\nname = "tiny"\nversion = "0.1.0"\ndependencies = [\n "demo",\n]\n',
    )


def repository():
    environment = dict(os.environ, GIT_CONFIG_GLOBAL="/dev/null", GIT_CONFIG_SYSTEM="/dev/null", HOME="/nonexistent")
    for name in ("AUTHOR", "COMMITTER"):
        environment[f"GIT_{name}_NAME"] = environment[f"GIT_{name}_EMAIL"] = "test"

    def git(*arguments):
        subprocess.run(["git", *arguments], check=True, capture_output=True, env=environment)

    git("init", "-q", "-b", "main", "../source")
    with open("../source/file", "w") as file:
        file.write("content\n")
    git("-C", "../source", "add", "file")
    git("-C", "../source", "commit", "-q", "-m", "first")
    git("clone", "-q", "--bare", "../source", "repo.git")
    git("-C", "repo.git", "update-server-info")


write("simple/demo/index.html", '<a href="/files/demo-1.0-py3-none-any.whl">demo-1.0-py3-none-any.whl</a>')
write("files/demo-1.0-py3-none-any.whl", wheel())
dist = {"tarball": HOST + "/files/demo-1.0.0.tgz"}
versions = {"1.0.0": {"name": "demo", "version": "1.0.0", "dist": dist}}
write("npm/demo", json.dumps({"name": "demo", "dist-tags": {"latest": "1.0.0"}, "versions": versions}))
TARBALL, CRATE = tarball(), crate()
CHECKSUM = hashlib.sha256(CRATE).hexdigest()
write("files/demo-1.0.0.tgz", TARBALL)
write("dl/demo-1.0.0.crate", CRATE)
entry = {"name": "demo", "vers": "1.0.0", "deps": [], "cksum": CHECKSUM, "features": {}, "yanked": False}
write("index/de/mo/demo", json.dumps(entry) + "\n")
projects()
repository()
write("go/example.com/demo/@v/v1.0.0.info", '{"Version":"v1.0.0"}')
write("go/example.com/demo/@v/v1.0.0.mod", "module example.com/demo\n")
write("go/example.com/demo/@v/list", "v1.0.0\n")
write("index/config.json", json.dumps({"dl": HOST + "/dl/{crate}-{version}.crate", "api": HOST}))
found = {"crates": [{"name": "demo", "max_version": "1.0.0", "description": "a demo"}], "meta": {"total": 1}}
write("api/v1/crates", json.dumps(found))
