from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import threading

import pytest

from chatlearn_core.exceptions import BackendTimeoutError, WeightSyncError
from chatlearn_sync.addresses import address_towards, listening_host
from chatlearn_sync.hub import Hub
from chatlearn_sync.intake import Intake, Source
from chatlearn_sync.messages import Decoder, encode, hello_of


class Knocker:
    """A raw connection to a hub."""

    def __init__(self, address):
        family = socket.AF_UNIX if address.family == "unix" else socket.AF_INET
        self.socket = socket.socket(family, socket.SOCK_STREAM)
        self.socket.settimeout(10)
        self.socket.connect(f"\0{address.host}" if address.family == "unix" else (address.host, address.port))
        self._decoder, self._messages = Decoder(), []

    def say(self, message):
        self.socket.sendall(encode(message))

    def hear(self):
        while not self._messages:
            data = self.socket.recv(4096)
            if not data:
                return None
            self._messages += self._decoder.feed(data)
        return self._messages.pop(0)


@pytest.fixture
def knock():
    with contextlib.ExitStack() as stack:

        def make(address):
            knocker = Knocker(address)
            stack.callback(knocker.socket.close)
            return knocker

        yield make


@pytest.fixture
def hub(make_plan, tensors, endpoint):
    made = []

    def make(replicas=1, host=None, collective=False, **changes):
        plan = make_plan(tensors, receivers=tuple(endpoint("generator", replica=r) for r in range(replicas)), **changes)
        made.append(Hub(plan, "test", endpoint("trainer"), host, collective=collective))
        return made[-1]

    yield make
    for one in made:
        one.release(WeightSyncError("the test is over"))


def test_messages_may_come_in_any_pieces():
    messages = [{"a": 1}, {}, {"text": "ä" * 300}]
    data, decoder, found = b"".join(encode(message) for message in messages), Decoder(), []
    for start in range(0, len(data), 7):
        found += decoder.feed(data[start : start + 7])
    assert found == messages


@pytest.mark.parametrize("host", [None, "127.0.0.1"])
def test_a_receiver_connects_and_acknowledges(hub, knock, endpoint, host):
    here = hub(host=host)
    there = knock(here.address)
    there.say(hello_of(endpoint("generator"), here.address, ranks=4))
    here.wait_connected()
    [peer] = here.live
    assert peer.hello["ranks"] == 4
    here.say({"bucket": 0})
    assert there.hear() == {"bucket": 0}
    there.say({"acknowledged": 0})
    here.wait_acknowledged(0)


@pytest.mark.parametrize(
    "change", [{"token": "guessed"}, {"token": None}, {"receiver": ["generator", 7, 0]}, {"receiver": None}]
)
def test_a_stranger_is_not_let_in(hub, knock, endpoint, change):
    here = hub(timeout_s=0.2)
    there = knock(here.address)
    there.say({k: v for k, v in (hello_of(endpoint("generator"), here.address) | change).items() if v is not None})
    with pytest.raises(BackendTimeoutError, match=r"did not connect within 0\.2 s"):
        here.wait_connected()
    assert there.hear() is None, "it is hung up on"


def test_noise_is_no_message(hub, knock):
    here = hub(timeout_s=0.2)
    there = knock(here.address)
    there.socket.sendall(b"\x05\0\0\0GET /")
    with pytest.raises(BackendTimeoutError):
        here.wait_connected()
    assert there.hear() is None


def test_who_goes_away_is_named_and_the_others_go_on(hub, knock, endpoint):
    here = hub(replicas=2)
    first, second = (knock(here.address) for _ in range(2))
    for replica, one in enumerate((first, second)):
        one.say(hello_of(endpoint("generator", replica=replica), here.address))
    here.wait_connected()
    first.socket.close()
    second.say({"acknowledged": 0})
    here.wait_acknowledged(0)
    assert [peer.endpoint.replica for peer in here.live] == [1]
    second.say({"failed": "no memory"})
    with pytest.raises(
        WeightSyncError, match=r"no receiver is left\. .*replica 0.*went away.*; .*replica 1.*no memory"
    ):
        here.wait_acknowledged(1)


