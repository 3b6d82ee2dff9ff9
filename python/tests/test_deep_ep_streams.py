# SPDX-License-Identifier: Apache-2.0
"""Which stream waits for which, with streams and events that only write down what is asked of them."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed: skipped")

from crossdock.deep_ep import streams  # noqa: E402
from crossdock.deep_ep.utils import event as events  # noqa: E402
from crossdock.deep_ep.utils.event import EventHandle, EventOverlap  # noqa: E402

DEVICE = torch.device("cuda", 0)


class Recorded(torch.Tensor):  # type: ignore[name-defined]
    def record_stream(self, stream: Any) -> None:
        Cuda.log.append(f"{stream.name} uses {int(self)}")


def tensor(number: int) -> Any:
    return torch.tensor(number).as_subclass(Recorded)


class Stream:
    device_index = 0

    def __init__(self, device: Any = None, priority: int = 0, name: str = "own") -> None:
        self.name = name

    @property
    def cuda_stream(self) -> int:
        return id(self)


class Event:
    num = 0

    def __init__(self) -> None:
        Event.num += 1
        self.at: Any = None

    def record(self, stream: Stream) -> None:
        self.at = stream.name, len([entry for entry in Cuda.log if entry.startswith(f"work on {stream.name}")])

    def wait(self, stream: Stream) -> None:
        Cuda.log.append(f"{stream.name} waits for {self.at[0]} after {self.at[1]}")


class Cuda:
    """What the modules use of torch.cuda; Stream is theirs."""

    Stream, Event = Stream, Event
    log: list[str] = []
    main: Any = Stream(name="main")
    side: Any = Stream(name="side")
    current: Any = main
    device, is_captured = 0, False

    @classmethod
    def set_stream(cls, stream: Any) -> None:
        cls.current = stream

    @classmethod
    def stream(cls, stream: Any) -> Any:
        raise AssertionError("another device is current")

    @classmethod
    def current_stream(cls, index: int) -> Any:
        return cls.current

    @classmethod
    def current_device(cls) -> int:
        return cls.device

    @classmethod
    def is_initialized(cls) -> bool:
        return True

    @classmethod
    def is_current_stream_capturing(cls) -> bool:
        return cls.is_captured


@pytest.fixture(autouse=True)
def cuda(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    fake = SimpleNamespace(cuda=Cuda, device=torch.device, Tensor=torch.Tensor)
    for module in (events, streams):
        monkeypatch.setattr(module, "torch", fake)
    monkeypatch.setattr(events, "current_stream_address", lambda index: Cuda.current.cuda_stream)
    monkeypatch.setattr(events, "_known_streams", {})
    # torch has to do it.
    monkeypatch.setattr(streams, "order_streams", lambda device, waiting, before: False)
    monkeypatch.setattr(EventHandle, "record", lambda event, device, stream: False)
    Cuda.log, Cuda.current, Cuda.is_captured, Event.num = [], Cuda.main, False, 0
    yield
    assert Cuda.current is Cuda.main


def work(*arguments: Any) -> Any:
    Cuda.log.append(f"work on {Cuda.current.name}")
    return tensor(2)


def run(to: Any, previous: Any = None, is_async: bool = False, further: Any = None) -> tuple[EventOverlap, list[str]]:
    Cuda.log = []
    _, overlap = to.run(DEVICE, work, (tensor(1), None), previous, is_async, further)
    return overlap, Cuda.log


def test_a_call_with_nothing_to_overlap_is_the_callers() -> None:
    overlap, log = run(streams.CommStream(), EventOverlap())
    assert log == ["work on main"] and overlap.event is None and Event.num == 0


def test_an_asynchronous_call_follows_the_caller_who_waits_when_asked() -> None:
    to = streams.CommStream()
    for _ in range(2):
        overlap, log = run(to, is_async=True)
        assert log == ["own waits for main after 0", "work on own", "main uses 2"]
        overlap.current_stream_wait()
        assert log[-1] == "main waits for own after 1" and len(overlap.extra_tensors or ()) == 2
    for waits_elsewhere in (False, True):
        overlap, log = run(to, is_async=True)
        if waits_elsewhere:
            Cuda.set_stream(Cuda.side)
            overlap.current_stream_wait()
            Cuda.set_stream(Cuda.main)
            assert log[-1] == "side waits for own after 1"
        del overlap
        assert log[-1] == "own uses 1"  # the caller's stream has not waited
    Cuda.is_captured = True
    overlap, log = run(to, is_async=True)
    del overlap
    assert log == ["own waits for main after 0", "work on own"]


def test_an_event_stands_for_the_caller_and_a_further_one_comes_beside() -> None:
    to, early = streams.CommStream(), EventHandle(Cuda.side)
    _, log = run(to, EventOverlap(early), further=EventHandle(Cuda.main))
    assert log[:3] == ["own waits for side after 0", "own waits for main after 0", "work on own"]
    assert log[-1] == "main waits for own after 1"
    Cuda.is_captured = True
    assert run(to, early)[1] == ["own waits for side after 0", "work on own", "main waits for own after 1"]


def test_the_stream_comes_back_where_work_fails() -> None:
    with pytest.raises(ZeroDivisionError):
        streams.CommStream().run(DEVICE, lambda: 1 // 0, (), None, True)
    assert Cuda.log == ["own waits for main after 0", "main waits for own after 0"]  # a capture can end


def test_a_hook_runs_on_the_stream_of_its_call() -> None:
    hook = streams.on_this_stream(DEVICE, lambda: work() and None)
    hook()
    Cuda.set_stream(Cuda.side)
    hook()
    assert Cuda.log == ["work on main"] * 2 and Cuda.current is Cuda.side
    Cuda.set_stream(Cuda.main)
