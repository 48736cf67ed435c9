"""S3 and what speaks its language, by way of s3fs: credentials, region and endpoint are found as every AWS program finds them."""

from __future__ import annotations

from typing import Any

import s3fs

from .bucket import Item
from .trouble import code_of
from .windows import Windows

_OPTIONS = {"connect_timeout": 10, "read_timeout": 60, "max_pool_connections": 64, "retries": {"total_max_attempts": 1}}


class S3:
    """One client; its calls are single requests, which whoever calls makes again."""

    part_bytes = 16 << 20

    def __init__(self) -> None:
        """Nothing is asked yet."""
        self.renew()

    def renew(self) -> None:
        """A new client finds its credentials anew."""
        # Without fsspec's caches: what another rank has written must be seen.
        self._fs: Any = s3fs.S3FileSystem(config_kwargs=_OPTIONS, use_listings_cache=False, skip_instance_cache=True)
        self._fs.retries = 1

    def _call(self, method: str, key: str, **words: Any) -> Any:
        bucket, name = _split(key)
        return self._fs.call_s3(method, Bucket=bucket, Key=name, **words)

    def put(self, key: str, data: Windows) -> None:
        """One request."""
        self._call("put_object", key, Body=data.read())

    def get(self, key: str, at: int, length: int | None) -> bytes:
        """One request."""
        try:
            content: bytes = self._fs.cat_file(key, start=at, end=None if length is None else at + length)
        except Exception as e:
            if code_of(e) == "InvalidRange":  # nothing of the range is there; of an empty object nothing ever is
                return b""
            raise
        return content

    def page(self, prefix: str, token: str, *, deep: bool) -> tuple[list[Item], str]:
        """One request, up to 1,000 names."""
        bucket, under = _split(prefix)
        words: dict[str, Any] = {"ContinuationToken": token} if token else {}
        if not deep:
            words["Delimiter"] = "/"
        answer = self._fs.call_s3("list_objects_v2", Bucket=bucket, Prefix=under, **words)
        root = prefix[: len(prefix) - len(under)]
        cut = 0 if deep else len(under)
        items = [Item((root if deep else "") + o["Key"][cut:], int(o["Size"])) for o in answer.get("Contents", []) if o["Key"] != under]
        items += [Item(p["Prefix"][cut:].rstrip("/"), None) for p in answer.get("CommonPrefixes", [])]
        return items, answer.get("NextContinuationToken", "")

    def delete(self, key: str) -> None:
        """One request."""
        self._call("delete_object", key)

    def make_directory(self, key: str) -> None:
        """There are none."""

    def remove_directory(self, key: str) -> None:
        """There are none."""

    # -- in parts ------------------------------------------------------------------------------------------------------

    def begin(self, key: str) -> str:
        """Begin an upload."""
        return str(self._call("create_multipart_upload", key)["UploadId"])

    def put_part(self, key: str, upload: str, number: int, piece: list[memoryview]) -> str:
        """Put one part; only this copy of it is made."""
        return str(self._call("upload_part", key, UploadId=upload, PartNumber=number, Body=b"".join(piece))["ETag"])

    def complete(self, key: str, upload: str, tags: list[str]) -> None:
        """Now the object is there."""
        parts = [{"PartNumber": number, "ETag": tag} for number, tag in enumerate(tags, 1)]
        try:
            self._call("complete_multipart_upload", key, UploadId=upload, MultipartUpload={"Parts": parts})
        except Exception as e:
            if code_of(e) != "NoSuchUpload":
                raise
            self._call("head_object", key)  # an earlier try may have been heard, and its answer lost

    def abort(self, key: str, upload: str) -> None:
        """It will not be."""
        self._call("abort_multipart_upload", key, UploadId=upload)


def _split(key: str) -> tuple[str, str]:
    bucket, _, name = key.partition("://")[2].partition("/")
    return bucket, name
