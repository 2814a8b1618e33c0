"""The layout of buckets: Megatron-Core's numbers, and that every element has one owner."""

import math

import pytest
import torch

from sidestream.buffers import ParamAndGradBuffer, param_and_grad_layout

SIDE, LAYERS = 95, 10
W, B = SIDE * SIDE, SIDE
# A weight that starts at a multiple of 64 after a bias of 95.
BW = 128 + W


def _shapes(bias: bool) -> list[tuple[int, ...]]:
    layer = [(SIDE, SIDE), (SIDE,)] if bias else [(SIDE, SIDE)]
    return layer * LAYERS


# What each bucket spans without padding at its end. Tensors come from the last to the first, so a
# layer with a bias begins with it.
WHOLE = {
    (None, False): [10 * W],
    (9000, False): [W] * 10,
    (9025, False): [W] * 10,
    (9050, False): [2 * W] * 5,
    (18000, False): [2 * W] * 5,
    (18050, False): [2 * W] * 5,
    (20000, False): [3 * W] * 3 + [W],
    (None, True): [10 * (W + B)],
    (9000, True): [W + B] * 10,
    (9025, True): [W + B] * 10,
    (9050, True): [W + B] * 10,
    (18000, True): [2 * (W + B)] * 5,
    (18050, True): [2 * (W + B)] * 5,
    (20000, True): [3 * (W + B)] * 3 + [W + B],
}
# Divided: a weight takes 9088 = 142 * 64 up to the next start, a bias and a weight 9216 = 144 * 64.
DIVIDED = {
    (None, False): [9 * 9088 + W],
    (9000, False): [W] * 10,
    (9025, False): [W] * 10,
    (9050, False): [9088 + W] * 5,
    (18000, False): [9088 + W] * 5,
    (18050, False): [9088 + W] * 5,
    (20000, False): [2 * 9088 + W] * 3 + [W],
    (None, True): [9 * 9216 + BW],
    (9000, True): [BW] * 10,
    (9025, True): [BW] * 10,
    (9050, True): [BW] * 10,
    (18000, True): [9216 + BW] * 5,
    (18050, True): [9216 + BW] * 5,
    (20000, True): [2 * 9216 + BW] * 3 + [BW],
}


@pytest.mark.parametrize("case", WHOLE, ids=str)
def test_buckets_that_all_ranks_hold(case):
    size, bias = case
    layout = param_and_grad_layout(_shapes(bias), size, shared_embeddings={0})
    assert [bucket.numel for bucket in layout.buckets] == WHOLE[case]
    assert layout.flat.numel == LAYERS * (W + bias * B)  # no padding anywhere


@pytest.mark.parametrize("world_size", [1, 2, 3, 8], ids="{} ranks".format)
@pytest.mark.parametrize("case", DIVIDED, ids=str)
def test_divided_buckets(case, world_size):
    size, bias = case
    multiple = {1: 128, 2: 128, 3: 384, 8: 128}[world_size]
    for bus in (False, True):
        layout = param_and_grad_layout(
            _shapes(bias), size, num_shards=world_size, pad_for_bus_bandwidth=bus
        )
        segments = layout.flat.segments
        assert [segments[b.indices[-1]].stop - b.start for b in layout.buckets] == DIVIDED[case]
        multiple = math.lcm(multiple, 2**16) if bus else multiple
        for bucket in layout.buckets:
            assert bucket.numel % multiple == 0 == bucket.start % multiple
            assert bucket.stop - segments[bucket.indices[-1]].stop < multiple
        assert multiple % world_size == 0 and layout.num_shards == world_size
        assert all(segment.start % 64 == 0 for segment in segments)


def test_places_of_a_small_model_by_hand():
    layout = param_and_grad_layout([(3, 50), (60,), (7, 10)], 100, num_shards=3)
    # Tensor 2 (70), then tensor 1 at 128 closes the first bucket at 188; tensor 0 is the second.
    segments = layout.flat.segments
    assert [(one.start, one.stop) for one in segments] == [(384, 534), (128, 188), (0, 70)]
    assert [(b.start, b.stop, b.indices) for b in layout.buckets] == [
        (0, 384, (2, 1)),
        (384, 768, (0,)),
    ]


