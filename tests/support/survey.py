"""tools/template_survey.py as a module."""

import importlib.util
import sys
from functools import lru_cache
from pathlib import Path
from types import ModuleType

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "templates.md"


@lru_cache(maxsize=1)
def survey_tool() -> ModuleType:
    """The tool."""
    spec = importlib.util.spec_from_file_location("template_survey", ROOT / "tools" / "template_survey.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module
