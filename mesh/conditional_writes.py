"""Whether a store keeps the promise that put_if_absent rests on.

AWS, MinIO, Ceph, R2 and SeaweedFS refuse a PUT with `If-None-Match: *` if the key is taken; some servers and
proxies ignore the header and write. To ask first whether the key is taken, and then to write, would be no
remedy: another may write in between. So nothing here depends on it for safety: what is written so is either
the same from every writer (manifests, which are named by their content) or right from any (which of two
engines of one build is found). Only the time of publication is then that of the last writer, not the first.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from mesh.object_store import ObjectStore

PROBE = "probes/conditional-write"


def are_honoured(objects: ObjectStore) -> bool:
    """Asks the server by writing an empty object twice; one that honours them refuses the second."""
    objects.put_if_absent(PROBE, b"")
    return not objects.put_if_absent(PROBE, b"")
