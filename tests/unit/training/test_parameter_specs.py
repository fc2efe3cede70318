"""How parameters are sharded where no dimension is a multiple of the number of devices."""

import math
from itertools import product

import pytest

from training.mesh import Mesh

pytestmark = pytest.mark.fast

MESHES = [
    Mesh(fsdp=256),
    Mesh(fsdp=96),
    Mesh(fsdp=6),
    Mesh(dcn=2, fsdp=128),
    Mesh(fsdp=64, domain=4),
    Mesh(fsdp=36, tensor=4),
    Mesh(dcn=2, fsdp=8, domain=2, tensor=2),
    Mesh(domain=8),
    Mesh(),
]
SHAPES = [
    *product([3456, 1152, 4304, 1408, 384, 1000, 7], [1152, 1408, 588, 384, 34]),
    (1152, 3, 14, 14),
    (1, 729, 1152),
    (3, 1152, 1152),
    (1, 1, 1152),
    (4304,),
]


def power(number: int, prime: int) -> int:
    """The largest n of which prime ** n divides the number."""
    return 0 if number % prime else 1 + power(number // prime, prime)


@pytest.mark.parametrize("mesh", MESHES, ids=str)
@pytest.mark.parametrize("tensor_dim", [None, 0])
def test_shards_are_even_and_use_each_device_once(mesh, tensor_dim):
    for shape in SHAPES:
        tensor = tensor_dim if len(shape) == 2 and shape[0] % mesh.tensor == 0 else None
        spec = mesh.parameter_spec(shape, tensor)
        for size, axes in zip(shape, spec, strict=True):
            assert size % mesh.shard_count([axes]) == 0
        used = [name for axes in mesh.in_factors(spec) for name in axes]
        assert len(used) == len(set(used))
        assert "dcn" not in {name.partition("/")[0] for name in used}
        if tensor is not None and mesh.tensor > 1:
            assert spec[tensor][0] == "tensor"


@pytest.mark.parametrize("mesh", [Mesh(fsdp=256), Mesh(fsdp=96), Mesh(fsdp=6)], ids=str)
def test_as_many_shards_as_the_sizes_allow(mesh):
    """Of each prime: as often as in the number of devices, or in all sizes together."""
    for shape in SHAPES:
        spec = mesh.parameter_spec(shape)
        if max(shape) == math.prod(shape) and shape[-1] % mesh.fsdp:  # a vector
            assert mesh.shard_count(spec) == 1
            continue
        expected = math.prod(
            p ** min(power(mesh.fsdp, p), sum(power(size, p) for size in shape)) for p in (2, 3)
        )
        assert mesh.shard_count(spec) == expected


@pytest.mark.parametrize("mesh", [Mesh(fsdp=8), Mesh(dcn=2, fsdp=128), Mesh(fsdp=96)], ids=str)
def test_whole_axis_where_it_divides(mesh):
    """The largest dimension of those that it divides, and no other."""
    for shape in SHAPES:
        if even := [d for d, size in enumerate(shape) if size % mesh.fsdp == 0]:
            spec = [()] * len(shape)
            spec[max(even, key=lambda d: shape[d])] = ("fsdp",)
            assert mesh.parameter_spec(shape) == tuple(spec)
            assert not mesh.is_split(mesh.parameter_spec(shape))


def test_so400m_on_256_chips():
    mesh = Mesh(fsdp=256)
    inner, outer = ("fsdp/7",), tuple(f"fsdp/{i}" for i in range(7))
    assert mesh.parameter_spec((3456, 1152)) == (inner, outer)
    assert mesh.parameter_spec((1152, 4304)) == (outer, inner)
    assert mesh.parameter_spec((1, 256, 1152)) == ((), ("fsdp",), ())
    assert mesh.is_split((inner, outer))
    assert not mesh.is_split((("fsdp",), ()))
    # Several axes share what "tensor" leaves of its dimension, and the others.
    mesh = Mesh(dcn=2, fsdp=128, tensor=2)
    assert mesh.parameter_spec((4304, 1000), tensor_dim=0) == (
        ("tensor", *(f"fsdp/{i}" for i in range(3, 6))),
        tuple(f"fsdp/{i}" for i in range(3)),
    )


def test_position_embedding_along_domain():
    mesh = Mesh(fsdp=256, domain=4)
    outer = tuple(f"fsdp/{i}" for i in range(7))
    assert mesh.position_embedding_spec((1, 256, 1152)) == ((), ("domain",), outer)
    assert mesh.position_embedding_spec((1, 256, 1024)) == ((), ("domain",), ("fsdp",))
    assert Mesh(domain=4).position_embedding_spec((1, 256, 1152)) == ((), ("domain",), ())


@pytest.mark.parametrize("mesh", MESHES, ids=str)
def test_parts_of_axes(mesh):
    """Each factor is in one part, and dimensions share none."""
    for shape in SHAPES:
        spec = mesh.parameter_spec(shape)
        parts = mesh.parts_of_axes(spec)
        (factors,) = mesh.in_factors((tuple(name for axes in parts for name in axes),))
        assert sorted(factors) == sorted(mesh.factor_sizes)
        assert all(sum(set(part) <= set(axes) for axes in spec) <= 1 for part in parts)
    assert mesh.parts_of_axes(((),)) == [(axis,) for axis in mesh.axis_sizes]
