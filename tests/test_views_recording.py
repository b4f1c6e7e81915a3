"""Recorded snapshots are read as PyTorch counts, and without running anything."""

import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from remat.views.recording import read_snapshot, to_recording
from remat.views.snapshot import to_snapshot
from remat.views.step_report import Timeline


def alloc(size: int, address: int = 1, frames: tuple[Any, ...] = ()) -> dict[str, Any]:
    return {"action": "alloc", "addr": address, "size": size, "frames": list(frames)}


def freed(size: int, address: int = 1) -> list[dict[str, Any]]:
    pair = ("free_requested", "free_completed")
    return [{"action": action, "addr": address, "size": size, "frames": []} for action in pair]


def test_frees_of_every_kind_count_once() -> None:
    """Bytes are given back when the free is asked for; a lone ``free`` or completion is one, too."""
    trace = [
        alloc(1000, 1),
        alloc(2000, 2),
        freed(1000, 1)[0],
        alloc(4000, 3),
        freed(1000, 1)[1],
        freed(2000, 2)[1],
        {"action": "free", "addr": 3, "size": 4000},
        *freed(500, 9),
        {"action": "segment_alloc", "addr": 0, "size": 2**21},
        {"action": "something new", "addr": 0, "size": 1},
        {"action": "something new", "addr": 0, "size": 1},
    ]
    active = {"size": 512, "state": "active_allocated", "requested_size": 8, "frames": []}
    waiting = active | {"state": "active_awaiting_free"}
    segment = {"address": 4096, "device": 0, "blocks": [active, waiting]}
    recording = to_recording({"segments": [segment], "device_traces": [trace]})
    assert recording.totals() == [
        *(508, 1508, 3508, 2508, 6508, 6508, 4508, 508),
        *(8, 8, 8, 8, 8),
    ]
    assert recording.notes == ("events 'something new' are not understood: 2 of them",)


def test_old_snapshots_without_requested_sizes_are_read() -> None:
    block = {"size": 1024, "state": "active_allocated", "history": [{"real_size": 1000}]}
    segment = {"address": 0, "blocks": [block]}
    recording = to_recording({"segments": [segment], "device_traces": [[alloc(1, 9)]]})
    assert recording.allocations[0].bytes == 1000


class Evil:
    """Pickled, it asks for a function to be called."""

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[str]]:
        return print, ("called",)


def test_a_pickle_that_asks_for_code_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "evil.pickle"
    path.write_bytes(pickle.dumps({"segments": [], "device_traces": [[Evil()]]}))
    with pytest.raises(ValueError, match=r"plain containers: it asks for builtins\.print"):
        read_snapshot(path)
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"not a pickle", "cannot be read as a memory snapshot"),
        (b"", "cannot be read as a memory snapshot"),
        (pickle.dumps(to_snapshot(Timeline("eager", (), ())))[:-20], "cannot be read"),
        (pickle.dumps([1, 2]), "this is no memory snapshot"),
        (pickle.dumps({"segments": []}), "this is no memory snapshot"),
        (pickle.dumps({"segments": [], "device_traces": [[]]}), "holds no events"),
    ],
)
def test_other_files_are_refused_with_a_reason(
    content: bytes, message: str, tmp_path: Path
) -> None:
    path = tmp_path / "s.pickle"
    path.write_bytes(content)
    with pytest.raises(ValueError, match=message):
        read_snapshot(path)


def test_a_damaged_snapshot_is_refused_with_a_reason() -> None:
    with pytest.raises(ValueError, match="damaged"):
        to_recording({"segments": [], "device_traces": [[{"action": "alloc"}]]})
