"""Who a process is, for the handshake: everything in which the two roles must agree.

The model is identified by content, never by path: a relative path, a symlink and a copy are the same model. The
fingerprint covers the configuration, the names, shapes and types of all checkpoint tensors, and a sample of their
values that is small enough to read at every start.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import reprlib
import zlib
from collections.abc import Iterable
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from afd_patch.errors import HandshakeError, WeightError

if TYPE_CHECKING:
    from afd_patch.boundaries import Boundary
    from afd_patch.config import AFDConfig

#: Keys of config.json that say where a model came from, not what it is.
_PROVENANCE = ("_name_or_path", "transformers_version", "_commit_hash")
#: Read at every start: so many tensors, so many bytes at either end.
_SAMPLED_TENSORS, _SAMPLE_BYTES = 1024, 2048
#: The same for files of other formats, which have no table of tensors.
_SAMPLED_PLACES = 64
_NUMBERS = re.compile(r"\d+")
#: What a peer sent goes into messages only in part: neither long nor deep.
_quote = reprlib.Repr()
_quote.maxstring = _quote.maxother = _quote.maxlong = 80
_short = _quote.repr


@dataclass(frozen=True)
class Identity:
    """What one side announces. All fields but ``max_rows`` must be equal on both sides.

    ``model`` and ``weights`` are hexadecimal digests; ``hidden_size`` is in elements; ``layers`` is the number of
    decoder layers; ``dtype`` is that of the rows and of the results; ``request_columns`` and ``reply_columns`` are the
    elements of one row there and back, in that dtype (see ``connectors/columns.py``);
    ``max_rows`` is the largest number of rows of one call (attention: sends, FFN: accepts).
    """

    vllm: str
    model: str
    weights: str
    architecture: str
    boundary: str
    gate: str
    dtype: str
    hidden_size: int
    request_columns: int
    reply_columns: int
    layers: int
    compiled: bool
    max_rows: int

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, content: object) -> Identity:
        """Raises ``HandshakeError`` when ``content`` is no object, or a field is missing or has another type."""
        if not isinstance(content, dict):
            raise HandshakeError(f"the peer's handshake has no proper identity (got {_short(content)})")
        values: dict[str, Any] = {}
        for field in fields(cls):
            value = content.get(field.name)
            if type(value).__name__ != field.type:
                raise HandshakeError(f"the peer's handshake has no proper {field.name!r} (got {_short(value)})")
            values[field.name] = value
        return cls(**values)

    def mismatch(self, other: Identity) -> str | None:
        """A sentence with both values of the first fields that differ (``self`` is here, ``other`` the peer)."""
        differing = [
            f"{field.name}: {_short(getattr(self, field.name))} here, {_short(getattr(other, field.name))} there"
            for field in fields(self)
            if field.name != "max_rows" and getattr(self, field.name) != getattr(other, field.name)
        ]
        if not differing:
            return None
        hint = "; both need one tensor-parallel rank, or both several" if self._differ_by_ranks(other) else ""
        return "the two roles do not belong together; " + "; ".join(differing) + hint

    def _differ_by_ranks(self, other: Identity) -> bool:
        """Whether results cross whole on one side only: in compiled models that depends on the number of ranks."""
        same_else = replace(self, reply_columns=other.reply_columns, max_rows=other.max_rows) == other
        return self.compiled and same_else and self.hidden_size in (self.reply_columns, other.reply_columns)

    def too_many_rows(self, other: Identity) -> str | None:
        """A sentence, when the attention role ``other`` sends more rows at once than this FFN role takes."""
        if 0 < other.max_rows <= self.max_rows:
            return None
        rows = f"{other.max_rows:d}" if abs(other.max_rows) < 10**12 else "far too many"
        return (
            f"the attention role sends up to {rows} rows at once and this FFN server takes {self.max_rows}; "
            f"start it with --max-num-batched-tokens {rows}"
        )


def identify(vllm_config: Any, boundary: Boundary, config: AFDConfig) -> Identity:
    """The identity of a process with vLLM's configuration ``vllm_config``."""
    import vllm

    model_config = vllm_config.model_config
    request, reply = boundary.columns(vllm_config, config.gate)
    return Identity(
        vllm=vllm.__version__,
        model=_digest(_config_content(model_config)),
        weights=_weights(vllm_config),
        architecture=model_config.hf_config.architectures[0],
        boundary=boundary.family,
        gate=config.gate,
        dtype=str(model_config.dtype).removeprefix("torch."),
        hidden_size=int(model_config.hf_text_config.hidden_size),
        request_columns=request,
        reply_columns=reply,
        layers=int(model_config.hf_text_config.num_hidden_layers),
        compiled=getattr(vllm_config.compilation_config.mode, "name", "NONE") != "NONE",
        max_rows=int(vllm_config.scheduler_config.max_num_batched_tokens),
    )


def _weights(vllm_config: Any) -> str:
    if vllm_config.load_config.load_format == "dummy":
        return "dummy"
    folder = Path(vllm_config.model_config.model)
    return weights_fingerprint(folder if folder.is_dir() else _fetched(vllm_config))


