"""A job's agents and the network between them, in simulated time: the same pure parts that run over sockets, and nothing else."""

from collections import deque

from goodrun.elastic_runner.nodes.leader import Leader
from goodrun.elastic_runner.nodes.member import Changed, Ended, Formed, Member
from goodrun.elastic_runner.nodes.messages import Ready, Status
from goodrun.elastic_runner.nodes.timing import Timing

STEP_S = 0.05
_OURS = 0


class Wire:
    """One connection. What is sent while a cable is cut arrives after it was healed, as with TCP."""

    def __init__(self, number, client, k, server):
        self.number, self.client, self.k, self.server = number, client, k, server
        self.to_server, self.to_client = deque(), deque()
        self.greeted = False


class Agent:
    """One agent. Its ranks stop `lag_s` after it was told."""

    def __init__(self, net, number, place, held):
        self.place = place
        self.net, self.number, self.name = net, number, f"n{number}"
        self.member = Member(self.name, f"machine{place}", net.timing, net.now)
        self.leader = None
        if held is not None:
            self.member.held = held
            self.leader = Leader(self.name, net.endpoints, net.nnodes, net.timing, net.now)
            self.member.receive(held, Status(self.name, False), net.now)
        self.alive, self.frozen, self.ended = True, False, None
        self.trains = None
        self.stops_t = None
        self.ready_t = net.now
        self.rounds = []
        self.asks, self.distrusts = {}, ()
        self.wires = {}

    def get_ready(self):
        self.trains = self.stops_t = self.ready_t = None
        self.member.ready(Ready(0, 1, f"10.0.0.{self.number}", 1, 1, "", 0, **self.asks))
        self.asks = {}

    def turn(self):
        now, net = self.net.now, self.net
        for wire in list(net.wires):
            if wire.server is self and not net.cut(self, wire.client):
                if not wire.greeted:
                    wire.greeted = True
                    self.leader.link_up(wire.number)
                while wire.to_server:
                    self.leader.receive(wire.number, wire.to_server.popleft(), now)
            if wire.client is self and not net.cut(self, wire.server):
                while wire.to_client:
                    self.member.receive(wire.k, wire.to_client.popleft(), now)
        self.member.tick(now)
        if self.leader is not None:
            self.leader.tick(now)
        self._deliver()
        self._connect()
        self._deliver()
        if self.ready_t is not None and now >= self.ready_t:
            self.get_ready()
            self._deliver()

    def _connect(self):
        net, wanted = self.net, self.member.wanted(self.net.endpoints)
        for k, wire in list(self.wires.items()):
            if k not in wanted:
                net.close(wire, self)
                self.member.forget(k)
        for k in wanted - set(self.wires) - {self.member.held}:
            holder = net.holders.get(k)
            if holder is None or not holder.alive:
                if holder is None or not net.cut(self, holder):
                    self.member.link_down(k, net.now, ended=False)
            elif not net.cut(self, holder):
                self.wires[k] = net.connect(self, k, holder)

    def _deliver(self):
        net, now = self.net, self.net.now
        while self.member.out or (self.leader is not None and (self.leader.out or self.leader.stirred)):
            said, self.member.out = self.member.out, []
            for k, message in said:
                if k == self.member.held:
                    self.leader.receive(_OURS, message, now)
                elif k in self.wires:
                    self.wires[k].to_server.append(message)
            if self.leader is not None:
                if self.leader.stirred:
                    self.leader.tick(now, beat=False)
                said, self.leader.out = self.leader.out, []
                for link, message in said:
                    if link == _OURS:
                        self.member.receive(self.member.held, message, now)
                    else:
                        for wire in net.wires:
                            if wire.number == link and wire.server is self:
                                wire.to_client.append(message)
        for k in self.member.dropped:
            if k in self.wires:
                net.close(self.wires[k], self)
        self.member.dropped = []
        if self.leader is not None:
            for link in self.leader.dropped:
                for wire in [w for w in net.wires if w.number == link]:
                    net.close(wire, self)
            self.leader.dropped = []
        notes, self.member.notes = self.member.notes, []
        for note in notes:
            if isinstance(note, Formed):
                net.formed(self, note)
            elif isinstance(note, Changed):
                self.stops_t = now
                self.ready_t = now + (net.lag_s if note.at_once else 2 * net.lag_s)
            elif isinstance(note, Ended):
                self.ended, self.trains = note, None


