"""A store in an S3 bucket, on AWS or any server that speaks its API. Opened by ``prodrl.store.open_store``.

``create`` needs conditional writes (If-None-Match); ``check_writable`` proves that the server honours them.
Credentials from a mounted Secret are read again when the server refuses them: Secrets rotate under running processes.
"""

from __future__ import annotations

import os
import secrets
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import urlsplit

import boto3
import botocore.config
import botocore.exceptions
from boto3.exceptions import S3UploadFailedError

from prodrl.config import StoreConfig
from prodrl.errors import (
    CredentialsError,
    DataError,
    RuntimeFault,
    StorageFullError,
    UnavailableError,
    UsageError,
    from_os_error,
)
from prodrl.store import keys

_T = TypeVar("_T")
CREDENTIALS_ENV = "PRODRL_CREDENTIALS_DIR"
_MARK = "prodrl-write"
"""Metadata that tells our own write from another's after a retry that the client made by itself."""
_CONFLICT_TRIES = 8
_MISSING = frozenset({"NoSuchKey", "404", "NotFound"})
_REFUSED = frozenset(
    {
        "401",
        "403",
        "AccessDenied",
        "AllAccessDisabled",
        "ExpiredToken",
        "InvalidAccessKeyId",
        "InvalidToken",
        "SignatureDoesNotMatch",
        "TokenRefreshRequired",
    }
)
_FULL = frozenset(
    {"507", "BucketQuotaExceeded", "InsufficientStorage", "QuotaExceeded", "StorageFull", "XMinioStorageFull"}
)
_NO_CREDENTIALS = (
    botocore.exceptions.NoCredentialsError,
    botocore.exceptions.PartialCredentialsError,
    botocore.exceptions.CredentialRetrievalError,
    botocore.exceptions.TokenRetrievalError,
)


