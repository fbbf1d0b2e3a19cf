from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import threading

import pytest

from chatlearn_core.exceptions import BackendTimeoutError, WeightSyncError
from chatlearn_hosting.engine_side.greeting import ANSWER_BYTES, GREETING_BYTES, MARK, Caller
from chatlearn_sync.addresses import address_towards, listening_host
from chatlearn_sync.hub import MOST_STRANGERS, Hub
from chatlearn_sync.intake import Intake, Source
from chatlearn_sync.messages import Address, Decoder, encode, hello_of


class Knocker:
    """A raw connection to a hub."""

    def __init__(self, address):
        family = socket.AF_UNIX if address.family == "unix" else socket.AF_INET
        self.socket = socket.socket(family, socket.SOCK_STREAM)
        self.socket.settimeout(10)
        self.socket.connect(f"\0{address.host}" if address.family == "unix" else (address.host, address.port))
        self._decoder, self._messages, self._caller = Decoder(), [], None

    def greet(self, address):
        """Prove that it knows the secret; the answer arrives when the hub looks."""
        caller = Caller(address.token)
        self.socket.sendall(caller.greeting)
        return caller

    def enter(self, address, endpoint, **facts):
        """Do all that a receiver does to get in."""
        self._caller = self.greet(address)
        self.say(hello_of(endpoint) | facts)

    def say(self, message):
        self.socket.sendall(encode(message))

    def hear(self):
        if self._caller is not None:
            answer = self.socket.recv(ANSWER_BYTES)
            if not answer:
                return None
            assert self._caller.accepts(answer)
            self._caller = None
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
    there.enter(here.address, endpoint("generator"), ranks=4)
    here.wait_connected()
    [peer] = here.live
    assert peer.hello["ranks"] == 4
    here.say({"bucket": 0})
    assert there.hear() == {"bucket": 0}
    there.say({"acknowledged": 0})
    here.wait_acknowledged(0)


@pytest.mark.parametrize("receiver", [["generator", 7, 0], None, [[]], {}, 5, ["\ud800", 0, 0]])
def test_one_that_is_not_in_the_plan_is_not_let_in(hub, knock, endpoint, receiver):
    here = hub()
    there = knock(here.address)
    there.enter(here.address, endpoint("generator"), receiver=receiver)
    let_in(here, knock, endpoint)
    assert there.hear() is None, "it is hung up on"


def let_in(here, knock, endpoint):
    """The receiver of the plan gets in beside a stranger, and a bucket goes to it and back."""
    there = knock(here.address)
    there.enter(here.address, endpoint("generator"))
    here.wait_connected()
    here.say({"bucket": 0})
    assert there.hear() == {"bucket": 0}
    there.say({"acknowledged": 0})
    here.wait_acknowledged(0)
    assert len(here.live) == 1
    assert here.live[0].acknowledged == 0


def framed(content: bytes) -> bytes:
    return len(content).to_bytes(4, "little") + content


NOISE = {
    "nested": framed(b"[" * 100_000),
    "lone surrogate": framed(b'{"token": "\\ud800", "receiver": ["generator", 0, 0]}'),
    "endless": b"\xff" * 300_000,
    "request": b"GET / HTTP/1.1\r\n\r\n",
    "wrong secret": Caller("guessed").greeting,
    "mark alone": MARK,
    "nothing": b"",
}


@pytest.mark.parametrize("host", [None, "127.0.0.1"])
@pytest.mark.parametrize("noise", NOISE.values(), ids=NOISE)
def test_a_stranger_does_nothing_to_the_sync(hub, knock, endpoint, host, noise):
    here = hub(host=host)
    there = knock(here.address)
    there.socket.setblocking(False)
    with contextlib.suppress(BlockingIOError):
        there.socket.send(noise)
    there.socket.settimeout(10)
    let_in(here, knock, endpoint)
    if len(noise) >= GREETING_BYTES:
        with contextlib.suppress(ConnectionResetError):
            assert there.socket.recv(1) == b"", "it is hung up on"


def test_a_greeting_counts_once(hub, knock, endpoint):
    here = hub()
    first, second = knock(here.address), knock(here.address)
    caller = first.greet(here.address)
    here.check()
    here.check()
    second.socket.sendall(caller.greeting)
    let_in(here, knock, endpoint)
    assert caller.accepts(first.socket.recv(ANSWER_BYTES))
    assert second.socket.recv(1) == b""


