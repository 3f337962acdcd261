"""The protocol under random interleavings: docs/protocol.md, rule by rule, against a model of its world."""

from dataclasses import dataclass, field

from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, initialize, invariant, precondition, rule

from enginemesh.internal.v1 import step_pb2
from gateway.request_table import LinkSessions, RequestTable
from gateway.session import State
from mesh.errors import AttemptsExhaustedError
from tests.gateway.helpers import ERROR, LENGTH, session, step

MAX_TOKENS = 6
MAX_ATTEMPTS = 4


def truth(request_id: str) -> list[int]:
    """The undisturbed answer: what any reproducible engine gives, from any attempt."""
    return [1 + (hash_of(request_id) * 7 + place * 13) % 200 for place in range(MAX_TOKENS)]


def hash_of(text: str) -> int:
    return sum((place + 1) * ord(character) for place, character in enumerate(text))


@dataclass
class Run:
    """A sequence in a worker's engine."""

    request_id: str
    given: list[int]
    base: int


@dataclass
class Worker:
    link: LinkSessions
    last_handle: int = 0
    runs: dict[int, Run] = field(default_factory=dict)
    in_flight: list[step_pb2.StepOutput] = field(default_factory=list)


class Protocol(RuleBasedStateMachine):
    requests = Bundle("requests")

    @initialize()
    def begin(self):
        self.table = RequestTable()
        self.sessions = {}
        self.entries: dict[tuple[str, int], list[int]] = {}  # present entries: tokens that came with them
        self.workers = [Worker(LinkSessions(f"w{n}", "e")) for n in range(3)]
        self.ended: set[str] = set()
        self.count = 0

    # -- what happens ---------------------------------------------------------------------------------

    @rule(target=requests)
    def submit(self):
        self.count += 1
        request_id = f"r{self.count}"
        made = session(request_id, max_tokens=MAX_TOKENS, max_attempts=MAX_ATTEMPTS)
        self.table.add(made)
        self.sessions[request_id] = made
        self.queue(made)
        return request_id

    @precondition(lambda self: self.entries)
    @rule(data=st.data(), number=st.integers(0, 2), asks=st.booleans(), acknowledges=st.booleans())
    def worker_takes_or_claims_entries(self, data, number, asks, acknowledges):
        """It may die before it asks, or after, before it acknowledges: then its entries stay."""
        worker = self.workers[number]
        for key in data.draw(st.sets(st.sampled_from(sorted(self.entries)), min_size=1)):
            tokens = self.entries[key]
            if asks:
                self.claim(worker, key, tokens)
            if asks and acknowledges:
                del self.entries[key]

    def claim(self, worker, key, tokens):
        worker.last_handle += 1
        if self.table.claim(worker.link, *key, worker.last_handle):
            worker.runs[worker.last_handle] = Run(key[0], list(tokens), len(tokens))

    @precondition(lambda self: any(worker.runs for worker in self.workers))
    @rule(size=st.integers(1, 3), merged=st.booleans())
    def engines_step(self, size, merged):
        for worker in self.workers:
            self.engine_step(worker, size, merged=merged)

    def engine_step(self, worker, size, *, merged):
        rows, finishes = [], []
        for handle, run in list(worker.runs.items()):
            fresh = truth(run.request_id)[len(run.given) : len(run.given) + size]
            rows.append((handle, len(run.given) - run.base, fresh))
            run.given = run.given + fresh
            if len(run.given) == MAX_TOKENS:
                finishes.append((handle, LENGTH))
                del worker.runs[handle]
        frame = step(*rows, finishes=finishes)
        if merged and worker.in_flight:
            worker.in_flight[-1].MergeFrom(frame)
        elif rows:
            worker.in_flight.append(frame)

    @precondition(lambda self: any(worker.in_flight for worker in self.workers))
    @rule(repeated=st.booleans())
    def frames_arrive(self, repeated):
        for worker in self.workers:
            if worker.in_flight:
                frame = worker.in_flight.pop(0)
                if repeated:
                    again = step_pb2.StepOutput()
                    again.CopyFrom(frame)
                    del again.finishes[:]
                    self.deliver(worker, again)
                self.deliver(worker, frame)

    @precondition(lambda self: any(worker.runs for worker in self.workers))
    @rule()
    def an_engine_fails_a_sequence(self):
        worker = next(worker for worker in self.workers if worker.runs)
        handle = next(iter(worker.runs))
        del worker.runs[handle]
        worker.in_flight.append(step(finishes=[(handle, ERROR)]))

    @precondition(lambda self: any(worker.link.by_handle for worker in self.workers))
    @rule(data=st.data())
    def a_link_breaks(self, data):
        """The gateway loses the link; late frames of it may still come, and must change nothing."""
        busy = [n for n, worker in enumerate(self.workers) if worker.link.by_handle]
        number = data.draw(st.sampled_from(busy))
        worker = self.workers[number]
        for moved in self.table.lose(worker.link):
            self.queue(moved)
        before = {name: list(s.token_ids) for name, s in self.sessions.items()}
        for frame in worker.in_flight:
            self.deliver(worker, frame)
        assert before == {name: list(s.token_ids) for name, s in self.sessions.items()}
        self.workers[number] = Worker(LinkSessions(f"w{number}", "e"))

    @rule()
    def redis_loses_everything(self):
        self.entries.clear()

    @rule()
    def audit(self):
        for waiting in self.table.queued():
            self.queue(waiting)

    @rule(request_id=requests)
    def client_cancels(self, request_id):
        self.end(self.sessions[request_id])

    @rule()
    def handlers_run(self):
        for one in list(self.sessions.values()):
            self.handle(one)

    # -- the gateway's shell ----------------------------------------------------------------------------

    def queue(self, waiting):
        self.entries[(waiting.request_id, waiting.attempt)] = list(waiting.token_ids)

    def deliver(self, worker, frame):
        result = self.table.take_step(worker.link, frame)
        assert not result.gaps, "frames of one link arrive in order"
        for failed in result.failed:
            if self.table.next_attempt(failed):
                self.queue(failed)

    def handle(self, one):
        if one.state is State.ENDED:
            return
        while one.has_news and one.terminal is None:
            try:
                one.drain()
            except AttemptsExhaustedError as error:  # ends the request as its handler would
                assert error.metadata["tokens_sent"] == str(one.taken)  # noqa: PT017 - not the point of the test
                self.end(one)
                return
        if one.terminal is not None:
            assert one.token_ids == truth(one.request_id)
            self.end(one)

    def end(self, one):
        leftover = self.table.end(one)
        if leftover.link is not None:  # the gateway tells the worker to stop it
            for worker in self.workers:
                if worker.link is leftover.link:
                    worker.runs.pop(leftover.handle, None)
        self.entries.pop((one.request_id, one.attempt), None)
        self.ended.add(one.request_id)

    # -- what must hold ---------------------------------------------------------------------------------

    @invariant()
    def tokens_are_a_prefix_of_the_truth(self):
        for name, one in getattr(self, "sessions", {}).items():
            assert one.token_ids == truth(name)[: len(one.token_ids)]

    @invariant()
    def a_request_runs_on_one_link_at_most(self):
        for one in getattr(self, "sessions", {}).values():
            owners = [w for w in self.workers if one in w.link.by_handle.values()]
            assert len(owners) == (one.link is not None)

    def teardown(self):
        """Left alone, everything ends, and nothing is left."""
        if not hasattr(self, "table"):
            return
        for _ in range(200):
            if not len(self.table):
                break
            self.audit()
            for worker in self.workers:
                for key, tokens in list(self.entries.items()):
                    self.claim(worker, key, tokens)
                self.engine_step(worker, 3, merged=False)
                while worker.in_flight:
                    self.deliver(worker, worker.in_flight.pop(0))
            self.entries.clear()
            self.handlers_run()
        assert len(self.table) == 0
        assert self.ended == set(self.sessions)
        assert all(not worker.link.by_handle for worker in self.workers)


TestProtocol = Protocol.TestCase
TestProtocol.settings = settings(
    max_examples=150,
    stateful_step_count=50,
    deadline=None,
    suppress_health_check=list(HealthCheck),
    phases=(Phase.generate,),
)