class Net:
    """All agents; `run` lets time pass. Breaking a promise of membership raises AssertionError at once."""

    def __init__(self, count, endpoints, nnodes, *, lag_s=0.2, timing=None):
        self.timing = timing or Timing(last_call_s=3.0)
        self.now, self.endpoints, self.nnodes, self.lag_s = 0.0, endpoints, nnodes, lag_s
        self.wires, self.holders, self.agents = [], {}, []
        self.severed = set()
        self.agreed, self.reasons = {}, {}
        self.count = 0
        for i in range(count):
            self.start(i)

    def start(self, place):
        """An agent on machine `place`, which holds the endpoint of that number, if there is one."""
        held = place if place < self.endpoints else None
        agent = Agent(self, len(self.agents), place, held)
        self.agents.append(agent)
        if held is not None:
            self.holders[held] = agent
        return agent

    def thaw(self, agent):
        """It goes on where it stood; what it does first is to look at the time."""
        if agent.frozen:
            agent.frozen = False
            agent.turn()

    def cut(self, a, b):
        return frozenset((a.place, b.place)) in self.severed

    def connect(self, client, k, server):
        self.count += 1
        wire = Wire(self.count, client, k, server)
        self.wires.append(wire)
        return wire

    def close(self, wire, by, *, ended=False):
        """Taken away on both sides, where the other one can learn of it."""
        if wire not in self.wires:
            return
        self.wires.remove(wire)
        if wire.client.wires.get(wire.k) is wire:
            del wire.client.wires[wire.k]
        if self.cut(wire.client, wire.server):
            return  # the other side is left with half a connection: silence
        now = self.now
        if by is wire.server and wire.client.alive and not wire.client.frozen:
            while wire.to_client:
                wire.client.member.receive(wire.k, wire.to_client.popleft(), now)
            wire.client.member.link_down(wire.k, now, ended=ended)
        if by is wire.client and wire.server.alive and not wire.server.frozen:
            while wire.to_server:
                wire.server.leader.receive(wire.number, wire.to_server.popleft(), now)
            wire.server.leader.link_down(wire.number, now, ended=True)  # how a close looks from the other side

    def kill(self, agent):
        agent.alive, agent.trains = False, None
        for wire in [w for w in self.wires if agent in (w.client, w.server)]:
            self.close(wire, agent, ended=True)

    def formed(self, agent, note):
        r = note.round
        assert self.agreed.setdefault(r.generation, r.nodes) == r.nodes, "two rounds of one generation"
        assert len(r.nodes) <= self.nnodes[1]
        self.reasons[r.generation] = note.reason
        agent.trains, agent.stops_t, agent.distrusts = r.generation, None, note.distrusted
        agent.rounds.append((r.generation, note.place.rank, r.nodes))
        for other in self.agents:
            if other.alive and not other.frozen and other.trains is not None and other.trains != r.generation:
                stopped = other.stops_t is not None and self.now >= other.stops_t + min(self.lag_s, STEP_S)
                assert stopped or other.trains > r.generation, f"{other.name} still trains in {other.trains} beside {r}"

    def run(self, seconds, until=lambda: False):
        end = self.now + seconds
        while self.now < end:
            self.now += STEP_S
            for agent in self.agents:
                if agent.alive and not agent.frozen and agent.ended is None:
                    agent.turn()
            if until():
                return True
        return until()

    def living(self):
        return [a for a in self.agents if a.alive and a.ended is None]

    def together(self, agents, more_than=-1):
        """Whether `agents`, and they alone, train in one round later than `more_than`."""
        rounds = {a.trains for a in agents}
        g = next(iter(rounds))
        return len(rounds) == 1 and g is not None and g > more_than and set(self.agreed[g]) == {a.name for a in agents}
