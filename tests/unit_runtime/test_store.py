"""The store's contract: the same cases against a folder and against an S3 server."""

from __future__ import annotations

import errno
import threading
from pathlib import Path

import pytest

from prodrl import progress
from prodrl.config import StoreConfig
from prodrl.errors import CredentialsError, DataError, PreemptedError, StorageFullError, UnavailableError, UsageError
from prodrl.store import folders, layout, open_store
from prodrl.store.local import LocalStore
from prodrl.store.port import Store

pytest_plugins = ["tests.support.stores"]


def test_what_was_put_is_read_back_and_put_replaces(any_store: Store) -> None:
    any_store.put("a/b.bin", b"one")
    any_store.put("a/b.bin", b"two\x00")
    assert any_store.get("a/b.bin") == b"two\x00"
    assert any_store.exists("a/b.bin")
    assert not any_store.exists("a")


def test_a_missing_object_is_a_key_error_everywhere(any_store: Store, tmp_path: Path) -> None:
    with pytest.raises(KeyError):
        any_store.get("nope")
    with pytest.raises(KeyError):
        any_store.get_file("nope", tmp_path / "x")
    assert not any_store.exists("nope")
    any_store.delete("nope")
    assert list(tmp_path.glob(".partial*")) == []


def test_create_never_replaces(any_store: Store) -> None:
    assert any_store.create("ledger/0001.json", b"mine")
    assert not any_store.create("ledger/0001.json", b"yours")
    assert not any_store.create("ledger/0001.json", b"mine")
    assert any_store.get("ledger/0001.json") == b"mine"


