"""Meshes and rules tables: what is read, and what is refused before anything is allocated."""

from __future__ import annotations

import jax
import pytest
from jax.sharding import PartitionSpec as P

from sharding.mesh import AXES, MeshConfig
from sharding.rules import MeshError, ShardingRules


def test_axes_and_sizes():
    mesh = MeshConfig.parse(" data=2, tensor = 4")
    assert (mesh.data, mesh.stage, mesh.tensor, mesh.num_devices) == (2, 1, 4, 8)
    assert str(mesh) == "data=2,tensor=4"
    assert MeshConfig.parse(None) == MeshConfig.parse("") == MeshConfig()
    assert str(MeshConfig()) == "tensor=1"


def test_a_toml_file_has_sizes_and_rules(tmp_path):
    file = tmp_path / "mesh.toml"
    file.write_text('[mesh]\ntensor = 2\n[rules]\nvocab = "replicated"\n')
    mesh = MeshConfig.parse(str(file))
    assert mesh.tensor == 2
    assert mesh.rules().ways("heads") == 2
    assert mesh.rules().ways("vocab") == 1
    assert str(mesh) == "tensor=2 (vocab = replicated)"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("wide=2", "unknown axis 'wide'; the axes are data, stage, tensor, expert"),
        ("tensor=0", "the size of 'tensor' must be a positive integer, not 0"),
        ("tensor=two", "not 'two'"),
        ("tensor", "not ''"),
        ("tensor=2,tensor=4", "given twice"),
    ],
)
def test_sizes_that_are_none(text, said):
    with pytest.raises(MeshError, match=said):
        MeshConfig.parse(text)


@pytest.mark.parametrize(
    ("toml", "said"),
    [
        ("[mesh]\ntensor = true\n", "positive integer, not True"),
        ('[mesh]\ntensor = "2"\n', "positive integer, not '2'"),
        ("[meshes]\n", "'meshes' is not one of its tables"),
        ("tensor = 2\n", "'tensor' is not one of its tables"),
        ("[mesh\n", "cannot be read"),
        ('[rules]\nwords = "tensor"\n', "unknown logical axis 'words'; they are vocab, heads"),
        ('[rules]\nvocab = "data"\n', "its submeshes run programs of their own.*use one of tensor, expert, replicated"),
        ('[rules]\nheads = "replicated"\n', "query heads attend to their own KV heads"),
    ],
)
def test_files_that_are_none(tmp_path, toml, said):
    file = tmp_path / "mesh.toml"
    file.write_text(toml)
    with pytest.raises(MeshError, match=said):
        MeshConfig.parse(str(file))
    with pytest.raises(MeshError, match=r"missing\.toml: cannot be read"):
        MeshConfig.parse(str(tmp_path / "missing.toml"))


def test_two_axes_of_one_array_cannot_share_a_mesh_axis():
    rules = ShardingRules.of({"tensor": 2}, {"model": "tensor"})
    with pytest.raises(MeshError, match="'heads' and 'model' are axes of one array, and both lie on 'tensor'"):
        rules.spec(("heads", "model"))
    assert rules.spec(("model", None)) == P("tensor", None)
    # On a mesh axis of size 1 nothing is split, so nothing collides.
    assert ShardingRules.of({}, {"model": "tensor"}).spec(("heads", "model")) == P(None, None)


def test_submeshes_are_disjoint_and_neighbours_along_tensor():
    submeshes = MeshConfig(data=2, stage=2, tensor=2).build()
    ids = [[[device.id for device in mesh.devices.flat] for mesh in stages] for stages in submeshes]
    assert ids == [[[0, 1], [2, 3]], [[4, 5], [6, 7]]]
    assert submeshes[0][0].axis_names == AXES
    assert dict(submeshes[0][0].shape) == {"data": 1, "stage": 1, "tensor": 2, "expert": 1}


def test_more_devices_than_there_are():
    with pytest.raises(MeshError, match=r"data=3,tensor=3 needs 9 devices; there are 8 \(cpu\); JAX_NUM_CPU_DEVICES"):
        MeshConfig(data=3, tensor=3).build()
    assert MeshConfig(tensor=1).build(jax.devices()[3:4])[0][0].devices.flat[0].id == 3
