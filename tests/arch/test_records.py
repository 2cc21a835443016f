"""Records are keyword-only dataclasses with slots, public names are listed, rows match the schema, errors pickle."""

import ast
import dataclasses
import pickle
from pathlib import Path

import pytest

from gyre_data import errors, schema, types

ROOT = Path(__file__).resolve().parents[2]
FOLDERS = [ROOT / "gyre_data", ROOT / "gyre_train", ROOT / "gyre_sched", ROOT / "proxy" / "gyre_proxy"]
MODULES = sorted(path for folder in FOLDERS for path in folder.rglob("*.py"))


def _dataclass_arguments(node: ast.ClassDef) -> set[str] | None:
    for decorator in node.decorator_list:
        name = decorator.func if isinstance(decorator, ast.Call) else decorator
        if isinstance(name, ast.Name) and name.id == "dataclass":
            keywords = decorator.keywords if isinstance(decorator, ast.Call) else []
            return {k.arg or "" for k in keywords if isinstance(k.value, ast.Constant) and k.value.value}
    return None


def test_dataclasses_are_keyword_only_with_slots() -> None:
    for path in MODULES:
        for node in ast.walk(ast.parse(path.read_text())):
            # A subclass of another library's dataclass follows that class.
            if isinstance(node, ast.ClassDef) and not node.bases:
                arguments = _dataclass_arguments(node)
                assert arguments is None or {"kw_only", "slots"} <= arguments, f"{path}:{node.lineno} {node.name}"


def test_every_module_lists_its_public_names() -> None:
    for path in MODULES:
        tree = ast.parse(path.read_text())
        defined = [n for n in tree.body if isinstance(n, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef)]
        if any(not node.name.startswith("_") for node in defined):
            targets = [getattr(n.targets[0], "id", "") for n in tree.body if isinstance(n, ast.Assign)]
            assert "__all__" in targets, f"{path} has public names and no __all__"


@pytest.mark.parametrize("name", list(schema.TABLES))
def test_row_types_have_the_columns_of_their_table(name: str) -> None:
    fields = dataclasses.fields(types.ROW_TYPES[name])
    table = schema.table(name)
    assert tuple(field.name for field in fields) == table.column_names
    for field, column in zip(fields, table.columns, strict=True):
        assert (field.default is None) == column.nullable, field.name


@pytest.mark.parametrize("name", errors.__all__)
def test_errors_pickle_and_share_a_root(name: str) -> None:
    error = getattr(errors, name)("wanted a, got b; do c")
    assert str(pickle.loads(pickle.dumps(error))) == str(error)
    assert isinstance(error, errors.GyreError)