def _fetched(vllm_config: Any) -> Path:
    """The folder of a model of the hub; vLLM's own loader fetches the weights, as it would a little later."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import LocalEntryNotFoundError
    from vllm.model_executor.model_loader import get_model_loader

    model, load = vllm_config.model_config, vllm_config.load_config
    get_model_loader(load).download_model(model)
    try:
        # No file is asked for, only where they are: not everything that the hub has was fetched.
        folder = snapshot_download(
            model.model, revision=model.revision, cache_dir=load.download_dir, local_files_only=True, allow_patterns=[]
        )
        return Path(folder)
    except LocalEntryNotFoundError as error:
        raise WeightError(
            f"the weights of {model.model} are not where the hub keeps what was fetched, so the two roles cannot "
            "compare theirs; fetch the model and give its folder"
        ) from error


def _config_content(model_config: Any) -> dict[str, Any]:
    content: dict[str, Any] = model_config.hf_config.to_dict()
    content["quantization"] = model_config.quantization
    return {key: value for key, value in content.items() if key not in _PROVENANCE}


def _digest(content: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True, default=str).encode()).hexdigest()[:16]


def weights_fingerprint(folder: Path) -> str:
    """A digest of the checkpoint in ``folder``: independent of file names and of how it is sharded.

    Covers each tensor's name, dtype and shape, and the first and last bytes of up to 1024 tensors.
    """
    files = _safetensors_files(folder)
    if not files:
        return _other_files_fingerprint(folder)
    digest = hashlib.sha256()
    entries: dict[str, tuple[Path, int, dict[str, Any]]] = {}
    for path in files:
        start, header = read_header(path)
        entries.update({name: (path, start, entry) for name, entry in header.items() if name != "__metadata__"})
    sampled = _sampled(entries)
    for name in sorted(entries):
        path, start, entry = entries[name]
        digest.update(f"{name} {entry['dtype']} {entry['shape']}\n".encode())
        if name in sampled:
            begin, end = entry["data_offsets"]
            size = min(_SAMPLE_BYTES, end - begin)
            with path.open("rb", buffering=0) as file:
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_RANDOM)  # a sample is no reason to read ahead
                for place in (begin, end - size):
                    digest.update(os.pread(file.fileno(), size, start + place))
    return digest.hexdigest()[:16]


def _sampled(names: Iterable[str]) -> set[str]:
    """Up to 1024 tensors, in no order that their names have, and before all others one of each kind."""
    mixed = sorted(names, key=lambda name: (zlib.crc32(name.encode()), name))
    first = {_NUMBERS.sub("#", name): name for name in reversed(mixed)}
    return set(list(dict.fromkeys([*first.values(), *mixed]))[:_SAMPLED_TENSORS])


def _safetensors_files(folder: Path) -> list[Path]:
    """The files that vLLM loads (``DefaultModelLoader._prepare_weights``); others may hold the same tensors again.

    Those of Mistral's format are preferred where there are any, and an index says which ones count.
    """
    files = sorted(folder.glob("*.safetensors"))
    consolidated = [path for path in files if path.name.startswith("consolidated")]
    files = consolidated or files
    index = folder / f"{'consolidated' if consolidated else 'model'}.safetensors.index.json"
    if not index.is_file():
        return files
    try:
        listed = set(json.loads(index.read_text())["weight_map"].values())
    except (ValueError, KeyError, TypeError, AttributeError):
        raise WeightError(f"{index} is no index of safetensors files; fetch the checkpoint again") from None
    missing = sorted(listed - {path.name for path in files})
    if missing:
        raise WeightError(f"{index} names files that are not there ({', '.join(missing[:3])}); fetch them")
    return [path for path in files if path.name in listed]


def read_header(path: Path) -> tuple[int, dict[str, Any]]:
    """Where the data of a safetensors file begins, and its table of tensors."""
    with path.open("rb", buffering=0) as file:
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_RANDOM)  # what follows the header is not asked for
        prefix = file.read(8)
        length = int.from_bytes(prefix, "little")
        if len(prefix) == 8 and length <= path.stat().st_size:
            try:
                return 8 + length, json.loads(file.read(length))
            except ValueError:
                pass
    raise WeightError(f"{path} is no complete safetensors file; fetch the checkpoint again")


def _other_files_fingerprint(folder: Path) -> str:
    paths = sorted(path for pattern in ("*.bin", "*.pt") for path in folder.glob(pattern))
    if not paths:
        raise WeightError(f"{folder} holds no weights (*.safetensors, *.bin, *.pt); fetch the checkpoint")
    digest = hashlib.sha256()
    for path in paths:
        size = path.stat().st_size
        digest.update(f"{size}\n".encode())
        with path.open("rb") as file:
            for sample in range(_SAMPLED_PLACES):
                file.seek(size * sample // _SAMPLED_PLACES)
                digest.update(os.read(file.fileno(), _SAMPLE_BYTES))
    return digest.hexdigest()[:16]