def test_of_many_concurrent_creates_exactly_one_wins(local_store: Store) -> None:
    """Of a real S3 server: tests/s3; the one in this process looks and writes without a lock."""
    barrier = threading.Barrier(8)
    won: list[int] = []

    def attempt(number: int) -> None:
        barrier.wait()
        if local_store.create("claim", str(number).encode()):
            won.append(number)

    threads = [threading.Thread(target=attempt, args=(n,)) for n in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(won) == 1
    assert local_store.get("claim") == str(won[0]).encode()


KEYS = ["a", "a-b/c", "a.b", "a/b", "a/b/c.json", "a/c", "ab", "b/0010", "b/0009", "b/x-10", "\u00e9/1"]


@pytest.mark.parametrize("prefix", ["", "a", "a/", "a/b", "b/0", "zz", "a-b/"])
@pytest.mark.parametrize("after", ["", "a/b", "a", "b/0009", "\u00e9"])
def test_listings_are_the_sorted_keys_with_the_prefix(any_store: Store, prefix: str, after: str) -> None:
    keys = [key for key in KEYS if key not in ("a", "a/b")] + ["a/b.x"]
    for key in keys:
        any_store.put(key, b"")
    assert list(any_store.list(prefix, after=after)) == sorted(k for k in keys if k.startswith(prefix) and k > after)


def test_a_listing_of_more_than_a_page_is_complete(s3_store: Store) -> None:
    keys = [f"many/{number:05d}" for number in range(1003)]
    for key in keys:
        s3_store.put(key, b"")
    assert list(s3_store.list("many/")) == keys
    assert list(s3_store.list("many/", after="many/00998")) == keys[999:]


@pytest.mark.parametrize("key", ["", "/etc/passwd", "../x", "a/../../x", "a//b", "a/.", "a\x00b", "a\\b", "x" * 2000])
def test_keys_cannot_leave_the_root(any_store: Store, key: str) -> None:
    for act in (any_store.get, any_store.exists, any_store.delete, lambda k: any_store.put(k, b"")):
        with pytest.raises(UsageError, match="relative path"):
            act(key)


def test_files_go_up_and_down(any_store: Store, tmp_path: Path) -> None:
    content = bytes(range(256)) * 40_000
    (tmp_path / "up").write_bytes(content)
    any_store.put_file("files/x", tmp_path / "up")
    any_store.get_file("files/x", tmp_path / "new" / "down")
    assert (tmp_path / "new" / "down").read_bytes() == content


def test_a_writable_store_passes_its_probe_and_keeps_nothing_of_it(any_store: Store) -> None:
    any_store.check_writable()
    assert list(any_store.list("")) == []


# --- the folder ---------------------------------------------------------------------------------------------------


def test_a_writer_that_dies_leaves_no_object(local_store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    local_store.put("a", b"old")

    def die(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("os.fsync", die)
    for act in (local_store.put, local_store.create):
        with pytest.raises(KeyboardInterrupt):
            act("a" if act == local_store.put else "b", b"new")
    monkeypatch.undo()
    assert local_store.get("a") == b"old"
    assert list(local_store.list("")) == ["a"]


def test_a_full_disk_and_a_read_only_one_are_told_apart(local_store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail_with(number: int) -> None:
        def fail(*_: object) -> None:
            raise OSError(number, "no")

        monkeypatch.setattr("os.fsync", fail)

    local_store.put("x", b"")
    fail_with(errno.ENOSPC)
    with pytest.raises(StorageFullError):
        local_store.put("a", b"1")
    fail_with(errno.EROFS)
    with pytest.raises(UsageError):
        local_store.create("a", b"1")
    monkeypatch.undo()
    assert list(local_store.list("")) == ["x"]


def test_only_folders_without_a_host_are_local_stores() -> None:
    with pytest.raises(UsageError, match="file:///folder"):
        LocalStore("file://host/folder")


# --- S3 -----------------------------------------------------------------------------------------------------------


def test_a_missing_bucket_is_the_users_fault(s3_config: StoreConfig) -> None:
    store = open_store(s3_config.model_copy(update={"uri": "s3://no-such-bucket/x"}))
    with pytest.raises(UsageError, match="Bucket no-such-bucket"):
        store.put("a", b"")


def test_an_unreachable_endpoint_is_unavailable(s3_config: StoreConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("time.sleep", lambda _: None)
    store = open_store(s3_config.model_copy(update={"endpoint_url": "http://127.0.0.1:1"}))
    with pytest.raises(UnavailableError, match=r"127\.0\.0\.1:1 cannot be reached"):
        store.get("a")


def test_credential_files_must_be_there(s3_config: StoreConfig, tmp_path: Path) -> None:
    with pytest.raises(CredentialsError, match="accessKeyId"):
        open_store(s3_config.model_copy(update={"credentials_dir": str(tmp_path / "none")}))


def _client_error(code: str, status: int) -> Exception:
    import botocore.exceptions

    response = {"Error": {"Code": code, "Message": ""}, "ResponseMetadata": {"HTTPStatusCode": status}}
    return botocore.exceptions.ClientError(response, "PutObject")


@pytest.mark.parametrize(
    ("code", "status", "name"),
    [
        ("AccessDenied", 403, "CredentialsError"),
        ("InvalidAccessKeyId", 403, "CredentialsError"),
        ("SignatureDoesNotMatch", 403, "CredentialsError"),
        ("XMinioStorageFull", 507, "StorageFullError"),
        ("QuotaExceeded", 403, "StorageFullError"),
        ("SlowDown", 503, "UnavailableError"),
        ("InternalError", 500, "UnavailableError"),
        ("InvalidRequest", 400, "UsageError"),
    ],
)
def test_refusals_have_the_kind_that_decides_on_a_retry(
    s3_store: Store, monkeypatch: pytest.MonkeyPatch, code: str, status: int, name: str
) -> None:
    def refuse(**_: object) -> None:
        raise _client_error(code, status)

    monkeypatch.setattr(s3_store._client, "put_object", refuse)
    with pytest.raises(Exception, match="Object s3://") as caught:
        s3_store.put("a", b"")
    assert type(caught.value).__name__ == name


def test_rotated_credentials_are_read_again(s3_config: StoreConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    store = open_store(s3_config)

    def refuse(**_: object) -> None:
        raise _client_error("InvalidAccessKeyId", 403)

    monkeypatch.setattr(store._client, "put_object", refuse)
    with pytest.raises(CredentialsError):
        store.put("a", b"1")
    Path(str(s3_config.credentials_dir), "accessKeyId").write_text("rotated")
    store.put("a", b"1")
    assert store.get("a") == b"1"


def test_a_create_whose_answer_was_lost_is_recognised_as_our_own(
    s3_store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = s3_store._client.put_object

    def lose_the_answer(**arguments: object) -> None:
        real(**arguments)
        real(**arguments)  # what the client's own retry does: it finds the object of the first try

    monkeypatch.setattr(s3_store._client, "put_object", lose_the_answer)
    assert s3_store.create("claim", b"mine")
    monkeypatch.undo()
    assert not s3_store.create("claim", b"mine")


def test_a_server_that_ignores_conditions_is_refused(s3_store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    real = s3_store._client.put_object

    def ignore(**arguments: object) -> None:
        arguments.pop("IfNoneMatch", None)
        real(**arguments)

    monkeypatch.setattr(s3_store._client, "put_object", ignore)
    with pytest.raises(UsageError, match="If-None-Match"):
        s3_store.check_writable()


# --- folders ------------------------------------------------------------------------------------------------------


def _folder(path: Path, **files: str) -> Path:
    for name, content in files.items():
        target = path / name.replace("__", "/")
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(content)
    return path


def test_a_folder_comes_back_as_it_was(any_store: Store, tmp_path: Path) -> None:
    source = _folder(tmp_path / "in", a="1", sub__b="2")
    manifest = folders.write_folder(any_store, "w", source, "weights", {"steps": "3"})
    assert [file.path for file in manifest.files] == ["a", "sub/b"]
    assert folders.read_manifest(any_store, "w", manifest.digest()).attributes == {"steps": "3"}
    folders.fetch_folder(any_store, "w", tmp_path / "out", manifest.digest())
    names = sorted(p.relative_to(tmp_path / "out").as_posix() for p in (tmp_path / "out").rglob("*") if p.is_file())
    assert names == ["a", layout.MANIFEST, "sub/b"]
    again = folders.write_folder(any_store, "w2", tmp_path / "out", "weights", {"steps": "3"})
    assert again.digest() == manifest.digest()


def test_a_folder_without_manifest_does_not_exist(any_store: Store, tmp_path: Path) -> None:
    any_store.put("w/a", b"1")
    assert not folders.exists(any_store, "w")
    with pytest.raises(DataError, match="Folder w: has no manifest"):
        folders.fetch_folder(any_store, "w", tmp_path / "out")


@pytest.mark.parametrize("damage", [b"x", b"longer", None])
def test_a_damaged_file_is_named_and_nothing_is_put_in_place(
    any_store: Store, tmp_path: Path, damage: bytes | None
) -> None:
    folders.write_folder(any_store, "w", _folder(tmp_path / "in", a="1", b="2"), "weights")
    if damage is None:
        any_store.delete("w/b")
    else:
        any_store.put("w/b", damage)
    with pytest.raises(DataError, match="File w/b"):
        folders.fetch_folder(any_store, "w", tmp_path / "out")
    with pytest.raises(DataError, match="File w/b"):
        folders.verify(any_store, "w")
    assert list((tmp_path / "out").iterdir()) == []


def test_another_manifest_than_expected_is_refused(any_store: Store, tmp_path: Path) -> None:
    manifest = folders.write_folder(any_store, "w", _folder(tmp_path / "in", a="1"), "weights")
    wrong = "sha256:" + "0" * 64
    with pytest.raises(DataError, match=manifest.digest()):
        folders.read_manifest(any_store, "w", wrong)


def test_a_folder_is_written_once_unless_it_is_replaced(any_store: Store, tmp_path: Path) -> None:
    one, two = _folder(tmp_path / "1", a="1"), _folder(tmp_path / "2", a="2")
    first = folders.write_folder(any_store, "w", one, "weights")
    assert folders.write_folder(any_store, "w", one, "weights") == first
    with pytest.raises(DataError, match="complete with another content"):
        folders.write_folder(any_store, "w", two, "weights")
    folders.verify(any_store, "w", first.digest())
    second = folders.write_folder(any_store, "w", two, "weights", replace=True)
    folders.verify(any_store, "w", second.digest())


def test_a_slow_attempt_does_not_overwrite_the_one_that_finished(
    any_store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mine, theirs = _folder(tmp_path / "1", a="1", b="1"), _folder(tmp_path / "2", a="2", b="2")
    real = any_store.put_file

    def overtaken(key: str, path: Path) -> None:
        monkeypatch.setattr(any_store, "put_file", real)
        real(key, path)
        folders.write_folder(any_store, "w", theirs, "weights")

    monkeypatch.setattr(any_store, "put_file", overtaken)
    with pytest.raises(DataError, match="another attempt finished first"):
        folders.write_folder(any_store, "w", mine, "weights")
    folders.verify(any_store, "w")
    assert any_store.get("w/b") == b"2"


def test_a_crash_before_the_manifest_is_repaired_by_the_next_attempt(
    any_store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = _folder(tmp_path / "in", a="1")

    def die(*_: object) -> bool:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(any_store, "create", die)
        with pytest.raises(KeyboardInterrupt):
            folders.write_folder(any_store, "w", source, "weights")
    assert any_store.exists("w/a")
    assert not folders.exists(any_store, "w")
    folders.write_folder(any_store, "w", source, "weights")
    folders.verify(any_store, "w")


@pytest.mark.parametrize("path", ["../escape", "/etc/passwd", "a/../../b"])
def test_a_manifest_cannot_write_outside_the_folder(any_store: Store, tmp_path: Path, path: str) -> None:
    any_store.put("w/manifest.json", f'{{"kind":"x","files":[{{"path":"{path}","size":1,"sha256":"0"}}]}}'.encode())
    with pytest.raises(DataError, match="relative"):
        folders.fetch_folder(any_store, "w", tmp_path / "out")


def test_transfers_stop_when_told_to(local_store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = _folder(tmp_path / "in", a="1")
    folders.write_folder(local_store, "w", source, "weights")
    event = threading.Event()
    event.set()
    monkeypatch.setattr(progress, "stop_requested", event)
    with pytest.raises(PreemptedError):
        folders.fetch_folder(local_store, "w", tmp_path / "out")
    with pytest.raises(PreemptedError):
        folders.write_folder(local_store, "w2", source, "weights")
