"""The virtual clock: times that can be computed by hand, and that no run changes."""

from collections.abc import Iterator

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from simulated_gpu import Simulator
from simulated_gpu.clock import CARDS, Card, Clock
from tapestream.costs.rates import Rates, usual_rates
from tapestream.frontends.outlines.fake import fake_tensors, faked

# One operation, one byte a second would do; powers of two make sums exact.
CARD = Card("by hand", memory=2.0**20, half=2.0**24, single=2.0**22, full=2.0**20, into=2.0**10, out=2.0**11,
            peer=2.0**12, launch=2.0**-10, kernel=2.0**-8, copy=2.0**-6)  # fmt: skip


@pytest.fixture
def clock(simulator: Simulator) -> Iterator[Clock]:
    torch.cuda.synchronize()
    simulator.clock.set(CARD)
    yield simulator.clock
    simulator.clock.off()


def test_a_kernel_takes_its_bytes_or_its_operations(clock: Clock) -> None:
    x, y = torch.ones(64, 64, device="cuda"), torch.ones(64, 64, device="cuda")
    clock.set(CARD)
    torch.add(x, y)
    (added,) = clock.record()
    assert (added.start, added.nbytes) == (2.0**-10, 3 * 64 * 64 * 4)
    assert added.end - added.start == pytest.approx(2.0**-8 + 3 * 2**14 / 2**20)
    clock.forget_record()
    x.mm(y)
    x.bfloat16().mm(y.bfloat16())
    wide, *_, narrow = clock.record()
    assert wide.end - wide.start == pytest.approx(2.0**-8 + 2 * 64**3 / 2**22)
    assert narrow.end - narrow.start == pytest.approx(2.0**-8 + 2 * 64**3 / 2**24)
    assert wide.start == added.end  # one stream


