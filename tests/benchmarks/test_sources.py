"""Recipes: files that tell how long training takes, and the traces that are made of them."""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest
import sources
from sources import Recipe, cells, recipes

EPOCHS = "workload,batch_size,run,epochs\n" + "".join(
    f"w,{b},{run},{needed}\n"
    for b, some in {32: (8, 9), 64: (5, 6), 128: (20, "")}.items()
    for run, needed in enumerate(some)
)
AMOUNT = {"amount": "epochs"}
TOML = 'citation = "X"\nlicence = "CC0"\nfile = "x.csv"\nsha256 = "0"\n'


def described(folder: Path, content: str, columns: dict[str, str] = AMOUNT) -> Recipe:
    """Write a data file and return a recipe for it."""
    (folder / "data.csv").write_text(content)
    return Recipe("made", "nobody", "CC0", "data.csv", hashlib.sha256(content.encode()).hexdigest(), columns)


def test_a_workload_becomes_a_cell_for_each_half_point_and_default(tmp_path: Path) -> None:
    found = cells(described(tmp_path, EPOCHS), tmp_path)
    assert len(found) == len(sources.HALF_POINTS) * 3
    assert {c.workload for c in found} == {"made/w"}
    assert found[0].name == "made/w, half 16, b0 smallest"
    trace = found[0].trace
    assert trace.epochs == {16: (8, 9), 32: (5, 6), 64: (20, None)}, "the smallest batch size is scaled to 16"
    assert trace.max_epochs == 18, "the longest run at a batch size that always reaches the target, twice"
    assert not trace.curves


def test_the_default_is_a_batch_size_that_always_reaches_the_target(tmp_path: Path) -> None:
    found = cells(described(tmp_path, EPOCHS), tmp_path)
    assert {c.trace.default_batch_size for c in found if c.name.endswith("largest")} == {32}


def test_a_greater_half_point_makes_large_batch_sizes_faster_in_comparison(tmp_path: Path) -> None:
    found = {c.name: c.trace for c in cells(described(tmp_path, EPOCHS), tmp_path)}

    def gain(half: int) -> float:
        profiles = found[f"made/w, half {half}, b0 smallest"].profiles
        return profiles[64].measurements[0].samples_per_s / profiles[16].measurements[0].samples_per_s

    assert gain(16) < gain(64) < gain(256)


def test_samples_are_counted_in_epochs_of_a_tenth_of_the_shortest_run(tmp_path: Path) -> None:
    content = "workload,batch_size,run,n,unit\nw,8,0,1000,samples\nw,16,0,1550,samples\n"
    found = cells(described(tmp_path, content, {"amount": "n", "unit": "unit"}), tmp_path)
    assert found[0].trace.epochs == {16: (10,), 32: (16,)}


def test_levels_become_curves(tmp_path: Path) -> None:
    content = "workload,batch_size,run,level,epoch\nw,16,0,0.5,2\nw,16,0,0.9,4\nw,16,0,1.0,7\n"
    (trace, *_) = (
        c.trace for c in cells(described(tmp_path, content, {"amount": "epoch", "level": "level"}), tmp_path)
    )
    assert trace.epochs == {16: (7,)}
    assert trace.curves == {16: (((2, 0.5), (4, 0.9), (7, 1.0)),)}


def test_columns_may_have_other_names(tmp_path: Path) -> None:
    content = "task,bs,seed,epochs\nw,16,0,3\n"
    columns = {"workload": "task", "batch_size": "bs", "run": "seed", "amount": "epochs"}
    assert cells(described(tmp_path, content, columns), tmp_path)[0].trace.epochs == {16: (3,)}


def test_a_workload_that_no_batch_size_always_trains_is_left_out_and_said(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    content = EPOCHS + "never,16,0,\nnever,32,0,\n"
    assert {c.workload for c in cells(described(tmp_path, content), tmp_path)} == {"made/w"}
    assert capsys.readouterr().err == "made/never is left out: no batch size always reaches the target\n"


def test_another_file_than_the_one_described_is_refused(tmp_path: Path) -> None:
    recipe = described(tmp_path, EPOCHS)
    (tmp_path / "data.csv").write_text(EPOCHS + "w,256,0,1\n")
    with pytest.raises(
        SystemExit, match=r"data.csv is not the file that sources/made.toml describes: its hash differs"
    ):
        cells(recipe, tmp_path)


def test_a_file_that_is_not_there_is_named_with_whom_it_comes_from(tmp_path: Path) -> None:
    recipe = described(tmp_path, EPOCHS)
    with pytest.raises(SystemExit, match=r"elsewhere.*data.csv.*made.toml says where it comes from: nobody"):
        cells(recipe, tmp_path / "elsewhere")


def test_a_missing_column_is_named(tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match=r"data.csv has no column steps, which sources/made.toml names"):
        cells(described(tmp_path, EPOCHS, {"amount": "steps"}), tmp_path)


@pytest.mark.parametrize("row", ["w,many,0,3", "w,16,0,long", "w,16", "w,16,0,3,4"])
def test_a_broken_row_is_named_by_its_line(tmp_path: Path, row: str) -> None:
    with pytest.raises(SystemExit, match=r"data.csv:8: "):
        cells(described(tmp_path, f"{EPOCHS}{row}\n"), tmp_path)


def test_a_recipe_is_read_from_its_file(tmp_path: Path) -> None:
    (tmp_path / "mine.toml").write_text(f'{TOML}[columns]\namount = "n"\n')
    assert recipes(tmp_path) == [Recipe("mine", "X", "CC0", "x.csv", "0", {"amount": "n"})]


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("citation = ", "mine.toml: "),
        (TOML, "a recipe has citation, columns, file, licence, sha256; this one has citation, file, licence, sha256"),
        (f'{TOML}[columns]\nlevel = "n"\n', "amount at least; here level"),
        (f'{TOML}[columns]\namount = "n"\nepoch = "n"\n', "here amount, epoch"),
    ],
)
def test_a_broken_recipe_is_refused(tmp_path: Path, content: str, said: str) -> None:
    (tmp_path / "mine.toml").write_text(content)
    with pytest.raises(SystemExit, match=said):
        recipes(tmp_path)


def test_every_recipe_of_the_project_cites_and_has_a_hash() -> None:
    found = recipes()
    assert {"lcbench", "mlperf"} <= {r.name for r in found}
    assert all(r.citation and r.licence and len(r.sha256) == 64 for r in found)
