"""What each test costs in CPU seconds, the processes that it starts included: wall time says little on a busy machine.

    python -m pytest -p durations --durations-json costs.json [tests/...]
    python tests/durations.py costs.json... > table.md

The first line writes JSON: for each test its CPU seconds (a fixture counts for the first test that uses it), its wall seconds,
and how many programs were compiled in its own process, with the seconds of tracing, lowering and compiling. With pytest-xdist
each worker writes a file of its own: costs.gw0.json and so on. The second writes a table.
"""

import json
import os
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

EVENTS = {
    "/jax/core/compile/jaxpr_trace_duration": "trace",
    "/jax/core/compile/jaxpr_to_mlir_module_duration": "lower",
    "/jax/core/compile/backend_compile_duration": "compile",
}


def cpu_seconds() -> float:
    """User and system time of this process and of all that it started, ended or not."""
    own = os.times()
    total = own.user + own.system + own.children_user + own.children_system
    for child in psutil.Process().children(recursive=True):
        try:
            total += sum(child.cpu_times()[:4])
        except psutil.NoSuchProcess:  # it ended meanwhile
            pass
    return total


class Durations:
    def __init__(self, path: Path):
        self.path = path
        self.tests: dict[str, dict[str, float]] = {}
        self.current: Counter[str] = Counter()

    def pytest_collection_finish(self) -> None:
        import jax.monitoring  # after conftest.py has set JAX's environment

        jax.monitoring.register_event_duration_secs_listener(self._event)

    def _event(self, name: str, seconds: float, **_: object) -> None:
        if name in EVENTS:
            self.current[EVENTS[name]] += seconds
            self.current["programs"] += EVENTS[name] == "compile"

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[None]:
        self.current = Counter()
        cpu, wall = cpu_seconds(), time.perf_counter()
        result = yield
        self.tests[item.nodeid] = {
            "cpu": round(cpu_seconds() - cpu, 2),
            "wall": round(time.perf_counter() - wall, 2),
            **{name: round(value, 2) for name, value in self.current.items()},
        }
        return result

    def pytest_sessionfinish(self) -> None:
        self.path.write_text(json.dumps(self.tests, indent=0))


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--durations-json", type=Path, help="write what each test costs to this file")


def pytest_configure(config: pytest.Config) -> None:
    if path := config.getoption("--durations-json"):
        if worker := os.environ.get("PYTEST_XDIST_WORKER"):
            path = path.with_suffix(f".{worker}.json")
        config.pluginmanager.register(Durations(path.resolve()))


def table(tests: dict[str, dict[str, float]], most: int = 40) -> str:
    """Markdown: the cost by file, and the dearest tests."""
    files: defaultdict[str, Counter[str]] = defaultdict(Counter)
    for name, cost in tests.items():
        files[name.split("::")[0]].update({"tests": 1, **cost})
    total = sum(files.values(), Counter())
    head = "| {} | CPU s | programs compiled | tracing s | lowering s | compiling s |\n|---|---|---|---|---|---|"
    keys = ("cpu", "programs", "trace", "lower", "compile")

    def row(name: str, cost: dict[str, float]) -> str:
        return " | ".join([f"| {name}", *(f"{cost.get(key, 0):.0f}" for key in keys)]) + " |"

    def dearest(costs: dict) -> list[tuple[str, dict]]:
        return sorted(costs.items(), key=lambda pair: -pair[1]["cpu"])

    by_file = [row(f"{name} ({cost['tests']} tests)", cost) for name, cost in dearest(files)]
    by_test = [row(name.removeprefix("tests/"), cost) for name, cost in dearest(tests)[:most]]
    parts = [head.format("file"), *by_file, row(f"**all ({total['tests']} tests)**", total), "", head.format("test"), *by_test]
    return "\n".join(parts)


if __name__ == "__main__":
    print(table({name: cost for path in sys.argv[1:] for name, cost in json.loads(Path(path).read_text()).items()}))