class Mixed(nn.Module):
    """Products, a convolution, norms, activations, an embedding, and views of all sorts."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.norm, self.out = nn.Embedding(500, 32), nn.LayerNorm(32), nn.Linear(32, 8)
        self.conv, self.batch = nn.Conv1d(32, 32, 3, padding=1), nn.BatchNorm1d(32)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        x = self.norm(self.table(rows))
        x = x + F.gelu(self.batch(self.conv(x.transpose(1, 2)))).transpose(1, 2)
        scores = torch.softmax(x @ x.transpose(1, 2) / 4, -1)
        return self.out((scores @ x)[:, 1:]).exp().mean()


def test_the_planner_counts_as_the_clock_does(clock: Clock) -> None:
    """One table: what `tapestream plan` takes an operation for, the simulated card takes it for."""
    torch.manual_seed(0)
    model, rows = Mixed(), torch.randint(500, (4, 16))
    with fake_tensors("cpu", model) as meter:
        loss = model(*faked((rows,)))
        made = meter.work.copy()
        loss.backward()
    model.zero_grad()
    model.cuda()
    there = rows.cuda()
    clock.set(CARD)
    loss = model(there)
    forward = len(clock.record())
    loss.backward()
    ran = [one for one in clock.record() if "copy in" not in one.name]
    nbytes = sum(one.nbytes for one in ran)
    by_clock, counted = sum(one.nbytes for one in ran[:forward]), sum(n * count for (_, n), count in made.items())
    assert by_clock == counted + 8  # the norm's counter of batches is read and written there, here it counts once
    assert nbytes == pytest.approx(sum(n * count for (_, n), count in meter.work.items()), rel=0.1)
    rates = Rates(CARD.single, CARD.memory, CARD.kernel)
    assert sum(one.end - one.start for one in ran) == pytest.approx(rates.seconds(meter.work), rel=0.1)
    assert CARDS["h100"].launch == usual_rates("cuda").launch_seconds


def test_both_directions_copy_at_once_and_each_one_at_a_time(clock: Clock) -> None:
    host = [torch.ones(256).pin_memory() for _ in range(3)]
    device = [torch.ones(256, device="cuda") for _ in range(3)]
    streams = [torch.cuda.Stream() for _ in range(3)]
    clock.set(CARD)
    for stream, to, source in zip(streams, (device[0], device[1], host[2]), (host[0], host[1], device[2]), strict=True):
        with torch.cuda.stream(stream):
            to.copy_(source, non_blocking=True)
    first, second, out = clock.record()
    assert (first.start, first.end) == (2.0**-10, 2.0**-10 + 2.0**-6 + 1)
    assert (second.start, second.end) == (first.end, first.end + 2.0**-6 + 1)
    assert (out.start, out.end) == (3 * 2.0**-10, 3 * 2.0**-10 + 2.0**-6 + 0.5)


def test_events_order_streams_and_the_host(clock: Clock) -> None:
    other = torch.cuda.Stream()
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    torch.cuda._sleep(int(0.25 * 1.5e9))
    event = torch.cuda.current_stream().record_event()
    with torch.cuda.stream(other):
        other.wait_event(event)
        torch.cuda._sleep(int(0.5 * 1.5e9))
        end.record()
    assert clock.host() == 2 * 2.0**-10
    end.synchronize()
    assert clock.host() == pytest.approx(2.0**-10 + 0.75)
    assert begin.elapsed_time(end) == pytest.approx(1e3 * (2.0**-10 + 0.75))


def test_an_early_copy_that_waits_keeps_no_other_from_running(clock: Clock) -> None:
    host, device = torch.ones(256).pin_memory(), torch.ones(2, 256, device="cuda")
    late, soon = torch.cuda.Stream(), torch.cuda.Stream()
    clock.set(CARD)
    torch.cuda._sleep(int(4 * 1.5e9))
    late.wait_stream(torch.cuda.current_stream())
    for stream, target in ((late, device[0]), (soon, device[1])):
        with torch.cuda.stream(stream):
            target.copy_(host, non_blocking=True)
    _, waiting, running = clock.record()
    assert waiting.start == pytest.approx(4 + 2.0**-10)
    assert running.start == 3 * 2.0**-10


def test_lanes_of_the_host_wait_for_events_and_streams_for_them(clock: Clock) -> None:
    disk, update = clock.lane("disk", bytes_per_second=2.0**10), clock.lane("update")
    torch.cuda._sleep(int(1.5e9))
    event = torch.cuda.current_stream().record_event()
    written = disk.work("write", nbytes=2**11, after=clock.moment(event))
    assert written == pytest.approx(1 + 2.0**-10 + 2)
    assert disk.work("read", nbytes=2**10) == pytest.approx(written + 1)
    updated = update.work("adamw", seconds=0.5, after=written)
    stream = torch.cuda.Stream()
    clock.hold(stream, updated)
    assert clock.moment(stream) == updated
    clock.wait(updated)
    clock.host_works("clip", 0.25)
    assert clock.host() == updated + 0.25
    assert [one.lane for one in clock.record()][1:] == ["disk", "disk", "update", "host"]


def test_links_between_devices(clock: Clock) -> None:
    x = torch.ones(1024, device="cuda:0")
    torch.empty(1024, device="cuda:1")
    clock.set(CARD)
    x.to("cuda:1")
    (copied,) = clock.record()
    assert copied.end - copied.start == 2.0**-6 + 1


def test_cards_have_figures(simulator: Simulator) -> None:
    assert CARDS["h100"].memory > CARDS["rtx4090"].memory


def test_a_question_is_answered_by_the_clock(clock: Clock) -> None:
    """And not by how fast this machine is; who asks again and again gets an answer."""
    torch.cuda._sleep(10_000_000)
    event = torch.cuda.current_stream().record_event()
    assert not event.query()
    moment = clock.moment(event)
    asked = 1
    while not event.query():
        asked += 1
    assert asked > 100
    assert moment <= clock.host() < moment + 1e-5


def test_an_event_of_an_earlier_setting_is_over(clock: Clock) -> None:
    torch.cuda._sleep(10_000_000)
    event = torch.cuda.current_stream().record_event()
    assert clock.moment(event) > 0
    clock.set("h100")
    assert clock.moment(event) == 0
    event.synchronize()
    torch.cuda.current_stream().wait_event(event)
    assert clock.host() == 0
    assert event.query()
