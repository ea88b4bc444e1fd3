"""`make hub`: the package alone, beside pc, and as transformers' attention from a local folder."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from processes import python

ROOT = Path(__file__).parent.parent
SMALL = {"vocab_size": 97, "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2,
         "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "pad_token_id": 0}  # fmt: skip
# Class, further options of its config, and the attention to compare with: sdpa has no attention sinks.
FAMILIES: dict[str, tuple[dict[str, Any], str]] = {
    "Llama": ({}, "sdpa"),
    "Qwen3": ({}, "sdpa"),
    "Mistral": ({"sliding_window": 6}, "sdpa"),
    "Olmo2": ({}, "sdpa"),
    "Phi3": ({"sliding_window": 7}, "sdpa"),
    "Gemma3": ({"sliding_window": 5, "layer_types": ["sliding_attention", "full_attention"]}, "sdpa"),
    "Gemma2": ({"sliding_window": 5, "query_pre_attn_scalar": 16}, "eager"),  # sdpa ignores its softcap
    "GptOss": ({"sliding_window": 6, "num_local_experts": 2, "num_experts_per_tok": 1}, "eager"),
}


@pytest.fixture(scope="module")
def package(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("hub")
    python(ROOT / "build_hub.py", "--output", folder)
    return folder


LOAD = """
import importlib.util, json, sys
from pathlib import Path
def load(variant):
    name = json.loads((variant / "metadata.json").read_text())["id"]
    spec = importlib.util.spec_from_file_location(name, variant / "__init__.py")
    sys.modules[name] = module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
"""


def run(code: str, package: Path) -> list[str]:
    return python("-c", LOAD + code, package / "build" / "torch-cpu", cwd=package).stdout.splitlines()


def identity(package: Path, backend: str = "cpu") -> str:
    metadata = json.loads((package / "build" / f"torch-{backend}" / "metadata.json").read_text())
    return str(metadata["id"])


BESIDE = """
q, k, v = (torch.randn(1, 3, heads, 16) for heads in (2, 1, 1))
print(torch.equal(pc.flash_attn.flash_attn_func(q, k, v), module.flash_attn_func(q, k, v)))
names = [s.name for s in torch._C._jit_get_all_schemas() if s.name.endswith("::paged_attention")]
print(sorted(names))
print(hasattr(torch.ops.pc, "paged_attention"))
"""


def assert_beside(said: list[str], package: Path) -> None:
    """Each package has its own namespace, so nothing is registered twice; both packages' kernels run."""
    assert said == ["True", str(sorted(["pc::paged_attention", f"{identity(package)}::paged_attention"])), "True"]


def test_the_package_runs_where_there_is_no_pc_and_beside_a_pc_imported_later(package: Path) -> None:
    said = run(
        """
given = {*sys.modules}
for absent in ("pc", "einops", "transformers", "triton"): sys.modules[absent] = None
import torch
before = {*sys.modules}
numpy, sys.modules["numpy"] = sys.modules.pop("numpy", None), None
module = load(Path(sys.argv[1]))
sys.modules["numpy"] = numpy
q, k, v = (torch.randn(2, 5, heads, 16) for heads in (4, 2, 2))
out = module.flash_attn_func(q, k, v, causal=True)
wanted = torch.nn.functional.scaled_dot_product_attention(
    *(x.transpose(1, 2) for x in (q, k, v)), is_causal=True, enable_gqa=True).transpose(1, 2)
print(torch.allclose(out, wanted, atol=1e-5), module.__all__)
roots = {name.partition(".")[0] for name in {*sys.modules} - before}
print(sorted(roots - {*sys.stdlib_module_names} - {"torch", module.__name__}))
ops = importlib.import_module(module.__name__ + "._ops")
print(ops.add_op_namespace_prefix("paged_attention"), hasattr(ops.ops, "paged_attention"), hasattr(torch.ops.pc, "x"))
for absent in ("pc", "einops", "transformers", "triton"): del sys.modules[absent]
if numpy is None: del sys.modules["numpy"]
import pc
"""
        + BESIDE,
        package,
    )
    assert said[0] == "True ['flash_attn_func', 'flash_attn_varlen_func', 'flash_attn_with_kvcache']"
    assert said[1:3] == ["[]", f"{identity(package)}::paged_attention True False"]
    assert_beside(said[3:], package)


@pytest.mark.slow
@pytest.mark.parametrize("first", ["pc", "package"])
def test_operators_beside_those_of_pc(package: Path, first: str) -> None:
    order = ["import pc", "module = load(Path(sys.argv[1]))"]
    code = "\n".join(["import torch", *(order if first == "pc" else reversed(order))])
    assert_beside(run(code + BESIDE, package), package)


