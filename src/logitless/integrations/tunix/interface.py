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
from typing import Literal

import jax

from logitless.integrations.tunix.policy_head import Peer

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
_SFT_LOSS = "model input_tokens input_mask positions attention_mask images"
_TOKEN_LOGPS = "model input_tokens positions attn_mask logits_to_keep images"


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


def modules() -> tuple[Peer, Peer, Peer]:
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


def sft_modules() -> tuple[Peer, Peer]:
    """``tunix.sft.peft_trainer`` and ``tunix.sft.dpo.dpo_trainer``."""
    modules()
    names = ("tunix.sft.peft_trainer", "tunix.sft.dpo.dpo_trainer")
    try:
        trainer, dpo = (importlib.import_module(name) for name in names)
    except ImportError as error:
        raise TunixChanged(" or ".join(names), f"not there ({error})", "a module") from error
    return trainer, dpo


def interface() -> Interface:
    """The known interface of the installed Tunix; raises :class:`TunixChanged` for an unknown interface."""
    common, core, registry = modules()
    found = _parameters("tunix.rl.common.compute_per_token_logps", _stock(common, "compute_per_token_logps"))
    if found not in _LOGPS:
        expected = " or ".join(f"({k.replace(' ', ', ')})" for k in _LOGPS)
        raise TunixChanged("compute_per_token_logps", f"({found.replace(' ', ', ')})", expected)
    known: Interface = _LOGPS[found]  # type: ignore[assignment]
    same_parameters("tunix.rl.common.process_ids", getattr(common, "process_ids", None), _PROCESS_IDS)
    loss = getattr(core, "grpo_loss_fn", None)
    same_parameters("tunix.rl.algo_core.grpo_loss_fn", loss, _LOSS)
    # The losses are to find both functions where they can be replaced.
    wanted = {"common", "compute_per_token_logps"}
    if known == "0.1.7":
        wanted.add("compute_entropy_from_logits")
        entropy = _stock(core, "compute_entropy_from_logits")
        same_parameters("tunix.rl.algo_core.compute_entropy_from_logits", entropy, "logits")
    _calls("tunix.rl.algo_core.grpo_loss_fn", loss, wanted)
    if not callable(getattr(registry, "register_policy_loss_fn", None)):
        raise TunixChanged("tunix.rl.function_registry", "without register_policy_loss_fn", "a registry of losses")
    _check_sft()
    return known


def _check_sft() -> None:
    """Raise unless supervised fine-tuning and DPO are as they were."""
    common, _, _ = modules()
    trainer, dpo = sft_modules()
    loss = _stock(trainer, "_default_loss_fn")
    same_parameters("tunix.sft.peft_trainer._default_loss_fn", loss, _SFT_LOSS)
    _calls("tunix.sft.peft_trainer.PeftTrainer.__init__", trainer.PeftTrainer.__init__, {"_default_loss_fn"})
    logps = _stock(common, "get_per_token_logps")
    same_parameters("tunix.rl.common.get_per_token_logps", logps, _TOKEN_LOGPS)
    summed: Peer = getattr(dpo, "compute_logps", None)
    _calls("tunix.sft.dpo.dpo_trainer.compute_logps", inspect.unwrap(summed), {"common", "get_per_token_logps"})


def _stock(module: object, name: str) -> Peer:
    """Tunix' own function, also while it is replaced."""
    return _installed.get(name, (None, None))[1] or getattr(module, name, None)


def _parameters(what: str, function: object) -> str:
    if not callable(function):
        raise TunixChanged(what, "not there", "a function")
    return " ".join(inspect.signature(function).parameters)


def _calls(what: str, function: object, wanted: set[str]) -> None:
    """Raise unless ``function`` looks up these names in a replaceable place."""
    names = set(function.__code__.co_names) if inspect.isfunction(function) else set()
    if not wanted <= names:
        missing = ", ".join(sorted(wanted - names))
        raise TunixChanged(what, f"without {missing}", "calls through the module")


def same_parameters(what: str, function: object, expected: str) -> None:
    """Raise :class:`TunixChanged` unless the parameters of ``function`` are the ``expected`` ones, in their order."""
    found = _parameters(what, function)
    if found != expected:
        raise TunixChanged(what, f"({found.replace(' ', ', ')})", f"({expected.replace(' ', ', ')})")


# -- replacing -------------------------------------------------------------------------------------------------------

_installed: dict[str, tuple[Peer, Peer]] = {}
"""Replaced functions by name: module and original."""


class Installation:
    """What :func:`install` returns. As a context manager, leaving the block reverts this :func:`install`."""

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
    """Makes all of Tunix logits-free: its RL losses, metrics, reference and old passes, supervised fine-tuning, DPO and
    ORPO, with its own loss maths. Distillation takes a strategy instead: ``tunix.distillation.DistillationStrategy``.

    Call it before building a learner: programs compiled earlier stay unchanged. Models of the families qwen2, qwen3,
    gemma, gemma2, gemma3 and llama3 are served, with LoRA on any of their weights, and MaxText's behind an adapter with
    ``skip_lm_head=``. Others, and quantised heads, raise ``NotImplementedError`` by name when they are first used. A
    second call does nothing. :func:`install` includes :func:`register`.

        import logitless.integrations.tunix
        logitless.integrations.tunix.install()

    Returns:
      A context manager for optional use: ``with install(): ...``.
    """
    known = interface()
    if _installed:
        return Installation(False, known)
    from logitless.integrations.tunix import logps, sft_losses

    common, core, _ = modules()
    trainer, _ = sft_modules()
    register()
    sft = sft_losses.default_loss(known, trainer._default_loss_fn, trainer.utils)
    replaced = [
        ("compute_per_token_logps", common, logps.per_token_logps(common.compute_per_token_logps)),
        ("get_per_token_logps", common, sft_losses.token_logps(common.get_per_token_logps)),
        ("_default_loss_fn", trainer, sft),
    ]
    if known == "0.1.7":
        entropy = logps.entropy_from_logits(core.compute_entropy_from_logits)
        replaced.append(("compute_entropy_from_logits", core, entropy))
    for name, module, new in replaced:
        _installed[name] = (module, getattr(module, name))
        setattr(module, name, new)
    _forget_programs()
    return Installation(True, known)


def uninstall() -> None:
    """Puts Tunix' own functions back. A loss by the name of ``"logitless"`` stays known to its registry."""
    if not _installed:
        return
    while _installed:
        name, (module, stock) = _installed.popitem()
        setattr(module, name, stock)
    _forget_programs()


def _forget_programs() -> None:
    """Drop the programs of ``dpo_trainer.compute_logps``, which Tunix compiles once for all trainers."""
    _, dpo = sft_modules()
    program = getattr(dpo.compute_logps, "jitted_fn", dpo.compute_logps)
    getattr(program, "clear_cache", jax.clear_caches)()


def register() -> None:
    """Makes ``GRPOConfig(policy_loss_fn="logitless")`` known: the fused loss, which saves a matmul where the objective
    is uncoupled (all but ``loss_algo="gspo-token"``). It replaces nothing."""
    known = interface()
    from logitless.integrations.tunix.tunix_loss import policy_loss

    _, _, registry = modules()
    if LOSS_NAME not in registry.default_registry.list_functions("policy_loss_fn"):
        registry.register_policy_loss_fn(LOSS_NAME)(policy_loss(known))
