"""Tables on the GPU live as long as anything may read them."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from numdev.attention.kernels.runtime import Tables
from numdev.errors import Unsupported

CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)


def numbers(value: int) -> torch.Tensor:
    return torch.full((4,), value, dtype=torch.int32)


def test_the_same_tensor_for_the_same_key() -> None:
    tables = Tables(2)
    first = tables.get("a", CPU, lambda: numbers(1))
    assert tables.get("a", CPU, lambda: numbers(2)) is first


def test_the_least_recently_used_goes() -> None:
    tables = Tables(2)
    first = tables.get("a", CPU, lambda: numbers(1))
    tables.get("b", CPU, lambda: numbers(2))
    assert tables.get("a", CPU, lambda: numbers(3)) is first
    tables.get("c", CPU, lambda: numbers(4))
    assert tables.get("a", CPU, lambda: numbers(5)) is first
    assert tables.get("b", CPU, lambda: numbers(6))[0] == 6


class Stub:
    """A table whose copy to the GPU is itself."""

    def to(self, device: torch.device) -> Stub:
        return self


class TestCapture:
    @pytest.fixture
    def waited(self, monkeypatch: pytest.MonkeyPatch) -> list[torch.device]:
        devices: list[torch.device] = []
        monkeypatch.setattr(torch.cuda, "synchronize", devices.append)
        return devices

    @pytest.fixture
    def capturing(self, monkeypatch: pytest.MonkeyPatch, waited: list[torch.device]) -> list[bool]:
        state = [False]
        monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: state[0])
        return state

    def test_a_table_that_a_capture_has_used_stays(self, capturing: list[bool]) -> None:
        tables: Any = Tables(1)
        first = tables.get("a", GPU, Stub)
        capturing[0] = True
        assert tables.get("a", GPU, Stub) is first
        capturing[0] = False
        for key in range(20):
            tables.get(key, GPU, Stub)
        assert tables.get("a", GPU, Stub) is first

    @pytest.mark.usefixtures("capturing")
    def test_every_launch_ends_before_a_table_goes(self, waited: list[torch.device]) -> None:
        tables: Any = Tables(1)
        tables.get("a", GPU, Stub)
        assert not waited
        tables.get("b", GPU, Stub)
        assert waited == [GPU]

    def test_a_capture_without_its_table_is_refused(self, capturing: list[bool]) -> None:
        tables: Any = Tables(1)
        capturing[0] = True
        with pytest.raises(Unsupported, match="call it once with these shapes before the capture"):
            tables.get("a", GPU, Stub)
