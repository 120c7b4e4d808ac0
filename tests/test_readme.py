import re
from pathlib import Path

README = Path(__file__).parents[1] / "README.md"


def test_the_readme_example_runs():
    (example,) = re.findall(r"```python\n(.*?)```", README.read_text(), re.DOTALL)
    names = {}
    exec(compile(example, str(README), "exec"), names)
    assert names["out"].shape == (8, 6, 64)