def test_in_a_collective_one_that_goes_away_ends_it_for_all(hub, knock, endpoint):
    here = hub(replicas=2, collective=True)
    first, second = (knock(here.address) for _ in range(2))
    for replica, one in enumerate((first, second)):
        one.say(hello_of(endpoint("generator", replica=replica), here.address))
    here.wait_connected()
    first.say({"failed": "its loader broke"})
    second.say({"acknowledged": 0})
    here.wait_acknowledged(0)
    here.say({"bucket": 1})
    assert first.hear() == {"bucket": 1}, "it takes part to the end"
    first.socket.close()
    with pytest.raises(WeightSyncError, match=r"all receivers move together, and one went away.*its loader broke"):
        here.wait_acknowledged(1)


def test_a_receiver_that_is_given_up_hears_it(hub, knock, endpoint):
    here = hub(timeout_s=2.0)
    there = knock(here.address)
    there.say(hello_of(endpoint("generator"), here.address))
    here.wait_connected()
    with pytest.raises(BackendTimeoutError, match=r"replica 0 .*did not acknowledge a bucket within 2 s"):
        here.wait_acknowledged(0)
    assert "the sender gave up on role 'generator' replica 0" in there.hear()["failed"]


def test_what_the_sending_thread_raises_is_told(hub, knock, endpoint):
    here = hub()
    there = knock(here.address)
    there.say(hello_of(endpoint("generator"), here.address))

    def send():
        with here.sending():
            here.wait_connected()
            raise RuntimeError("no memory")

    with pytest.raises(RuntimeError, match="no memory"):
        send()
    assert there.hear() == {"failed": "RuntimeError: no memory"}
    assert there.hear() is None


def test_release_ends_a_wait_in_another_thread(hub):
    here, errors = hub(timeout_s=1e6), []

    def wait():
        try:
            with here.sending():
                here.wait_connected()
        except WeightSyncError as error:
            errors.append(error)

    thread = threading.Thread(target=wait)
    thread.start()
    here.release(WeightSyncError("the sync was released"))
    thread.join(10)
    assert not thread.is_alive()
    assert "the sync was released" in str(errors[0])


def test_who_took_the_end_may_go(hub, knock, endpoint):
    here = hub(replicas=2)
    peers = [knock(here.address) for _ in range(2)]
    for replica, one in enumerate(peers):
        one.say(hello_of(endpoint("generator", replica=replica), here.address))
    here.wait_connected()
    ending = threading.Thread(target=here.end, args=(3,))
    ending.start()
    for one in peers:
        assert one.hear() == {"end": 3}
        one.say({"acknowledged": 3})
        one.socket.close()
    ending.join(10)
    assert not ending.is_alive()
    assert len(here.live) == 2


def test_one_host_needs_no_network(make_plan, tensors, endpoint):
    plan = make_plan(tensors)
    assert listening_host(plan, endpoint("trainer"), None) is None
    assert listening_host(plan, endpoint("trainer"), "10.0.0.1") == "10.0.0.1"


def test_the_way_to_another_host_gives_the_address():
    assert address_towards("127.0.0.1") == "127.0.0.1"


class Collecting(Intake):
    async def take(self, source: Source, message) -> None:
        if message.get("break"):
            raise RuntimeError("a broken pipe of its own")
        self.num_bytes += message["bucket"]


async def test_last_words_explain_a_bucket_that_broke_off(make_plan, tensors, endpoint, hub):
    """Whose fault it was: the receiver sees a broken bucket, the sender says why."""
    here = hub()
    offer = type("Offer", (), {"sender": endpoint("trainer"), "address": here.address})()

    def send():
        with contextlib.suppress(RuntimeError), here.sending():
            here.wait_connected()
            here.say({"break": True})
            raise RuntimeError("out of memory in the gather")

    sending = asyncio.create_task(asyncio.to_thread(send))
    with pytest.raises(WeightSyncError, match="out of memory in the gather"):
        await Collecting(make_plan(tensors), "test", endpoint("generator")).run([offer])
    await sending


def test_messages_are_json():
    assert json.loads(encode({"a": [1, "x"]})[4:]) == {"a": [1, "x"]}


def test_a_nudge_ends_a_wait_from_any_thread(hub):
    one = hub()
    threading.Timer(0.05, one.nudge).start()
    one.check(None)  # returns, or hangs
    one.release(WeightSyncError("over"))
    one.nudge()  # nobody is left to wake
