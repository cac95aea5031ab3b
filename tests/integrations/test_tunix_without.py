"""The Tunix integration where there is no Tunix: it imports, says what is missing, and its page is current."""

from __future__ import annotations

import importlib.util
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from logitless.integrations.tunix.logps import worth_computing
from logitless.integrations.tunix.placement import sharding_of
from logitless.settings.from_tunix import TUNIX

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "tunix.md").read_text()


def test_importing_it_loads_neither_tunix_nor_flax() -> None:
    code = (
        "import sys, logitless.integrations.tunix as t; t.install, t.uninstall, t.register\n"
        "print([m for m in ('tunix', 'flax', 'qwix') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_without_tunix_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    import logitless.integrations.tunix as integration

    for name in ("tunix", "tunix.rl", "tunix.rl.common"):
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(ImportError, match=r"Tunix cannot be imported .* pip install 'logitless\[tunix\]'"):
        integration.install()


def test_page_lists_every_setting() -> None:
    """Each is mapped or not of the loss; one that is in neither is refused by ``Objective.from_tunix``."""
    block = re.search(r"<!-- options: begin -->\n(.*?)<!-- options: end -->", PAGE, re.DOTALL)
    assert block is not None
    named = re.findall(r"^\| `(\w+)` \|", block.group(1), re.MULTILINE)
    assert len(named) == len(set(named)) and set(named) == {*TUNIX.loss, *TUNIX.other}


@pytest.mark.tunix
def test_settings_are_those_of_tunix() -> None:
    if importlib.util.find_spec("tunix") is None:
        pytest.skip("Tunix is not installed here: make test-tunix")
    import dataclasses

    from tunix.rl.agentic import agentic_grpo_learner
    from tunix.rl.grpo import dapo_learner, drgrpo_learner, grpo_learner

    from logitless import Objective

    known = {*TUNIX.loss, *TUNIX.other}
    for cls in (
        grpo_learner.GRPOConfig,
        dapo_learner.DAPOConfig,
        drgrpo_learner.DrGRPOConfig,
        agentic_grpo_learner.GRPOConfig,
    ):
        assert {f.name for f in dataclasses.fields(cls)} <= known
        Objective.from_tunix(cls(num_generations=2), max_length=7.0)


def test_padding_that_is_not_computed() -> None:
    """All of a row's end but its first token; a pad token inside a row is computed."""
    tokens = jnp.array([[5, 6, 0, 0], [5, 0, 6, 0], [0, 0, 0, 0], [5, 6, 7, 8]])
    expected = [[1, 1, 1, 0], [1, 1, 1, 1], [1, 0, 0, 0], [1, 1, 1, 1]]
    assert worth_computing(tokens, pad_id=0).astype(int).tolist() == expected


def head(shape: tuple[int, int], layout: str, axes: tuple[Any, ...]) -> Any:
    return SimpleNamespace(weight=np.zeros(shape), layout=layout, axes=axes, batch_axes="fsdp")


@pytest.mark.parametrize(
    "case, batch, tokens, spec, repeated",
    [
        (head((32, 8), "vh", ("tp", "fsdp")), 4, ("fsdp",), (("tp",), ("fsdp",)), ()),
        (head((8, 32), "hv", ("fsdp", "tp")), 4, ("fsdp",), (("fsdp",), ("tp",)), ()),
        (head((33, 8), "vh", ("tp", "fsdp")), 4, ("fsdp",), (None, ("fsdp",)), ("tp",)),
        (head((32, 8), "vh", ("tp", "fsdp")), 3, None, (("tp",), ("fsdp",)), ("fsdp",)),
        (head((32, 8), "vh", ()), 4, ("fsdp",), (None, None), ("tp",)),
        (head((32, 8), "vh", (("fsdp", "tp"), None)), 4, ("fsdp",), (("tp",), None), ()),
    ],
    ids=["tied", "lm_head", "odd vocabulary", "odd batch", "no annotation", "not a run of columns"],
)
def test_placement(case: Any, batch: int, tokens: Any, spec: Any, repeated: Any) -> None:
    mesh = jax.make_mesh((2, 2), ("fsdp", "tp"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    assert sharding_of(case, batch) is None  # no mesh
    with jax.set_mesh(mesh):
        found = sharding_of(case, batch)
    assert found is not None
    entries = [e if e is None or isinstance(e, tuple) else (e,) for e in (*found.tokens, *found.head)]
    assert entries == [tokens, *spec] and found.replicated == repeated


def test_truncated_sequences_leave_the_mask_where_the_config_says_so() -> None:
    """A verdict per row, and in packed rows one per token, of which one is enough for its segment."""
    from logitless.integrations.tunix.tunix_loss import _trained

    mask = np.array([[1, 1, 0, 1], [1, 1, 1, 1]], np.float32)
    off, on = SimpleNamespace(overlong_loss_masking=False), SimpleNamespace(overlong_loss_masking=True)
    by_row = SimpleNamespace(completion_mask=jnp.asarray(mask), overlong=np.array([1.0, 0.0]))
    assert (_trained(by_row, off, None) == mask).all()
    assert (_trained(by_row, on, None) == mask * [[0], [1]]).all()
    per_token = np.array([[0, 1, 0, 0], [0, 0, 0, 0]], np.float32)
    segments = jnp.array([[1, 1, 2, 2], [1, 1, 1, 2]])
    packed = SimpleNamespace(completion_mask=jnp.asarray(mask), overlong=per_token)
    assert _trained(packed, on, segments).tolist() == [[0, 0, 0, 1], [1, 1, 1, 1]]
    with pytest.raises(ValueError, match="needs the example's overlong"):
        _trained(SimpleNamespace(completion_mask=jnp.asarray(mask)), on, None)
