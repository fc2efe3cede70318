"""What --mesh_domain, --attention and --matmul refuse: in one line, and nothing is written."""

import pytest

from tests.support.usage_error import told_in_one_line

pytestmark = pytest.mark.fast

SMALL = (
    "--data_source mosaics --image_size 32 --patch_size 8 --embed_dim 48 --num_heads 3 "
    "--num_blocks 1 --num_classes 10 --batch_size 16"
)
HYBRID = "--model hybrid_vit"
ON_GPUS = [
    ("--mesh_domain 8", "--mesh_domain 8 exceeds the 4 rows of patches of an image"),
    (
        "--mesh_domain 3",
        "x --mesh_domain 3 x --mesh_tensor 1 is 6, not the 8 process(es) of this run",
    ),
    ("--mesh_domain 2 --fsdp megatron", "--fsdp megatron requires"),
    ("--mesh_domain 2 --block te", "--block te"),
    ("--mesh_domain 2 --pos_dropout 0.1", "the same positions of their tokens (--pos_dropout)"),
    ("--mesh_domain 2 --patch_drop_rate 0.5", "it has --patch_drop_rate"),
    ("--domain_attention ring", "--domain_attention ring requires --mesh_domain"),
    (
        "--mesh_domain 2 --domain_attention ulysses",
        "ulysses requires a number of heads divisible by --mesh_domain 2, not 3: use ring",
    ),
    ("--mesh_domain 2 --domain_attention gather", "requires --backend xla: use ring or ulysses"),
    ("--mesh_domain 2 --mesh_tensor 2", "--mesh_tensor 2 requires --fsdp simple"),
    ("--mesh_domain 2 --compile --grad_ckpt selective", "requires --grad_ckpt full or none"),
]
ON_XLA = [
    ("--mesh_domain 8", "--mesh_domain 8 exceeds the 4 rows of patches of an image"),
    (
        "--mesh_domain 3",
        "x --mesh_domain 3 x --mesh_tensor 1 is 6, not the 8 device(s) of this run",
    ),
    ("--domain_attention ring", "--domain_attention ring requires --mesh_domain"),
    ("--mesh_domain 2 --domain_attention ulysses", "requires --backend cuda: use ring or gather"),
    (
        "--mesh_domain 2 --domain_attention ring --att_dropout 0.1",
        "--domain_attention ring does not support --att_dropout 0.1: use gather",
    ),
    ("--mesh_domain 2 --xla_fsdp nested --cpu_devices 1", "--mesh_domain requires --xla_fsdp spmd"),
    ("--mesh_domain 2 --fsdp fsdp2", "--fsdp requires --backend cuda"),
]
EVERYWHERE = [
    ("--dimension 3", "does not accept --dimension"),
    (f"{HYBRID} --image_size 16 16 16", "--image_size 16 16 16 has 3 values: use 1 or 2"),
    (f"{HYBRID} --image_size 36", "--image_size 36 is not a multiple of --patch_size 8"),
    (f"{HYBRID} --class_token", "hybrid_vit does not accept --class_token; it accepts"),
    (f"{HYBRID} --dimension 3 --image_size 16 --data_source folder", "--data_source"),
    ("--model hybrid", "unknown model hybrid"),
]
COMPILE = "--compile_only --tpu_topology v5e:2x2"
KERNELS = [
    ("xla", "--attention flash", "--attention flash requires a TPU: use --attention sdpa"),
    ("cuda", "--attention flash", "--attention flash requires --backend xla or --backend torchtpu"),
    (
        "xla",
        f"{COMPILE} --attention flash --mesh_tensor 2 --mesh_domain 2 --num_heads 2",
        "--attention flash does not support --mesh_domain 2 together with --mesh_tensor 2",
    ),
    (
        "xla",
        f"{COMPILE} --attention flash --att_dropout 0.1",
        "--attention flash does not support --att_dropout 0.1",
    ),
    (
        "xla",
        f"{COMPILE} --attention flash --embed_dim 320 --num_heads 1",
        "--attention flash supports heads up to 256 wide, not 320",
    ),
    (
        "xla",
        f"{COMPILE} --attention whole --image_size 560 --patch_size 14",
        "--attention whole supports up to 1,024 tokens, not 1,600",
    ),
    (
        "xla",
        f"{COMPILE} --attention whole --mesh_domain 2",
        "--attention whole is incompatible with --mesh_domain 2: use --attention sdpa",
    ),
    ("xla", "--matmul int8", "--matmul int8 requires --precision bf16, not fp32"),
    (
        "xla",
        "--matmul int8 --precision bf16 --xla_fsdp nested --cpu_devices 1",
        "--matmul int8 requires --xla_fsdp spmd",
    ),
    (
        "xla",
        "--matmul fp8 --precision bf16",
        "--matmul fp8 requires --backend torchtpu: with xla use int8",
    ),
    ("cuda", "--matmul int8 --fsdp simple", "--matmul int8 requires --precision bf16, not fp32"),
    (
        "cuda",
        "--matmul int8 --precision bf16",
        "--matmul int8 requires --fsdp simple, not fsdp2",
    ),
    ("cuda", "--gather_dtype fp8", "--gather_dtype fp8 requires --fsdp simple, not fsdp2"),
    (
        "cuda",
        "--fsdp simple --gather_dtype fp8 --zero_dp_strategy 0",
        "--gather_dtype fp8 is incompatible with --zero_dp_strategy 0, which gathers nothing",
    ),
    (
        "cuda",
        "--fsdp simple --gather_dtype fp8 --matmul int8 --precision bf16",
        "--gather_dtype fp8 is incompatible with --matmul int8: drop one of the two",
    ),
    (
        "xla",
        "--matmul int8 --precision bf16 --no-scan_blocks",
        "--matmul int8 requires scanned blocks, which this run does not have (--no-scan_blocks)",
    ),
]
CASES = [
    *KERNELS,
    *(("cuda", *case) for case in ON_GPUS),
    *(("xla", *case) for case in ON_XLA),
    *((backend, *case) for backend in ("cuda", "xla") for case in EVERYWHERE),
]


@pytest.mark.parametrize(("backend", "flags", "words"), CASES)
def test_refused(backend, flags, words, tmp_path, monkeypatch, capsys):
    devices = ["--cpu_devices", "8"] if backend == "xla" and COMPILE not in flags else []
    if backend == "cuda":
        monkeypatch.setenv("WORLD_SIZE", "8")
        monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    given = ["--backend", backend, *devices, *SMALL.split(), *flags.split()]
    told = told_in_one_line(capsys, *given, "--ckpt_dir", tmp_path / "run")
    assert words in told
    assert not list(tmp_path.iterdir())
