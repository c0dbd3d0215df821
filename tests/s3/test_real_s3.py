"""The store's contract and folders against a real S3 server; what is in the bucket is looked at with plain boto3."""

from __future__ import annotations

import hashlib
import itertools
import random
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from prodrl.config import StoreConfig
from prodrl.errors import CredentialsError, DataError, UnavailableError, UsageError
from prodrl.store import folders, layout, open_store
from prodrl.store.port import Store
from tests.support.s3 import BUCKET, AnswerLoser, RealServer

pytestmark = [pytest.mark.slow, pytest.mark.timeout(180, func_only=True)]  # building the server takes longer
CREATORS = 8


@pytest.fixture
def store(real_config: StoreConfig) -> Store:
    return open_store(real_config)


def _prefix(config: StoreConfig) -> str:
    return config.uri.removeprefix(f"s3://{BUCKET}/")


def _race(acts: list[Callable[[], object]]) -> list[object]:
    """All at once; the results in order."""
    barrier = threading.Barrier(len(acts))

    def run(act: Callable[[], object]) -> object:
        barrier.wait()
        return act()

    with ThreadPoolExecutor(len(acts)) as pool:
        return list(pool.map(run, acts))


# --- objects ------------------------------------------------------------------------------------------------------


def test_objects_are_what_another_client_finds_in_the_bucket(
    store: Store, real_config: StoreConfig, real_server: RealServer
) -> None:
    store.put("a/b.bin", b"one")
    store.put("a/b.bin", b"two\x00")
    name = f"{_prefix(real_config)}/a/b.bin"
    assert real_server.client().get_object(Bucket=BUCKET, Key=name)["Body"].read() == b"two\x00"
    assert store.get("a/b.bin") == b"two\x00"
    assert store.exists("a/b.bin")
    assert not store.exists("a/b")
    store.delete("a/b.bin")
    store.delete("a/b.bin")
    assert not store.exists("a/b.bin")
    with pytest.raises(KeyError):
        store.get("a/b.bin")
    assert real_server.client().list_objects_v2(Bucket=BUCKET, Prefix=name)["KeyCount"] == 0


def test_a_missing_file_leaves_nothing_behind(store: Store, tmp_path: Path) -> None:
    with pytest.raises(KeyError):
        store.get_file("nope", tmp_path / "down" / "x")
    assert list((tmp_path / "down").iterdir()) == []


def test_a_writable_bucket_passes_its_probe_and_keeps_nothing_of_it(store: Store) -> None:
    store.check_writable()
    assert list(store.list("")) == []


def test_create_never_replaces(store: Store) -> None:
    assert store.create("ledger/0001.json", b"mine")
    assert not store.create("ledger/0001.json", b"yours")
    assert not store.create("ledger/0001.json", b"mine")
    assert store.get("ledger/0001.json") == b"mine"
    store.delete("ledger/0001.json")
    assert store.create("ledger/0001.json", b"again")


def test_of_eight_concurrent_creators_exactly_one_wins(real_config: StoreConfig) -> None:
    creators = [open_store(real_config) for _ in range(CREATORS)]
    for claim in range(25):
        key = f"ledger/{claim:04d}.json"
        won = _race([lambda n=n, key=key: creators[n].create(key, f"creator {n}".encode()) for n in range(CREATORS)])
        assert won.count(True) == 1, f"{key}: {won}"
        assert creators[0].get(key) == f"creator {won.index(True)}".encode()


def test_listings_are_sorted_complete_over_pages_and_begin_after(store: Store) -> None:
    keys = [f"many/{number:05d}" for number in range(1003)]
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda key: store.put(key, b""), random.Random(1).sample(keys, len(keys))))
    assert list(store.list("many/")) == keys
    assert list(store.list("many/", after="many/00001")) == keys[2:]
    assert list(store.list("many/", after="many/01001")) == keys[1002:]
    assert list(store.list("many/", after="many/01002")) == []


