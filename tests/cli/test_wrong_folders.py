"""A file, or a model of another format, in place of the folder that a command reads or writes."""

from pathlib import Path

import pytest

from command_call import call


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("evaluate", "file"), "file is a file; give the folder of a run"),
        (("generate", "file", "--prompt", "a"), "file is a file; give the folder of a run"),
        (("export", "x", "file", "--to", "hf"), "file is a file; choose another path for the new"),
        (("data", "list", "--root", "file"), "--root file is no folder; name a folder"),
        (
            ("data", "prepare", "stdlib", "--root", "file"),
            "--root file is no folder; name a folder",
        ),
        (("demo", "--out", "file"), "cannot write into file: file is no folder; choose another"),
        (
            ("evaluate", "hub"),
            "hub/config.json is that of a HuggingFace model, not of a run; `acmoe",
        ),
    ],
)
def test_a_file_or_another_model_in_place_of_a_folder_is_named(
    capsys, monkeypatch, tmp_path, arguments, says
):
    monkeypatch.chdir(tmp_path)
    Path("file").touch()
    Path("hub").mkdir()
    Path("hub/config.json").write_text('{"model_type": "mixtral"}')
    code, out, err = call(capsys, *arguments)
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert says in err
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file", "hub"]
