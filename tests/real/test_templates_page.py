"""docs/templates.md is what tools/template_survey.py writes."""

import pytest

from tests.support.public_templates import templates_folder
from tests.support.survey import PAGE, survey_tool

pytestmark = pytest.mark.real


def test_the_page_is_up_to_date() -> None:
    written = survey_tool().page(templates_folder())
    assert written == PAGE.read_text(encoding="utf-8"), f"run tools/template_survey.py {templates_folder()}"