class S3Store:
    """The port over one prefix of one bucket."""

    def __init__(self, config: StoreConfig) -> None:
        self.uri = config.uri
        parts = urlsplit(config.uri)
        if not parts.netloc or parts.query or parts.fragment:
            raise UsageError(f"Store {config.uri}: must be s3://bucket/prefix; correct storage.uri")
        self._bucket = parts.netloc
        self._prefix = parts.path.strip("/") + "/" if parts.path.strip("/") else ""
        self._config = config
        folder = config.credentials_dir or os.environ.get(CREDENTIALS_ENV)
        self._credentials_dir = Path(folder) if folder else None
        self._credentials = self._read_credentials()
        self._client = self._connect()

    def get(self, key: str) -> bytes:
        """The object's bytes."""

        def read() -> bytes:
            body = self._client.get_object(Bucket=self._bucket, Key=self._key(key))["Body"]
            with body:
                return bytes(body.read())

        return self._call(key, read)

    def put(self, key: str, data: bytes) -> None:
        """Write or replace the object."""
        self._call(key, lambda: self._client.put_object(Bucket=self._bucket, Key=self._key(key), Body=data))

    def create(self, key: str, data: bytes) -> bool:
        """Write the object unless it exists."""
        mark = secrets.token_hex(16)

        def write() -> bool:
            for _ in range(_CONFLICT_TRIES):
                try:
                    self._client.put_object(
                        Bucket=self._bucket, Key=self._key(key), Body=data, IfNoneMatch="*", Metadata={_MARK: mark}
                    )
                except botocore.exceptions.ClientError as exc:
                    if _code(exc) in ("PreconditionFailed", "412"):
                        # The client retries by itself: a first try that was taken but whose answer got lost is ours.
                        found = self._client.head_object(Bucket=self._bucket, Key=self._key(key))
                        return bool(found.get("Metadata", {}).get(_MARK) == mark)
                    if _code(exc) not in ("ConditionalRequestConflict", "409"):
                        raise
                else:
                    return True
            raise UnavailableError(f"{self._name(key)}: others write it at the same time; try again")

        return self._call(key, write)

    def exists(self, key: str) -> bool:
        """Whether the object exists."""
        try:
            self._call(key, lambda: self._client.head_object(Bucket=self._bucket, Key=self._key(key)))
        except KeyError:
            return False
        return True

    def list(self, prefix: str, after: str = "") -> Iterator[str]:
        """Keys in the order of their bytes; a page is fetched when the one before is used up."""
        keys.check_prefix(prefix)
        where = {"Bucket": self._bucket, "Prefix": self._prefix + prefix}
        if after:
            where["StartAfter"] = self._prefix + after
        while True:
            # Not boto3's paginator: it ends with the first refusal, and new credentials mean a new client.
            page = self._call(prefix, lambda: self._client.list_objects_v2(**where))
            for found in page.get("Contents", ()):
                if not found["Key"].endswith("/"):
                    yield str(found["Key"]).removeprefix(self._prefix)
            if not page.get("IsTruncated"):
                return
            where["ContinuationToken"] = page["NextContinuationToken"]

    def delete(self, key: str) -> None:
        """Remove the object; a missing one is not an error."""
        self._call(key, lambda: self._client.delete_object(Bucket=self._bucket, Key=self._key(key)))

    def put_file(self, key: str, path: Path) -> None:
        """Upload a file, in parts where it is large."""
        self._call(key, lambda: self._client.upload_file(str(path), self._bucket, self._key(key)))

    def get_file(self, key: str, path: Path) -> None:
        """Download beside ``path``, then rename."""
        name = self._key(key)
        partial = None
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            handle, partial = tempfile.mkstemp(dir=path.parent, prefix=".partial-")
            os.close(handle)
            self._call(key, lambda: self._client.download_file(self._bucket, name, partial))
            Path(partial).chmod(0o644)
            Path(partial).replace(path)
        except OSError as exc:
            raise from_os_error(exc, f"File {path}") from exc
        finally:
            if partial is not None:
                Path(partial).unlink(missing_ok=True)

    def check_writable(self) -> None:
        """Probe the bucket."""
        keys.probe(self)

    def _key(self, key: str) -> str:
        return self._prefix + keys.check(key)

    def _name(self, key: str) -> str:
        return f"Object s3://{self._bucket}/{self._prefix}{key}"

    def _call(self, key: str, act: Callable[[], _T]) -> _T:
        """Run one request; refused credentials that have changed on disk since are tried once more."""
        try:
            return self._translated(key, act)
        except CredentialsError:
            fresh = self._read_credentials()
            if fresh == self._credentials:
                raise
            self._credentials = fresh
            self._client = self._connect()
        return self._translated(key, act)

    def _translated(self, key: str, act: Callable[[], _T]) -> _T:
        try:
            return act()
        except S3UploadFailedError as exc:
            cause = exc.__cause__ or exc.__context__
            raise (self._fault(cause, key) if isinstance(cause, Exception) else self._fault(exc, key)) from exc
        except (botocore.exceptions.ClientError, botocore.exceptions.BotoCoreError) as exc:
            raise self._fault(exc, key) from exc

    def _fault(self, exc: Exception, key: str) -> Exception:
        """The error of ours that an S3 error is."""
        if isinstance(exc, botocore.exceptions.ClientError):
            return self._client_fault(exc, key)
        name, where = self._name(key), self._config.endpoint_url or "AWS"
        if isinstance(exc, _NO_CREDENTIALS):
            return CredentialsError(f"{name}: no credentials, {exc}; set storage.secretRef")
        if isinstance(exc, botocore.exceptions.ConnectionError | botocore.exceptions.HTTPClientError):
            return UnavailableError(f"{name}: {where} cannot be reached, {exc}; check storage.endpointUrl")
        if isinstance(exc, botocore.exceptions.IncompleteReadError | botocore.exceptions.FlexibleChecksumError):
            return UnavailableError(f"{name}: arrived incomplete, {exc}; try again")
        return UsageError(f"{name}: the S3 client refuses, {exc}; check the storage settings")

    def _client_fault(self, exc: botocore.exceptions.ClientError, key: str) -> Exception:
        name, code = self._name(key), _code(exc)
        status = exc.response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0)
        message = exc.response.get("Error", {}).get("Message", "")
        if code == "NoSuchBucket":
            return UsageError(f"Bucket {self._bucket}: does not exist; create it or correct storage.uri")
        if code in _MISSING:
            return KeyError(key)
        if code in _FULL or status == 507:
            return StorageFullError(f"{name}: the storage is full, got {code}; free space or raise the quota")
        if code in _REFUSED or status in (401, 403):
            return CredentialsError(f"{name}: the storage refused the credentials, got {code}; check storage.secretRef")
        if status >= 500 or status in (0, 408, 429) or code in ("SlowDown", "RequestTimeout"):
            return UnavailableError(f"{name}: the storage cannot answer now, got {code} {message}; try again")
        fault: type[RuntimeFault] = DataError if code == "InvalidObjectState" else UsageError
        return fault(f"{name}: the storage refused the request, got {code} {message}; check the storage settings")

    def _read_credentials(self) -> tuple[str, str] | None:
        if self._credentials_dir is None:
            return None
        found = []
        for name in ("accessKeyId", "secretAccessKey"):
            try:
                found.append((self._credentials_dir / name).read_text(encoding="utf-8").strip())
            except (OSError, UnicodeDecodeError) as exc:
                raise CredentialsError(
                    f"Credentials {self._credentials_dir}: file {name} cannot be read; check storage.secretRef"
                ) from exc
            if not found[-1]:
                raise CredentialsError(
                    f"Credentials {self._credentials_dir}: file {name} is empty; check storage.secretRef"
                )
        return found[0], found[1]

    def _connect(self) -> Any:
        access, secret = self._credentials or (None, None)
        style = {"addressing_style": "path"} if self._config.endpoint_url else {}
        settings = botocore.config.Config(
            connect_timeout=10,
            read_timeout=60,
            retries={"mode": "standard", "total_max_attempts": 5},
            s3=style,
            # Servers other than AWS often lack the newer checksums; our manifests hold sha256 of everything.
            request_checksum_calculation="when_required",
            response_checksum_validation="when_required",
        )
        try:
            return boto3.session.Session().client(
                "s3",
                endpoint_url=self._config.endpoint_url,
                region_name=self._config.region or (None if not self._config.endpoint_url else "us-east-1"),
                aws_access_key_id=access,
                aws_secret_access_key=secret,
                config=settings,
            )
        except (ValueError, botocore.exceptions.BotoCoreError) as exc:
            raise UsageError(f"Store {self.uri}: the S3 client refuses, {exc}; check the storage settings") from exc


def _code(exc: botocore.exceptions.ClientError) -> str:
    return str(exc.response.get("Error", {}).get("Code", ""))
