"""BERT, or another encoder of texts that `transformers` knows, from a local directory: nothing is downloaded.

All weights are fine-tuned, in 32 bits whatever precision they were saved in, under a head with one output. The head is
new, unless the directory has one of that size.

`transformers` is forgiving where an experiment must not be: of a directory without a tokenizer some versions make one
that knows no word, and weights that are missing are drawn at random. Both would train, to no end; here they are errors.
"""

from __future__ import annotations

import hashlib
import importlib.util
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from zeus_flows.errors import ConfigError


def require(directory: Path | None) -> Path:
    """Return the directory of a pretrained model. Its contents are checked when they are used.

    Raises:
        ConfigError: it is no directory, or `transformers` is not installed.
    """
    if directory is None or not directory.is_dir():
        raise ConfigError(f"model.directory must be a directory with a pretrained model, not {directory}")
    if importlib.util.find_spec("transformers") is None:
        raise ConfigError("model.kind bert needs the package transformers; `pip install 'zeus-flows[bert]'` brings it")
    return directory


class Tokenizer:
    """Turns texts into what `Bert` takes.

    Args:
        directory: Where it is.
        tokens: How long every text is made, its special tokens included.

    Raises:
        ConfigError: there is no tokenizer or no model, or so many tokens do not fit.
    """

    def __init__(self, directory: Path, tokens: int) -> None:
        self._directory, self._tokens = require(directory), tokens
        transformers = _transformers()
        config = _config(directory)
        try:
            self._tokenizer = transformers.AutoTokenizer.from_pretrained(
                str(directory), local_files_only=True, trust_remote_code=False
            )
        except Exception as error:
            raise ConfigError(
                f"{directory} has no tokenizer that can be loaded ({_first_line(error)}); "
                "save it there with tokenizer.save_pretrained"
            ) from None
        if len(self._tokenizer) <= len(self._tokenizer.all_special_ids):
            raise ConfigError(f"{directory} has no tokenizer; save it there with tokenizer.save_pretrained")
        if self._tokenizer.pad_token_id is None:
            raise ConfigError(f"the tokenizer in {directory} has no token to pad with")
        self._vocabulary: int = getattr(config, "vocab_size", len(self._tokenizer))
        least = int(self._tokenizer.num_special_tokens_to_add()) + 1
        most = min(int(self._tokenizer.model_max_length), getattr(config, "max_position_embeddings", None) or tokens)
        if not least <= tokens <= most:
            raise ConfigError(f"model.words must be {least} to {most} for the model in {directory}, not {tokens}")

    def encode(self, texts: Sequence[str]) -> Tensor:
        """Return token ids and attention masks, stacked: (texts, 2, tokens).

        Every text is made equally long, not just as long as the longest beside it: an epoch then costs the same on
        every slice. What pads is the tokenizer's affair; the mask says where.

        Raises:
            ConfigError: the tokenizer has tokens that the model does not know.
        """
        encoded = self._tokenizer(
            list(texts), padding="max_length", truncation=True, max_length=self._tokens, return_tensors="pt"
        )
        ids: Tensor = encoded["input_ids"]
        if int(ids.max()) >= self._vocabulary:
            raise ConfigError(
                f"the tokenizer in {self._directory} has a token {int(ids.max())}, and the model knows "
                f"{self._vocabulary}: they do not belong together"
            )
        return torch.stack((ids, encoded["attention_mask"]), dim=1)


class Bert(nn.Module):
    """A pretrained encoder under a head with one output.

    Raises:
        ConfigError: the directory has no model, or weights are missing.
    """

    def __init__(self, directory: Path) -> None:
        super().__init__()
        transformers = _transformers()
        try:
            with _quiet(transformers):
                bert, found = transformers.AutoModelForSequenceClassification.from_pretrained(
                    str(require(directory)),
                    local_files_only=True,
                    trust_remote_code=False,
                    num_labels=1,
                    ignore_mismatched_sizes=True,  # of a head with other outputs; more is refused below
                    output_loading_info=True,
                )
        except Exception as error:
            raise ConfigError(f"{directory} has no model that can be loaded ({_first_line(error)})") from None
        lacking = _encoder_keys(bert, (*found["missing_keys"], *found["mismatched_keys"]))
        if lacking:
            raise ConfigError(
                f"{directory} has no weights that fit its config.json: {lacking[0]} and {len(lacking) - 1} more "
                "are missing or of another size"
            )
        self.bert: Any = bert.float()

    def forward(self, texts: Tensor) -> Tensor:
        """Return a logit for every text, as `Tokenizer.encode` made them."""
        ids, mask = texts.unbind(dim=1)
        logits: Tensor = self.bert(input_ids=ids, attention_mask=mask).logits.flatten()
        return logits


def describe(directory: Path) -> str:
    """Return what a directory holds, for people: `bert with 12 layers of width 768 (bert-base-uncased)`."""
    config = _config(directory)
    layers, width = getattr(config, "num_hidden_layers", None), getattr(config, "hidden_size", None)
    size = f" with {layers} layer{'s'[: layers != 1]} of width {width}" if layers and width else ""
    return f"{config.model_type}{size} ({directory.resolve().name})"


def weights_digest(directory: Path) -> str:
    """Return a hash of what a directory's model and tokenizer are made of; other weights are another model.

    Where there are weights as safetensors, those are the ones that are loaded.
    """
    weights = sorted(directory.glob("*.safetensors")) or sorted(directory.glob("*.bin"))
    others = [path for pattern in ("*.json", "*.txt", "*.model") for path in sorted(directory.glob(pattern))]
    stats = [(path, path.stat()) for path in (*weights, *others)]
    return _digest(tuple((str(path), stat.st_size, stat.st_mtime_ns) for path, stat in stats))


@lru_cache(maxsize=4)
def _digest(files: tuple[tuple[str, int, int], ...]) -> str:
    """Hash files, once per process as long as size and time of change are the same: weights take a second or more."""
    digest = hashlib.sha256()
    for path in (Path(name) for name, _, _ in files):
        with path.open("rb") as file:
            digest.update(f"{path.name} {hashlib.file_digest(file, 'sha256').hexdigest()}\n".encode())
    return digest.hexdigest()[:16]


def _encoder_keys(bert: Any, keys: Iterable[Any]) -> list[str]:
    """Return those names of weights that are the encoder's: neither the head's nor the pooler's, which is its part."""
    prefix = bert.base_model_prefix
    encoder = {name for name in bert.state_dict() if name.startswith(f"{prefix}.") and ".pooler." not in name}
    names = [str(key if isinstance(key, str) else key[0]) for key in keys]
    # Versions before 4.50 name weights as the file does, which may be without the prefix.
    return sorted(full for name in names for full in (name, f"{prefix}.{name}") if full in encoder)


def _config(directory: Path) -> Any:
    try:
        return _transformers().AutoConfig.from_pretrained(
            str(directory), local_files_only=True, trust_remote_code=False
        )
    except Exception as error:
        raise ConfigError(f"{directory} has no model that can be loaded ({_first_line(error)})") from None


def _transformers() -> Any:
    import transformers

    return transformers


@contextmanager
def _quiet(transformers: Any) -> Iterator[None]:
    """Silence the progress bar and the table of each load: every batch size, slice and seed loads once."""
    log = transformers.utils.logging
    verbosity, bar = log.get_verbosity(), log.is_progress_bar_enabled()
    log.set_verbosity_error()
    log.disable_progress_bar()
    try:
        yield
    finally:
        log.set_verbosity(verbosity)
        if bar:
            log.enable_progress_bar()


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
