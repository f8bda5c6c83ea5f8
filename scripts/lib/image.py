"""Writes a container image of one layer as an archive in the layout of the Open Container Initiative.

Such an archive is a few JSON files beside a tar file, so no daemon, no root and no base image are needed, and the same
content gives the same bytes. `podman load`, `skopeo copy oci-archive:...` and `buildah from oci-archive:...` read it.
https://github.com/opencontainers/image-spec/blob/v1.1.1/image-layout.md
"""

import gzip
import hashlib
import io
import json
import tarfile

MANIFEST = "application/vnd.oci.image.manifest.v1+json"
CONFIG = "application/vnd.oci.image.config.v1+json"
LAYER = "application/vnd.oci.image.layer.v1.tar+gzip"


class Layer:
    """The files of an image."""

    def __init__(self):
        self._entries = []

    def folder(self, name, *, mode=0o755, owner=0):
        self._add(name, b"", kind=tarfile.DIRTYPE, mode=mode, owner=owner)

    def file(self, name, data, *, mode=0o644):
        self._add(name, data, kind=tarfile.REGTYPE, mode=mode, owner=0)

    def _add(self, name, data, *, kind, mode, owner):
        # Without a time, so that the digest depends on the content only.
        entry = tarfile.TarInfo(name)
        entry.type, entry.mode, entry.size, entry.uid, entry.gid = kind, mode, len(data), owner, owner
        self._entries.append((entry, data))

    def packed(self):
        """The layer as it is stored, and the digest of what it unpacks to."""
        content = archive(self._entries)
        return gzip.compress(content, compresslevel=9, mtime=0), digest(content)


def archive(entries):
    """A tar archive of entries with their content."""
    written = io.BytesIO()
    with tarfile.open(fileobj=written, mode="w", format=tarfile.PAX_FORMAT) as packed:
        for entry, data in entries:
            packed.addfile(entry, io.BytesIO(data))
    return written.getvalue()


def digest(data):
    return f"sha256:{hashlib.sha256(data).hexdigest()}"


def write(path, name, images):
    """Writes an image for several processors. `images` are their layers and configurations by processor, in Go's names.

    `name` is the reference that tools give the image, such as `forebay:0.1.0`.
    """
    blobs = {}

    def blob(media, data):
        blobs[digest(data)] = data
        return {"mediaType": media, "digest": digest(data), "size": len(data)}

    def document(media, content):
        return blob(media, json.dumps(content, sort_keys=True).encode())

    manifests = []
    for processor, (layer, config) in sorted(images.items()):
        packed, unpacked = layer.packed()
        platform = {"architecture": processor, "os": "linux"}
        described = document(
            CONFIG, {**platform, "config": config, "rootfs": {"type": "layers", "diff_ids": [unpacked]}}
        )
        layers = [blob(LAYER, packed)]
        manifest = {"schemaVersion": 2, "mediaType": MANIFEST, "config": described, "layers": layers}
        annotations = {"org.opencontainers.image.ref.name": name}
        manifests.append({**document(MANIFEST, manifest), "platform": platform, "annotations": annotations})
    index = {"schemaVersion": 2, "mediaType": "application/vnd.oci.image.index.v1+json", "manifests": manifests}
    files = {"oci-layout": b'{"imageLayoutVersion": "1.0.0"}', "index.json": json.dumps(index, sort_keys=True).encode()}
    files |= {f"blobs/{name.replace(':', '/')}": data for name, data in sorted(blobs.items())}
    with tarfile.open(path, "w") as archive:
        for name, data in files.items():
            entry = tarfile.TarInfo(name)
            entry.size = len(data)
            archive.addfile(entry, io.BytesIO(data))
