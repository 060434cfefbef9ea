import json
import sys
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch

from slipstream.errors import ModelError
from slipstream.models.gguf import find_gguf, import_gguf

HIDDEN, LAYERS, HEADS, FEED_FORWARD = 64, 2, 2, 96
TOKENS = [
    *("<|end|>", "<|user|>", "<|assistant|>"),
    *("Ġ", "a", "b", "c", "d", "e", "ab", "cd", "Ġab"),
]
TEMPLATE = "{% for m in messages %}{{ '<|user|>' + m.content }}{% endfor %}<|assistant|>"


def write_gguf(path: Path) -> dict[str, np.ndarray]:
    """A tiny Llama as a GGUF file with Q8_0 matrices. Returns the tensors before they were quantized."""
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_context_length(64)
    writer.add_embedding_length(HIDDEN)
    writer.add_block_count(LAYERS)
    writer.add_feed_forward_length(FEED_FORWARD)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(HEADS)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(10000.0)
    writer.add_rope_dimension_count(HIDDEN // HEADS)
    writer.add_vocab_size(len(TOKENS))
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(TOKENS)
    writer.add_token_types([3, 3, 3] + [1] * (len(TOKENS) - 3))
    writer.add_token_merges(["a b", "c d", "Ġ ab"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(0)
    writer.add_pad_token_id(0)
    writer.add_chat_template(TEMPLATE)
    random = np.random.default_rng(0)
    shapes = {"token_embd.weight": (len(TOKENS), HIDDEN), "output_norm.weight": (HIDDEN,)}
    for layer in range(LAYERS):
        shapes |= {
            f"blk.{layer}.{name}.weight": (HIDDEN, HIDDEN) for name in ("attn_q", "attn_k", "attn_v", "attn_output")
        }
        shapes |= {f"blk.{layer}.{name}.weight": (HIDDEN,) for name in ("attn_norm", "ffn_norm")}
        shapes |= {f"blk.{layer}.{name}.weight": (FEED_FORWARD, HIDDEN) for name in ("ffn_gate", "ffn_up")}
        shapes[f"blk.{layer}.ffn_down.weight"] = (HIDDEN, FEED_FORWARD)
    tensors = {name: random.normal(0, 0.1, shape).astype(np.float32) for name, shape in shapes.items()}
    for name, tensor in tensors.items():
        if tensor.ndim == 1:
            writer.add_tensor(name, tensor)
        else:
            kind = gguf.GGMLQuantizationType.Q8_0
            writer.add_tensor(name, gguf.quants.quantize(tensor, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return tensors


def test_an_imported_model_is_an_ordinary_folder(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tensors = write_gguf(tmp_path / "tiny.gguf")
    out = tmp_path / "new" / "model"
    import_gguf(str(tmp_path), out)
    assert "quantization_config" not in json.loads((out / "config.json").read_text())
    assert (out / "generation_config.json").exists()
    model = AutoModelForCausalLM.from_pretrained(out)
    assert model.dtype == torch.float32
    step = np.abs(tensors["blk.1.ffn_down.weight"]).max() / 127
    found = model.model.layers[1].mlp.down_proj.weight.detach().numpy()
    np.testing.assert_allclose(found, tensors["blk.1.ffn_down.weight"], atol=step)
    assert model.get_output_embeddings().weight is model.get_input_embeddings().weight
    assert torch.isfinite(model(torch.tensor([[1, 4, 5, 2]])).logits).all()
    tokenizer = AutoTokenizer.from_pretrained(out)
    assert tokenizer.chat_template == TEMPLATE
    assert tokenizer("ab abcd")["input_ids"] == [TOKENS.index("ab"), TOKENS.index("Ġab"), TOKENS.index("cd")]
    assert sorted(path.name for path in out.parent.iterdir()) == ["model"], "nothing temporary is left"


def test_the_file_is_found_by_file_folder_or_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = tmp_path / "site" / "a_model"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("import something_that_is_not_installed")
    file = package / "weights.gguf"
    file.touch()
    assert find_gguf(str(file)) == file
    assert find_gguf(str(tmp_path)) == file
    monkeypatch.syspath_prepend(str(tmp_path / "site"))
    assert find_gguf("a-model") == file, "found without importing it"
    assert "a_model" not in sys.modules
    information = tmp_path / "site" / "other_name-1.0.dist-info"
    information.mkdir()
    (information / "METADATA").write_text("Metadata-Version: 2.1\nName: other-name\nVersion: 1.0\n")
    (information / "RECORD").write_text("a_model/weights.gguf,,\na_model/__init__.py,,\n")
    assert find_gguf("other-name") == file, "a distribution may carry a module of another name"


@pytest.mark.parametrize(
    ("files", "source", "message"),
    [
        ([], "", r"no \.gguf file in"),
        (["one.gguf", "sub/two.gguf"], "", r"several \.gguf files in .*: one\.gguf, sub/two\.gguf; give the path"),
        (["model.safetensors"], "model.safetensors", r"is not a \.gguf file"),
        ([], "nowhere", r"no file, folder or installed package is called"),
    ],
)
def test_what_cannot_be_imported_is_explained(tmp_path: Path, files: list[str], source: str, message: str) -> None:
    for name in files:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    with pytest.raises(ModelError, match=message):
        import_gguf(str(tmp_path / source), tmp_path / "out")


def test_a_damaged_file_is_a_clear_error_and_leaves_nothing(tmp_path: Path) -> None:
    (tmp_path / "bad.gguf").write_bytes(b"GGUF" + bytes(100))
    with pytest.raises(ModelError, match=r"cannot read the GGUF file .*bad\.gguf"):
        import_gguf(str(tmp_path / "bad.gguf"), tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_an_output_folder_with_something_in_it_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "tiny.gguf").touch()
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "mine.txt").write_text("x")
    with pytest.raises(ModelError, match="out exists and is not an empty folder"):
        import_gguf(str(tmp_path / "tiny.gguf"), tmp_path / "out")