def test_listings_are_in_the_order_of_bytes(store: Store) -> None:
    keys = ["a-b/c", "a.b", "a/b.x", "a/b/c.json", "a/c", "ab", "b/0009", "b/0010", "b/x-10", "\u00e9/1"]
    for key in keys:
        store.put(key, b"")
    for prefix, after in itertools.product(["", "a", "a/", "a/b", "b/0", "a-b/", "zz"], ["", "a", "a/b.x", "b/0009"]):
        wanted = sorted((k for k in keys if k.startswith(prefix) and k > after), key=str.encode)
        assert list(store.list(prefix, after=after)) == wanted, f"prefix {prefix!r} after {after!r}"


def test_a_large_file_goes_up_in_parts_and_comes_back(
    store: Store, real_config: StoreConfig, real_server: RealServer, tmp_path: Path
) -> None:
    content = random.Random(2).randbytes(20 * 1024 * 1024 + 17)
    (tmp_path / "up").write_bytes(content)
    store.put_file("weights/model.safetensors", tmp_path / "up")
    name = f"{_prefix(real_config)}/weights/model.safetensors"
    head = real_server.client().head_object(Bucket=BUCKET, Key=name)
    assert head["ETag"].strip('"').endswith("-3")  # three parts of up to 8 MiB
    assert head["ContentLength"] == len(content)
    assert "Uploads" not in real_server.client().list_multipart_uploads(Bucket=BUCKET)
    store.get_file("weights/model.safetensors", tmp_path / "new" / "down")
    got = hashlib.sha256((tmp_path / "new" / "down").read_bytes()).hexdigest()
    assert got == hashlib.sha256(content).hexdigest()
    assert [path.name for path in (tmp_path / "new").iterdir()] == ["down"]


# --- refusals and outages -----------------------------------------------------------------------------------------


def _acts(store: Store, folder: Path) -> dict[str, Callable[[], object]]:
    (folder / "small").write_bytes(b"1")
    return {
        "get": lambda: store.get("a"),
        "put": lambda: store.put("a", b"1"),
        "create": lambda: store.create("a", b"1"),
        "exists": lambda: store.exists("a"),
        "list": lambda: list(store.list("")),
        "delete": lambda: store.delete("a"),
        "put_file": lambda: store.put_file("a", folder / "small"),
        "get_file": lambda: store.get_file("a", folder / "down"),
        "check_writable": store.check_writable,
    }


ACTS = ["get", "put", "create", "exists", "list", "delete", "put_file", "get_file", "check_writable"]


@pytest.mark.parametrize("name", ["accessKeyId", "secretAccessKey"])
@pytest.mark.parametrize("act", ACTS)
def test_wrong_credentials_are_named_and_right_ones_are_read_again(
    real_config: StoreConfig, tmp_path: Path, name: str, act: str
) -> None:
    open_store(real_config).put("a", b"0")
    file = Path(str(real_config.credentials_dir), name)
    right = file.read_text()
    file.write_text("wrong-wrong-wrong")
    store = open_store(real_config)
    with pytest.raises(CredentialsError, match="refused the credentials"):
        _acts(store, tmp_path)[act]()
    file.write_text(right)
    answers = {"get": b"0", "create": False, "exists": True, "list": ["a"]}
    assert _acts(store, tmp_path)[act]() == answers.get(act)


def test_a_listing_goes_on_when_the_credentials_change_between_two_pages(
    own_server: RealServer, tmp_path: Path
) -> None:
    config = own_server.config(tmp_path / "credentials")
    store = open_store(config)
    keys = [f"many/{number:05d}" for number in range(1003)]
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda key: store.put(key, b""), keys))
    listing = store.list("many/")
    first = next(listing)
    own_server.stop()
    own_server.access_key, own_server.secret_key = "rotated-key", "rotated-secret"
    own_server.start()
    Path(str(config.credentials_dir), "accessKeyId").write_text(own_server.access_key)
    Path(str(config.credentials_dir), "secretAccessKey").write_text(own_server.secret_key)
    assert [first, *listing] == keys


@pytest.mark.parametrize("act", ["get", "put", "create", "list", "put_file", "check_writable"])
def test_a_missing_bucket_is_the_users_fault(real_config: StoreConfig, tmp_path: Path, act: str) -> None:
    store = open_store(real_config.model_copy(update={"uri": "s3://no-such-bucket/x"}))
    with pytest.raises(UsageError, match="Bucket no-such-bucket"):
        _acts(store, tmp_path)[act]()


