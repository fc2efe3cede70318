"""What libtpu is started with: the same in a run and by --compile_only, and what it refuses."""

import json

import pytest

from tests.support.cli import run_program

V5 = "--xla_enable_async_all_gather=true"


@pytest.mark.long
@pytest.mark.parametrize("kind", ["v4-8", "v5litepod-8", "v5p-8", "v6e-8"])
def test_compile_only_has_the_set_of_a_run(kind, monkeypatch):
    """torch_xla's, which it sets where it finds chips; libtpu takes all of it."""
    monkeypatch.setenv("LIBTPU_INIT_ARGS", "--xla_tpu_enable_flash_attention=true")
    done = run_program("tests/fakes/as_on_a_tpu.py", kind, warm=False)
    assert done.returncode == 0, done.stderr
    run, compile_only = json.loads(done.stdout)
    assert compile_only == run
    flags = run["LIBTPU_INIT_ARGS"].split()
    assert flags[0] == "--xla_tpu_enable_flash_attention=true"  # the user's stays
    names = [flag.partition("=")[0] for flag in flags]
    assert len(names) == len(set(names))
    assert "--xla_latency_hiding_scheduler_rerun=1" in flags  # torch_xla's
    assert "--xla_jf_spmd_threshold_for_windowed_einsum_mib=1000000" in flags  # ours
    limit = {"v4-8": [], "v6e-8": ["65536"]}.get(kind, ["32768"])  # of vector memory
    name = "--xla_tpu_scoped_vmem_limit_kib="
    assert [flag.removeprefix(name) for flag in flags if flag.startswith(name)] == limit
    assert (V5 in flags) == kind.startswith("v5")
    # On other chips a later libtpu warns of incorrect results.
    fused = "--xla_tpu_enable_async_collective_fusion_fuse_all_reduce=true"
    assert (fused in flags) == (kind == "v5litepod-8")
    assert run["TPU_MEGACORE"] == ("megacore_dense" if kind == "v4-8" else None)


@pytest.mark.long
def test_wrong_flag_of_the_user_is_told(tmp_path, monkeypatch):
    """In a run libtpu itself prints such a line, and ends the process."""
    monkeypatch.setenv("LIBTPU_INIT_ARGS", "--xla_no_such_flag=true")
    folder = tmp_path / "run"
    flags = f"--fake_data --model vit_tiny_patch16_224 --num_blocks 1 --ckpt_dir {folder}".split()
    compile_only = "--compile_only --tpu_topology v5e:1x1 --batch_size 1".split()
    done = run_program("run_vit_training.py", *compile_only, *flags)
    assert done.returncode == 2, done.stderr
    assert done.stderr.splitlines()[-1] == (
        "run_vit_training.py: error: libtpu refuses LIBTPU_INIT_ARGS (Unknown command line flag "
        "'xla_no_such_flag'): correct or unset it"
    )
    assert "Traceback" not in done.stderr
    assert not folder.exists()
