"""What is replaced in Tunix, and the check that Tunix still is what this was written for.

Two interfaces are known. They differ in what the log-probability function returns beside log-probabilities:

    0.1.7   logits, from which the losses compute the entropy with ``algo_core.compute_entropy_from_logits``
    0.1.8   the entropy (its main branch of August 2026)

:func:`install` replaces that function (and on 0.1.7 the entropy's), which Tunix always calls through its module: in
the losses, the reference pass, the old pass. It replaces nothing in models, learners or configs.
"""

from __future__ import annotations

import importlib
import inspect
from types import TracebackType
from typing import Any, Literal

Interface = Literal["0.1.7", "0.1.8"]

LOSS_NAME = "logitless"
"""What ``GRPOConfig(policy_loss_fn=...)`` calls the fused loss."""

_BEFORE = "graphdef state prompt_tokens completion_tokens pad_id eos_id images stop_gradient"
_LOGPS = {
    f"{_BEFORE} return_logits segment_ids segment_positions temperature": "0.1.7",
    f"{_BEFORE} return_entropy segment_ids segment_positions temperature chunk_size": "0.1.8",
}
"""Parameters of ``compute_per_token_logps``, in their order."""
_PROCESS_IDS = "prompt_tokens completion_tokens pad_id eos_id segment_ids segment_positions"
_LOSS = "model train_example algo_config pad_id eos_id kwargs"


class TunixChanged(RuntimeError):
    """Tunix has not the functions that this was written for."""

    def __init__(self, what: str, found: str, expected: str) -> None:
        super().__init__(
            f"logitless.integrations.tunix: {what} of the Tunix that is installed ({_version()}) is {found}; expected "
            f"{expected}. This was written for google-tunix 0.1.7 and its main branch of August 2026 (0.1.8). Nothing "
            "has been replaced: Tunix works as it does without this."
        )


def _version() -> str:
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version("google-tunix")
    except PackageNotFoundError:
        return "of unknown version"


def modules() -> tuple[Any, Any, Any]:
    """``tunix.rl.common``, ``.algo_core`` and ``.function_registry``."""
    try:
        names = ("common", "algo_core", "function_registry")
        common, core, registry = (importlib.import_module(f"tunix.rl.{n}") for n in names)
    except ImportError as error:
        raise type(error)(
            f"logitless.integrations.tunix: Tunix cannot be imported ({error}); pip install 'logitless[tunix]'.",
            name=error.name,
        ) from error
    return common, core, registry


def interface() -> Interface:
    """Which of the known interfaces the installed Tunix has; raises :class:`TunixChanged` where it has none."""
    common, core, registry = modules()
    found = _parameters("tunix.rl.common.compute_per_token_logps", _stock(common, "compute_per_token_logps"))
    if found not in _LOGPS:
        expected = " or ".join(f"({k.replace(' ', ', ')})" for k in _LOGPS)
        raise TunixChanged("compute_per_token_logps", f"({found.replace(' ', ', ')})", expected)
    known: Interface = _LOGPS[found]  # type: ignore[assignment]
    _same("tunix.rl.common.process_ids", getattr(common, "process_ids", None), _PROCESS_IDS)
    loss = getattr(core, "grpo_loss_fn", None)
    _same("tunix.rl.algo_core.grpo_loss_fn", loss, _LOSS)
    # The losses are to find both functions where they can be replaced.
    wanted = {"common", "compute_per_token_logps"}
    if known == "0.1.7":
        wanted.add("compute_entropy_from_logits")
        _same("tunix.rl.algo_core.compute_entropy_from_logits", _stock(core, "compute_entropy_from_logits"), "logits")
    names = set(loss.__code__.co_names) if inspect.isfunction(loss) else set()
    if not wanted <= names:
        missing = ", ".join(sorted(wanted - names))
        raise TunixChanged("tunix.rl.algo_core.grpo_loss_fn", f"without {missing}", "calls through the module")
    if not callable(getattr(registry, "register_policy_loss_fn", None)):
        raise TunixChanged("tunix.rl.function_registry", "without register_policy_loss_fn", "a registry of losses")
    return known


def _stock(module: Any, name: str) -> Any:
    """Tunix' own function, also while it is replaced."""
    return _installed.get(name, (None, None))[1] or getattr(module, name, None)


def _parameters(what: str, function: Any) -> str:
    if not callable(function):
        raise TunixChanged(what, "not there", "a function")
    return " ".join(inspect.signature(function).parameters)


def _same(what: str, function: Any, expected: str) -> None:
    found = _parameters(what, function)
    if found != expected:
        raise TunixChanged(what, f"({found.replace(' ', ', ')})", f"({expected.replace(' ', ', ')})")


# -- replacing -------------------------------------------------------------------------------------------------------

_installed: dict[str, tuple[Any, Any]] = {}
"""What was replaced: by its name, the module and what stood there."""


class Installation:
    """What :func:`install` returns. As a context manager it undoes, on leaving, what this :func:`install` has done."""

    def __init__(self, owner: bool, interface: Interface) -> None:
        self.interface = interface
        self._owner = owner

    def __enter__(self) -> Installation:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if self._owner:
            uninstall()

    def __repr__(self) -> str:
        return f"Installation(interface={self.interface!r}, active={bool(_installed)})"


def install() -> Installation:
    """Makes all of Tunix logits-free: its losses, metrics, reference and old passes, with its own loss maths.

    Call it before a learner is built: programs that are compiled already keep what they were compiled with. Models of
    the families qwen2, qwen3, gemma, gemma2, gemma3 and llama3 are served, with LoRA on any of their weights; others,
    quantised heads and MaxText's models raise ``NotImplementedError`` by name when they are first used. A second call
    does nothing. It also does what :func:`register` does.

        import logitless.integrations.tunix
        logitless.integrations.tunix.install()

    Returns:
      A context manager that undoes it, for those who want to: ``with install(): ...``.
    """
    known = interface()
    if _installed:
        return Installation(False, known)
    from logitless.integrations.tunix import logps

    common, core, _ = modules()
    register()
    replaced = [("compute_per_token_logps", common, logps.per_token_logps(common.compute_per_token_logps))]
    if known == "0.1.7":
        entropy = logps.entropy_from_logits(core.compute_entropy_from_logits)
        replaced.append(("compute_entropy_from_logits", core, entropy))
    for name, module, new in replaced:
        _installed[name] = (module, getattr(module, name))
        setattr(module, name, new)
    return Installation(True, known)


def uninstall() -> None:
    """Puts Tunix' own functions back. A loss by the name of ``"logitless"`` stays known to its registry."""
    while _installed:
        name, (module, stock) = _installed.popitem()
        setattr(module, name, stock)


def register() -> None:
    """Makes ``GRPOConfig(policy_loss_fn="logitless")`` known: the fused loss, which saves a matmul where the objective
    is uncoupled (all but ``loss_algo="gspo-token"``). It replaces nothing."""
    known = interface()
    from logitless.integrations.tunix.tunix_loss import policy_loss

    _, _, registry = modules()
    if LOSS_NAME not in registry.default_registry.list_functions("policy_loss_fn"):
        registry.register_policy_loss_fn(LOSS_NAME)(policy_loss(known))