SHARED = {
    "first": ({0}, [(9, 8, 7), (6, 5, 4), (3, 2, 1), (0,)]),
    "last": ({9}, [(9,), (8, 7, 6), (5, 4, 3), (2, 1, 0)]),  # no empty bucket before it
    "in the middle": ({5}, [(9, 8, 7), (6,), (5,), (4, 3, 2), (1, 0)]),
    "both ends": ({0, 9}, [(9,), (8, 7, 6), (5, 4, 3), (2, 1), (0,)]),
}


@pytest.mark.parametrize("case", SHARED.values(), ids=SHARED)
def test_shared_embeddings_are_apart(case):
    shared, expected = case
    layout = param_and_grad_layout(_shapes(False), 20000, num_shards=2, shared_embeddings=shared)
    assert [bucket.indices for bucket in layout.buckets] == expected
    # Whatever else a stage has, it cuts this weight in the same places.
    alone = param_and_grad_layout([(SIDE, SIDE)], num_shards=2)
    (bucket,) = [b for b in layout.buckets if b.indices == (min(shared),)]
    assert bucket.numel == alone.flat.numel
    assert layout.flat.segments[min(shared)].start == bucket.start


@pytest.mark.parametrize("world_size", [1, 2, 3, 8], ids="{} ranks".format)
def test_every_element_has_one_owner(world_size):
    layout = param_and_grad_layout(_shapes(True), 20000, num_shards=world_size)
    buffer = ParamAndGradBuffer(layout, grad_dtype=torch.float64, param_dtype=torch.bfloat16)
    for number in range(len(layout.buckets)):
        for rank, shard in enumerate(buffer.shards(number)):
            shard += 1 + rank  # views: what is added twice would show
    views, params = buffer.grads.views(), buffer.params.views()
    for number, bucket in enumerate(layout.buckets):
        for index in bucket.indices:
            segment, grad = layout.flat.segments[index], views[index]
            places = torch.arange(segment.start - bucket.start, segment.stop - bucket.start)
            rank_numel = len(buffer.shards(number)[0])
            assert torch.equal(grad.reshape(-1), 1.0 + places // rank_numel)
            assert grad.shape == _shapes(True)[index] == params[index].shape
    buffer.scale_gradients(0.5)
    assert views[0][0, 0] == 0.5  # of the first rank
    assert buffer.shards(0, of_params=True)[0].dtype == torch.bfloat16
    buffer.reset()
    assert not buffer.grads.data.any()


BAD = {
    "bucket_size": {"bucket_size": 0},
    "num_shards": {"num_shards": 0},
    "pad_for_bus_bandwidth": {"pad_for_bus_bandwidth": True},
    "shapes": {"shapes": [(-2, 3), (4,)]},
    "shared_embeddings": {"num_shards": 2, "shared_embeddings": [1]},
}


@pytest.mark.parametrize("name", BAD)
def test_bad_options_are_refused(name):
    with pytest.raises(ValueError, match=f"{name}: expected"):
        param_and_grad_layout(**{"shapes": [(2, 3)], **BAD[name]})


def test_half_an_element_is_refused():
    for options in ({"shapes": [(2.5,)]}, {"bucket_size": 2.5}, {"num_shards": 2.5}):
        with pytest.raises(TypeError):
            param_and_grad_layout(**{"shapes": [(2, 3)], **options})


def test_a_buffer_of_gradients_has_no_parameters():
    buffer = ParamAndGradBuffer(param_and_grad_layout([(2, 3)]))
    for call in (lambda: buffer.params, lambda: buffer.shards(0, of_params=True)):
        with pytest.raises(ValueError, match="params: expected a buffer with parameters"):
            call()


def test_nothing_at_all():
    layout = param_and_grad_layout([])
    assert layout.flat.numel == 0 and not ParamAndGradBuffer(layout).grads.views()
