"""BERT on slices: a tiny one with random weights, saved and loaded as a pretrained one is, and trained for real."""

from __future__ import annotations

import importlib
import shutil
import socket
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from mlflow import MlflowClient

from tests.experiments.capriccio_builders import write_experiment
from zeus_flows.errors import ConfigError
from zeus_flows.experiments.capriccio import stages
from zeus_flows.experiments.capriccio.bert import Bert, Tokenizer, describe, weights_digest
from zeus_flows.experiments.capriccio.contenders import Experiment, open_experiment
from zeus_flows.experiments.capriccio.curves import CellTrainer, open_curves
from zeus_flows.experiments.capriccio.file import load_experiment, parse_experiment
from zeus_flows.experiments.capriccio.models import Learner
from zeus_flows.settings import read_settings

SPECIAL = ["[UNK]", "[CLS]", "[SEP]", "[MASK]", "[PAD]"]  # what pads is not 0: nothing may take that for granted
WORDS = ["good", "bad", "day", "sun", "rain", "tea", "##s"]
PAD = SPECIAL.index("[PAD]")


pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("own_cache")]


@pytest.fixture(autouse=True)
def _no_network(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Let no test of this file reach beyond the machine, nor try to: nothing may be downloaded."""
    tried: list[Any] = []

    def refuse(*address: Any, **_: Any) -> None:
        tried.append(address)
        raise OSError("there is no network")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)
    yield
    assert not tried


@pytest.fixture(scope="session")
def _saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    transformers: Any = importlib.import_module("transformers")
    folder = tmp_path_factory.mktemp("bert")
    (folder / "vocab.txt").write_text("\n".join([*SPECIAL, *WORDS]))
    tokenizer = transformers.BertTokenizerFast.from_pretrained(str(folder))
    tokenizer.save_pretrained(str(folder / "tiny"))
    config = transformers.BertConfig(
        vocab_size=len(SPECIAL + WORDS),
        hidden_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=32,
        max_position_embeddings=16,
        pad_token_id=PAD,
    )
    with torch.random.fork_rng():
        torch.manual_seed(1)
        transformers.BertModel(config).save_pretrained(str(folder / "tiny"))
    return folder / "tiny"


@pytest.fixture
def tiny(_saved: Path, tmp_path: Path) -> Path:
    """The directory of a tiny BERT with its tokenizer, which a test may spoil."""
    return Path(shutil.copytree(_saved, tmp_path / "tiny"))


def write_texts(path: Path, *, days: int = 6, a_day: int = 30) -> None:
    """Write texts of which one word in each says what the label is."""
    rng, lines = np.random.default_rng(5), ["when,label,text"]
    for i in range(days * a_day):
        around = [str(word) for word in rng.choice(["day", "sun", "rains", "teas"], size=rng.integers(1, 5))]
        around.insert(int(rng.integers(0, len(around) + 1)), "good" if i % 2 else "bad")
        lines.append(f"2026-01-{1 + i // a_day:02d},{i % 2},{' '.join(around)}")
    path.write_text("\n".join(lines))


def write_bert_experiment(folder: Path, **changes: Any) -> Path:
    """Write an experiment with the BERT in `tiny` beside it."""
    if not (folder / "rows.csv").exists():
        write_texts(folder / "rows.csv")
    fields: dict[str, Any] = {
        "data": {"kind": "csv", "path": "rows.csv", "time": "when", "label": "label", "text": "text"},
        "slices": {"days": 4, "most": 3},
        "model": {"kind": "bert", "directory": "tiny", "words": 8},
        "job": {
            "device": "simulated-v100",
            "batch_sizes": [8, 16],
            "default_batch_size": 16,
            "target": {"metric": "balanced_accuracy", "value": 0.95, "better": "higher"},
            "max_epochs": 20,
            "learning_rate": {"base": 0.01},
        },
        "contenders": {"drift-reset": {"policy": "thompson"}},
        "science": {"seeds": 1, "replays": 0, "workers": 1},
    }
    return write_experiment(folder, **fields | changes)


def trainer_of(path: Path) -> CellTrainer:
    file = load_experiment(path)
    return CellTrainer(file, file.data.read(keep_text=True))


def learner_of(trainer: CellTrainer, seed: int) -> Learner:
    data = trainer.data(trainer.slices[0].key)
    return Learner(data, trainer.experiment.model, batch_size=16, learning_rate=0.01, seed=seed)


def weights(learner: Learner) -> torch.Tensor:
    return torch.cat([parameter.detach().flatten() for parameter in learner._model.parameters()])


@pytest.mark.usefixtures("tiny")
def test_an_experiment_with_bert_learns_every_slice_and_its_report_names_the_model(
    tmp_path: Path, sqlite_uri: str
) -> None:
    path = write_bert_experiment(tmp_path)
    experiment: Experiment = open_experiment(path, data=None, tracking_uri=sqlite_uri, settings=read_settings())

    found = [experiment.run_slice(part)["drift-reset"] for part in experiment.slices]
    report = stages.report(experiment, None, tmp_path / "out")

    assert [outcome.converged for outcome in found] == [True, True, True]
    for outcome in found:
        assert 1 < outcome.epochs < 20  # no slice is known before it was learnt
        assert outcome.scores is not None
        assert outcome.scores.balanced_accuracy >= 0.95
    client = MlflowClient(tracking_uri=sqlite_uri)
    job = client.get_experiment_by_name("small.drift-reset")
    assert job is not None
    attempts = client.search_runs([job.experiment_id], "tags.`zf.kind` = 'attempt'")
    assert {run.data.tags["zf.outcome"] for run in attempts} <= {"converged", "stopped"}
    page = report.files[0].read_text()
    assert "this is bert with 1 layer of width 16 (tiny)" in page
    assert "small model" not in page


@pytest.mark.usefixtures("tiny")
def test_bert_is_trained_in_processes_of_its_own_too(tmp_path: Path) -> None:
    path = write_bert_experiment(tmp_path, slices={"days": 4, "most": 1})
    curves = open_curves(str(path))

    curves.fill()

    cells = curves.trainer.cells()
    assert [curves.get(cell)[-1].balanced_accuracy >= 0.95 for cell in cells] == [True] * len(cells)
    assert curves.trainer.curve(cells[0])[-1].log_loss == pytest.approx(curves.get(cells[0])[-1].log_loss, abs=1e-5)


def test_a_text_padded_further_has_the_same_logit(tiny: Path) -> None:
    model = Bert(tiny).eval()
    texts = ["good day", "bad rains sun tea", ""]

    with torch.no_grad():
        short, long = (model(Tokenizer(tiny, tokens).encode(texts)) for tokens in (7, 16))
        alone = model(Tokenizer(tiny, 4).encode(texts[:1]))  # [CLS] good day [SEP]: nothing is padded

    torch.testing.assert_close(short, long)
    torch.testing.assert_close(alone, long[:1])
    assert len(set(long.tolist())) == 3


def test_what_pads_is_the_tokenizer_s_own_token_and_the_mask_hides_it_alone(tiny: Path) -> None:
    ids, mask = Tokenizer(tiny, 6).encode(["good unheard-of", "day"]).unbind(dim=1)

    assert mask.tolist() == [[1, 1, 1, 1, 1, 1], [1, 1, 1, 0, 0, 0]]
    assert ids[1].tolist() == [1, 7, 2, PAD, PAD, PAD]
    assert 0 in ids[0]  # [UNK] has the number that other vocabularies pad with: it counts


@pytest.mark.usefixtures("tiny")
def test_a_seed_fixes_head_order_and_dropout_whatever_else_draws_random_numbers(tmp_path: Path) -> None:
    trainer = trainer_of(write_bert_experiment(tmp_path))

    def after_an_epoch(seed: int) -> torch.Tensor:
        learner = learner_of(trainer, seed)
        torch.rand(seed + int(torch.randint(9, ())))  # somebody else, between
        next(learner.epochs())
        return weights(learner)

    first, again, other = after_an_epoch(1), after_an_epoch(1), after_an_epoch(2)

    assert torch.equal(first, again)
    assert not torch.allclose(first, other)


@pytest.mark.usefixtures("tiny")
def test_training_leaves_the_random_numbers_of_others_alone(tmp_path: Path) -> None:
    trainer = trainer_of(write_bert_experiment(tmp_path))
    torch.manual_seed(3)
    expected = torch.rand(4)

    torch.manual_seed(3)
    next(learner_of(trainer, 1).epochs())

    assert torch.equal(torch.rand(4), expected)


@pytest.mark.usefixtures("tiny")
def test_dropout_is_on_from_the_first_step_and_off_in_scoring(tmp_path: Path) -> None:
    learner = learner_of(trainer_of(write_bert_experiment(tmp_path)), 1)

    assert all(part.training for part in learner._model.modules())
    assert learner.scores() == learner.scores()
    assert all(part.training for part in learner._model.modules())


@pytest.mark.usefixtures("tiny")
def test_all_weights_are_fine_tuned(tmp_path: Path) -> None:
    learner = learner_of(trainer_of(write_bert_experiment(tmp_path)), 1)
    before = {name: value.detach().clone() for name, value in learner._model.named_parameters()}

    next(learner.epochs())

    same = [name for name, value in learner._model.named_parameters() if torch.equal(value, before[name])]
    assert same == []


def test_weights_saved_in_16_bits_are_trained_in_32(tiny: Path) -> None:
    transformers: Any = importlib.import_module("transformers")
    transformers.BertModel.from_pretrained(str(tiny)).half().save_pretrained(str(tiny))

    assert {parameter.dtype for parameter in Bert(tiny).parameters()} == {torch.float32}


def test_a_head_for_other_labels_is_replaced(tiny: Path) -> None:
    transformers: Any = importlib.import_module("transformers")
    model = transformers.BertForSequenceClassification.from_pretrained(str(tiny), num_labels=3)
    model.save_pretrained(str(tiny))

    assert Bert(tiny)(Tokenizer(tiny, 8).encode(["good", "bad"])).shape == (2,)


def test_a_load_is_silent_and_the_library_is_as_loud_as_before(tiny: Path, capfd: pytest.CaptureFixture[str]) -> None:
    transformers: Any = importlib.import_module("transformers")
    log = transformers.utils.logging
    before = log.get_verbosity(), log.is_progress_bar_enabled()

    Bert(tiny)

    assert capfd.readouterr() == ("", "")
    assert (log.get_verbosity(), log.is_progress_bar_enabled()) == before


@pytest.mark.usefixtures("tiny")
def test_other_weights_are_another_experiment_and_another_place_is_not(tmp_path: Path) -> None:
    tiny = tmp_path / "tiny"
    file = load_experiment(write_bert_experiment(tmp_path))
    dataset = file.data.read(keep_text=True)
    first = file.digest(dataset)

    tiny.rename(tmp_path / "elsewhere")
    model = {"kind": "bert", "directory": "elsewhere", "words": 8}
    moved = load_experiment(write_bert_experiment(tmp_path, model=model))
    assert moved.digest(dataset) == first

    path = tmp_path / "elsewhere" / "model.safetensors"
    spoiled = bytearray(path.read_bytes())
    spoiled[-1] ^= 1
    path.write_bytes(spoiled)
    assert moved.digest(dataset) != first


def test_texts_that_differ_in_what_is_no_word_are_other_data_to_bert(tmp_path: Path) -> None:
    def digest(text: str, *, keep_text: bool) -> str:
        (tmp_path / "rows.csv").write_text(f"when,label,text\n2026-01-01,1,{text}\n")
        file = load_experiment(write_experiment(tmp_path, data=data, model={"kind": "bag"}))
        return file.data.read(keep_text=keep_text).digest

    data = {"kind": "csv", "path": "rows.csv", "time": "when", "label": "label", "text": "text"}

    assert digest("день", keep_text=True) != digest("ночь", keep_text=True)
    assert digest("день", keep_text=False) == digest("ночь", keep_text=False)


def test_a_directory_is_described_by_its_config(tiny: Path) -> None:
    assert describe(tiny) == "bert with 1 layer of width 16 (tiny)"
    assert len(weights_digest(tiny)) == 16


def test_the_file_in_the_documentation_is_right() -> None:
    page = Path(__file__).parents[2].joinpath("docs", "drift.md").read_text()
    text = page.partition("### With BERT")[2].partition("```yaml\n")[2].partition("```")[0]

    file = parse_experiment(text)

    assert file.model.kind == "bert"
    assert not file.simulated


def test_a_missing_directory_is_an_error_at_its_line(tmp_path: Path) -> None:
    path = write_bert_experiment(tmp_path)

    with pytest.raises(ConfigError, match=r"experiment\.yaml:\d+: model\.directory must be a directory with a pretr"):
        load_experiment(path)
    with pytest.raises(ConfigError, match=r"experiment\.yaml:\d+: model: directory is missing: where is the"):
        load_experiment(write_bert_experiment(tmp_path, model={"kind": "bert"}))


@pytest.mark.usefixtures("tiny")
def test_without_transformers_the_error_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write_bert_experiment(tmp_path)
    monkeypatch.setitem(sys.modules, "transformers", None)

    with pytest.raises(ConfigError, match=r"experiment\.yaml:\d+: .*pip install 'zeus-flows\[bert\]'"):
        load_experiment(path)


def without_tokenizer(directory: Path) -> None:
    for path in (*directory.glob("tokenizer*"), *directory.glob("*.txt"), *directory.glob("special*")):
        path.unlink()


def without_config(directory: Path) -> None:
    (directory / "config.json").unlink()


def with_fewer_words(directory: Path) -> None:
    config = directory / "config.json"
    config.write_text(config.read_text().replace(f'"vocab_size": {len(SPECIAL + WORDS)}', '"vocab_size": 6'))


@pytest.mark.parametrize(
    ("spoil", "words", "expected"),
    [
        (without_tokenizer, 8, "tiny has no tokenizer"),
        (without_config, 8, "tiny has no model that can be loaded"),
        (lambda _directory: None, 17, "model.words must be 3 to 16 for the model in .*tiny, not 17"),
        (lambda _directory: None, 2, "model.words must be 3 to 16"),
    ],
)
def test_a_directory_of_no_use_is_an_error_before_data_are_read(
    tmp_path: Path, tiny: Path, spoil: Callable[[Path], None], words: int, expected: str
) -> None:
    path = write_bert_experiment(tmp_path, model={"kind": "bert", "directory": "tiny", "words": words})
    (tmp_path / "rows.csv").unlink()
    spoil(tiny)

    with pytest.raises(ConfigError, match=expected):
        open_curves(str(path))


def test_weights_that_are_missing_or_do_not_fit_are_an_error_and_not_drawn_at_random(tiny: Path) -> None:
    with_fewer_words(tiny)

    with pytest.raises(ConfigError, match=r"tokenizer in .*tiny has a token 7, and the model knows 6"):
        Tokenizer(tiny, 8).encode(["day"])
    with pytest.raises(ConfigError, match=r"no weights that fit its config\.json: bert\.embeddings\.word_embeddings"):
        Bert(tiny)
    (tiny / "model.safetensors").unlink()
    with pytest.raises(ConfigError, match="tiny has no model that can be loaded"):
        Bert(tiny)
