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
def test_as_many_shards_as_one_dimension_allows(mesh):
    """The largest common divisor of a size and the number of devices."""
    for shape in SHAPES:
        spec = mesh.parameter_spec(shape)
        if max(shape) == math.prod(shape) and shape[-1] % mesh.fsdp:  # a vector
            assert mesh.shard_count(spec) == 1
            continue
        assert mesh.shard_count(spec) == max(math.gcd(size, mesh.fsdp) for size in shape)


@pytest.mark.parametrize("mesh", [Mesh(fsdp=8), Mesh(dcn=2, fsdp=128), Mesh(fsdp=96)], ids=str)
def test_whole_axis_where_it_divides(mesh):
    """The largest dimension of those that it divides, and no other."""
    for shape in SHAPES:
        if even := [d for d, size in enumerate(shape) if size % mesh.fsdp == 0]:
            spec = [()] * len(shape)
            spec[max(even, key=lambda d: shape[d])] = ("fsdp",)
            assert mesh.parameter_spec(shape) == tuple(spec)
            assert not mesh.uses_factors(mesh.parameter_spec(shape))


def test_so400m_on_256_chips():
    mesh = Mesh(fsdp=256)
    inner = tuple(f"fsdp/{i}" for i in range(1, 8))
    assert mesh.parameter_spec((3456, 1152)) == (inner, ())
    assert mesh.parameter_spec((4304, 1152)) == ((), inner)
    assert mesh.parameter_spec((1, 256, 1152)) == ((), ("fsdp",), ())
    assert mesh.uses_factors((inner, ()))
    assert not mesh.uses_factors((("fsdp",), ()))
    # "tensor" has a part of a dimension, and factors of "fsdp" a part of the same or another.
    mesh = Mesh(dcn=2, fsdp=128, tensor=2)
    factors = tuple(f"fsdp/{i}" for i in range(2, 7))
    assert mesh.parameter_spec((4304, 1248), tensor_dim=0) == (("tensor",), factors)
    assert mesh.parameter_spec((1248 * 2, 4304), tensor_dim=0) == (("tensor", *factors), ())


def test_position_embedding_along_domain():
    mesh = Mesh(fsdp=256, domain=4)
    inner = tuple(f"fsdp/{i}" for i in range(1, 8))
    assert mesh.position_embedding_spec((1, 256, 1152)) == ((), ("domain",), inner)
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