def test_many_silent_strangers_are_hung_up_on(hub, knock, endpoint):
    here = hub(host="127.0.0.1")
    for _ in range(3 * MOST_STRANGERS):
        knock(here.address)
        here.check()
    let_in(here, knock, endpoint)
    assert len(here._strangers) <= MOST_STRANGERS + 1


@pytest.mark.parametrize("message", [[1], 5, None, {"acknowledged": "x"}, {"acknowledged": None}])
def test_a_receiver_that_talks_nonsense_is_lost_alone(hub, knock, endpoint, message):
    here = hub(replicas=2)
    first, second = (knock(here.address) for _ in range(2))
    for replica, one in enumerate((first, second)):
        one.enter(here.address, endpoint("generator", replica=replica))
    here.wait_connected()
    first.say(message)
    second.say({"acknowledged": 0})
    here.wait_acknowledged(0)
    assert [peer.endpoint.replica for peer in here.live] == [1]


async def test_a_sender_that_does_not_know_the_secret_is_not_listened_to(make_plan, tensors, endpoint):
    """Who took over the name of a sender that is gone learns nothing and says nothing."""
    heard = []

    async def pretend(reader, writer):
        heard.append(await reader.readexactly(GREETING_BYTES))
        writer.write(bytes(ANSWER_BYTES) + encode({"bucket": 1}))

    server = await asyncio.start_server(pretend, "127.0.0.1", 0)
    address = Address("tcp", "127.0.0.1", server.sockets[0].getsockname()[1], "the secret")
    offer = type("Offer", (), {"sender": endpoint("trainer"), "address": address})()
    intake = Collecting(make_plan(tensors), "test", endpoint("generator"))
    async with server:
        with pytest.raises(WeightSyncError, match="does not know the secret of this sync"):
            await intake.run([offer])
    assert intake.num_bytes == 0
    assert b"the secret" not in heard[0]
    assert "the secret" not in repr(address)


def test_who_goes_away_is_named_and_the_others_go_on(hub, knock, endpoint):
    here = hub(replicas=2)
    first, second = (knock(here.address) for _ in range(2))
    for replica, one in enumerate((first, second)):
        one.enter(here.address, endpoint("generator", replica=replica))
    here.wait_connected()
    first.socket.close()
    second.say({"acknowledged": 0})
    here.wait_acknowledged(0)
    assert [peer.endpoint.replica for peer in here.live] == [1]
    second.say({"failed": "no memory"})
    with pytest.raises(
        WeightSyncError, match=r"no receiver remains\. .*replica 0.*disconnected.*; .*replica 1.*no memory"
    ):
        here.wait_acknowledged(1)


def test_in_a_collective_one_that_goes_away_ends_it_for_all(hub, knock, endpoint):
    here = hub(replicas=2, collective=True)
    first, second = (knock(here.address) for _ in range(2))
    for replica, one in enumerate((first, second)):
        one.enter(here.address, endpoint("generator", replica=replica))
    here.wait_connected()
    first.say({"failed": "its loader broke"})
    second.say({"acknowledged": 0})
    here.wait_acknowledged(0)
    here.say({"bucket": 1})
    assert first.hear() == {"bucket": 1}, "it takes part to the end"
    first.socket.close()
    with pytest.raises(WeightSyncError, match=r"a receiver of the collective disconnected.*its loader broke"):
        here.wait_acknowledged(1)


def test_a_receiver_that_is_given_up_hears_it(hub, knock, endpoint):
    here = hub(timeout_s=2.0)
    there = knock(here.address)
    there.enter(here.address, endpoint("generator"))
    here.wait_connected()
    with pytest.raises(BackendTimeoutError, match=r"replica 0 .*did not acknowledge a bucket within 2 s"):
        here.wait_acknowledged(0)
    assert "the sender dropped role 'generator' replica 0" in there.hear()["failed"]


def test_what_the_sending_thread_raises_is_told(hub, knock, endpoint):
    here = hub()
    there = knock(here.address)
    there.enter(here.address, endpoint("generator"))

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
        one.enter(here.address, endpoint("generator", replica=replica))
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
    one.nudge()  # no waiting receiver is left