def test_a_stopped_server_is_unavailable_and_nothing_is_lost_when_it_is_back(
    own_server: RealServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = open_store(own_server.config(tmp_path / "credentials"))
    assert store.create("a", b"before")
    own_server.kill()
    with monkeypatch.context() as patched:
        patched.setattr("time.sleep", lambda _: None)  # the client's pauses between its tries
        for name in ACTS:
            with pytest.raises(UnavailableError, match=f"127.0.0.1:{own_server.port}"):
                _acts(store, tmp_path)[name]()
    assert not (tmp_path / "down").exists()
    own_server.start()
    assert store.get("a") == b"before"
    assert not store.create("a", b"after")


@pytest.fixture
def loser(real_server: RealServer) -> Iterator[AnswerLoser]:
    with AnswerLoser(real_server.port) as proxy:
        thread = threading.Thread(target=proxy.serve_forever, args=(0.05,))
        thread.start()
        yield proxy
        proxy.shutdown()
        thread.join()


def test_a_create_whose_answer_got_lost_is_known_as_ones_own(real_config: StoreConfig, loser: AnswerLoser) -> None:
    endpoint = f"http://127.0.0.1:{loser.server_address[1]}"
    store = open_store(real_config.model_copy(update={"endpoint_url": endpoint}))
    for number in range(5):
        loser.lose.set()
        assert store.create(f"claim-{number}", b"mine")
        assert loser.lost == number + 1
    loser.lose.set()
    assert not store.create("claim-0", b"yours")
    assert open_store(real_config).get("claim-0") == b"mine"


# --- folders ------------------------------------------------------------------------------------------------------


@pytest.fixture
def source(tmp_path: Path) -> Path:
    folder = tmp_path / "source"
    (folder / "sub").mkdir(parents=True)
    (folder / "config.json").write_text("{}")
    (folder / "sub" / "model.safetensors").write_bytes(random.Random(3).randbytes(9 * 1024 * 1024))
    return folder


def test_a_folder_is_written_fetched_and_verified(store: Store, source: Path, tmp_path: Path) -> None:
    manifest = folders.write_folder(store, "rounds/0001/weights", source, "weights", {"steps": "3"})
    assert folders.write_folder(store, "rounds/0001/weights", source, "weights", {"steps": "3"}) == manifest
    assert folders.verify(store, "rounds/0001/weights", manifest.digest()) == manifest
    folders.fetch_folder(store, "rounds/0001/weights", tmp_path / "out", manifest.digest())
    for file in manifest.files:
        assert (tmp_path / "out" / file.path).read_bytes() == (source / file.path).read_bytes()
    assert (tmp_path / "out" / layout.MANIFEST).read_bytes() == manifest.canonical()


@pytest.mark.parametrize("damage", [b"{]", b"longer than it was", None])
def test_damage_in_the_bucket_is_found(
    store: Store, real_config: StoreConfig, real_server: RealServer, source: Path, tmp_path: Path, damage: bytes | None
) -> None:
    folders.write_folder(store, "w", source, "weights")
    name = f"{_prefix(real_config)}/w/config.json"
    if damage is None:
        real_server.client().delete_object(Bucket=BUCKET, Key=name)
    else:
        real_server.client().put_object(Bucket=BUCKET, Key=name, Body=damage)
    with pytest.raises(DataError, match=r"File w/config\.json"):
        folders.verify(store, "w")
    with pytest.raises(DataError, match=r"File w/config\.json"):
        folders.fetch_folder(store, "w", tmp_path / "out")
    assert list((tmp_path / "out").iterdir()) == []


def test_concurrent_writers_of_one_folder_agree_or_are_refused(real_config: StoreConfig, tmp_path: Path) -> None:
    def write(number: int) -> str:
        folder = tmp_path / f"writer-{number}"
        folder.mkdir()
        (folder / f"part-{number % 2}").write_text(str(number % 2))  # two contents, four writers each
        try:
            return folders.write_folder(open_store(real_config), "w", folder, "weights").digest()
        except DataError:
            return "refused"

    results = _race([lambda n=n: write(n) for n in range(CREATORS)])
    standing = folders.verify(open_store(real_config), "w").digest()
    winners = {n % 2 for n, result in enumerate(results) if result == standing}
    assert len(winners) == 1
    assert set(results) <= {standing, "refused"}