def test_the_folder_is_as_the_library_reads_it(package: Path) -> None:
    ids = set()
    for backend in ("cpu", "cuda", "rocm"):
        folder = package / "build" / f"torch-{backend}"
        metadata = json.loads((folder / "metadata.json").read_text())
        assert metadata["backend"] == {"type": backend}
        assert metadata["id"].isidentifier()
        ids.add(metadata["id"])
        files = {path.relative_to(folder).as_posix() for path in folder.rglob("*.py")}
        own = {path.relative_to(ROOT).as_posix() for path in (ROOT / "triton_ops").rglob("*.py")}
        assert files == own | {"__init__.py", "_ops.py"}
        assert all((folder / name).read_bytes() == (ROOT / name).read_bytes() for name in own)
    assert len(ids) == 3
    card = (package / "README.md").read_text()
    assert card.startswith("---\nlicense: apache-2.0\n")
    assert "attn_implementation" in card
    assert "make hub" not in card


@pytest.fixture
def named(package: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """The package's name for transformers."""
    kernels = pytest.importorskip("kernels.load", reason="needs `pip install --no-deps kernels==0.17.2`")
    transformers = pytest.importorskip("transformers")
    from importlib.metadata import version

    if int(transformers.__version__.split(".")[1]) >= 23 and version("kernels") < "0.18":
        pytest.skip(f"transformers {transformers.__version__} needs kernels 0.18.2, 5.21 and 5.22 do with 0.17.2")
    monkeypatch.setenv("LOCAL_KERNELS", f"someorg/pc={package}")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    kernels._parse_local_kernel_overrides.cache_clear()
    return "someorg/pc"


def small(family: str) -> Any:
    import transformers

    options = FAMILIES[family][0]
    name = {"Gemma3": "Gemma3Text"}.get(family, family)
    torch.manual_seed(0)
    config = getattr(transformers, f"{name}Config")(**{**SMALL, **options})
    model = getattr(transformers, f"{family}ForCausalLM")(config).eval()
    model.set_attn_implementation(FAMILIES[family][1])
    model.generation_config.eos_token_id = None
    return model


@pytest.mark.quick
@pytest.mark.parametrize("family", FAMILIES)
def test_models_say_the_same(named: str, family: str) -> None:
    """Compare in float32: greedy, and batched with padding on the left, longer than windows."""
    model = small(family)
    ids = torch.randint(1, 97, (3, 14))
    padding = torch.ones(3, 14, dtype=torch.long)
    padding[0, :6], padding[2, :1] = 0, 0
    calls = [
        {"input_ids": ids[:1], "attention_mask": padding[1:2]},
        {"input_ids": ids, "attention_mask": padding},
    ]

    def tokens() -> list[torch.Tensor]:
        return [model.generate(**call, max_new_tokens=8, do_sample=False) for call in calls]

    wanted = tokens()
    model.set_attn_implementation(named, allow_all_kernels=True)
    assert all(torch.equal(*pair) for pair in zip(wanted, tokens(), strict=True))


@pytest.mark.quick
@pytest.mark.parametrize(
    ("family", "blocks"),
    [("Llama", 0), ("Mistral", 0), ("Llama", 8)],
    ids=["packed", "packed in windows", "block tables"],
)
def test_continuous_batching(named: str, family: str, blocks: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """transformers recognizes FlashAttention by its name, in which the part before a | is transformers' own."""
    from transformers import ContinuousBatchingConfig, GenerationConfig, modeling_flash_attention_utils
    from transformers.generation.continuous_batching import initialization

    # Without CUDA, transformers never asks for block tables.
    monkeypatch.setattr(initialization, "ensure_decode_fast_path_is_available", lambda *_: None)
    model = small(family)
    prompts = [torch.randint(1, 97, (n,)).tolist() for n in (8, 3, 20)]
    generation = GenerationConfig(max_new_tokens=7, do_sample=False, pad_token_id=0)
    wanted = [model.generate(torch.tensor([p]), generation_config=generation)[0, len(p) :].tolist() for p in prompts]
    model.set_attn_implementation(f"flash2|{named}", allow_all_kernels=True)
    called = []
    name = "_flash_with_kvcache_fn"
    function = getattr(modeling_flash_attention_utils, name)
    monkeypatch.setattr(
        modeling_flash_attention_utils, name, lambda *args, **given: called.append(1) or function(*args, **given)
    )
    batching = ContinuousBatchingConfig(
        page_size=16, num_blocks=32, max_batch_tokens=64, max_blocks_per_request=blocks, use_cuda_graph=False
    )
    found = model.generate_batch(prompts, generation_config=generation, continuous_batching_config=batching)
    assert [result.generated_tokens for result in found.values()] == wanted
    assert bool(called) == bool(blocks)
