import json
from pathlib import Path

NOTEBOOK = Path(__file__).parents[2] / "examples" / "notebook.ipynb"


def test_the_notebook_runs_and_shows_its_figures(tmp_path, monkeypatch):
    import nbclient
    import nbformat

    monkeypatch.setenv("PYTHONPATH", str(NOTEBOOK.parents[1]), prepend=":")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    nbclient.NotebookClient(notebook, timeout=240, resources={"metadata": {"path": str(tmp_path)}}).execute()
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", ())]
    assert sum("image/png" in output.get("data", {}) for output in outputs) == 2
    text = "".join(output.get("text", "") for output in outputs)
    assert "4/4" in text
    assert text.count("reward ") >= 4
    assert (tmp_path / "runs" / "notebook" / "1" / "checkpoints" / "last.ckpt").is_file()


def test_it_is_kept_without_outputs():
    cells = json.loads(NOTEBOOK.read_text())["cells"]
    assert all(not cell.get("outputs") and cell.get("execution_count") is None for cell in cells)
