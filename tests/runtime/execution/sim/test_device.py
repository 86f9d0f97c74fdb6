"""The simulated device itself: what is on which side, and what each operation costs."""

import threading

import pytest
import torch

CUDA = torch.device("cuda")


def test_tensors_are_on_the_device(device):
    with device.watch() as events:
        made = torch.zeros(3, 4, device=CUDA)
        again = (made[1:] + 1).view(torch.uint8).unflatten(0, (2, 1))
        assert made.is_cuda
        assert (again.device, again.shape) == (torch.device("cuda:0"), (2, 1, 16))
    assert events.of("sync", "pageable", "wait") == []


def test_mixing_host_and_device_raises(device):
    made = torch.zeros(3, device=CUDA)
    for mix in (
        lambda: made + torch.ones(3),
        lambda: torch.cat([made, torch.ones(3)]),
        lambda: made.index_copy_(0, torch.tensor([1]), made[:1]),
        lambda: torch.ones(3) * made,
        lambda: made.numpy(),
        lambda: made + torch.zeros(3, device="cuda:1"),
    ):
        with pytest.raises((RuntimeError, TypeError)):
            mix()
    assert (made + torch.tensor(2.0)).is_cuda, "a single number of the host is taken"


@pytest.mark.parametrize(
    "read",
    [
        lambda t: t.cpu(),
        lambda t: t.tolist(),
        lambda t: t[0].item(),
        lambda t: bool(t[0] > 1),
        lambda t: t.nonzero(),
        lambda t: t[t > 1],
        lambda t: t[torch.tensor([1])],
        lambda t: torch.empty(3).copy_(t),
        lambda t: torch.equal(t, t),
        lambda t: t.unique(),
        lambda t: torch.cuda.synchronize(),
        lambda t: t.int().bincount(),
    ],
)
def test_reading_is_a_sync(device, read):
    made = torch.ones(3, device=CUDA)
    with device.watch() as events:
        read(made)
    assert events.count("sync") == 1
    assert events.seen[0].place == "a test"


def test_copies_from_the_host_are_told_apart(device):
    source, made = torch.ones(3), torch.zeros(3, device=CUDA)
    for upload, kind in (
        (lambda: source.to(CUDA), "pageable"),
        (lambda: source.to(CUDA, non_blocking=True), "pageable"),
        (lambda: torch.tensor([1, 2], device=CUDA), "pageable"),
        (lambda: made.copy_(source), "pageable"),
        (lambda: source.pin_memory().to(CUDA), "sync"),
        (lambda: source.pin_memory().to(CUDA, non_blocking=True), "upload"),
        (lambda: made.copy_(source.pin_memory(), non_blocking=True), "upload"),
        (lambda: torch.empty(3, pin_memory=True).copy_(made, non_blocking=True), "download"),
    ):
        with device.watch() as events:
            upload()
        assert [event.kind for event in events.seen if event.kind != "pin"] == [kind]


def test_memory_is_reserved_once(device):
    def use():
        return torch.zeros(1 << 20, device=CUDA).sum()

    use()
    with device.watch() as events:
        use()
    assert events.count("reserve") == 0
    with device.watch() as events:
        kept = [torch.zeros(1 << 20, device=CUDA) for _ in range(3)]
    assert events.count("reserve") == 2
    assert len(kept) == 3


def test_a_graph_repeats_its_kernels_on_its_buffers(device):
    buffer, table = torch.ones(3, device=CUDA), torch.arange(3, device=CUDA)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = (buffer[table] * 2).cumsum(0)
    place = result.data_ptr()
    buffer.fill_(5)
    with device.watch() as events:
        graph.replay()
    assert [event.kind for event in events.seen] == ["launch"]
    assert (result.tolist(), result.data_ptr()) == ([10, 20, 30], place)


@pytest.mark.parametrize(
    "what", [lambda t: t.tolist(), lambda t: t.copy_(torch.ones(3)), lambda t: torch.ones(3).pin_memory()]
)
def test_nothing_waits_or_copies_within_a_capture(device, what):
    made = torch.zeros(3, device=CUDA)
    with pytest.raises(RuntimeError, match="capturing"), torch.cuda.graph(torch.cuda.CUDAGraph()):
        what(made)


def test_threads_have_the_device_too(device):
    found = []
    thread = threading.Thread(target=lambda: found.append(torch.zeros(3, device=CUDA) + 1))
    with torch.cuda.device(1):
        thread.start()
        thread.join()
    assert found[0].device == torch.device("cuda:0"), "the current device is one of each thread"
